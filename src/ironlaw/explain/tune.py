"""The tuning loop: measure, choose a remedy by its planned gain, measure again beside the unchanged config.

    result = tune(config, profile, budget_seconds=900, folder=Path("runs/tune"))
    result.config                     # the best config found
    result.trials[1].measured_gain    # what its remedy brought, against control runs before and after it

A trial is a short run. It counts as a gain only when it beats both of the control runs that enclose it by more than
those two, which are the same config, differ from each other: an A/B/A test, so that a machine that drifts is not
taken for a remedy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ironlaw import units
from ironlaw.config import RunConfig
from ironlaw.errors import UserError
from ironlaw.explain import grades
from ironlaw.explain.explanation import read_metrics
from ironlaw.explain.remedies import find_remedies, situation, with_settings
from ironlaw.explain.remedy import EFFECTS, Effect, Remedy
from ironlaw.ledger import Ledger
from ironlaw.machine.profile import Profile
from ironlaw.plan.step import plan_run
from ironlaw.train.session import run_training

MIN_STEPS, MAX_STEPS = 12, 200
TRIAL_SECONDS = 8.0  # of steps: long enough for ten blocks of neighbouring steps
MIN_NOISE = 0.04  # of the time per token: medians of short runs on shared cores differ by 1 to 2%
INTERRUPTED = "interrupted"
LOSS_TOLERANCE = 0.05  # nats per token: short runs with the same seed differ by rounding only by less


@dataclass(frozen=True)
class Measured:
    """One short run: its time without evaluations and checkpoints, and the training loss of each step."""

    seconds_per_token: float
    step_seconds: float
    losses: tuple[float, ...]
    run: str

    def to_json(self) -> dict[str, Any]:
        return {"seconds_per_token": self.seconds_per_token, "step_seconds": self.step_seconds, "run": self.run,
                "steps": len(self.losses)}  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One remedy tried. Gains are fractions of the time per token; `noise` is what the controls differ by."""

    remedy: str
    settings: dict[str, Any]
    effect: str
    predicted_gain: float | None  # None: nobody has planned it
    measured_gain: float
    noise: float
    loss_change: float
    kept: bool
    reason: str
    run: str


@dataclass
class Tuned:
    config: Any  # a RunConfig; of a server its settings
    start: Measured
    best: Measured
    trials: list[Trial] = field(default_factory=list)
    runs: int = 0
    seconds: float = 0.0
    stopped: str = ""
    signal: str = ""  # which ended it, if one did

    @property
    def gain(self) -> float:
        """Of the time per token, as the product of the gains that were kept: each was measured against its controls."""
        left = 1.0
        for trial in self.trials:
            left *= 1 - trial.measured_gain if trial.kept else 1.0
        return 1 - left

    def settings(self) -> dict[str, Any]:
        """What changed, all kept remedies together."""
        return {key: value for trial in self.trials if trial.kept for key, value in trial.settings.items()}

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": 1, "gain": self.gain, "settings": self.settings(), "runs": self.runs,
            "seconds": self.seconds, "stopped": self.stopped, "start": self.start.to_json(),
            "best": self.best.to_json(),
            "trials": [asdict(trial) for trial in self.trials],
        }  # fmt: skip


@dataclass(frozen=True)
class Change:
    """What is tried. `how` says it in words; without, the settings do."""

    name: str
    settings: dict[str, Any]
    effect: Effect = Effect.NONE
    predicted_gain: float | None = None
    how: str = ""

    @property
    def apply(self) -> str:
        return self.how or ", ".join(f"{key} = {value}" for key, value in self.settings.items())


Measure = Callable[[Any, str], Measured]  # of a config, or settings, under a name
Say = Callable[[str], None]


