"""Times of a program's operations and collectives on this machine, from measured curves, alone or shared by ranks.

For catalogued accelerators, `plan/module.py` computes them from the constants of a generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Protocol, cast

from ironlaw.catalog.formats import number_format, precision_recipe
from ironlaw.ledger import Origin, Phase
from ironlaw.machine.links import RankFabric
from ironlaw.machine.profile import STEP_PHASES, TINY, Profile, reference_step
from ironlaw.model.parameters import model_parameters
from ironlaw.workload.blocks import Precision, Shape
from ironlaw.workload.kinds import has_experts
from ironlaw.workload.operations import Operation
from ironlaw.workload.optimizers import adamw_operations
from ironlaw.workload.program import training_operations

COPY_RATE = "memory (copy rate)"
"""Bound of a kernel without its own curve: its bytes at the measured rate of a copy, plus one small operation."""

AS_MATMUL = "compute (as matmul)"
"""Bound of a convolution: timed as its implicit matrix product."""


PART_OF_LOSS = ("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward")
"""Kernels that the measured curve of the loss includes."""

NARROW = 16
"""Matrix units do not run products with fewer columns or terms than this, as in depthwise convolutions."""


def measured_precision(precision: str, profile: Profile) -> str:
    """Return `precision`, or if this machine was not measured in it, the precision of the stored tensors."""
    return next(name for name in (precision, number_format(precision).held_as, "bf16") if name in profile.matmul)


def is_emulated(precision: str, profile: Profile) -> bool:
    """Whether a run emulates the precision by rounding the operands of its products."""
    return precision_recipe(precision) is not None and not number_format(precision).is_native(profile.capability)


@dataclass(frozen=True)
class Timing:
    """The seconds of one call and the ceiling that sets them: compute, memory or overhead (dispatch, launch)."""

    seconds: float
    bound: str
    origin: Origin


class Machine(Protocol):
    """A time model of a machine."""

    def time(self, op: Operation) -> Timing:
        """Return the timing of one call."""
        ...

    def dispatch_seconds(self, phase: Phase, calls: int, busy_seconds: float) -> float:
        """Return the seconds that dispatching the kernels of a phase adds to their own time."""
        ...

    def collective_seconds(self, kind: str, size: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds of one collective on a buffer of `size` bytes, over `ranks` ranks that are `stride` apart.
        All such groups run it at the same time."""
        ...


