"""Loss spikes: detect one, go back to a checkpoint before it, and continue without the batches around it.

This follows practice on large runs. PaLM was restarted from a checkpoint about 100 steps before a spike and skipped
some 200 to 500 batches; the same batches did no harm from another state (arXiv 2204.02311, section 5.1). The OPT-175B
logbook records the same procedure by hand (arXiv 2205.01068). Every decision is a pure function of logged numbers
(losses, gradient norms, earlier events), so that all ranks, and a run resumed after a kill, decide alike.

Batches are numbered in the loader's order; `batch_of` maps steps to batches. The decision about a spike, including the
checkpoint to go back to, is written to `events.jsonl` and synced before anything else changes, and is binding for a
run that is resumed later.
"""

from __future__ import annotations

import itertools
import math
import shutil
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ironlaw.config import RecoveryConfig
from ironlaw.errors import UserError, reported
from ironlaw.files import read_json
from ironlaw.train import checkpoint as disk
from ironlaw.train.checkpoint import Checkpoint

SIGMA = 1.4826  # standard deviation of a normal distribution in median absolute deviations


@dataclass(frozen=True)
class MeasuredStep:
    """The metrics of one step. `step` counts from 1."""

    step: int
    loss: float
    grad_norm: float


@dataclass(frozen=True)
class Spike:
    """Outlying steps, first to last. `typical_loss` and `spread` describe the loss of the steps before, in nats."""

    first_step: int
    last_step: int
    reason: str
    typical_loss: float
    spread: float


def batch_of(step: int, skipped: Iterable[tuple[int, int]]) -> int:
    """Return the number of the batch for step `step` (from 0), past the half-open ranges `skipped` (may overlap)."""
    batch, passed = step, 0
    for first, end in sorted(skipped):
        if first > batch:
            break
        batch += max(0, end - max(first, passed))
        passed = max(passed, end)
    return batch


