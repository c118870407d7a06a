"""Tuning keeps what pays on the machine, not what was planned to, and takes no noise for a gain."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from synthetic import make_config, make_profile

from ironlaw.cli.failure import described
from ironlaw.config import RunConfig
from ironlaw.explain.remedies import with_settings
from ironlaw.explain.tune import Measured, TrialRunner, judge, loss_difference, tune


class Simulated:
    """A machine on which a config takes what `truth` says, times jitter and drift."""

    def __init__(self, truth: Any, jitter: float = 0.0, drift: float = 0.0, seed: int = 0, loss: Any = None) -> None:
        self.truth, self.jitter, self.drift, self.chance = truth, jitter, drift, random.Random(seed)
        self.loss, self.runs = loss or (lambda config: 5.0), 0

    def __call__(self, config: RunConfig, name: str) -> Measured:
        self.runs += 1
        seconds = self.truth(config) * self.chance.gauss(1, self.jitter) * (1 + self.drift * self.runs)
        return Measured(seconds / config.tokens_per_step, seconds, (self.loss(config),) * 9, name)


def bf16_is_fast(config: RunConfig) -> float:
    return (0.5 if config.train.precision == "bf16" else 1.0) * (1 + 0.2 / config.micro_batch)


def run(machine: Simulated, **options: Any) -> Any:
    profile = make_profile(bf16_factor=4.0)
    options = {"budget_seconds": 1e9} | options
    return tune(make_config(micro_batch=1, global_batch=4), profile, folder=Path("unused"), measure=machine, **options)


def test_what_pays_is_kept_and_what_does_not_is_dropped() -> None:
    machine = Simulated(bf16_is_fast)
    result = run(machine)
    assert result.config.train.precision == "bf16" and result.config.micro_batch > 1
    assert result.gain == pytest.approx(1 - bf16_is_fast(result.config) / 1.2, abs=0.02)
    assert result.stopped == "nothing else is planned or known to pay" and result.runs == machine.runs
    slow = run(Simulated(lambda config: 1.0))  # whatever the plan says, nothing changes here
    assert slow.config.train.precision == "fp32" and slow.gain == 0 and all(not t.kept for t in slow.trials)


def test_exact_leaves_the_arithmetic_alone() -> None:
    result = run(Simulated(bf16_is_fast), exact=True)
    assert result.config.train.precision == "fp32"
    assert all(trial.remedy != "precision" for trial in result.trials)


def test_a_remedy_that_spoils_the_loss_is_dropped() -> None:
    machine = Simulated(bf16_is_fast, loss=lambda config: 5.3 if config.train.precision == "bf16" else 5.0)
    result = run(machine)
    assert result.config.train.precision == "fp32"
    trial = next(t for t in result.trials if t.remedy == "precision")
    assert "nats higher" in trial.reason and trial.measured_gain > 0.3


def test_losses_are_compared_after_as_many_steps() -> None:
    short = Measured(1.0, 1.0, (6.0, 5.5, 5.2, 5.1, 5.0, 4.9), "")
    longer = Measured(0.5, 0.5, (6.0, 5.5, 5.2, 5.1, 5.0, 4.9, 4.0, 3.0), "")
    assert loss_difference(short, longer) == 0.0


@pytest.mark.parametrize("drift", [-0.02, 0.0, 0.02])
def test_noise_and_drift_are_rarely_taken_for_gains(drift: float) -> None:
    """An A/A test: no change changes anything, and the medians of short runs jitter by 2% and drift by 2% a run."""
    chance, false = random.Random(1), 0
    for _ in range(2000):
        runs = [Measured((1 + drift * n) * chance.gauss(1, 0.02), 1.0, (5.0,), "") for n in range(3)]
        gain, noise, reason = judge(*runs)
        false += not reason
        assert (gain > noise) or reason
    assert false / 2000 < 0.05, false


def test_the_budget_ends_it() -> None:
    now = iter(range(0, 100000, 60))
    result = run(Simulated(bf16_is_fast), budget_seconds=200, clock=lambda: float(next(now)))
    assert result.stopped == "the budget is used up" and result.runs == 1


def test_a_trial_is_shorter_than_the_warmup() -> None:
    config = with_settings(make_config(steps=850), {"schedule.warmup_steps": 400})
    short = TrialRunner(Path("unused"), make_profile())._short(config)
    assert short.train.steps == short.warmup_steps < 400


def test_ctrl_c_in_a_trial_leaves_what_was_found_before_it() -> None:
    class Stopped(Simulated):
        def __call__(self, config: RunConfig, name: str) -> Measured:
            if self.runs == 4:
                raise KeyboardInterrupt
            return super().__call__(config, name)

    kept: list[int] = []
    machine = Stopped(lambda config: 1.0)  # nothing pays, so that there is always another trial
    result = run(machine, keep=lambda so_far: kept.append(len(so_far.trials)))
    assert result.stopped == "interrupted" and len(result.trials) == 1 and kept == [1]
    assert result.to_json()["runs"] == 3


def test_a_signal_that_ends_a_trial_is_kept_for_the_exit_code() -> None:
    class Stopped(Simulated):
        def __call__(self, config: RunConfig, name: str) -> Measured:
            if self.runs == 4:
                raise KeyboardInterrupt("SIGTERM")
            return super().__call__(config, name)

    result = run(Stopped(lambda config: 1.0))
    assert (result.stopped, result.signal) == ("interrupted", "SIGTERM")
    assert described(KeyboardInterrupt(result.signal)) == (143, "interrupted")
    assert described(KeyboardInterrupt()) == (130, "interrupted")
