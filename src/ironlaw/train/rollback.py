"""The answer to a loss spike: which checkpoint to go back to, written down before anything changes."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ironlaw.errors import UserError
from ironlaw.files import read_json
from ironlaw.train import checkpoint as disk
from ironlaw.train.checkpoint import Checkpoint
from ironlaw.train.recovery import Recovery, Rollback, Spike

_MILDER = "lower optimizer.lr or train with train.precision = fp32"


class GoBack(Exception):
    """Raised out of the steps: the run goes on from `target`."""

    def __init__(self, target: Checkpoint) -> None:
        self.target = target


def answer(
    spike: Spike, recovery: Recovery, folder: Path, event: Callable[..., None], say: Callable[[str], None]
) -> Checkpoint | None:
    """The checkpoint to go back to, decided and logged; None when there is none and the run can go on as it is.

    Raises UserError when the run has to stop: the last strike, or a loss that is not finite with nothing to go back to.
    """
    if not recovery.config.enabled:
        raise UserError(f"{spike.reason} in step {spike.last}: {_MILDER}, or allow recovery.enabled")
    decision, target = _choose(spike, recovery, folder)
    record = recovery.event(decision)
    if record["event"] == "stop":
        # Checkpoints from within the spike must not be what a resumed run starts from.
        record["to_step"] = spike.first - 1 if decision.to_step is None else decision.to_step
        _write(event, record)
        recovery.take(record)
        drop_after(folder, record["to_step"])
        raise UserError(_report(recovery, decision))
    if target is None:
        if not math.isfinite(recovery.history[-1].loss + recovery.history[-1].grad_norm):
            raise UserError(
                f"{spike.reason} in step {spike.last}, and there is no checkpoint before it to go back to: {_MILDER}"
            )
        _write(event, record | {"event": "spike"})
        say(f"loss spike in step {spike.first} ({spike.reason}); no checkpoint before it, training goes on")
        return None
    _write(event, record)
    recovery.take(record)
    drop_after(folder, target.step)
    first, end = decision.skip
    say(
        f"loss spike in step {spike.first} ({spike.reason}): back to step {target.step}, leaving out batches "
        f"{first} to {end - 1} (strike {decision.strike} of {recovery.config.strikes})"
    )
    return target


def _choose(spike: Spike, recovery: Recovery, folder: Path) -> tuple[Rollback, Checkpoint | None]:
    """Checksums are read of the chosen one only; if they do not hold, of the next best."""
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
        if decision.to_step is None:
            return decision, None
        try:
            return decision, disk.read_index(steps.pop(decision.to_step))
        except UserError:
            continue


def drop_after(folder: Path, step: int) -> None:
    """Checkpoints of the branch that was given up."""
    for path in disk.complete(folder):
        if disk.step_of(path) > step:
            shutil.rmtree(path, ignore_errors=True)


def _write(event: Callable[..., None], record: dict[str, Any]) -> None:
    try:
        event(**record)
    except OSError as error:
        raise UserError(
            f"a loss spike, and its event cannot be written ({error.strerror}): free some space and run again with "
            "--resume"
        ) from None


def _report(recovery: Recovery, decision: Rollback) -> str:
    """All strikes of the row in one line: where each was, and that skipping batches did not help."""
    row = [event["spike"]["first_step"] for event in recovery.turns[-decision.strike :]]
    spikes = ", ".join(str(step) for step in row)
    return (
        f"stopped after {decision.strike} loss spikes (in steps {spikes}; the last: {decision.spike.reason}): other "
        "batches did not help, so look at optimizer.lr, train.clip and train.precision; what happened is in "
        "events.jsonl, and --resume goes on from before the last spike"
    )
