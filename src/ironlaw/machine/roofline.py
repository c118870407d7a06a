"""The time of one operation: on a measured machine from its curves, else from catalogued ceilings (a roofline)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ironlaw.ledger import Origin
from ironlaw.machine.profile import Profile
from ironlaw.workload.operations import Operation


@dataclass(frozen=True)
class Timing:
    """Seconds of one call and the ceiling that sets them: compute, memory or overhead (dispatch, launch)."""

    seconds: float
    bound: str
    origin: Origin


class Machine(Protocol):
    """Anything that can time an operation."""

    def time(self, op: Operation, precision: str) -> Timing: ...


@dataclass(frozen=True)
class MeasuredMachine:
    """This machine, by the profile that `ironlaw measure` made."""

    profile: Profile

    def time(self, op: Operation, precision: str) -> Timing:
        profile = self.profile
        if op.matmul is not None:
            seconds = profile.matmul[precision][op.kernel].at(*op.matmul)
            bound = "compute"
        elif op.attention is not None:
            _, sequence, _, _, head_size = op.attention
            direction = op.kernel.removeprefix("attention_")
            pair = profile.attention_seconds_per_pair(precision, direction, sequence, head_size)
            seconds = pair * op.elements + profile.small_operation_seconds
            bound = "compute"
        else:
            seconds = profile.curve(op.kernel, precision).at(op.elements)
            bound = "memory"
        if seconds < 4 * profile.small_operation_seconds:
            bound = "overhead"
        return Timing(seconds, bound, Origin.MEASURED)


@dataclass(frozen=True)
class Ceilings:
    """Catalogued ceilings and the fractions of them that operations attain (Williams et al. 2009, roofline)."""

    flops_per_second: float
    bytes_per_second: float
    compute_fraction: float = 1.0
    memory_fraction: float = 1.0
    launch_seconds: float = 0.0

    @property
    def ridge_point(self) -> float:
        """FLOP per byte above which the arithmetic, not the memory, limits."""
        return self.flops_per_second / self.bytes_per_second

    def time(self, op: Operation, precision: str) -> Timing:
        compute = (op.flops or 0) / (self.flops_per_second * self.compute_fraction)
        memory = op.bytes_moved / (self.bytes_per_second * self.memory_fraction)
        seconds = max(compute, memory, self.launch_seconds)
        bound = {compute: "compute", memory: "memory", self.launch_seconds: "overhead"}[seconds]
        return Timing(seconds, bound, Origin.CALCULATED)