def tune(
    config: RunConfig, profile: Profile, *, budget_seconds: float, folder: Path, exact: bool = False,
    measure: Measure | None = None, say: Say = lambda message: None, clock: Callable[[], float] = time.monotonic,
    keep: Callable[[Tuned], None] = lambda result: None,
) -> Tuned:  # fmt: skip
    """`exact`: only remedies that leave the arithmetic as it is. Never changes the model, nor what is learned from.

    Otherwise as `search`.
    """
    tried: set[tuple[Any, ...]] = set()

    def next_change(result: Tuned) -> Change | None:
        remedy = _combined_remedies(config, profile, exact) if not tried else None
        remedy = remedy or _next_remedy(result.config, profile, tried, exact)
        if remedy is None:
            return None
        tried.add(_key(remedy))
        return Change(remedy.name, remedy.settings, remedy.effect, remedy.gain, remedy.apply)

    def graded(result: Tuned) -> None:
        trial = result.trials[-1]
        if measure is None:
            grades.keep(
                grades.Grade(trial.remedy, trial.predicted_gain or 0.0, trial.measured_gain, "tune", profile.name)
            )
        keep(result)

    return search(
        config, next_change, measure or TrialRunner(folder, profile, min(TRIAL_SECONDS, budget_seconds / 12)),
        with_settings, lambda start: f"{units.seconds(start.step_seconds)} per step", budget_seconds=budget_seconds,
        say=say, clock=clock, keep=graded,
    )  # fmt: skip


def search(
    config: Any, next_change: Callable[[Tuned], Change | None], measure: Measure,
    apply: Callable[[Any, dict[str, Any]], Any], describe: Callable[[Measured], str], *, budget_seconds: float,
    say: Say, clock: Callable[[], float], keep: Callable[[Tuned], None],
) -> Tuned:  # fmt: skip
    """Try one change after the other, each on what was kept so far. What changes rounding must also leave the loss
    where it was.

    `keep` is given what is known after every trial. Ctrl-C in a trial ends the search with what was found before it.
    Raises UserError when the budget does not last for the first measurement.
    """
    began = clock()
    start = measure(config, "start")
    result = Tuned(config, start, start, runs=1)
    say(f"start      {describe(start)}")
    one = max(clock() - began, 1e-9)  # what a run takes
    while not result.stopped:
        change, number = next_change(result), len(result.trials) + 1
        if change is None:
            result.stopped = "nothing else is planned or known to pay"
        elif clock() - began + 2 * one > budget_seconds:
            result.stopped = "the budget is used up"
        else:
            after = apply(result.config, change.settings)
            try:
                trial = measure(after, f"trial-{number}-{change.name}")
                control = measure(result.config, f"control-{number}")
            except UserError as error:
                say(f"{change.name:<10} {change.apply}: not possible: {error}")
                continue
            except KeyboardInterrupt as stop:
                result.stopped, result.signal = INTERRUPTED, stop.args[0] if stop.args else "SIGINT"
                break
            result.runs += 2
            kept = _record_trial(result, change, trial, control, say)
            # If not kept the same config, measured later: the next comparison is with now, not with then.
            result.config, result.best = (after, trial) if kept else (result.config, control)
            result.seconds = clock() - began
            keep(result)
    result.seconds = clock() - began
    return result


def _record_trial(result: Tuned, change: Change, after: Measured, control: Measured, say: Say) -> bool:
    """Record a trial and log a line about it. Returns whether the change is kept."""
    gain, noise, reason = judge(result.best, after, control)
    worse = loss_difference(result.best, after)
    if not reason and change.effect > Effect.NONE and worse > LOSS_TOLERANCE:
        reason = f"the loss is {worse:.3f} nats higher"
    result.trials.append(
        Trial(
            change.name, change.settings, EFFECTS[change.effect], change.predicted_gain, gain, noise, worse, not reason,
            reason, after.run,
        )
    )  # fmt: skip
    planned = "" if change.predicted_gain is None else f"planned {units.signed_percent(change.predicted_gain)}, "
    verdict = f"dropped: {reason}" if reason else "kept"
    found = f"{units.signed_percent(gain)} ± {units.percent(noise)}"
    say(f"{change.name:<10} {change.apply}: {planned}measured {found}, {verdict}")
    return not reason


