"""The fitting itself, shared by all operations of `fit_operations.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from operations_data import REFERENCES, Array, Table
from scipy.optimize import least_squares

from ironlaw.machine.efficiency.hardware import Efficiency, Hardware, StreamingConstants

MAX_ROWS = 1200
UPPER = {
    "attainable_fraction": 1.0, "wave_rigidity": 1.0, "memory_fraction": 0.97, "tail_rigidity": 1.0,
    "ring_fraction": 0.98, "direct_fraction": 0.98, "attained_fraction": 1.0,
    "throttle_seconds": 4e-3, "split_traffic": 300.0,
}  # fmt: skip
NO_STREAM = StreamingConstants({}, 0.0, 0.0)


def fit(
    constants: Any,
    names: list[str],
    predict: Callable[[Any], Array],
    seconds: Array,
    starts: int = 2,
    weights: Array | float = 1.0,
    upper: Mapping[str, float] | None = None,
) -> Any:
    """Constants that minimise the soft absolute log error; positive, bounded, weakly tied to the start.

    `upper`: bounds beside those of `UPPER`."""
    bounds = UPPER | (upper or {})
    start = np.array([max(getattr(constants, n), 1e-12) for n in names])

    def at(z: Array) -> Any:
        values = {n: min(v, bounds.get(n, np.inf)) for n, v in zip(names, start * np.exp(z), strict=True)}
        return replace(constants, **{n: float(v) for n, v in values.items()})

    def residual(z: Array) -> Array:
        return np.concatenate([weights * np.log(predict(at(z)) / seconds), 0.01 * z])

    rng, best = np.random.default_rng(0), None
    for trial in range(starts):
        first = rng.normal(0.0, 0.3, len(names)) * (trial > 0)
        found = least_squares(
            residual, first, loss="soft_l1", f_scale=0.05, max_nfev=60, diff_step=3e-3, bounds=(-9, 6)
        )
        if best is None or found.cost < best.cost:
            best = found
    assert best is not None
    return at(best.x)


def device(name: str, matmul: Mapping[str, Any] | None = None, attention: Any = None) -> Hardware:
    """A reference accelerator carrying trial constants."""
    reference = REFERENCES[name]
    efficiency = Efficiency(reference.generation, matmul or {}, attention, NO_STREAM, None)
    return Hardware(name=name, efficiency=efficiency, **reference.toml())  # type: ignore[arg-type]


def by_accelerator(table: Table, predict: Callable[[Table, str], Array]) -> Array:
    """Predictions row by row, computed one accelerator at a time."""
    out = np.empty(len(table.seconds))
    names = np.array(table.accelerator)
    for name in dict.fromkeys(table.accelerator):
        mask = names == name
        out[mask] = predict(table.pick(mask), name)
    return out


def subsample(table: Table, rows: int = MAX_ROWS) -> Table:
    """At most `rows` rows, chosen with a fixed seed."""
    keep = np.zeros(len(table.seconds), dtype=bool)
    keep[np.random.default_rng(1).permutation(len(keep))[:rows]] = True
    return table.pick(keep)


def transfer(table: Table, learn: Callable[[Table], Any], predict: Callable[[Table, Any], Array]) -> dict[str, float]:
    """Median absolute error on each source, and accelerator, when it took no part in the fit."""
    out = {}
    for column, names in (("source", table.source), ("accelerator", table.accelerator)):
        short = [s.split("/")[2] if column == "source" and s.count("/") == 3 else s for s in names]
        labels = sorted(set(short))
        if len(labels) < 2 or any(len(label) > 30 for label in labels):
            continue
        for label in labels:
            there = np.array([label == s for s in short])
            constants, rest = learn(subsample(table.pick(~there))), table.pick(there)
            out[label] = float(np.median(np.abs(predict(rest, constants) / rest.seconds - 1)))
    return out


def baseline(ideal: Array, seconds: Array) -> tuple[float, float, float]:
    """Median, mean, p90 of absolute error of ideal time over the one fraction that fits best."""
    error = np.abs(ideal * np.median(seconds / ideal) / seconds - 1)
    return float(np.median(error)), float(error.mean()), float(np.percentile(error, 90))
