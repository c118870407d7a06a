"""A measured machine: how long its kernels take at best, as curves over size. Made by `measure`, read by `plan`.

At best, because that is what a machine repeats: other programs and neighbours on a shared host only ever add to
it. How much they typically add is kept apart, as interference (`machine/interference.py`). A later measurement of
the same machine keeps the better of the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import ConfigDict, TypeAdapter

from ironlaw.errors import UserError
from ironlaw.files import cache_folder, read_json, write_json
from ironlaw.model.config import ModelConfig

SCHEMA_VERSION = 3  # raised where an older profile lacks, or names otherwise, what plans need
WORTH_IT = 0.95  # attention in blocks rounds otherwise and keeps more: a gain inside the measurement's error is none
FP32Products = Literal["default", "onednn"]
Stored = TypeVar("Stored")
# So small that what its blocks take is the cost of calling them; measured, and taken apart again by the plan.
TINY = ModelConfig(layers=4, hidden=16, heads=2, vocab=16, context=16)
# A whole step, to see what kernels take together that they do not take alone: REFERENCE_BATCH sequences of it.
REFERENCE = ModelConfig(layers=2, hidden=256, heads=4, vocab=2048, context=128)
REFERENCE_BATCH = 4


@dataclass(frozen=True)
class Curve:
    """Seconds of one kernel over its size (elements), both increasing; straight between points in log-log."""

    elements: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, elements: float) -> float:
        """Below the smallest size the fixed cost rules; above the largest, time grows in proportion."""
        if elements <= self.elements[0]:
            return self.seconds[0]
        if elements >= self.elements[-1]:
            return self.seconds[-1] * elements / self.elements[-1]
        logs = np.interp(math.log(elements), np.log(self.elements), np.log(self.seconds))
        return math.exp(float(logs))


@dataclass(frozen=True)
class MatmulFit:
    """Seconds of a matrix product of any shape, from measured shapes.

    A law first: fixed + F (1/R + a/m + b/n + c/k), F = 2mnk FLOPs, a peak rate R that short dimensions dilute.
    Then the law's errors at the measured shapes, weighted by their distance, correct it in between: kernels change
    with the shape in ways that no smooth law follows.
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
        """Shepard's inverse-distance weighting in log dimensions; far from every shape it fades to none."""
        weights = 1 / (((np.log2((m, n, k)) - self._logs) ** 2).sum(axis=1) + 0.01)
        if leave_out is not None:
            weights[leave_out] = 0.0
        # The law itself counts like a shape at distance 4.
        return float(weights @ np.array(self.corrections)) / (1 / 16.0 + float(weights.sum()))

    @cached_property
    def _logs(self) -> np.ndarray:
        return np.log2(np.array(self.shapes, dtype=float)).reshape(-1, 3)

    @cached_property
    def peak_flops_per_second(self) -> float:
        """The best rate among the measured shapes."""
        return max(2.0 * m * n * k / self.at(m, n, k) for m, n, k in self.shapes)

    @staticmethod
    def fit(shapes: Sequence[tuple[int, int, int]], seconds: Sequence[float]) -> MatmulFit:
        """Least squares on relative error with coefficients kept non-negative (a negative one is dropped)."""
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
    """This machine's ceilings. Rates are what was attained, not what a data sheet says."""

    __pydantic_config__ = ConfigDict(allow_inf_nan=False, extra="forbid")  # of a file that anything may have written

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
    tiny_block_seconds: dict[str, float]  # phase -> one block so small that only calling it takes time
    reference_step_seconds: dict[str, float]  # precision -> forward, backward and update of REFERENCE
    storage_bytes_per_second: float | None
    tokenizer_tokens_per_second: float | None
    # Per round of the measurement, how much slower than at its best the machine was: kind of kernel -> ratios.
    interference: dict[str, list[float]] = field(default_factory=dict)
    fp32_products: FP32Products = "default"  # the library whose fp32 matrix products are faster here: the trainer's
    onednn: dict[str, MatmulFit] = field(default_factory=dict)  # kernel -> fit, where that library is oneDNN
    # As `attention`, of our own kernel (kernels/attention.c); only on CPUs.
    native_attention: dict[str, dict[str, list[tuple[int, int, float]]]] = field(default_factory=dict)
    probe: dict[str, float] = field(default_factory=dict)  # seconds at best of the kernels that a run repeats
    # Every kernel's best seconds by name, for the next measurement: a best is the best ever seen.
    best_seconds: dict[str, float] = field(default_factory=dict)
    capability: tuple[int, int] | None = None  # NVIDIA's compute capability; None of a CPU

    @property
    def machine(self) -> str:
        """What must be the same for two measurements to be of the same machine."""
        return f"{self.name}, {self.threads} threads, torch {self.versions['torch']}, {self.fp32_products} products"

    def matmul_peak(self, precision: str) -> float:
        """FLOP/s that large products attain, the middle of the three training products."""
        fits = {kernel: self.product(precision, kernel) for kernel in self.matmul[precision]}
        return sorted(fit.peak_flops_per_second for fit in fits.values())[len(fits) // 2]

    def product(self, precision: str, kernel: str) -> MatmulFit:
        """A matrix product as Ironlaw's own models run it; `matmul` has what any other PyTorch module gets."""
        return self.onednn[kernel] if precision == "fp32" and self.onednn else self.matmul[precision][kernel]

    def curve(self, kernel: str, precision: str) -> Curve:
        """What stays in fp32 under reduced precision (norms, loss, update) has only an fp32 curve."""
        return self.curves[precision].get(kernel) or self.curves["fp32"][kernel]

    def native_is_faster(self, precision: str, sequence: int, head_size: int) -> bool:
        """Whether our own attention takes less time than PyTorch's here, forward and backward together."""
        if precision not in self.native_attention:
            return False
        fused, native = (
            sum(
                self.attention_seconds_per_pair(precision, d, sequence, head_size, way) for d in ("forward", "backward")
            )
            for way in (False, True)
        )
        return native < WORTH_IT * fused

    def attention_seconds_per_pair(
        self, precision: str, direction: str, sequence: int, head_size: int, native: bool = False
    ) -> float:
        """Nearest measured (tokens, head size) in log distance, scaled by the head size."""
        points = (self.native_attention if native else self.attention)[precision][direction]
        nearest = min(
            points,
            key=lambda p: abs(math.log(p[0] / sequence)) + 2 * abs(math.log(p[1] / head_size)),
        )
        lengths = sorted((tokens, seconds) for tokens, size, seconds in points if size == nearest[1])
        seconds = float(np.interp(math.log(sequence), [math.log(t) for t, _ in lengths], [s for _, s in lengths]))
        return seconds * head_size / nearest[1]

    def to_json(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION} | asdict(self)

    @property
    def is_complete(self) -> bool:
        """Whether it has what every machine is measured in."""
        by_precision = (self.matmul, self.curves, self.attention, self.reference_step_seconds)
        complete = all("fp32" in table for table in by_precision)
        complete &= {"forward", "backward"} <= self.tiny_block_seconds.keys()
        complete &= {"compute", "memory"} <= self.interference.keys()
        complete &= self.device == "cpu" or self.capability is not None
        return complete and min(self.best_seconds.values(), default=1.0) > 0


def store(path: Path, measured: Any, version: int) -> None:
    """Write a dataclass for `stored`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"schema_version": version} | asdict(measured))


def stored(path: Path, kind: type[Stored], version: int) -> Stored | None:
    """None where the file is missing or damaged, from another version, or a value is missing or of another type."""
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
    """This machine's profile; a UserError says how to make one when there is none or it is from another version."""
    path = path or profile_path()
    if not path.is_file():
        raise UserError("this machine has not been measured yet: run `ironlaw measure` (under 30 s)")
    profile = stored(path, Profile, SCHEMA_VERSION)
    if profile is None or not profile.is_complete:
        raise UserError(f"the machine profile at {path} is from another version: run `ironlaw measure` again")
    return profile


def earlier_profile() -> Profile | None:
    """The profile there is, or None where there is none to learn from."""
    with suppress(UserError):
        return load_profile()
    return None
