"""An accelerator of the catalogue as a `Machine`: by the constants of its generation."""

from __future__ import annotations

from dataclasses import dataclass

from ironlaw.ledger import Kind, Origin, Phase
from ironlaw.machine.efficiency.attention import BACKWARD_FLOPS_RATIO, attention_seconds
from ironlaw.machine.efficiency.collectives import collective_seconds
from ironlaw.machine.efficiency.hardware import Fabric, Hardware
from ironlaw.machine.efficiency.matmul import matmul_seconds
from ironlaw.machine.efficiency.streaming import streaming_seconds
from ironlaw.machine.timing import Timing, element_type, is_narrow
from ironlaw.plan.cluster.operation_costs import FLASH2_SLOWDOWN
from ironlaw.plan.engines.engine import TrainingEngine
from ironlaw.workload.operations import Operation

HOST_SECONDS_PER_CALL = 8e-6
"""Of the processor that launches one eager kernel: Python, dispatch and autograd. Assumed: reports lie at 5 to 10 µs.
A device that needs less than this per kernel waits for its host."""


@dataclass(frozen=True)
class CataloguedAccelerator:
    """Constants of the accelerator's generation; eager kernels, launched by a host that runs ahead if it can."""

    hardware: Hardware
    engine: TrainingEngine  # how much slower kernels are inside a run than in a benchmark
    precision: str = "fp32"  # of operations that name none
    fabric: Fabric | None = None  # to others of its kind

    def time(self, op: Operation) -> Timing:
        dtype = element_type(op, op.precision or self.precision)
        seconds, bound = 0.0, "memory"
        if op.matmul is not None and not is_narrow(op):
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
        # Of a head's value: what its FLOPs leave beside those of scores, two per score and element of a key.
        products = 4 if op.phase is Phase.BACKWARD else 2
        value_size = (op.flops or 0) / (products * op.elements) - size if op.flops and op.elements else size
        seconds = attention_seconds(
            sequences, side, heads, kv_heads, size, causal, dtype if dtype in ("bf16", "fp16") else "bf16",
            hardware=self.hardware, direction=direction, sustained=True, value_size=value_size,
        )  # fmt: skip
        if dtype not in ("bf16", "fp16"):  # no flash kernel: as slow as the peaks are apart
            flops = (op.flops or 0) * (BACKWARD_FLOPS_RATIO / 2 if direction == "backward" else 1.0)
            return max(float(seconds), flops / (0.5 * self.hardware.peak("fp32")))
        old = FLASH2_SLOWDOWN.get(self.hardware.efficiency.generation, 1.0)
        old = old if self.engine.attention_kernel == "flash2" else 1.0
        return float(seconds) * old * self.engine.attention_slowdown

    def dispatch_seconds(self, phase: Phase, calls: int, busy_seconds: float) -> float:
        return max(0.0, calls * HOST_SECONDS_PER_CALL - busy_seconds)

    def collective_seconds(self, kind: str, size: float, ranks: int, stride: int = 1) -> float:
        assert self.fabric is not None
        return float(collective_seconds(kind, size, ranks, fabric=self.fabric))
