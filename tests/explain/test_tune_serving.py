"""Tuning of a server keeps what pays on the machine, and no format that costs loss."""

from __future__ import annotations

from typing import Any

import pytest

from ironlaw.errors import UserError
from ironlaw.explain.remedy import Effect
from ironlaw.explain.tune import Measured, Tuned
from ironlaw.explain.tune_serving import candidates, tune_serving

BASE = {"weights": "fp32", "threads": 1, "block": 16, "token_budget": 512}


class Simulated:
    """A server on which settings take what `truth` says; bf16 is quick, int8 quicker and loses what it knew."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def __call__(self, settings: dict[str, Any], name: str) -> Measured:
        at = BASE | settings
        if at["block"] == 64:
            raise UserError("the prompt has 64 tokens, this server takes 47")
        self.asked.append(settings)
        seconds = {"fp32": 1.0, "bf16": 0.6, "int8": 0.4}[at["weights"]] * (0.8 if at["block"] == 32 else 1.0)
        return Measured(seconds, seconds, (5.3 if at["weights"] == "int8" else 5.0,), name)


def tuned(**options: Any) -> tuple[Tuned, Simulated]:
    machine = Simulated()
    tried = candidates(1, 8, 64, ("bf16", "int8"), exact=options.pop("exact", False))
    return tune_serving(tried, machine, BASE, options.pop("given", {}), **({"budget_seconds": 1e9} | options)), machine


def test_what_pays_is_kept_on_what_was_kept_before() -> None:
    result, machine = tuned()
    assert result.config == {"weights": "bf16", "block": 32}
    assert result.gain == pytest.approx(1 - 0.6 * 0.8) and result.runs == len(machine.asked)
    spoilt = next(trial for trial in result.trials if trial.settings == {"weights": "int8"})
    assert not spoilt.kept and "loss" in spoilt.reason
    assert {"threads": 1} not in [trial.settings for trial in result.trials]  # it was so already


def test_what_is_given_stays_and_what_is_not_possible_is_passed_over() -> None:
    result, machine = tuned(given={"weights": "bf16", "seed": 7})
    assert result.config == {"weights": "bf16", "seed": 7, "block": 32} and result.settings() == {"block": 32}
    assert all(asked["weights"] == "bf16" and asked["seed"] == 7 for asked in machine.asked)
    tried = [trial.settings for trial in result.trials]
    assert {"block": 64} not in tried and {"batch": 2} in tried  # which comes after it


def test_exact_tries_no_format_and_a_budget_ends_it() -> None:
    result, machine = tuned(exact=True)
    assert result.config == {"block": 32} and all("weights" not in asked for asked in machine.asked)
    ticks = iter(range(100))
    short, machine = tuned(budget_seconds=6, clock=lambda: float(next(ticks)))
    assert short.stopped == "the budget is used up" and short.runs == len(machine.asked) < result.runs


def test_guesses_are_tried_on_text_only() -> None:
    assert not [one for one in candidates(2, 8, 64, speculates=False) if one.name == "speculation"]
    assert all(one.effect is Effect.NONE for one in candidates(2, 8, 64, ("int8",), exact=True))
