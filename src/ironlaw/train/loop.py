"""The training loop of one rank. A single process is a mesh of one (`mesh.py`).

    trainer = Trainer(config, run, plan, dataset, profile, mesh, Step)
    outcome = trainer.train()

A step waits for its batch, runs forward and backward over its micro-batches, clips the gradients and updates the
weights. Everything else (validation, checkpoints, profiling) happens between steps and is accounted for separately in
the wall time. Every rank runs this loop; rank 0 writes the files.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch

from ironlaw import units
from ironlaw.config import RunConfig
from ironlaw.data.dataset import Dataset
from ironlaw.data.loader import Loader, Prefetcher
from ironlaw.ledger import Ledger, Phase
from ironlaw.machine import host
from ironlaw.machine.measure import Probe
from ironlaw.machine.profile import Profile
from ironlaw.observe.clock import StepTimes
from ironlaw.observe.energy import EnergyMeter
from ironlaw.observe.gpu_monitor import find_gpu_monitor
from ironlaw.observe.measured import Observations, warmup_steps
from ironlaw.observe.profile import COPY_SCOPE, STEP_SCOPE, profiled, read_profile, scope, scopes_of
from ironlaw.train import checkpoint
from ironlaw.train.checkpoint import RandomState, Stateful, seed_everything
from ironlaw.train.checkpointer import Checkpointer
from ironlaw.train.faults import Interruption, is_out_of_memory, out_of_memory
from ironlaw.train.finetune import save_adapter
from ironlaw.train.history import Journal, NoJournal, batch_crc32, load_step_profile, save_step_profile
from ironlaw.train.jsonl import read_lines
from ironlaw.train.mesh import Mesh, Observer
from ironlaw.train.offload import Transfer
from ironlaw.train.recovery import Recovery, Rollback, handle_spike
from ironlaw.train.result import Outcome, finished_ledger, in_other_units, validate
from ironlaw.train.run_directory import RunDirectory
from ironlaw.train.step import Step

REPLAN_AFTER_STEPS = 3  # after the warm-up: their median predicts the others within the spread of single steps
MIN_REPORTED_SECONDS = 10.0  # report the new plan only if more time than this remains
PROBE_EVERY_SECONDS = 3.0  # a probe takes some 10 ms: a third of a percent of the run


class Trainer:
    """One run on one rank. Call `train()` once, on every rank of the mesh."""

    def __init__(
        self,
        config: RunConfig,
        run: RunDirectory,
        plan: Ledger,
        dataset: Dataset,
        profile: Profile,
        mesh: Mesh,
        step: type[Step],
        *,
        observer: Observer | None = None,
        start: checkpoint.Checkpoint | None = None,
        watch: Callable[[dict[str, Any]], None] | None = None,
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.started = time.perf_counter()
        self.config, self.run, self.plan, self.dataset, self.profile = config, run, plan, dataset, profile
        self.mesh, self.observer, self.device = mesh, observer or Observer(), mesh.device
        self.watch, self.say = watch or (lambda report: None), say
        self.observed = Observations(wall_seconds=dict.fromkeys(("training", "evaluation", "checkpoint"), 0.0))
        self.step = self.tokens = 0
        self.train_loss = self.validation_loss = self._gradient_norm = float("nan")
        self.interruption = Interruption(self.say)
        self._stop_requested = False
        self._last_probe = 0.0
        self._probe = Probe(profile.fp32_products)
        self._batch_crc32: int | None = None
        self._replanned: dict[str, Any] = {}
        self._step_type, self._start = step, start

    # -- set up ----------------------------------------------------------------------------------------------

    def _setup(self) -> None:
        config, mesh, start = self.config, self.mesh, self._start
        host.keep_freed_memory()
        torch.set_num_threads(mesh.threads(self.profile))
        self.loader = Loader(self.dataset, config.data, config.sequence)
        self.batches = self.loader.training(
            config.train.global_batch, config.train.seed, mesh.index("dp"), mesh.layout.dp
        )
        self.to_device = Transfer(self.device, config.data.pin_memory)
        seed_everything(config.train.seed)
        onednn = self.profile.fp32_products == "onednn"
        self.one_step = self._step_type(
            config, self.plan.decided, mesh, onednn=onednn, fresh=start is None, say=self.say
        )
        # Everything that a resumed run must restore beside the weights, each saved under its name.
        self.states: dict[str, Stateful] = self.one_step.states() | {"random": RandomState()}
        self.checkpointer = Checkpointer(
            self.run.checkpoints, config.checkpoint, config.model, say=self.say, store=self.one_step.store,
            ranks=self.one_step.writers, before_write=lambda: self.journal.sync(),
        )  # fmt: skip
        if start is not None:
            self._load(start)
            self.say(f"resumed from step {start.step}")
        self.compiled = self.one_step.compile()
        self.recovery = Recovery(config.recovery, read_lines(self.run.events_file))
        if mesh.is_rank_0:
            load_step_profile(self.run.profile_file, self.observed)
            self.journal = Journal(config, self.run, self.step, self._setting(), self.say)
        else:
            self.journal = cast(Journal, NoJournal())
        self._read_metrics()

    def _load(self, found: checkpoint.Checkpoint) -> None:
        """Restore the state of `found`. States that it lacks start over."""
        average = self.one_step.average
        missing = self.one_step.load(found, self.states)
        for name in missing:
            self.say(f"the checkpoint holds no {name} state: it starts anew")
        if average is not None and "average" in missing:
            average.reset()
        self.step, self.tokens = found.step, found.tokens
        self.checkpointer.go_on_from(found)

    def _read_metrics(self) -> None:
        """Go on from the metrics of the steps so far, on every rank, after rank 0 has dropped those of later ones."""
        self.mesh.barrier()
        entries = self.run.metrics()
        self.recovery.reset(entries)
        for entry in entries:  # a session without a step or a validation of its own ends with those of before
            self.train_loss = float(entry["loss"])
            self.validation_loss = float(entry.get("validation_loss", self.validation_loss))

    def _setting(self) -> dict[str, Any]:
        """Return the settings that must be equal for step times of two sessions to be comparable."""
        return {
            "profile": self.profile.created, "device": self.profile.device, "threads": self.profile.threads,
            "precision": self.one_step.precision, "compile": self.compiled, "torch": torch.__version__,
        } | self.one_step.setting()  # fmt: skip

    # -- the loop --------------------------------------------------------------------------------------------

    def train(self) -> Outcome:
        """Take all steps. Raises UserError, with the plan's advice, if a single process runs out of memory."""
        try:
            self._setup()
            return self._train()
        except Exception as error:
            if self.mesh.size > 1 or not is_out_of_memory(error):
                raise
            last = self.checkpointer.last if hasattr(self, "checkpointer") else self._start
            answer = out_of_memory(error, self.config, self.plan, self.profile, self.step, last)
            with contextlib.suppress(OSError):
                self.run.write_event("out_of_memory", step=self.step, message=str(answer))
            raise answer from None

    def _train(self) -> Outcome:
        config, observed = self.config, self.observed
        accelerated = self.device.type == "cuda"
        monitor = find_gpu_monitor(self.device.index or 0) if accelerated else None
        self.energy = EnergyMeter(accelerated=accelerated, gpu=monitor)
        observed.wall_seconds["startup"] = time.perf_counter() - self.started
        self._warm_until = self.step + warmup_steps(config.train.steps)
        first_step = self.step
        with self.interruption.listening():
            try:
                self._train_to_end(first_step)
            except BaseException as error:
                with contextlib.suppress(Exception):
                    self.checkpointer.wait()  # complete a checkpoint in progress, whatever ends the run
                self.journal.abandon(error, self.step, observed)
                raise
        if self.step >= config.train.steps:  # a signal during the last step did not end the run early
            self.interruption.name = None
        return Outcome(self._finish(), self.step, self.interruption.name)

    def _train_to_end(self, first_step: int) -> None:
        """Take all steps, restoring a checkpoint after each spike that requires it, and write the last checkpoint."""
        while True:
            try:
                self._take_steps()
                break
            except Rollback as back:
                self._restore(back.target)
        if not self._checkpoint_due() and self.step > first_step:
            self._take_checkpoint()
            self.checkpointer.write()
        began = time.perf_counter()
        try:
            self.checkpointer.finish()
        finally:
            self.observed.wall_seconds["checkpoint"] += time.perf_counter() - began
        self.journal.close()

    def _take_steps(self) -> None:
        """Take steps until the run ends, a signal arrives, or a loss spike requires a rollback."""
        config, observed = self.config, self.observed
        numbers = map(self.recovery.batch, range(self.step, config.train.steps))
        with Prefetcher(self.batches, numbers, config.data.prefetch, self.to_device) as self.prefetcher:
            while self.step < config.train.steps and not self._stopping():
                if config.train.profile_steps and self.step == self._warm_until and self._enough_steps_left():
                    self._profile_steps()
                else:
                    times = self._timed_step(recording=False)
                    if self.step > self._warm_until:
                        observed.steps.append(times)
                    self._after_step(times, recorded=False)
                    if not self._replanned and len(observed.steps) == REPLAN_AFTER_STEPS:
                        self._replan()
                self._probe_if_due()
                observed.joules, observed.joules_basis = self.energy.joules(), self.energy.basis

    def _replan(self) -> None:
        """Estimate the run again from the first steps. The plan made before the run is kept."""
        before, total = (self.plan.totals[name].value for name in ("step_seconds", "total_seconds"))
        step = float(np.median([times.wall_seconds for times in self.observed.steps]))
        total += (step - before) * self.config.train.steps
        self._replanned = {"after_steps": self.step, "step_seconds": step, "total_seconds": total}
        if (self.config.train.steps - self.step) * step < MIN_REPORTED_SECONDS:
            return
        self.say(
            f"Plan       after {self.step} steps: {units.seconds(step)} per step, {units.seconds(total)} in all "
            f"(before the run: {units.seconds(before)})"
        )

    def _stopping(self) -> bool:
        if self.mesh.size > 1:
            return self._stop_requested  # a rank must not stop alone: the others would wait for it
        return self.interruption.name is not None

    def _enough_steps_left(self) -> bool:
        """Whether the run is long enough to profile some of its steps, which makes them slower."""
        readable = self.mesh.size == 1 or self.device.type == "cpu"
        return readable and self.config.train.steps - self.step >= 3 * self.config.train.profile_steps

    def _timed_step(self, recording: bool) -> StepTimes:
        """Take one optimizer step. With `recording`, emit the marks that the profile reader looks for."""
        clock, observer, number = self.one_step.clock, self.observer, self.step
        self.one_step.recording = recording
        with clock.step() as times, scope(STEP_SCOPE, recording), observer.step(number + 1, clock):
            with clock.phase(Phase.DATA):
                batch = next(self.prefetcher)
                if self.config.tracking.batch_digests:
                    self._batch_crc32 = batch_crc32(batch)
            loss = self.one_step.forward_backward(batch, number)
            result = self.one_step.update(loss, number, self.interruption.name is not None)
        self.train_loss, self._gradient_norm, self._stop_requested = result
        if result.stop and self.interruption.name is None:
            self.interruption.name = "SIGTERM"  # another rank received a signal
        self.step += 1
        self.tokens += self.config.tokens_per_step
        observer.after_step(self.step, self.journal.event, self.say)
        return times

    def _profile_steps(self) -> None:
        """Take a few steps under the profiler, which records the time of each operation and every allocation."""
        count = self.config.train.profile_steps
        began, counted = time.perf_counter(), sum(self.observed.wall_seconds.values())
        finished: list[StepTimes] = []
        persistent = self.one_step.persistent_bytes()
        model = self.one_step.model
        with scopes_of(model, self.compiled), self.observer.recording(), profiled(self.device.type) as recorded:
            for _ in range(count):
                finished.append(self._timed_step(recording=True))
                self._after_step(finished[-1], recorded=True)
        self.observed.profiled_seconds = [times.wall_seconds for times in finished]
        self.observed.profile = read_profile(recorded, count, self.one_step.gradient_pointers)
        self.observer.recorded(recorded, self.observed.profile, persistent)
        if self.mesh.is_rank_0:
            save_step_profile(self.run.profile_file, self.observed)
        # The profiled steps and the work between them have already been counted under other headings.
        counted = sum(self.observed.wall_seconds.values()) - counted
        self.observed.wall_seconds["profiling"] = max(0.0, time.perf_counter() - began - counted)

    # -- between steps ---------------------------------------------------------------------------------------

    def _after_step(self, times: StepTimes, recorded: bool) -> None:
        config, step = self.config, self.step
        self._check_for_spike()
        phases = {f"{phase}_seconds": seconds for phase, seconds in times.phase_seconds.items()}
        entry: dict[str, Any] = {
            "step": step, "batch": self.recovery.batch(step - 1), "loss": self.train_loss, "tokens": self.tokens,
            "seconds": times.wall_seconds, "loader_tokens_per_second": self.prefetcher.tokens_per_second,
            "lr": self.one_step.optimizer.param_groups[0]["lr"], "grad_norm": self._gradient_norm, **phases,
        } | self.one_step.metrics()  # fmt: skip
        if not recorded:  # the time of profiled steps counts as profiling, which slows them
            self.observed.wall_seconds["training"] += times.wall_seconds
        if _due(step, config.evaluation.every) or step == config.train.steps:
            entry |= self._evaluate()
        if self._checkpoint_due():
            entry["checkpoint_seconds"] = self._take_checkpoint(entry.get("validation_loss"))
        entry["resident_bytes"] = host.resident_bytes()
        self.observed.resident_peak_bytes = max(self.observed.resident_peak_bytes or 0, entry["resident_bytes"])
        if recorded:
            entry["recorded"] = True
        if step <= self._warm_until:
            entry["warmup"] = True
        if self._batch_crc32 is not None:
            entry["batch_crc32"] = self._batch_crc32
        self.journal.step(entry)
        # After the metrics: otherwise a kill could leave a checkpoint whose metrics line is missing.
        self.checkpointer.write()
        self.watch(entry | {"steps": config.train.steps, "attention": self.one_step.attention})

    def _checkpoint_due(self) -> bool:
        return _due(self.step, self.config.checkpoint.every)

    def _evaluate(self) -> dict[str, float]:
        """Validate between steps. Returns the losses, also of averaged weights, and the seconds it took."""
        began = time.perf_counter()
        self.validation_loss = self._validate()
        found = {"validation_loss": self.validation_loss}
        if self.one_step.objective.per_token:
            found |= in_other_units(self.validation_loss, self.dataset.bits_per_byte(self.validation_loss))
        if self.one_step.average is not None:
            with self.one_step.average.applied():
                found["average_validation_loss"] = self._validate()
        found["evaluation_seconds"] = time.perf_counter() - began
        self.observed.wall_seconds["evaluation"] += found["evaluation_seconds"]
        return found

    def _validate(self) -> float:
        return validate(self.one_step, self.loader, self.to_device)

    def _take_checkpoint(self, validation_loss: float | None = None) -> float:
        """Copy the current state; `checkpointer.write()` then writes it while the next steps run. Returns seconds."""
        with scope(COPY_SCOPE):
            seconds = self.checkpointer.take(
                self.step, self.tokens, self.one_step.model, self.states, validation_loss,
                turns=len(self.recovery.decisions), text=self.dataset.digest, **self.one_step.about,
            )  # fmt: skip
        if self.device.type == "cpu" and self.step < self.config.train.steps:  # the copy is held during the next steps
            self.observed.checkpoint_copy_bytes = self.checkpointer.copied_bytes
        self.observed.wall_seconds["checkpoint"] += seconds
        return seconds

    def _check_for_spike(self) -> None:
        """Raise Rollback on a spike, or UserError if going back cannot help. A spike's last step is not logged."""
        spike = self.recovery.observe(self.step, self.train_loss, self._gradient_norm)
        if spike is None:
            return
        self.checkpointer.wait()
        # All ranks detect the same spike from the same numbers; rank 0 inspects, chooses and deletes checkpoints.
        target, self.recovery.decisions = self.mesh.on_rank_0(
            lambda: (
                handle_spike(spike, self.recovery, self.run.checkpoints, self.journal.event, self.say),
                self.recovery.decisions,
            )
        )
        if target is not None:
            raise Rollback(target)

    def _restore(self, target: checkpoint.Checkpoint) -> None:
        """Go back to the state of `target`. Later steps are discarded, except from the events and the wall time."""
        began = time.perf_counter()
        self._load(target)
        self.journal.drop_after(self.step, self.observed)
        self._read_metrics()
        wall = self.observed.wall_seconds
        wall["repeated"] = wall.get("repeated", 0.0) + time.perf_counter() - began

    def _probe_if_due(self) -> None:
        """Compare the machine's speed with its measured profile every few seconds."""
        now = time.perf_counter()
        due = now - self._last_probe > PROBE_EVERY_SECONDS
        if due and self.mesh.is_rank_0 and self.device.type == "cpu":
            self.observed.probes.append(self._probe.ratios(self.profile))
            self._last_probe = now

    def _finish(self) -> Ledger:
        """Return the ledger of the run. Rank 0's covers all ranks; those of other ranks are empty."""
        observed, config = self.observed, self.config
        self.observer.gather(observed)
        trained = self.one_step.trained() if config.finetune.adapts else {}
        if not self.mesh.is_rank_0:
            return Ledger("run")
        if config.finetune.adapts:
            save_adapter(self.run.adapter, trained, config)
        total = time.perf_counter() - self.started
        observed.wall_seconds["other"] = max(0.0, total - sum(observed.wall_seconds.values()))
        self.journal.sessions.end(self.interruption.name or "done", self.step, observed)
        self.journal.sessions.merge(observed, self.run.metrics())
        ledger = finished_ledger(
            observed, self.plan, self.one_step, self.dataset.unigram_loss,
            train_loss=self.train_loss, validation_loss=self.validation_loss, compile=self.compiled,
            data=self.loader.facts() | self.prefetcher.facts(), steps_done=self.step,
            interrupted=self.interruption.name, sessions=self.journal.sessions.facts(),
            rollbacks=len(self.recovery.decisions), planned_again=self._replanned or None,
        )  # fmt: skip
        self.observer.complete(ledger)
        return ledger


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
