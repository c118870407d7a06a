"""Out of memory: recognised in all its guises, and answered in one line with what the plan advises."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import torch

from ironlaw import units
from ironlaw.config import RunConfig
from ironlaw.errors import UserError
from ironlaw.ledger import Ledger
from ironlaw.machine.profile import Profile
from ironlaw.plan.step import plan_run
from ironlaw.train.checkpoint import Checkpoint

# PyTorch's allocator on the CPU raises plain RuntimeErrors.
_WORDS = ("can't allocate memory", "cannot allocate memory", "not enough memory", "out of memory", "std::bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is the device's or the host's way to say that there is no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _WORDS)


def out_of_memory(
    error: BaseException, config: RunConfig, plan: Ledger, profile: Profile, step: int, last: Checkpoint | None
) -> UserError:
    """The whole answer in one line: where, what the plan had expected, what needs less, and where to go on."""
    device = isinstance(error, torch.OutOfMemoryError)
    where = f"the {'device' if device else 'host'} is out of memory in step {step + 1}"
    expected = plan.totals["peak_bytes" if device or "resident_bytes" not in plan.totals else "resident_bytes"].value
    advice = next(_smaller(config, plan, profile), None)
    less = (
        f"train.micro_batch = {advice[0]} (now {config.micro_batch}) plans {units.bytes_(advice[1])} less: "
        f"--set train.micro_batch={advice[0]}"
        if advice
        else "train.micro_batch is 1 already: a shorter train.sequence or a smaller model needs less"
    )
    resume = f"the last checkpoint is of step {last.step}, run again with --resume" if last else "no checkpoint yet"
    return UserError(f"{where}; the plan expected {units.bytes_(expected)}; {less}; {resume}")


def _smaller(config: RunConfig, plan: Ledger, profile: Profile) -> Iterator[tuple[int, float]]:
    """The largest divisor of the micro-batch that plans at least a tenth less, and the bytes it saves."""
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
