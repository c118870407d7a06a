"""What times the operations of a program: this machine by its measured curves, alone or shared by several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, cast

from ironlaw.catalog.formats import number_format
from ironlaw.catalog.precision_recipes import precision_recipe
from ironlaw.ledger import UNNAMED, Kind, Line, Origin, Phase, merged
from ironlaw.machine.links import RankCosts
from ironlaw.machine.profile import REFERENCE, REFERENCE_BATCH, TINY, Profile
from ironlaw.workload.blocks import Precision, Shape
from ironlaw.workload.kinds import has_experts
from ironlaw.workload.operations import Operation, line_name
from ironlaw.workload.optimizers import adamw_operations
from ironlaw.workload.program import training_operations

COPY_RATE = "memory (copy rate)"
"""Bound of a kernel without a curve of its own: its bytes at the measured rate of a copy, plus one small operation."""

AS_MATMUL = "compute (as matmul)"
"""Bound of a convolution: timed as the matrix product that it implies."""


def measured_precision(precision: str, profile: Profile) -> str:
    """Itself, or where this machine was not measured in it, that of the tensors it multiplies."""
    return next(name for name in (precision, number_format(precision).held_as, "bf16") if name in profile.matmul)


def is_emulated(precision: str, profile: Profile) -> bool:
    """Whether a run here rounds the operands of its products itself: no CPU multiplies few bits, and on CUDA the
    recipes that no library runs are emulated too."""
    recipe = precision_recipe(precision)
    return recipe is not None and (profile.device != "cuda" or not recipe.library)


@dataclass(frozen=True)
class Timing:
    """Seconds of one call and the ceiling that sets them: compute, memory or overhead (dispatch, launch)."""

    seconds: float
    bound: str
    origin: Origin


class Machine(Protocol):
    """Anything that times the operations of a program."""

    def time(self, op: Operation) -> Timing: ...

    def dispatch_seconds(self, phase: Phase, calls: int, busy_seconds: float) -> float:
        """What calling the kernels of a phase adds to the time that they take."""
        ...


@dataclass(frozen=True)
class MeasuredMachine:
    """This machine, by the profile that `ironlaw measure` made.

    `slowdown`: kind of kernel -> how much longer it typically takes than at best (`interference.typical`).
    """

    profile: Profile
    slowdown: Mapping[str, float]
    whole_steps: bool = True  # apply `composition`; off where a kernel is looked at alone
    own_products: bool = True  # as our own models run them; else as any other module does

    def dispatch_seconds(self, phase: Phase) -> float:
        """Cost of one operation beyond its kernel: Python, module calls, the autograd engine.

        From a tiny block, whose arithmetic is next to nothing: its measured time less its kernels' smallest times.
        """
        return self._dispatch_seconds[phase]

    @cached_property
    def _dispatch_seconds(self) -> dict[Phase, float]:
        return {phase: self._beyond_kernels(phase) for phase in (Phase.FORWARD, Phase.BACKWARD)}

    def _beyond_kernels(self, phase: Phase) -> float:
        shape = Shape(TINY, 1, TINY.context)
        operations = [op for op in training_operations(shape) if op.group == "block" and op.phase is phase]
        alone = MeasuredMachine(self.profile, dict.fromkeys(self.slowdown, 1.0), whole_steps=False)
        kernels = sum(alone.time(op, "fp32").seconds * op.repeat for op in operations) / TINY.layers
        extra = max(0.0, self.profile.tiny_block_seconds[str(phase)] - kernels) / len(operations)
        return extra * self.slowdown["memory"]

    @cached_property
    def composition(self) -> dict[str, float]:
        """Precision -> a whole step over the sum of its kernels timed alone: colder caches, a busier allocator."""
        alone = MeasuredMachine(self.profile, dict.fromkeys(self.slowdown, 1.0), whole_steps=False)
        ratios = {}
        for precision in self.profile.matmul:
            measured = self.profile.reference_step_seconds[precision]
            shape = Shape(REFERENCE, REFERENCE_BATCH, REFERENCE.context, cast(Precision, precision))
            operations = training_operations(shape) + adamw_operations(
                REFERENCE.parameters, REFERENCE.parameter_tensors
            )
            kernels = sum(alone.time(op, precision).seconds * op.repeat for op in operations)
            calls = {p: sum(op.repeat for op in operations if op.phase is p) for p in (Phase.FORWARD, Phase.BACKWARD)}
            dispatch = sum(count * alone.dispatch_seconds(phase) for phase, count in calls.items())
            ratios[precision] = max(1.0, measured / (kernels + dispatch))
        return ratios

    def time(self, op: Operation, precision: str) -> Timing:
        profile, precision = self.profile, op.precision or precision
        precision = measured_precision(precision, profile)
        if op.matmul is not None:
            fit = profile.product(precision, op.kernel) if self.own_products else profile.matmul[precision][op.kernel]
            seconds = fit.at(*op.matmul) * op.batch
            if op.batch > 1 and has_experts(op.group) and precision == "fp32" and profile.onednn:
                # oneDNN makes a tensor per expert, which is copied into its place among the rows or weights.
                seconds += profile.curve("concatenate", precision).at(op.batch * op.matmul[0] * op.matmul[1])
            bound = "compute"
        elif op.attention is not None and op.kernel != "attention_decode":  # which reads its cache, as a copy does
            _, sequence, _, _, head_size = op.attention
            kernel, _, direction = op.kernel.partition("_")
            pair = profile.attention_seconds_per_pair(precision, direction, sequence, head_size, kernel == "native")
            seconds = pair * op.elements + profile.small_operation_seconds
            bound = "compute"
        elif op.kernel in profile.curves["fp32"] or op.kernel in profile.curves[precision]:
            seconds = profile.curve(op.kernel, precision).at(op.elements)
            bound = "memory"
        else:  # small kernels of a router, that nobody has measured: their bytes at the rate of a copy
            seconds = op.bytes_moved / profile.copy_bytes_per_second + profile.small_operation_seconds
            bound = "memory"
        if seconds < 4 * profile.small_operation_seconds:
            bound = "overhead"
        seconds *= self.slowdown["memory" if op.matmul is None and op.attention is None else "compute"]
        if self.whole_steps:
            seconds *= self.composition[precision]
        return Timing(seconds, bound, Origin.MEASURED)


@dataclass(frozen=True)
class SharedMachine:
    """The measured machine as one of `ranks` processes that compute on it at once sees it, in one precision."""

    machine: MeasuredMachine
    precision: str  # one that the machine was measured in
    costs: RankCosts | None = None  # None: one process alone
    ranks: int = 1

    def time(self, op: Operation) -> Timing:
        timing = self.machine.time(op, self.precision)
        if self.costs is None or self.ranks < 2:
            return timing
        kind = "compute" if op.matmul is not None or op.attention is not None else "memory"
        # A call's fixed cost is one thread's work, whoever else computes.
        fixed = min(timing.seconds, self.machine.profile.small_operation_seconds)
        grown = (timing.seconds - fixed) * self.costs.slowdown(kind, self.ranks)
        return replace(timing, seconds=fixed * self.turns + grown)

    @property
    def turns(self) -> float:
        """How much longer one thread's work takes where there are more ranks than cores."""
        return 1.0 if self.costs is None else max(1.0, self.ranks / self.costs.cores)

    def dispatch_seconds(self, phase: Phase, calls: int, busy_seconds: float) -> float:
        return calls * self.machine.dispatch_seconds(phase) * self.turns

    def copy_seconds(self, size: float) -> float:
        """Of bytes that are read and written."""
        slower = 1.0 if self.costs is None else self.costs.slowdown("memory", self.ranks)
        return 2 * size / self.machine.profile.copy_bytes_per_second * slower


