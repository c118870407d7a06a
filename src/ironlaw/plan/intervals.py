"""80% intervals, learned from how far plans were off on measured runs whose group was left out of the fit.

A comparable run is one of the same kind of layout. `interval_factors.toml` keeps, per kind, the 10th and 90th
percentile of ln(measured / planned); `benchmarks/fit_engines.py --intervals` writes it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from ironlaw.plan.jobs import Array, Jobs
from ironlaw.plan.runs import Run

_FILE = Path(__file__).parent / "interval_factors.toml"
UNKNOWN = (-0.2, 0.2)


@lru_cache(maxsize=1)
def factors() -> dict[str, dict[str, list[float]]]:
    """Quantity ("time", "memory") to kind of layout to [p10, p90] of ln(measured / planned)."""
    if not _FILE.is_file():
        return {"time": {}, "memory": {}}
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def kind_of_layout(columns: dict[str, float], nodes: int) -> str:
    """What sets the uncertainty of a step time: how many nodes, and what crosses the fabric."""
    where = "one_node" if nodes <= 1 else "nodes"
    if columns["pp"] > 1:
        return f"{where}_pipeline"
    if columns["tp"] > 1:
        return f"{where}_tensor"
    return f"{where}_data"


def interval_factors(quantity: str, columns: dict[str, float], nodes: int) -> tuple[float, float]:
    """Logarithms of lower and upper bound over the planned value, for one layout."""
    known = factors().get(quantity, {})
    low, high = known.get(kind_of_layout(columns, nodes), known.get("any", UNKNOWN))
    return float(low), float(high)


def _bounds(quantity: str, kinds: Sequence[str], planned: Array) -> tuple[Array, Array]:
    known = factors().get(quantity, {})
    pairs = np.array([known.get(kind, known.get("any", UNKNOWN)) for kind in kinds], dtype=float).reshape(-1, 2)
    return planned * np.exp(pairs[:, 0]), planned * np.exp(pairs[:, 1])


def time_interval(runs: Sequence[Run], jobs: Jobs, planned: Array) -> tuple[Array, Array]:
    """Lower and upper bound of the step time of each run, seconds."""
    del jobs
    return _bounds("time", [kind_of_layout(r.columns, r.cluster.nodes) for r in runs], planned)


def memory_interval(runs: Sequence[Run], jobs: Jobs, planned: Array) -> tuple[Array, Array]:
    """Lower and upper bound of the reported peak of each run, bytes."""
    del jobs
    return _bounds("memory", [kind_of_layout(r.columns, r.cluster.nodes) for r in runs], planned)
