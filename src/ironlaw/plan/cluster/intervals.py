"""80% intervals, learned from the errors of plans on measured runs that took no part in the fit.

The error of a run, ln(measured / planned), has a part shared by its group (the same cluster, version and habits) and a
part of its own. The shared part is smaller the more comparable groups the constants were checked on (same engine, same
accelerator generation, models within a factor `COMPARABLE` in size), and larger for unchecked software, hardware or
number formats. No checked run had experts, so none is comparable to a mixture of experts:

    spread^2 = within^2 + between^2 / (1 + groups) + unknown_engine^2 + assumed_hardware^2 + unknown_format^2
               + experts^2 + doubling^2 x doublings
    interval = planned x exp(-spread / skew) ... planned x exp(spread x skew)

`doublings`: of the number of accelerators beyond the largest checked run. The interval is skewed because runs are
slowed down more often than sped up. `benchmarks/fit_intervals.py` writes the constants to `interval_factors.toml`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ironlaw.catalog.accelerators import Accelerator
from ironlaw.catalog.formats import number_format
from ironlaw.files import read_toml
from ironlaw.plan.cluster.system import matmul_is_assumed
from ironlaw.plan.engines.engine import TrainingEngine
from ironlaw.plan.engines.named import GENERIC, engines

_FILE = Path(__file__).parent / "interval_factors.toml"

COMPARABLE = 8.0
"""Small models wait for launches, large ones do not: a group's errors tell little of models ten times its size."""


@dataclass(frozen=True)
class Distance:
    """A plan's distance from the runs that its constants were checked on."""

    groups: int  # comparable groups of measured runs
    unknown_engine: bool
    assumed_hardware: bool  # nothing was measured on this generation, not even matmuls alone
    doublings: float
    unknown_format: bool = False  # 8- or 4-bit numbers that no checked run of the engine computed in
    experts: bool = False  # which no checked run had

    def __str__(self) -> str:
        words = [f"{self.groups} groups of comparable runs" if self.groups else ""]
        words += ["an engine that no runs are known of" if self.unknown_engine else ""]
        words += ["no comparable runs of this engine" if not (self.groups or self.unknown_engine) else ""]
        words += ["hardware that nothing was measured on" if self.assumed_hardware else ""]
        words += ["a number format that none of them computed in" if self.unknown_format else ""]
        words += ["experts, which no checked run had" if self.experts else ""]
        words += [f"{2**self.doublings:.0f} times the accelerators of any checked run" if self.doublings >= 1 else ""]
        return ", ".join(word for word in words if word)


@lru_cache(maxsize=1)
def factors() -> dict[str, dict[str, Any]]:
    """Return, by quantity ("time", "memory"), the constants above and `checked`: groups by engine and generation.

    A group is [fewest parameters, most parameters, most accelerators, runs]. `formats`: by engine and generation, the
    number of runs that state each number format.
    """
    return read_toml(_FILE)


@lru_cache(maxsize=4096)
def distance(
    quantity: str, engine: str, generation: str, accelerators: int, parameters: float, experts: bool = False,
    precision: str = "",
) -> Distance:  # fmt: skip
    """Returns a plan's distance from the checked runs. Engines not shipped count as one group: their users' runs."""
    if engine not in engines():
        return Distance(1, False, False, 0.0)
    checked = factors()[quantity].get("checked", {}).get(engine, {})
    here = checked.get(generation, [])
    groups = 0 if experts else sum(comparable(parameters, low, high) for low, high, _, _ in here)
    most = max((group[2] for groups_ in checked.values() for group in groups_), default=accelerators)
    doublings = max(0.0, math.log2(accelerators / most))
    assumed = quantity == "time" and not here and matmul_is_assumed(generation)
    unknown = engine == GENERIC or engine not in factors()["time"]["checked"]
    seen = factors()[quantity].get("formats", {}).get(engine, {})
    narrow = bool(precision) and number_format(precision).narrow and not any(precision in of for of in seen.values())
    return Distance(groups, unknown, assumed, doublings, narrow and quantity == "time", experts)


def comparable(parameters: float, low: float, high: float) -> bool:
    """Returns whether runs of models with `low` to `high` parameters are comparable to a model of this size."""
    return low / COMPARABLE <= parameters <= high * COMPARABLE


def spread_factors(known: Mapping[str, Any], where: Distance) -> tuple[float, float]:
    """Returns the logarithms of the interval's bounds over the planned value, lower then upper."""
    squared = known["within"] ** 2 + known["between"] ** 2 / (1 + where.groups)
    squared += known["unknown_engine"] ** 2 * where.unknown_engine
    squared += known["assumed_hardware"] ** 2 * where.assumed_hardware
    squared += known["unknown_format"] ** 2 * where.unknown_format + known["experts"] ** 2 * where.experts
    squared += known["doubling"] ** 2 * where.doublings
    spread = np.sqrt(squared)
    return -spread / known["skew"], spread * known["skew"]


def interval_factors(quantity: str, *of: Any) -> tuple[float, float]:
    """Returns the `spread_factors` of a plan. `of`: arguments of `distance` after the quantity."""
    return spread_factors(factors()[quantity], distance(quantity, *of))


def format_shares(engine: TrainingEngine, accelerator: Accelerator, beside: Mapping[str, int]) -> dict[str, float]:
    """Returns the likely number formats of a run that does not state its own, widest first, as shares that sum to 1.

    They come from the formats of the runs `beside` it (of its group), with a prior worth three runs: the shares of the
    engine's checked runs on this generation. Those have a prior worth three runs too: two in `default_precision`, one
    in the other of 16 and 8 bits.
    """
    peaks = accelerator.peak_flops_per_second
    sixteen = "bf16" if "bf16" in peaks else "fp16"
    possible = [name for name in dict.fromkeys((sixteen, "fp8", *beside)) if number_format(name).peak in peaks]
    if not possible:
        return {engine.default_precision: 1.0}
    usual = engine.default_precision if engine.default_precision in possible else sixteen
    shares = {name: (2.0 if name == usual else 1.0) / 3 for name in possible if name in (sixteen, "fp8", usual)}
    for seen in (factors()["time"]["formats"].get(engine.name, {}).get(accelerator.generation, {}), beside):
        runs = {name: 3 * shares.get(name, 0.0) + seen.get(name, 0) for name in possible}
        shares = {name: count / sum(runs.values()) for name, count in runs.items() if count}
    return shares


def checked_runs() -> dict[str, dict[str, int]]:
    """Returns the number of timed runs by engine and generation, of the public runs reported in docs/accuracy.md."""
    checked = factors()["time"]["checked"]
    return {
        name: {generation: sum(group[3] for group in groups) for generation, groups in generations.items()}
        for name, generations in checked.items()
    }


DEFAULT_ON = {"ampere": "composer-fsdp", "cdna3": "torchtitan-2025"}
"""Default engines on generations where the usual default engine was never checked but another was."""


def evidence(engine: TrainingEngine, generation: str) -> dict[str, Any]:
    """Describes an engine for an answer: its source, and its own and other engines' checked runs on this generation."""
    there = {name: runs[generation] for name, runs in checked_runs().items() if generation in runs}
    own = there.pop(engine.name, 0)
    return {
        "name": engine.name,
        "source": engine.source,
        "generation": generation,
        "checked_runs": own,
        "checked_there": dict(sorted(there.items(), key=lambda item: -item[1])),
    }
