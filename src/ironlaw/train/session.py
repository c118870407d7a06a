"""Runs a training session: prepare the data, plan, train, write both ledgers into the run directory."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ironlaw.config import RunConfig
from ironlaw.data import supply
from ironlaw.data import tokenizer as tokenizers
from ironlaw.data.dataset import Dataset
from ironlaw.data.loader import Loader
from ironlaw.data.prepare import prepare
from ironlaw.data.shards import Progress
from ironlaw.errors import UserError
from ironlaw.files import at_home, copy_file
from ironlaw.ledger import Ledger
from ironlaw.machine import interference
from ironlaw.machine.measure import Probe
from ironlaw.machine.profile import Profile
from ironlaw.machine.timing import is_emulated
from ironlaw.plan import totals
from ironlaw.plan.step import plan_run
from ironlaw.train import checkpoint
from ironlaw.train.faults import is_out_of_memory, out_of_memory
from ironlaw.train.history import write_event
from ironlaw.train.jsonl import read_lines
from ironlaw.train.loop import Trainer
from ironlaw.train.mesh import Mesh, Observer
from ironlaw.train.objective import check_second_model
from ironlaw.train.optimizer import check_library
from ironlaw.train.recovery import Recovery
from ironlaw.train.restore import check_base, check_first_weights, check_resumable, check_text
from ironlaw.train.result import Outcome
from ironlaw.train.run_directory import RunDirectory, create_run, find_run, locked
from ironlaw.train.step import Step
from ironlaw.train.tracking import check_installed

PROBE_SECONDS = 0.6  # of probing the machine's current speed before a run
MAX_PROBE_FRACTION = 0.02  # the most that probing may take of the planned run


def run_training(
    config: RunConfig,
    out: Path,
    profile: Profile,
    mesh: Mesh | None = None,
    *,
    make_plan: Callable[[RunConfig, Profile, Any], Ledger] | None = None,
    step: type[Step] = Step,
    observer: Callable[[RunDirectory], Observer] = lambda run: Observer(),
    resume: bool = False,
    data_progress: Progress | None = None,
    planned: Callable[[Ledger, Dataset], None] | None = None,
    watch: Callable[[dict[str, Any]], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> Outcome:
    """Train `config` into the directory `out`, on every rank of `mesh`, by default on this process alone. `make_plan`
    (config, profile, mesh), `step` and `observer` are those of many ranks. `planned` is called with the plan before
    the first step, `watch` after each step with its metrics entry, the number of `steps` and the `attention` kernel, if
    known. Callbacks are called on rank 0 only, and only its outcome has a ledger.

    Raises UserError if the input cannot work (no text, no space, another model), before anything is written to `out`.
    """
    if mesh is None and config.layout is not None and (ranks := config.layout.ranks) > 1:
        raise UserError(
            f"[layout] is of {ranks} ranks, and this is one process: start it as torchrun --nproc-per-node {ranks} -m "
            "ironlaw train ..., or add --layout dp=1"
        )
    mesh = mesh or Mesh(torch.device(profile.device))
    if not mesh.is_rank_0:
        data_progress = planned = watch = say = None
    say = say or (lambda message: None)
    mesh.on_rank_0(lambda: check_installed(config.tracking))
    run = mesh.on_rank_0(lambda: find_run(out, config, resume))
    for line in config.unused_keys():
        say(line)
    with contextlib.ExitStack() as held:
        lock = lambda: held.enter_context(locked(run.path))  # noqa: E731
        there = mesh.on_rank_0(run.path.is_dir)
        if there:  # lock before its checkpoints are read; a new run is locked when its directory exists
            mesh.on_rank_0(lock)
        plan = (make_plan or plan_here)(config, profile, mesh)
        mesh.on_rank_0(lambda: check_library(config.optimizer.name))
        read = partial(prepare, config.data, config.model.vocab)
        if mesh.size > 1:  # the other ranks then find everything in the cache
            mesh.on_rank_0(lambda: read(data_progress, say) and None)
        dataset = read() if mesh.size > 1 else read(data_progress, say)
        start = mesh.on_rank_0(lambda: check_start(config, dataset, run, say))
        if start is not None and start.step >= config.train.steps and run.ledger_file.is_file():
            ledger = Ledger.load(run.ledger_file)
            if ledger.facts["steps_done"] == start.step:  # else it is of an earlier session: the last one was killed
                say(f"{run.path} has done its {start.step} steps already: set train.steps higher to go on")
                return Outcome(ledger, start.step, None)

        def create() -> None:
            create_run(run, config)
            shutil.rmtree(run.adapter, ignore_errors=True)  # of an earlier session: it would be older than checkpoints
            if not there:
                lock()
            plan.save(run.plan_file)
            if dataset.tokenizer_path is not None:
                copy_file(dataset.tokenizer_path, run.tokenizer_file)
                if config.data.tokenizer is not None:
                    from ironlaw.data.chat import write_tokenizer_fields

                    given = tokenizers.load(config.data.tokenizer, config.data.end_of_text)
                    write_tokenizer_fields(run.path, given, config.data.chat_template)
            if planned is not None:
                planned(plan, dataset)

        try:
            mesh.on_rank_0(create)
            with observer(run) as watching:
                named: dict[str, Any] = {"observer": watching, "start": start, "watch": watch, "say": say}
                trainer = partial(Trainer, config, run, plan, dataset, profile, mesh, step, **named)
                return _train(trainer, config, run, plan, profile, mesh, start)
        except UserError:
            # Weights are read, and found damaged, only now: the same command must work once they are replaced.
            if not there and mesh.is_rank_0 and not run.metrics_file.is_file():
                shutil.rmtree(run.path, ignore_errors=True)
            raise


def plan_here(config: RunConfig, profile: Profile, mesh: Mesh) -> Ledger:
    """Plan a run of one process. Raises UserError for a config that cannot run."""
    plan = plan_run(config, profile)
    worth = MAX_PROBE_FRACTION * plan.totals["total_seconds"].value
    if profile.probe and profile.device == "cpu" and worth > PROBE_SECONDS:
        torch.set_num_threads(mesh.threads(profile))
        now = Probe(profile.fp32_products).slowdown(profile, PROBE_SECONDS)
        plan = plan_run(config, profile, now) if now is not None else plan
    if not totals.fits(plan):
        raise UserError("the plan does not fit this machine's memory: lower train.micro_batch; see `ironlaw plan`")
    return plan


def _train(
    build: Callable[[], Trainer], config: RunConfig, run: RunDirectory, plan: Ledger, profile: Profile, mesh: Mesh,
    start: checkpoint.Checkpoint | None,
) -> Outcome:  # fmt: skip
    trainer: Trainer | None = None
    try:
        trainer = build()
        outcome = trainer.train()
    except Exception as error:
        if mesh.size > 1 or not is_out_of_memory(error):
            raise
        step = trainer.step if trainer is not None else 0
        last = trainer.checkpointer.last if trainer is not None else start
        answer = out_of_memory(error, config, plan, profile, step, last)
        with contextlib.suppress(OSError):
            write_event(run, "out_of_memory", step=step, message=str(answer))
        raise answer from None
    if mesh.is_rank_0:
        outcome.ledger.save(run.ledger_file)
    mesh.barrier()
    if mesh.size == 1:  # the records that improve later plans are of single processes only
        interference.append_observations(profile, trainer.observed.probes)
        _remember(plan, outcome, profile, run)
        supply.write_supply(config.data, config.sequence, outcome.ledger.facts["data"])
    return outcome


def check_start(
    config: RunConfig, dataset: Dataset, run: RunDirectory, say: Callable[[str], None]
) -> checkpoint.Checkpoint | None:
    """Check everything that can fail before the first step. Returns the checkpoint to start from, if there is one."""
    if config.objective.teacher is not None:
        check_text(at_home(config.objective.teacher), dataset, teaches=True)
    loader = Loader(dataset, config.data, config.sequence)
    loader.training(config.train.global_batch, config.train.seed)
    cut = loader.facts().get("documents_cut_fraction", 0.0)
    if dataset.train.marks is not None and cut:
        say(f"{cut:.0%} of the conversations are longer than a sequence and are cut: raise train.sequence")
    next(loader.validation(config.micro_batch, 1))
    recovery = Recovery(config.recovery, read_lines(run.events_file))
    start = checkpoint.newest(
        run.checkpoints, warn=say, usable=lambda c: recovery.usable(c.step, int(c.index.get("turns", 0)))
    )
    if start is None:
        checkpoint.check_none_lost(run)
        if run.metrics_file.is_file():
            say("the run ended before its first checkpoint was complete: it starts again at step 1")
    if config.finetune.adapts:
        check_base(config.finetune, config.train.start_from, config.model, start)
    elif start is None and config.train.start_from:
        check_first_weights(config.train.start_from, config.model, say)
    if start is not None:
        checkpoint.check_model(start, config.model)
        check_resumable(start)
        check_second_model(config, start)
        check_text(run.path, dataset, start)
    policy, steps = config.checkpoint, config.train.steps
    kept = policy.keep + policy.keep_best + (steps // policy.keep_every if policy.keep_every else 0)
    before_last = (steps - 1) // policy.every if policy.every else 0
    checkpoint.check_space(run.checkpoints, checkpoint.checkpoint_bytes(config), min(kept, before_last))
    return start


def _remember(plan: Ledger, outcome: Outcome, profile: Profile, run: RunDirectory) -> None:
    """Record planned and measured step times of a complete run, from which intervals of later plans are computed."""
    measured = outcome.ledger.totals.get("step_seconds")
    others = outcome.ledger.facts.get("other_load") or 0.0  # other programs' load makes a run unfit for comparison
    if others > interference.MAX_OTHER_LOAD or is_emulated(plan.decided.precision, profile):
        return  # the plan does not include the rounding of emulated products
    if measured is not None and outcome.interrupted is None and not outcome.ledger.facts["compile"]:
        totals.remember(profile.created, plan.totals["step_seconds"].value, measured.value, run.path.name)
