"""Tuning of a server: settings tried one by one on a measured load, each between two runs of the unchanged ones.

    result = tune_serving(candidates(cores=2, at_once=16, context=1024), measure, base, budget_seconds=300)
    result.config                     # the settings that were kept

A change counts only as in `tune.py`: quicker than both controls by more than they differ. What rounds otherwise (the
formats of weights and cache) must also leave the loss of held-out text, computed through the engine, where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ironlaw import units
from ironlaw.explain.remedy import EFFECTS, Effect
from ironlaw.explain.tune import INTERRUPTED, LOSS_TOLERANCE, Measured, Say, Trial, Tuned, judge, loss_difference

Settings = dict[str, Any]
MeasureServing = Callable[[Settings, str], Measured]


@dataclass(frozen=True)
class ServingTrial:
    name: str
    settings: Settings
    effect: Effect = Effect.NONE


def candidates(cores: int, at_once: int, context: int, formats: Sequence[str] = (), exact: bool = False,
               speculates: bool = True) -> list[ServingTrial]:  # fmt: skip
    """What may pay, what mostly pays most first. `speculates`: the prompts are text, so that guesses mean something."""
    found = [ServingTrial("weights", {"weights": form}, Effect.ROUNDING) for form in formats]
    found += [ServingTrial("threads", {"threads": n}) for n in sorted({1, cores})]
    if speculates:
        found += [ServingTrial("speculation", {"speculation": "ngram", "drafted": n}) for n in (3, 6)]
    found += [ServingTrial("budget", {"token_budget": n}) for n in (128, 256, 1024, 2048) if n < 2 * context * at_once]
    found += [ServingTrial("block", {"block": n}) for n in (8, 32, 64)]
    found += [ServingTrial("batch", {"batch": n}) for n in (at_once // 4, at_once // 2) if n]
    found += [ServingTrial("cache", {"kv": form}, Effect.ROUNDING) for form in ("bf16", "int8")]
    return [one for one in found if not (exact and one.effect > Effect.NONE)]


def tune_serving(
    tried: Sequence[ServingTrial], measure: MeasureServing, base: Settings, *, budget_seconds: float,
    say: Say = lambda message: None, clock: Callable[[], float] = time.monotonic,
    keep: Callable[[Tuned], None] = lambda result: None,
) -> Tuned:  # fmt: skip
    """Candidates in turn, on what was kept so far; `base`: what the unchanged settings are.

    Ctrl-C ends the search with what was found before it.
    """
    began = clock()
    start = measure({}, "start")
    result = Tuned({}, start, start, runs=1, stopped="nothing else is known to try")
    say(f"start      {1 / start.seconds_per_token:,.0f} output tokens/s")
    one = max(clock() - began, 1e-9)
    for number, candidate in enumerate(tried, 1):
        if clock() - began + 2 * one > budget_seconds:
            result.stopped = "the budget is used up"
            break
        if candidate.settings.items() <= (base | result.config).items():
            continue  # it is so already
        try:
            after = measure(result.config | candidate.settings, f"trial-{number}-{candidate.name}")
            control = measure(result.config, f"control-{number}")
        except KeyboardInterrupt as stop:
            result.stopped, result.signal = INTERRUPTED, stop.args[0] if stop.args else "SIGINT"
            break
        result.runs += 2
        _judge(result, candidate, after, control, say)
        result.seconds = clock() - began
        keep(result)
    result.seconds = clock() - began
    return result


def _judge(result: Tuned, candidate: ServingTrial, after: Measured, control: Measured, say: Say) -> None:
    gain, noise, reason = judge(result.best, after, control)
    worse = loss_difference(result.best, after) if after.losses and control.losses else 0.0
    if not reason and worse > LOSS_TOLERANCE:
        reason = f"the loss is {worse:.3f} nats higher"
    trial = Trial(candidate.name, candidate.settings, EFFECTS[candidate.effect], None, gain, noise, worse, not reason,
                  reason, after.run)  # fmt: skip
    result.trials.append(trial)
    verdict = "kept" if trial.kept else f"dropped: {reason}"
    change = ", ".join(f"{key} = {value}" for key, value in candidate.settings.items())
    say(f"{change}: {units.signed_percent(gain)} ± {units.percent(noise)} of the time per token, {verdict}")
    if trial.kept:
        result.config, result.best = result.config | candidate.settings, after
    else:
        result.best = control