@dataclass(frozen=True)
class MeasuredMachine:
    """This machine in one measured precision, from the profile of `ironlaw measure`.

    `slowdown`: kind of kernel -> typical time over best time (`interference.typical`). With a `fabric`, times are those
    of one of a job's `ranks`, of which `at_once` compute on this machine at a time.
    """

    profile: Profile
    slowdown: Mapping[str, float]
    precision: str = "fp32"
    whole_steps: bool = True  # apply `composition`; off for single kernels
    fabric: RankFabric | None = None  # None: one process alone
    ranks: int = 1
    at_once: int = 1
    _compositions: dict[str, dict[Phase, float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    own_products: ClassVar[bool] = True  # products as in Ironlaw's own models, not as in other modules

    # -- operations ------------------------------------------------------------------------------------------

    def time(self, op: Operation) -> Timing:
        timing = self._time_alone(op)
        if self.fabric is None or self.at_once < 2:
            return timing
        kind = "compute" if op.matmul is not None or op.attention is not None else "memory"
        # A call's fixed cost is the work of one thread, and independent of other ranks.
        fixed = min(timing.seconds, self.profile.small_operation_seconds)
        shared = (timing.seconds - fixed) * self.fabric.costs.slowdown(kind, self.at_once)
        return replace(timing, seconds=fixed * self.oversubscription + shared)

    def _time_alone(self, op: Operation) -> Timing:
        """Return the timing in a process that is alone on the machine."""
        profile = self.profile
        precision = measured_precision(op.precision or self.precision, profile)
        if op.matmul is not None:
            fit = profile.product(precision, op.kernel) if self.own_products else profile.matmul[precision][op.kernel]
            seconds = fit.at(*op.matmul) * op.batch
            if op.batch > 1 and has_experts(op.group) and precision == "fp32" and profile.onednn:
                # oneDNN creates a tensor per expert, which is then copied to its place among the rows or weights.
                seconds += profile.curve("concatenate", precision).at(op.batch * op.matmul[0] * op.matmul[1])
            bound = "compute"
        elif op.attention is not None and op.kernel != "attention_decode":  # decode is timed as a copy of the cache
            _, sequence, _, _, head_size = op.attention
            kernel, _, direction = op.kernel.partition("_")
            pair = profile.attention_seconds_per_pair(precision, direction, sequence, head_size, kernel == "native")
            seconds = pair * op.elements + profile.small_operation_seconds
            bound = "compute"
        elif op.kernel in profile.curves["fp32"] or op.kernel in profile.curves[precision]:
            seconds = profile.curve(op.kernel, precision).at(op.elements)
            bound = "memory"
        else:  # unmeasured kernels, such as a router's small ones: their bytes at the rate of a copy
            seconds = op.bytes_moved / profile.copy_bytes_per_second + profile.small_operation_seconds
            bound = "memory"
        if seconds < 4 * profile.small_operation_seconds:
            bound = "overhead"
        seconds *= self.slowdown["memory" if op.matmul is None and op.attention is None else "compute"]
        if self.whole_steps:
            seconds *= self.composition(precision).get(op.phase, 1.0)
        return Timing(seconds, bound, Origin.MEASURED)

    def copy_seconds(self, size: float) -> float:
        """Return the seconds to read and write `size` bytes."""
        slower = 1.0 if self.fabric is None else self.fabric.costs.slowdown("memory", self.at_once)
        return 2 * size / self.profile.copy_bytes_per_second * slower

    # -- the host --------------------------------------------------------------------------------------------

    def dispatch_seconds(self, phase: Phase, calls: int, busy_seconds: float) -> float:
        seconds = calls * self._call_seconds[phase] * self.oversubscription
        return max(0.0, seconds - busy_seconds) if self._queues else seconds

    @property
    def _queues(self) -> bool:
        """Whether the device computes while the host dispatches."""
        return self.profile.device != "cpu"

    @cached_property
    def _call_seconds(self) -> dict[Phase, float]:
        """Seconds of one operation in addition to its kernel: Python, module calls, the autograd engine.

        Derived from a tiny block with negligible arithmetic: its measured time less its kernels' smallest times, if
        these are the host's too.
        """
        precision: Precision = "bf16" if self._queues else "fp32"
        shape = Shape(TINY, 1, TINY.context, precision)
        found, block = {}, [op for op in training_operations(shape) if op.group == "block"]
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            operations = [op for op in block if op.phase is phase]
            kernels = 0.0
            if not self._queues:
                kernels = sum(self._at_best("fp32").time(op).seconds * op.repeat for op in operations) / TINY.layers
            extra = max(0.0, self.profile.tiny_block_seconds[str(phase)] - kernels) / len(operations)
            found[phase] = extra * self.slowdown["memory"]
        return found

    @property
    def oversubscription(self) -> float:
        """The factor on one thread's work when there are more ranks than cores."""
        return 1.0 if self.fabric is None else max(1.0, self.at_once / self.fabric.costs.cores)

    def _at_best(self, precision: str) -> MeasuredMachine:
        return MeasuredMachine(self.profile, dict.fromkeys(self.slowdown, 1.0), precision, whole_steps=False)

    def composition(self, precision: str) -> dict[Phase, float]:
        """Return the time of each phase of a whole step over the sum of its kernels alone: colder caches, also for
        Python's own work between them, and a busier allocator."""
        if precision not in self._compositions:
            at_best = self._at_best(precision)
            model, sequences = reference_step(self.profile.device)
            shape = Shape(model, sequences, model.context, cast(Precision, precision))
            operations = training_operations(shape) + adamw_operations(model.parameters, len(model_parameters(model)))
            alone = dict.fromkeys(STEP_PHASES, 0.0)
            for op in operations:
                alone[op.phase] += at_best.time(op).seconds * op.repeat
            for phase in (Phase.FORWARD, Phase.BACKWARD) if not self._queues else ():
                calls = sum(op.repeat for op in operations if op.phase is phase)
                alone[phase] += at_best.dispatch_seconds(phase, calls, 0)
            whole = self.profile.reference_step_seconds[precision]
            shares = self.profile.reference_step_shares.get(precision)
            if not shares:
                shares = {phase: seconds / sum(alone.values()) for phase, seconds in alone.items()}
            self._compositions[precision] = {p: max(1.0, whole * shares[p] / alone[p]) for p in STEP_PHASES}
        return self._compositions[precision]

    # -- other ranks -----------------------------------------------------------------------------------------

    @property
    def local_ranks(self) -> int:
        """Ranks of the job on one host."""
        return self.ranks if self.fabric is None else self.fabric.local_ranks(self.ranks)

    def collective_seconds(self, kind: str, size: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds over gloo, on one machine or on several equal ones."""
        assert self.fabric is not None
        return self.fabric.collective_seconds(kind, size, ranks, stride, job=self.ranks)


@dataclass(frozen=True)
class MeasuredForModules(MeasuredMachine):
    """A measured machine for the kernels of traced modules: timed by curves if measured, else by bytes."""

    own_products: ClassVar[bool] = False

    def time(self, op: Operation) -> Timing:
        profile = self.profile
        precision = element_type(op) if element_type(op) in profile.matmul else "fp32"
        if op.matmul is not None and not (op.kernel.startswith("convolution") and is_narrow(op)):
            return self._product(op, precision)
        precision = precision if precision in profile.curves else "fp32"
        if op.kernel in PART_OF_LOSS:
            return super().time(replace(op, bytes_moved=0, precision=op.precision or precision))
        curves = profile.curves[precision].keys() | profile.curves["fp32"].keys()
        timing = super().time(replace(op, matmul=None, precision=op.precision or precision))
        return timing if op.attention is not None or op.kernel in curves else replace(timing, bound=COPY_RATE)

    def _product(self, op: Operation, precision: str) -> Timing:
        """Time a batch as one product with more rows, and a convolution as its implicit product."""
        assert op.matmul is not None
        (m, n, k), fits = op.matmul, self.profile.matmul[precision]
        alike = "matmul_weight_gradient" if op.kernel == "convolution_weight_gradient" else "matmul"
        kernel = op.kernel if op.kernel in fits else alike
        shaped = replace(op, kernel=kernel, matmul=(m * op.batch, n, k), batch=1)
        timing = super().time(replace(shaped, precision=op.precision or precision))
        return timing if kernel == op.kernel or timing.bound == "overhead" else replace(timing, bound=AS_MATMUL)


def is_narrow(op: Operation) -> bool:
    return op.matmul is not None and min(op.matmul[1:]) < NARROW and bool(op.batch > 1)


def element_type(op: Operation, otherwise: str = "fp32") -> str:
    """Return the dtype of a traced operation; fp64 is timed as fp32, as it has no constants."""
    dtype = str(getattr(op, "dtype", otherwise))
    return "fp32" if dtype == "fp64" else dtype