def _combined_remedies(config: RunConfig, profile: Profile, exact: bool) -> Remedy | None:
    """Returns the plan's best: several remedies, each planned on the config with those before it."""
    steps: list[Remedy] = []
    now, left = config, 1.0
    while len(steps) < 4:
        found = _next_remedy(now, profile, {_key(r) for r in steps}, exact)
        if found is None or found.gain < MIN_COMPOSED:
            break
        steps.append(found)
        now, left = with_settings(now, found.settings), left * (1 - found.gain)
    if len(steps) < 2:
        return None
    settings = {key: value for step in steps for key, value in step.settings.items()}
    worst = max(steps, key=lambda r: r.effect)
    return replace(
        steps[0], name="+".join(dict.fromkeys(r.name for r in steps)), title="The plan's best", settings=settings,
        effect=worst.effect, risk=worst.risk, gain=1 - left,
        total_seconds_saved=sum(r.total_seconds_saved for r in steps),
    )  # fmt: skip


MIN_COMPOSED = 0.02


def _next_remedy(config: RunConfig, profile: Profile, tried: set[tuple[Any, ...]], exact: bool) -> Remedy | None:
    """Returns the allowed remedy with the largest planned gain that was not tried."""
    try:
        now = situation(config, profile, Ledger("run"))
    except UserError:
        return None
    most = Effect.NONE if exact else Effect.ROUNDING
    found = [r for r in find_remedies(now) if r.effect <= most and _key(r) not in tried and r.total_seconds_saved > 0]
    found = [r for r in found if r.name not in ("evaluation", "checkpoint")]  # the user's choice, not a speed
    return max(found, key=lambda r: r.gain, default=None)


def _key(remedy: Remedy) -> tuple[Any, ...]:
    return tuple(sorted(remedy.settings.items()))


def loss_difference(before: Measured, after: Measured) -> float:
    """Returns nats per token over the last five of as many steps of both: a quicker run has taken more steps."""
    common = min(len(before.losses), len(after.losses))
    if not common:
        return 0.0
    last = slice(max(0, common - 5), common)
    return statistics.mean(after.losses[last]) - statistics.mean(before.losses[last])


def judge(before: Measured, after: Measured, control: Measured) -> tuple[float, float, str]:
    """Returns (gain, noise, why it is none) of `after` against the same config measured before and after it."""
    controls = (before.seconds_per_token, control.seconds_per_token)
    middle = statistics.mean(controls)
    noise = max(MIN_NOISE, abs(controls[0] - controls[1]) / middle)
    gain = 1 - after.seconds_per_token / middle
    if after.seconds_per_token >= min(controls):
        return gain, noise, "not faster than both controls"
    return gain, noise, "" if gain > noise else "within the noise"


@dataclass
class TrialRunner:
    """Measures a config by training a few steps of it in this process."""

    folder: Path
    profile: Profile
    trial_seconds: float = TRIAL_SECONDS

    def __call__(self, config: RunConfig, name: str) -> Measured:
        out = self.folder / name
        outcome = run_training(self._short(config), out, self.profile)
        if outcome.interrupted:  # a run ends by itself on Ctrl-C; so does what started it
            raise KeyboardInterrupt(outcome.interrupted)
        step = outcome.ledger.totals.get("step_seconds")
        if step is None:
            raise UserError(f"{out} measured no step: give a larger --budget")
        steps = read_metrics(out / "metrics.jsonl")
        seconds = sorted(m["seconds"] for m in steps[4:] if not m.get("recorded"))
        # The median of the quicker half: other load on the machine only adds.
        typical = float(statistics.median(seconds[: max(1, (len(seconds) + 1) // 2)]))
        return Measured(typical / config.tokens_per_step, typical, tuple(float(m["loss"]) for m in steps), str(out))

    def _short(self, config: RunConfig) -> RunConfig:
        """Returns the config of a short run: no evaluation, no checkpoint, nothing recorded."""
        step = plan_run(config, self.profile).totals["step_seconds"].value
        steps = min(MAX_STEPS, max(MIN_STEPS, round(self.trial_seconds / step)), max(config.train.steps, MIN_STEPS))
        return with_settings(
            config,
            {"train.steps": steps, "schedule.warmup_steps": min(config.warmup_steps, steps), "train.profile_steps": 0,
             "evaluation.every": 0, "evaluation.batches": 1, "checkpoint.every": 0},
        )  # fmt: skip
