"""From a config to a finished run directory: prepare the data, plan, train, write both ledgers."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

from ironlaw.config import RunConfig
from ironlaw.data import supply
from ironlaw.data.dataset import Dataset
from ironlaw.data.loader import Loader
from ironlaw.data.prepare import prepare
from ironlaw.errors import UserError
from ironlaw.ledger import Ledger
from ironlaw.machine import interference
from ironlaw.machine.profile import Profile
from ironlaw.plan import record
from ironlaw.plan.step import plan_run
from ironlaw.plan.totals import fits
from ironlaw.train import checkpoint
from ironlaw.train.faults import is_out_of_memory, out_of_memory
from ironlaw.train.journal import write_event
from ironlaw.train.jsonl import read_lines
from ironlaw.train.lock import locked
from ironlaw.train.loop import Outcome, StepReport, Trainer
from ironlaw.train.recovery import Recovery
from ironlaw.train.run_directory import RunDirectory, create_run, find_run
from ironlaw.train.start import check_first_weights
from ironlaw.train.tracking import check_installed

DataProgress = Callable[[int, int], None]


def run_training(
    config: RunConfig,
    out: Path,
    profile: Profile,
    *,
    resume: bool = False,
    data_progress: DataProgress | None = None,
    planned: Callable[[Ledger, Dataset], None] | None = None,
    watch: Callable[[StepReport], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> Outcome:
    """Train `config` into the directory `out`; `planned` is shown the plan before the first step.

    Raises UserError when the input cannot work (no text, no room, another model), before anything is written to `out`.
    """
    say = say or (lambda message: None)
    check_installed(config.tracking)
    run = find_run(out, config, resume)
    with contextlib.ExitStack() as held:
        if out.is_dir():  # before its checkpoints are looked at; a new run is locked once there is a directory
            held.enter_context(locked(out))
        return _train_alone(config, run, profile, held, data_progress, planned, watch, say)


def _train_alone(
    config: RunConfig, run: RunDirectory, profile: Profile, held: contextlib.ExitStack,
    data_progress: DataProgress | None, planned: Callable[[Ledger, Dataset], None] | None,
    watch: Callable[[StepReport], None] | None, say: Callable[[str], None],
) -> Outcome:  # fmt: skip
    """The run directory is this process's, or does not exist yet."""
    new = not run.path.is_dir()
    plan = plan_run(config, profile)
    if not fits(plan):
        raise UserError(
            "the plan does not fit this machine's memory: lower train.micro_batch; `ironlaw plan` shows what holds it"
        )
    dataset = prepare(config.data, config.model.vocab, data_progress, say)
    start = check_start(config, dataset, run, say)
    if start is not None and start.step >= config.train.steps and run.ledger_file.is_file():
        say(f"{run.path} has done its {start.step} steps already: set train.steps higher to go on")
        return Outcome(Ledger.load(run.ledger_file), start.step, None)
    create_run(run, config)
    if new:
        held.enter_context(locked(run.path))
    plan.save(run.plan_file)
    if dataset.tokenizer_path is not None:
        shutil.copyfile(dataset.tokenizer_path, run.tokenizer_file)
    if planned is not None:
        planned(plan, dataset)
    trainer: Trainer | None = None
    try:
        trainer = Trainer(config, run, plan, dataset, profile, start=start, watch=watch, say=say)
        outcome = trainer.train()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        step = trainer.step if trainer is not None else 0
        last = trainer.checkpointer.last if trainer is not None else start
        answer = out_of_memory(error, config, plan, profile, step, last)
        with contextlib.suppress(OSError):
            write_event(run, "out_of_memory", step=step, message=str(answer))
        raise answer from None
    outcome.ledger.save(run.ledger_file)
    interference.remember(profile, trainer.observed.probes)
    _remember(plan, outcome, profile, run)
    supply.remember(config.data, config.sequence, outcome.ledger.facts["data"])
    return outcome


def check_start(
    config: RunConfig, dataset: Dataset, run: RunDirectory, say: Callable[[str], None]
) -> checkpoint.Checkpoint | None:
    """Everything that can be wrong before the first step; returns the checkpoint to start from, if there is one."""
    if dataset.vocab > config.model.vocab:
        raise UserError(
            f"the tokenizer has {dataset.vocab} entries, model.vocab = {config.model.vocab}: "
            f"set model.vocab = {dataset.vocab}"
        )
    loader = Loader(dataset, config.data, config.sequence)
    loader.training(config.train.global_batch, config.train.seed)
    next(loader.validation(config.micro_batch, 1))
    recovery = Recovery(config.recovery, read_lines(run.events_file), ())
    start = checkpoint.newest(
        run.checkpoints, warn=say, usable=lambda c: recovery.usable(c.step, int(c.index.get("turns", 0)))
    )
    if start is None:
        checkpoint.check_none_lost(run)
    if start is None and config.train.start_from:
        check_first_weights(config.train.start_from, config.model)
    if start is not None:
        checkpoint.check_model(start, config.model)
    policy = config.checkpoint
    kept = policy.keep + policy.keep_best + (config.train.steps // policy.keep_every if policy.keep_every else 0)
    checkpoint.check_space(run.checkpoints, checkpoint.checkpoint_bytes(config), kept)
    return start


def _remember(plan: Ledger, outcome: Outcome, profile: Profile, run: RunDirectory) -> None:
    """A complete run adds to what the next plan's interval is learned from."""
    measured = outcome.ledger.totals.get("step_seconds")
    others = outcome.ledger.facts.get("other_load") or 0.0  # a run beside other programs says nothing of the planner
    if others > interference.MOST_OTHERS:
        return
    if measured is not None and outcome.interrupted is None and not outcome.ledger.facts["compile"]:
        record.remember(profile.created, plan.totals["step_seconds"].value, measured.value, run.path.name)