def find_spike(history: Sequence[MeasuredStep], config: RecoveryConfig) -> Spike | None:
    """Return the spike in which the last entry of `history` lies, if any.

    A loss that is not finite is a spike at once. Otherwise the last `patience` steps must all be outliers with respect
    to the `window` before them: by `threshold` robust standard deviations (based on medians, which the spike itself
    cannot shift) and by `minimum_rise`. An outlying gradient norm halves both thresholds for the loss.
    """
    if not history:
        return None
    newest = history[-1]
    if not math.isfinite(newest.loss) or not math.isfinite(newest.grad_norm):
        what = "loss" if not math.isfinite(newest.loss) else "gradient norm"
        finite = [m.loss for m in history[:-1][-config.window :] if math.isfinite(m.loss)]
        middle, spread = _robust(finite) if finite else (math.nan, math.nan)
        return Spike(newest.step, newest.step, f"the {what} is not finite", middle, spread)
    recent = history[-config.patience :]
    before = history[: -config.patience][-config.window :]
    if len(recent) < config.patience or len(before) < max(8, config.window // 2):
        return None
    middle, spread = _robust([m.loss for m in before])
    norms = _robust([math.log(m.grad_norm) for m in before if m.grad_norm > 0] or [0.0])

    def has_high_norm(m: MeasuredStep) -> bool:
        return m.grad_norm > 0 and math.log(m.grad_norm) - norms[0] > config.threshold * norms[1]

    def is_outlier(m: MeasuredStep) -> bool:
        share = 0.5 if has_high_norm(m) else 1.0
        return m.loss - middle > share * max(config.threshold * spread, config.minimum_rise)

    if not all(is_outlier(m) for m in recent):
        return None
    first = recent[0].step
    for m in reversed(before[-config.patience :]):  # gradient norms often rise a few steps before the loss
        if not has_high_norm(m):
            break
        first = m.step
    sigmas = (newest.loss - middle) / spread
    reason = f"the loss is {newest.loss:.3f}, {sigmas:.0f} robust standard deviations above {middle:.3f}"
    return Spike(first, newest.step, reason, middle, spread)


def _robust(values: Sequence[float]) -> tuple[float, float]:
    """Return the median of the latest eighth of `values`, and their standard deviation around the trend.

    The deviation is computed from differences of neighbours, so that the fast decrease of the loss early in a run does
    not count as scatter. It has a lower bound, for values that hardly vary.
    """
    middle = statistics.median(values[-max(4, len(values) // 8) :])
    steps = [abs(later - earlier) for earlier, later in itertools.pairwise(values)]
    deviation = SIGMA * statistics.median(steps) / math.sqrt(2) if steps else 0.0
    return middle, max(deviation, 1e-3 * abs(middle), 1e-6)


class Recovery:
    """The run's history of spikes, from `events.jsonl`, and the decision about the next one."""

    def __init__(self, config: RecoveryConfig, events: Iterable[dict[str, Any]]) -> None:
        self.config = config
        self.decisions = [event for event in events if event.get("event") in ("rollback", "stop")]
        if not all(map(_is_decision, self.decisions)):
            raise UserError("events.jsonl has a rollback of no steps: remove that line, or give a new --out")
        self.history: list[MeasuredStep] = []
        self._in_spike = False

    def reset(self, metrics: Iterable[dict[str, Any]]) -> None:
        """Set the history to the latest metrics, at the start or after a rollback."""
        self.history = [
            MeasuredStep(int(entry["step"]), float(entry["loss"]), float(entry.get("grad_norm", math.nan)))
            for entry in metrics
        ][-self._reach :]
        self._in_spike = False

    @property
    def _reach(self) -> int:
        return self.config.window + 2 * self.config.patience

    def observe(self, step: int, loss: float, grad_norm: float) -> Spike | None:
        """Add a step to the history. Returns a Spike if one has begun."""
        self.history.append(MeasuredStep(step, loss, grad_norm))
        del self.history[: -self._reach]
        watched = self.config.enabled or not math.isfinite(loss + grad_norm)
        spike, known = find_spike(self.history, self.config) if watched else None, self._in_spike
        self._in_spike = spike is not None
        return None if known else spike

    def usable(self, step: int, decisions: int) -> bool:
        """Whether a checkpoint of `step`, made after `decisions` rollbacks, was not undone by a later rollback."""
        return all(step <= event["to_step"] for event in self.decisions[decisions:])

    def batch(self, step: int) -> int:
        """Return the number of the batch for step `step` (from 0)."""
        return batch_of(step, (tuple(e["skipped_batches"]) for e in self.decisions if e["event"] == "rollback"))

    def decide(self, spike: Spike, checkpoints: Sequence[int]) -> dict[str, Any]:
        """Return the response to a spike, including the evidence, as it is written to `events.jsonl`. `checkpoints`:
        the steps of the intact and usable ones. `to_step` is None if none precedes the spike; `strike` counts from 1.
        """
        config, before = self.config, [step for step in checkpoints if step < spike.first_step]
        far = [step for step in before if step <= spike.first_step - 1 - config.rewind]
        target = max(far) if far else min(before) if before else None
        first = self.batch(max(0, spike.first_step - 1 - config.skip_before, target or 0))
        end = self.batch(spike.last_step - 1) + 1 + config.skip_after
        strike, length = self._strike(spike), spike.last_step - spike.first_step
        return {
            "event": "stop" if strike >= config.strikes else "rollback",
            "strike": strike,
            "to_step": target,
            "skipped_batches": [first, end],
            "spike": asdict(spike),
            "evidence": [asdict(m) for m in self.history[-(4 * config.patience + length) :]],
        }  # fmt: skip

    def _strike(self, spike: Spike) -> int:
        """Return 1 plus the number of spikes in a row, each within `forgive_steps` of the next, since the last stop."""
        strike, later = 1, spike.first_step
        for event in reversed(self.decisions):
            if event["event"] == "stop" or later - event["spike"]["first_step"] > self.config.forgive_steps:
                break
            strike, later = strike + 1, event["spike"]["first_step"]
        return strike


def _is_decision(event: dict[str, Any]) -> bool:
    """Whether an event, which may have been edited by hand, has all fields of a rollback."""
    skipped, spike = event.get("skipped_batches"), event.get("spike")
    steps = [event.get("to_step"), spike.get("first_step") if isinstance(spike, dict) else None]
    numbers = [*steps, *(skipped if isinstance(skipped, list) and len(skipped) == 2 else [None])]
    return all(isinstance(number, int) for number in numbers)


_REMEDY = "lower optimizer.lr, or train with train.precision = fp32 unless you do"


class Rollback(Exception):
    """Raised by a step to make the run continue from `target`."""

    def __init__(self, target: Checkpoint) -> None:
        self.target = target


def handle_spike(
    spike: Spike, recovery: Recovery, folder: Path, event: Callable[..., None], say: Callable[[str], None]
) -> Checkpoint | None:
    """Decide on a spike and log it. Returns the checkpoint to go back to, or None if the run continues without one.

    Raises UserError if the run must stop: at the last strike, or with a loss that is not finite and no checkpoint.
    """
    if not recovery.config.enabled:
        raise UserError(f"{spike.reason} in step {spike.last_step}: {_REMEDY}, or allow recovery.enabled")
    record, target = _choose(spike, recovery, folder)
    stops = record["event"] == "stop"
    if stops and record["to_step"] is None:
        record["to_step"] = spike.first_step - 1  # a resumed run must not start from a checkpoint within the spike
    if target is None and not stops:
        if not math.isfinite(recovery.history[-1].loss + recovery.history[-1].grad_norm):
            raise UserError(
                f"{spike.reason} in step {spike.last_step}, and there is no checkpoint before it to go back to: "
                f"{_REMEDY}"
            )
        record["event"] = "spike"
    told = "a loss spike, and its event cannot be written ({reason}): free some space and run again with --resume"
    with reported(told, OSError):
        event(**record)
    if record["event"] == "spike":
        say(f"loss spike in step {spike.first_step} ({spike.reason}); no checkpoint before it, training goes on")
        return None
    recovery.decisions.append(record)
    drop_checkpoints_after(folder, record["to_step"])
    if stops:
        raise UserError(_report(recovery, record))
    assert target is not None
    first, end = record["skipped_batches"]
    say(
        f"loss spike in step {spike.first_step} ({spike.reason}): back to step {target.step}, leaving out batches "
        f"{first} to {end - 1} (strike {record['strike']} of {recovery.config.strikes})"
    )
    return target


def _choose(spike: Spike, recovery: Recovery, folder: Path) -> tuple[dict[str, Any], Checkpoint | None]:
    """Choose a checkpoint. Checksums are verified for the chosen one only; if they fail, the next best is tried."""
    steps = {}
    for path in disk.complete(folder):
        try:
            index = read_json(path / disk.INDEX)
            if recovery.usable(int(index["step"]), int(index.get("turns", 0))):
                steps[int(index["step"])] = path
        except (OSError, ValueError, KeyError, TypeError):
            continue
    while True:
        decision = recovery.decide(spike, sorted(steps))
        if decision["to_step"] is None:
            return decision, None
        try:
            return decision, disk.read_index(steps.pop(decision["to_step"]))
        except UserError:
            continue


def drop_checkpoints_after(folder: Path, step: int) -> None:
    """Delete the checkpoints after `step`, which belong to the discarded branch."""
    for path in disk.complete(folder):
        if disk.step_of(path) > step:
            shutil.rmtree(path, ignore_errors=True)


def _report(recovery: Recovery, stop: dict[str, Any]) -> str:
    """Return a one-line report of all strikes: where they occurred, and that skipping batches did not help."""
    row = [event["spike"]["first_step"] for event in recovery.decisions[-stop["strike"] :]]
    spikes = ", ".join(str(step) for step in row)
    return (
        f"stopped after {stop['strike']} loss spikes (in steps {spikes}; the last: {stop['spike']['reason']}): other "
        "batches did not help, so look at optimizer.lr, train.clip and train.precision; what happened is in "
        "events.jsonl, and --resume goes on from before the last spike"
    )
