"""From a config to a finished run on many ranks. What all would do alike, rank 0 does, and tells the others."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch.distributed as dist

from ironlaw.config import LayoutConfig, RunConfig
from ironlaw.data.dataset import Dataset
from ironlaw.data.prepare import prepare
from ironlaw.errors import UserError
from ironlaw.ledger import Ledger
from ironlaw.machine.profile import Profile
from ironlaw.train.journal import write_event
from ironlaw.train.lock import locked
from ironlaw.train.loop import Outcome, StepReport
from ironlaw.train.parallel.first import first_does
from ironlaw.train.parallel.hang import Note
from ironlaw.train.parallel.planning import plan_job
from ironlaw.train.parallel.ranks import Ranks
from ironlaw.train.parallel.trainer import DistributedTrainer
from ironlaw.train.parallel.watcher import Watcher
from ironlaw.train.run_directory import RunDirectory, create_run, find_run
from ironlaw.train.session import check_start
from ironlaw.train.tracking import check_installed

STATE_BYTES = 16  # per parameter in fp32 with AdamW: weight, gradient, two moments


def default_layout(config: RunConfig, size: int, memory_bytes: float) -> LayoutConfig:
    """Where none is written: replicas, and as much sharding as the memory of a rank asks for."""
    held = STATE_BYTES * config.model.parameters
    here = memory_bytes / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return LayoutConfig(zero=0 if held < here / 2 else 3)


def run_distributed(
    config: RunConfig,
    out: Path,
    profile: Profile,
    ranks: Ranks,
    store: dist.Store,
    *,
    resume: bool = False,
    data_progress: Callable[[int, int], None] | None = None,
    planned: Callable[[Ledger, Dataset], None] | None = None,
    watch: Callable[[StepReport], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> Outcome:
    """Train `config` into `out`, on every rank of the job. The callbacks are rank 0's; only its outcome is whole."""
    if not ranks.first:
        data_progress = planned = watch = say = None
    say = say or (lambda message: None)
    first_does(lambda: check_installed(config.tracking))
    run: RunDirectory = first_does(lambda: find_run(out, config, resume))
    with contextlib.ExitStack() as held:
        return _train(config, run, profile, ranks, store, held, data_progress, planned, watch, say)


def _train(
    config: RunConfig, run: RunDirectory, profile: Profile, ranks: Ranks, store: dist.Store,
    held: contextlib.ExitStack, data_progress: Callable[[int, int], None] | None,
    planned: Callable[[Ledger, Dataset], None] | None, watch: Callable[[StepReport], None] | None,
    say: Callable[[str], None],
) -> Outcome:  # fmt: skip
    """The run directory is rank 0's alone."""
    there = first_does(run.path.is_dir)
    first_does(lambda: _lock(run, held) if there else None)
    plan = _planned(config, profile, ranks)
    # Rank 0 prepares; the others then find everything in the cache.
    first_does(lambda: _prepared(config, data_progress, say))
    dataset = prepare(config.data, config.model.vocab)
    start = first_does(lambda: check_start(config, dataset, run, say))
    if start is not None and start.step >= config.train.steps and run.ledger_file.is_file():
        say(f"{run.path} has done its {start.step} steps already: set train.steps higher to go on")
        return Outcome(Ledger.load(run.ledger_file), start.step, None)

    def create() -> None:
        create_run(run, config)
        if not there:
            _lock(run, held)
        plan.save(run.plan_file)
        if dataset.tokenizer_path is not None:
            shutil.copyfile(dataset.tokenizer_path, run.tokenizer_file)
        if planned is not None:
            planned(plan, dataset)

    first_does(create)
    watcher = held.enter_context(Watcher(ranks, store, config.recovery.collective_seconds, partial(_hung, run)))
    trainer = DistributedTrainer(
        config, run, plan, dataset, profile, ranks=ranks, watcher=watcher, start=start, watch=watch, say=say
    )
    outcome = trainer.train()
    if ranks.first:
        outcome.ledger.save(run.ledger_file)
    dist.barrier()
    return outcome


def _planned(config: RunConfig, profile: Profile, ranks: Ranks) -> Ledger:
    """All of them plan, because two may have to be timed for it; what rank 0 found holds."""
    plan, error = Ledger("plan"), None
    try:
        plan = plan_job(config, profile, ranks)
    except UserError as problem:
        error = problem

    def told() -> Ledger:
        if error is not None:
            raise error
        return plan

    return first_does(told)


def _hung(run: RunDirectory, report: str, notes: list[Note]) -> None:
    """On the rank that found it, whichever that is: the others may not be able to."""
    print(f"ironlaw: {report}", file=sys.stderr, flush=True)
    write_event(run, "hang", report=report, ranks=[asdict(note) for note in notes])


def _lock(run: RunDirectory, held: contextlib.ExitStack) -> None:
    held.enter_context(locked(run.path))


def _prepared(config: RunConfig, progress: Callable[[int, int], None] | None, say: Callable[[str], None]) -> None:
    prepare(config.data, config.model.vocab, progress, say)
