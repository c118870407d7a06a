"""Early ends of a run: a signal, on this or another rank, and out of memory, recognized in its many forms and reported
in one line with the plan's advice."""

from __future__ import annotations

import errno
import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType

import torch

from ironlaw import units
from ironlaw.config import RunConfig
from ironlaw.errors import UserError
from ironlaw.ledger import Ledger
from ironlaw.machine.profile import Profile
from ironlaw.plan.step import plan_run
from ironlaw.train.checkpoint import Checkpoint
from ironlaw.train.run_directory import handled_signals

# PyTorch's allocator on the CPU raises plain RuntimeErrors.
_MESSAGES = ("can't allocate memory", "cannot allocate memory", "not enough memory", "out of memory", "std::bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` means that the device or the host is out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _MESSAGES)


def out_of_memory(
    error: BaseException, config: RunConfig, plan: Ledger, profile: Profile, step: int, last: Checkpoint | None
) -> UserError:
    """Return a one-line error: where it happened, what the plan expected, what needs less, and how to resume."""
    device = isinstance(error, torch.OutOfMemoryError)
    where = f"the {'device' if device else 'host'} is out of memory in step {step + 1}"
    expected = plan.totals["peak_bytes" if device else "resident_bytes"].value
    advice = next(_smaller_micro_batches(config, plan, profile), None)
    less = (
        f"train.micro_batch = {advice[0]} (now {config.micro_batch}) plans {units.bytes_(advice[1])} less: "
        f"--set train.micro_batch={advice[0]}"
        if advice
        else "train.micro_batch is 1 already: a shorter train.sequence or a smaller model needs less"
    )
    resume = f"the last checkpoint is of step {last.step}, run again with --resume" if last else "no checkpoint yet"
    return UserError(f"{where}; the plan expected {units.bytes_(expected)}; {less}; {resume}")


def _smaller_micro_batches(config: RunConfig, plan: Ledger, profile: Profile) -> Iterator[tuple[int, float]]:
    """Yield (micro-batch, planned bytes saved) for sizes that save over 10%, largest first, and for size 1."""
    peak = plan.totals["peak_bytes"].value
    sizes = (n for n in range(config.micro_batch // 2, 0, -1) if config.train.global_batch % n == 0)
    for size in sizes:
        smaller = config.model_copy(update={"train": config.train.model_copy(update={"micro_batch": size})})
        try:
            saved = peak - plan_run(smaller, profile).totals["peak_bytes"].value
        except (MemoryError, RuntimeError, UserError):
            return
        if saved > 0.1 * peak or size == 1:
            yield size, saved


class Interruption:
    """Ends the run after the current step, with a checkpoint, on the first signal, and at once on the second.

    `name` is the signal's name, or None before a signal arrives.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.name: str | None = None
        self._say = say

    def listening(self) -> AbstractContextManager[None]:
        """Return the context in which signals are heard, but for those that are ignored, as nohup does SIGHUP."""
        return handled_signals(self._on_signal, lambda before: before is not signal.SIG_IGN)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
        if self.name == "SIGHUP":  # writing to a closed terminal fails, which would stop the save
            for descriptor in (1, 2):
                if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        self._say(f"{self.name}: finishing the step and saving; once more to stop without saving")
