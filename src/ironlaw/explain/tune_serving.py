"""Tunes a server: tries settings one by one on a measured load, each between two runs of the unchanged ones.

    result = tune_serving(candidates(cores=2, at_once=16, context=1024), measure, base, given, budget_seconds=300)
    result.config                     # the settings given and those that were kept

A change counts only as in `tune.py`: quicker than both controls by more than they differ. What rounds otherwise (the
formats of weights and cache) must also leave the loss of held-out text, computed through the engine, where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ironlaw.explain.remedy import Effect
from ironlaw.explain.tune import Change, Measure, Say, Tuned, search

Settings = dict[str, Any]


def candidates(cores: int, at_once: int, context: int, formats: Sequence[str] = (), exact: bool = False,
               speculates: bool = True) -> list[Change]:  # fmt: skip
    """Returns changes that may pay, the most promising first. `speculates`: the prompts are text, not random tokens."""
    found = [Change("weights", {"weights": form}, Effect.ROUNDING) for form in formats]
    found += [Change("threads", {"threads": n}) for n in sorted({1, cores})]
    if speculates:
        found += [Change("speculation", {"speculation": "ngram", "drafted": n}) for n in (3, 6)]
    found += [Change("budget", {"token_budget": n}) for n in (128, 256, 1024, 2048) if n < 2 * context * at_once]
    found += [Change("block", {"block": n}) for n in (8, 32, 64)]
    found += [Change("batch", {"batch": n}) for n in (at_once // 4, at_once // 2) if n]
    found += [Change("cache", {"kv": form}, Effect.ROUNDING) for form in ("bf16", "int8")]
    return [one for one in found if not (exact and one.effect > Effect.NONE)]


def tune_serving(
    tried: Sequence[Change], measure: Measure, base: Settings, given: Settings, *, budget_seconds: float,
    say: Say = lambda message: None, clock: Callable[[], float] = time.monotonic,
    keep: Callable[[Tuned], None] = lambda result: None,
) -> Tuned:  # fmt: skip
    """Try candidates in turn, as `tune.search`; `given`: fixed settings; `base`: those and all others, unchanged."""
    left = iter(one for one in tried if not one.settings.keys() & given.keys())

    def next_change(result: Tuned) -> Change | None:
        return next((one for one in left if not one.settings.items() <= (base | result.config).items()), None)

    return search(
        given, next_change, measure, lambda config, settings: config | settings,
        lambda start: f"{1 / start.seconds_per_token:,.0f} output tokens/s", budget_seconds=budget_seconds, say=say,
        clock=clock, keep=keep,
    )  # fmt: skip
