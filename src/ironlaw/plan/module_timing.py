"""The time of one traced operation: on this machine from its measured curves, on an accelerator from its constants.

A traced module calls kernels that nobody has a curve for. They move bytes, and are timed by that; `bound` says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ironlaw.ledger import Kind, Origin, Phase
from ironlaw.machine.efficiency.attention import BACKWARD_FLOPS_RATIO, attention_seconds
from ironlaw.machine.efficiency.hardware import Hardware
from ironlaw.machine.efficiency.matmul import matmul_seconds
from ironlaw.machine.efficiency.streaming import streaming_seconds
from ironlaw.plan.cluster.operation_costs import FLASH2_SLOWDOWN
from ironlaw.plan.engines.engine import Engine
from ironlaw.plan.machines import AS_MATMUL, COPY_RATE, MeasuredMachine, Timing
from ironlaw.workload.operations import Operation

PART_OF_LOSS = ("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward")
"""The curve of the loss was measured with these inside."""

NARROW = 16
"""Products with fewer columns or terms than this, as of depthwise convolutions, are not run by matrix units."""

HOST_SECONDS_PER_CALL = 8e-6
"""Of the processor that launches one eager kernel: Python, dispatch and autograd. Assumed: reports lie at 5 to 10 µs.
A device that needs less than this per kernel waits for its host."""


@dataclass(frozen=True)
class ThisMachine:
    """Curves of the measured profile where they exist, else bytes."""

    machine: MeasuredMachine

    def time(self, op: Operation) -> Timing:
        profile = self.machine.profile
        precision = _dtype(op) if _dtype(op) in profile.matmul else "fp32"
        if op.matmul is not None and not (op.kernel.startswith("convolution") and _is_narrow(op)):
            return self._product(op, precision)
        precision = precision if precision in profile.curves else "fp32"
        if op.kernel in PART_OF_LOSS:
            return self.machine.time(replace(op, bytes_moved=0), precision)
        curves = profile.curves[precision].keys() | profile.curves["fp32"].keys()
        timing = self.machine.time(replace(op, matmul=None), precision)
        return timing if op.attention is not None or op.kernel in curves else replace(timing, bound=COPY_RATE)

    def _product(self, op: Operation, precision: str) -> Timing:
        """A batch counts as more rows; a convolution as its implicit product."""
        assert op.matmul is not None
        (m, n, k), fits = op.matmul, self.machine.profile.matmul[precision]
        alike = "matmul_weight_gradient" if op.kernel == "convolution_weight_gradient" else "matmul"
        kernel = op.kernel if op.kernel in fits else alike
        timing = self.machine.time(replace(op, kernel=kernel, matmul=(m * op.batch, n, k), batch=1), precision)
        return timing if kernel == op.kernel or timing.bound == "overhead" else replace(timing, bound=AS_MATMUL)

    def dispatch_seconds(self, phase: Phase, calls: int, busy_seconds: float) -> float:
        return calls * self.machine.dispatch_seconds(phase)


@dataclass(frozen=True)
class CataloguedAccelerator:
    """Constants of the accelerator's generation; eager kernels, launched by a host that runs ahead if it can."""

    hardware: Hardware
    engine: Engine  # how much slower kernels are inside a run than in a benchmark
    precision: str = "fp32"  # of operations that name none

    def time(self, op: Operation) -> Timing:
        dtype = _dtype(op, op.precision or self.precision)
        seconds, bound = 0.0, "memory"
        if op.matmul is not None and not _is_narrow(op):
            m, n, k = op.matmul
            product = matmul_seconds(m, n, k, op.batch, dtype, hardware=self.hardware, sustained=True)
            seconds, bound = float(product) * self.engine.matmul_slowdown, "compute"
        elif op.attention is not None:
            seconds, bound = self._attention(op, dtype), "compute"
        elif op.bytes_moved:
            kind = "norm" if op.kind is Kind.NORM else "elementwise"
            seconds = float(streaming_seconds(op.bytes_moved, self.hardware, kind))
        if seconds < 2 * self.hardware.efficiency.streaming.launch_seconds:
            bound = "overhead"
        return Timing(seconds, bound, Origin.CALCULATED)

    def _attention(self, op: Operation, dtype: str) -> float:
        """Scores that differ in queries and keys count as a square of the same area."""
        assert op.attention is not None
        sequences, tokens, heads, kv_heads, size = op.attention
        scores = op.elements / (sequences * heads)
        causal = scores <= tokens * tokens / 2
        side = round((2 * scores if causal else scores) ** 0.5)
        direction = "backward" if op.phase is Phase.BACKWARD else "forward"
        seconds = attention_seconds(
            sequences, side, heads, kv_heads, size, causal, dtype if dtype in ("bf16", "fp16") else "bf16",
            hardware=self.hardware, direction=direction, sustained=True, value_size=_value_size(op, size),
        )  # fmt: skip
        if dtype not in ("bf16", "fp16"):  # no flash kernel: as slow as the peaks are apart
            flops = (op.flops or 0) * (BACKWARD_FLOPS_RATIO / 2 if direction == "backward" else 1.0)
            return max(float(seconds), flops / (0.5 * self.hardware.peak("fp32")))
        old = FLASH2_SLOWDOWN.get(self.hardware.efficiency.generation, 1.0)
        old = old if self.engine.attention_kernel == "flash2" else 1.0
        return float(seconds) * old * self.engine.attention_slowdown

    def dispatch_seconds(self, phase: Phase, calls: int, busy_seconds: float) -> float:
        return max(0.0, calls * HOST_SECONDS_PER_CALL - busy_seconds)


def _is_narrow(op: Operation) -> bool:
    return op.matmul is not None and min(op.matmul[1:]) < NARROW and bool(op.batch > 1)


def _value_size(op: Operation, size: int) -> float:
    """Of a head's value: what its FLOPs leave beside those of scores, two per score and element of a key."""
    products = 4 if op.phase is Phase.BACKWARD else 2
    return (op.flops or 0) / (products * op.elements) - size if op.flops and op.elements else size


def _dtype(op: Operation, otherwise: str = "fp32") -> str:
    """Element type of a traced operation; fp64 is timed as fp32, which nobody has constants beyond."""
    dtype = str(getattr(op, "dtype", otherwise))
    return "fp32" if dtype == "fp64" else dtype
