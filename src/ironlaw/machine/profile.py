"""A measured machine: the best times of its kernels as curves over size. Written by `measure`, read by `plan`.

Best times are reproducible: other programs and neighbours on a shared host only ever add to them. The typical
slowdown is stored separately, as interference (`machine/interference.py`). A later measurement of the same machine
keeps the better of both times.

Reading needs no numpy: its import takes longer than a plan.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from operator import mul
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter

from ironlaw.errors import UserError
from ironlaw.files import cache_folder, read_json, write_json
from ironlaw.ledger import Phase
from ironlaw.model.config import ModelConfig

SCHEMA_VERSION = 4  # increased when plans need something that older profiles lack or name differently
MAX_NATIVE_TIME_RATIO = 0.95  # native attention rounds differently and saves more: its gain must exceed the error
FP32Products = Literal["default", "onednn"]
Stored = TypeVar("Stored")
# So small that a block's time is the cost of calling it; measured, and divided into calls by the plan.
STEP_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)  # of `reference_step`
TINY = ModelConfig(layers=4, hidden=16, heads=2, vocab=16, context=16)


def reference_step(device: str) -> tuple[ModelConfig, int]:
    """Return the model and the sequences of a whole step, which shows the extra time of kernels that run together."""
    if device == "cpu":
        return ModelConfig(layers=2, hidden=256, heads=4, vocab=2048, context=128), 4
    # Wide and long enough that the device never waits for the host.
    return ModelConfig(layers=4, hidden=2048, heads=16, vocab=32768, context=2048), 4


@dataclass(frozen=True)
class Curve:
    """Seconds of one kernel over its size (elements), both increasing, with log-log interpolation."""

    elements: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, elements: float) -> float:
        """Return the seconds at a size: constant below the smallest size, proportional above the largest."""
        if elements <= self.elements[0]:
            return self.seconds[0]
        if elements >= self.elements[-1]:
            return self.seconds[-1] * elements / self.elements[-1]
        points = zip(map(math.log, self.elements), map(math.log, self.seconds), strict=True)
        return math.exp(_between(list(points), math.log(elements)))


def _between(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate linearly between rising points; constant before the first and after the last."""
    after = bisect_right(points, x, key=lambda point: point[0])
    if after in (0, len(points)):
        return points[min(after, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[after - 1 : after + 1]
    return (y1 - y0) / (x1 - x0) * (x - x0) + y0


@dataclass(frozen=True)
class MatmulFit:
    """Seconds of a matrix product of any shape, from measured shapes.

    The law is fixed + F (1/R + a/m + b/n + c/k), with F = 2mnk FLOPs and a peak rate R that short dimensions reduce.
    In between, it is corrected by its errors at the measured shapes, weighted by distance: kernels depend on the shape
    in ways that no smooth law describes.
    """

    fixed_seconds: float
    seconds_per_flop: float
    per_m: float
    per_n: float
    per_k: float
    error: float  # median relative error at a measured shape that was left out
    shapes: tuple[tuple[int, int, int], ...] = ()
    corrections: tuple[float, ...] = ()  # log(measured / law) at each shape

    def law(self, m: float, n: float, k: float) -> float:
        flops = 2.0 * m * n * k
        return self.fixed_seconds + flops * (self.seconds_per_flop + self.per_m / m + self.per_n / n + self.per_k / k)

    def at(self, m: int, n: int, k: int) -> float:
        if not (m and n and k):  # an empty product costs its call
            return self.fixed_seconds
        return self.law(m, n, k) * math.exp(self._correction(m, n, k))

    def _correction(self, m: int, n: int, k: int, leave_out: int | None = None) -> float:
        """Return Shepard's inverse-distance weighting in log dimensions; it fades to 0 far from every shape."""
        x, y, z = math.log2(m), math.log2(n), math.log2(k)
        weights = [1 / ((x - a) ** 2 + (y - b) ** 2 + (z - c) ** 2 + 0.01) for a, b, c in self._logs]
        if leave_out is not None:
            weights[leave_out] = 0.0
        # The law itself has the weight of a shape at distance 4.
        return sum(map(mul, weights, self.corrections)) / (1 / 16.0 + sum(weights))

    @cached_property
    def _logs(self) -> list[tuple[float, float, float]]:
        return [(math.log2(m), math.log2(n), math.log2(k)) for m, n, k in self.shapes]

    @cached_property
    def peak_flops_per_second(self) -> float:
        """The highest rate among the measured shapes."""
        return max(2.0 * m * n * k / self.at(m, n, k) for m, n, k in self.shapes)

    @staticmethod
    def fit(shapes: Sequence[tuple[int, int, int]], seconds: Sequence[float]) -> MatmulFit:
        """Fit by least squares on the relative error, dropping negative coefficients."""
        import numpy as np

        sizes = np.array(shapes, dtype=float)
        times = np.array(seconds)
        flops = 2 * sizes.prod(axis=1)
        columns = np.stack(
            [np.ones_like(flops), flops, flops / sizes[:, 0], flops / sizes[:, 1], flops / sizes[:, 2]], axis=1
        )
        active = list(range(5))
        while True:
            weighted = columns[:, active] / times[:, None]
            scale = np.abs(weighted).max(axis=0)
            solution = np.linalg.lstsq(weighted / scale, np.ones_like(times), rcond=None)[0] / scale
            if (solution >= 0).all():
                break
            active.remove(active[int(solution.argmin())])
        coefficients = np.zeros(5)
        coefficients[active] = solution
        corrections = np.log(times / (columns @ coefficients))
        fixed, rate, per_m, per_n, per_k = (float(c) for c in coefficients)
        fit = MatmulFit(fixed, rate, per_m, per_n, per_k, 0.0, tuple(shapes), tuple(float(c) for c in corrections))
        left_out = [abs(fit._correction(*shape, i) - corrections[i]) for i, shape in enumerate(shapes)]
        return replace(fit, error=float(np.median(left_out)))


@dataclass
class Profile:
    """This machine's measured ceilings. Rates are attained ones, not data sheet values."""

    __pydantic_config__ = ConfigDict(allow_inf_nan=False, extra="forbid")  # files are not trusted

    device: str  # "cpu" or the accelerator's name
    name: str  # of the processor
    created: str  # ISO date and time
    versions: dict[str, str]
    threads: int
    memory_bytes: int
    runtime_bytes: int  # resident memory of a process that has only imported PyTorch
    matmul: dict[str, dict[str, MatmulFit]]  # precision -> kernel -> fit
    curves: dict[str, dict[str, Curve]]  # precision -> kernel -> seconds by elements
    # precision -> direction -> (tokens, head size, seconds per unmasked score)
    attention: dict[str, dict[str, list[tuple[int, int, float]]]]
    copy_bytes_per_second: float  # read plus written
    small_operation_seconds: float  # one tiny operation, dispatched from Python
    tiny_block_seconds: dict[str, float]  # phase -> one block of TINY: the cost of calling it
    reference_step_seconds: dict[str, float]  # precision -> a whole step of `reference_step`
    storage_bytes_per_second: float | None
    tokenizer_tokens_per_second: float | None
    # Kind of kernel -> the machine's time over its best time in each round of the measurement.
    interference: dict[str, list[float]] = field(default_factory=dict)
    fp32_products: FP32Products = "default"  # library with the faster fp32 matrix products, used by the trainer
    onednn: dict[str, MatmulFit] = field(default_factory=dict)  # kernel -> fit, if that library is oneDNN
    # As `attention`, for Ironlaw's own kernel (kernels/attention.c); only on CPUs.
    native_attention: dict[str, dict[str, list[tuple[int, int, float]]]] = field(default_factory=dict)
    probe: dict[str, float] = field(default_factory=dict)  # best seconds of the kernels that runs time again
    # Every kernel's best seconds ever, by name, for the next measurement.
    best_seconds: dict[str, float] = field(default_factory=dict)
    capability: tuple[int, int] | None = None  # NVIDIA's compute capability; None for a CPU
    # Precision -> phase -> its share of that step; empty in profiles measured before it was.
    reference_step_shares: dict[str, dict[Phase, float]] = field(default_factory=dict)

    @property
    def machine(self) -> str:
        """An identifier that is equal for measurements of the same machine."""
        return f"{self.name}, {self.threads} threads, torch {self.versions['torch']}, {self.fp32_products} products"

    def matmul_peak(self, precision: str) -> float:
        """Return the attained FLOP/s of large products: the median of the three products of training."""
        fits = {kernel: self.product(precision, kernel) for kernel in self.matmul[precision]}
        return sorted(fit.peak_flops_per_second for fit in fits.values())[len(fits) // 2]

    def product(self, precision: str, kernel: str) -> MatmulFit:
        """Return the fit of a matrix product in Ironlaw's own models; `matmul` has those of other PyTorch modules."""
        return self.onednn[kernel] if precision == "fp32" and self.onednn else self.matmul[precision][kernel]

    def curve(self, kernel: str, precision: str) -> Curve:
        """Return a kernel's curve; kernels that always run in fp32 (norms, loss, update) have only an fp32 curve."""
        return self.curves[precision].get(kernel) or self.curves["fp32"][kernel]

    def native_is_faster(self, precision: str, sequence: int, head_size: int) -> bool:
        """Whether Ironlaw's own attention is faster than PyTorch's here, forward and backward pass together."""
        if precision not in self.native_attention:
            return False
        fused, native = (
            sum(
                self.attention_seconds_per_pair(precision, d, sequence, head_size, way) for d in ("forward", "backward")
            )
            for way in (False, True)
        )
        return native < MAX_NATIVE_TIME_RATIO * fused

    def attention_seconds_per_pair(
        self, precision: str, direction: str, sequence: int, head_size: int, native: bool = False
    ) -> float:
        """Return the seconds per unmasked score at the nearest measured point in log distance, scaled by head size."""
        points = (self.native_attention if native else self.attention)[precision][direction]
        nearest = min(
            points,
            key=lambda p: abs(math.log(p[0] / sequence)) + 2 * abs(math.log(p[1] / head_size)),
        )
        lengths = sorted((math.log(tokens), seconds) for tokens, size, seconds in points if size == nearest[1])
        return _between(lengths, math.log(sequence)) * head_size / nearest[1]

    def to_json(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION} | asdict(self)

    @property
    def is_complete(self) -> bool:
        """Whether it contains every measurement that all machines have."""
        by_precision = (self.matmul, self.curves, self.attention, self.reference_step_seconds)
        complete = all("fp32" in table for table in by_precision)
        complete &= {"forward", "backward"} <= self.tiny_block_seconds.keys()
        complete &= {"compute", "memory"} <= self.interference.keys()
        complete &= self.device == "cpu" or self.capability is not None
        return complete and min(self.best_seconds.values(), default=1.0) > 0


def store(path: Path, measured: Any, version: int) -> None:
    """Write a dataclass to a file that `stored` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"schema_version": version} | asdict(measured))


def stored(path: Path, kind: type[Stored], version: int) -> Stored | None:
    """Read a file of `store`; None if it is missing, damaged or from another version, or if a value is invalid."""
    with suppress(OSError, KeyError, ValueError):
        document = read_json(path)
        if document.pop("schema_version") == version:
            return TypeAdapter(kind).validate_python(document)
    return None


def profile_path(device: str = "this") -> Path:
    return cache_folder() / "machine" / f"{device}.json"


def save_profile(profile: Profile, path: Path | None = None) -> Path:
    path = path or profile_path()
    store(path, profile, SCHEMA_VERSION)
    return path


def load_profile(path: Path | None = None) -> Profile:
    """Load this machine's profile. UserError if there is none, or if it is from another version."""
    path = path or profile_path()
    if not path.is_file():
        raise UserError("this machine has not been measured yet: run `ironlaw measure` (under 30 s)")
    profile = stored(path, Profile, SCHEMA_VERSION)
    if profile is None or not profile.is_complete:
        raise UserError(f"the machine profile at {path} is from another version: run `ironlaw measure` again")
    return profile


def earlier_profile() -> Profile | None:
    """Return the stored profile, or None if there is no valid one."""
    with suppress(UserError):
        return load_profile()
    return None