def fold(operations: Iterable[tuple[Operation, int]], machine: Machine) -> list[Line]:
    """Operations with how often each runs; the costliest decides what bounds a line. What calling them costs the host
    is a line of each phase."""

    def line(op: Operation, count: int) -> Line:
        timing, flops = machine.time(op), None if op.flops is None else op.flops * count
        seconds, moved = timing.seconds * count, float(op.bytes_moved * count)
        return Line(op.phase, op.kind, line_name(op.name), count, flops, moved, seconds, bound=timing.bound)

    calls: dict[int, tuple[Operation, int]] = {}
    for op, count in operations:  # a loop over tokens lists the same objects again and again
        calls[id(op)] = op, count + calls.get(id(op), (op, 0))[1]
    lines = merged(line(op, count) for op, count in calls.values())
    passes = (Phase.FORWARD, Phase.BACKWARD)
    lines += [_dispatch(phase, lines, machine) for phase in passes]
    return lines + [Line(phase, Kind.OTHER, UNNAMED, count=0, seconds=0.0) for phase in passes]


def _dispatch(phase: Phase, lines: list[Line], machine: Machine) -> Line:
    """What the host adds to the calls of a phase; an update is two calls, priced by its own curve."""
    here = [line for line in lines if line.phase is phase]
    calls, busy = sum(line.count or 0 for line in here), sum(line.seconds or 0.0 for line in here)
    seconds = machine.dispatch_seconds(phase, calls, busy)
    return Line(phase, Kind.HOST, "dispatch", count=calls, seconds=seconds, bound="overhead")
