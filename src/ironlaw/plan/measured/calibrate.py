"""Fits the physical constants of an engine on a cluster to a few ordinary step times.

    found = calibrate(runs, "my-cluster")
    found.engine, found.constants, found.error_left_out
    save_profile("my-cluster", found, "my_runs.csv")     # ~/.cache/ironlaw/engines/my-cluster.toml, found by its name

The fit is maximum a posteriori. Residuals are ln(planned / measured), with a Huber loss because a few step times are
always disturbed. The prior is the engine that the runs would be planned with; the spread of each constant is that
between engines of different software. Constants that the runs do not determine stay at their prior, so that few runs
cannot distort a plan. Bounds are the limits of hardware. The minimum is found by Levenberg and Marquardt's method on
numerical derivatives; fits with one run left out start from it. The correction is kept only if it beats the prior on
runs left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from ironlaw.errors import UserError
from ironlaw.files import write_text
from ironlaw.plan.cluster.candidates import Array, Candidates, candidates_of_jobs
from ironlaw.plan.cluster.step_costs import StepCosts, step_costs
from ironlaw.plan.cluster.timeline import Times
from ironlaw.plan.engines.engine import MEANING, TrainingEngine
from ironlaw.plan.engines.named import profile_path
from ironlaw.plan.measured.read import Run
from ironlaw.plan.measured.validate import plannable, settled, systems_of

MIN_RUNS = 4


@dataclass(frozen=True)
class Constant:
    """Bounds and prior of one constant. `spread`: prior standard deviation, of ln(value) when `logarithmic`."""

    name: str
    low: float
    high: float
    spread: float
    logarithmic: bool = True


CONSTANTS = (
    # Lowest: no software launches a block faster; highest: observed for eager code on a slow processor.
    Constant("host_layer_seconds", 2e-5, 6e-3, 0.3),
    Constant("host_collective_seconds", 1e-6, 6e-4, 0.4),
    Constant("host_microbatch_seconds", 1e-4, 5e-2, 0.5),
    Constant("host_step_seconds", 5e-4, 0.5, 0.7),
    # A kernel in a run is hardly faster than alone; twice as slow means another software generation.
    Constant("matmul_slowdown", 0.9, 2.4, 0.12),
    Constant("attention_slowdown", 0.6, 3.0, 0.2),
    # From fused kernels to eager ones that read and write memory for every operation.
    Constant("streaming_traffic", 0.7, 6.0, 0.4),
    Constant("shard_traffic", 0.7, 6.0, 0.3),
    Constant("score_traffic", 0.5, 6.0, 0.3),
    Constant("loss_traffic", 0.5, 8.0, 0.4),
    Constant("optimizer_traffic", 0.5, 6.0, 0.4),
    # Shares hidden: from none to all.
    # On one node its apparent effect is a misfit of other kinds: with a wider prior, large plans are 12% too fast.
    Constant("tp_hidden", 0.0, 0.95, 0.09, False),
    Constant("dp_hidden", 0.0, 1.0, 0.25, False),
    Constant("fsdp_hidden", 0.5, 1.0, 0.15, False),
    Constant("pp_hidden", 0.0, 0.98, 0.25, False),
    Constant("cp_hidden", 0.0, 0.98, 0.25, False),
    # The wire's rate is a limit; a busy or oversubscribed network may give a quarter of it.
    Constant("island_slowdown", 1.0, 4.0, 0.2),
    Constant("network_slowdown", 1.0, 6.0, 0.5),
)
"""Fitted constants. Spreads are about those between the engines in `engines/`, fitted to different software."""

NOISE = (0.03, 0.1)
"""Least and largest spread of ln(planned / measured) left unexplained; between them it is that of the residuals.

The prior weighs more where the runs disagree with each other."""

WITNESSES = 4.0
"""Runs that must determine a constant before it may leave its prior: one disturbed run is not enough."""

HUBER = 1.5  # residual, in spreads, beyond which a run's influence no longer grows
STEP = 1e-4  # step of numerical derivatives, in prior spreads


@dataclass(frozen=True)
class FittedConstant:
    """One constant before and after calibration."""

    name: str
    unit: str
    meaning: str
    before: float
    after: float
    spread: float  # posterior over prior standard deviation: 1 where the runs do not determine it


@dataclass(frozen=True)
class Calibration:
    """An engine fitted to runs, with its mean absolute relative errors of step time."""

    engine: TrainingEngine
    constants: tuple[FittedConstant, ...]
    runs: int
    error_before: float
    error_in_sample: float
    error_left_out: float  # each run planned by constants fitted to the others
    improved: bool  # False: the constants are unchanged
    start: str = ""  # name of the engine it started from

    def to_json(self) -> dict[str, Any]:
        return {
            "start": self.start,
            "runs": self.runs,
            "improved": self.improved,
            "errors": {
                "before": self.error_before, "in_sample": self.error_in_sample, "left_out": self.error_left_out,
            },
            "constants": [asdict(constant) for constant in self.constants],
        }  # fmt: skip


@dataclass(frozen=True)
class _SystemRuns:
    """Runs that share a system, with the costs that do not depend on the engine's constants."""

    candidates: Candidates
    costs: StepCosts
    generation: str
    index: list[int]


def calibrate(runs: Sequence[Run], name: str, start: TrainingEngine | None = None) -> Calibration:
    """Fits the constants of `start` (or the engine of the runs) to the step times of `runs`."""
    usable = [r for r in runs if r.ran and r.step_seconds and "time" in r.checks]
    known, rejected = plannable(usable)
    if len(known) < MIN_RUNS:
        why = f"; {rejected[0][2]}" if rejected else ""
        raise UserError(f"{len(known)} runs with a step time that can be planned: {MIN_RUNS} or more are needed{why}")
    engine = start or the_engine(known)
    known = settled([replace(run, engine=engine) for run in known])
    problem = _Problem(known, engine)
    x = np.zeros(len(CONSTANTS))
    for _ in range(3):
        x = problem.minimum(x, np.ones(len(known)))
        problem.noise = float(np.clip(1.48 * np.median(np.abs(problem.log_errors(x))), *NOISE))
    before = problem.errors(np.zeros_like(x))
    left_out = np.empty(len(known))
    for i in range(len(known)):
        weights = np.ones(len(known))
        weights[i] = 0.0
        left_out[i] = problem.errors(problem.minimum(x, weights, rounds=3))[i]
    # A plain mean would let one disturbed run decide.
    improved = bool(_robust_mean(left_out) < _robust_mean(before))
    chosen = x if improved else np.zeros_like(x)
    values: dict[str, Any] = dict(problem.values(chosen))
    spreads = problem.posterior(chosen)
    constants = tuple(
        FittedConstant(c.name, *MEANING[c.name], float(getattr(engine, c.name)), values[c.name], float(spreads[i]))
        for i, c in enumerate(CONSTANTS)
    )
    values |= {"name": name, "frameworks": (), "by_generation": _without(engine, problem.generations)}
    fitted = replace(engine, **values)
    return Calibration(
        engine=fitted,
        constants=constants,
        runs=len(known),
        error_before=float(before.mean()),
        error_in_sample=float(problem.errors(chosen).mean()),
        error_left_out=float((left_out if improved else before).mean()),
        improved=improved,
        start=engine.name,
    )


def the_engine(runs: Sequence[Run]) -> TrainingEngine:
    """Returns the engine of all runs. Raises UserError for several: one calibration cannot fit the constants of two."""
    names = sorted({run.engine.name for run in runs})
    if len(names) > 1:
        raise UserError(f"the runs belong to several engines ({', '.join(names)}): give one of them with --from")
    return runs[0].engine


def _robust_mean(errors: Array) -> float:
    return float(np.minimum(errors, 4 * np.median(errors) + 1e-9).mean())


def _without(engine: TrainingEngine, generations: set[str]) -> dict[str, dict[str, float]]:
    """Returns the overrides per generation without those that the calibrated values replace."""
    fitted = {c.name for c in CONSTANTS}
    kept = {
        generation: {k: v for k, v in entries.items() if not (generation in generations and k in fitted)}
        for generation, entries in engine.by_generation.items()
    }
    return {generation: entries for generation, entries in kept.items() if entries}


class _Problem:
    """The fit's objective. Constants are given as `x`, in prior spreads from the start (all zero: the start itself)."""

    def __init__(self, runs: Sequence[Run], engine: TrainingEngine) -> None:
        self.noise = NOISE[0]
        self.measured = np.array([run.step_seconds for run in runs], dtype=float)
        self.blocks: list[_SystemRuns] = []
        for where, index in systems_of(runs):
            candidates = candidates_of_jobs([runs[i].job for i in index])
            generation = runs[index[0]].cluster.accelerator.generation
            self.blocks.append(_SystemRuns(candidates, step_costs(candidates, where), generation, index))
        self.generations = {block.generation for block in self.blocks}
        # With one generation the start includes its overrides; with several it is the plain values.
        self.engine = engine.on(self.blocks[0].generation) if len(self.generations) == 1 else engine
        self.plain = replace(self.engine, by_generation={})
        self.start = np.array([float(getattr(self.engine, c.name)) for c in CONSTANTS])
        self.logarithmic = np.array([c.logarithmic for c in CONSTANTS])
        self.spread = np.array([c.spread for c in CONSTANTS])
        low, high = np.array([c.low for c in CONSTANTS]), np.array([c.high for c in CONSTANTS])
        self.low = self._encode(np.minimum(low, self.start))  # a start outside the bounds may stay there
        self.high = self._encode(np.maximum(high, self.start))

        self.precision = self._precision()

    def _precision(self) -> Array:
        """Returns the precision of each constant's prior: larger where few runs determine the constant.

        Their effective number is Kish's: (sum s)^2 / sum s^2, with s the squared sensitivity of a run's time.
        """
        zero = np.zeros(len(CONSTANTS))
        sensitivity = self.jacobian(zero, self.log_errors(zero)) ** 2
        total = np.maximum((sensitivity**2).sum(axis=0), 1e-30)
        witnesses = sensitivity.sum(axis=0) ** 2 / total
        return np.maximum(1.0, WITNESSES / np.maximum(witnesses, 1.0)) ** 2

    def _encode(self, values: Array) -> Array:
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(values / self.start)
        return np.asarray(np.where(self.logarithmic, logs, values - self.start) / self.spread)

    def values(self, x: Array) -> dict[str, float]:
        moved = x * self.spread
        scaled = self.start * np.exp(np.where(self.logarithmic, moved, 0.0))
        values = np.where(self.logarithmic, scaled, self.start + moved)
        return {c.name: float(v) for c, v in zip(CONSTANTS, values, strict=True)}

    def log_errors(self, x: Array) -> Array:
        """Returns ln(planned / measured) of every run."""
        constants: dict[str, Any] = dict(self.values(x))
        engine = replace(self.plain, **constants)
        planned = np.empty(len(self.measured))
        for block in self.blocks:
            planned[block.index] = Times(block.costs, block.candidates, engine).step_seconds
        return np.asarray(np.log(planned / self.measured))

    def errors(self, x: Array) -> Array:
        """Returns the absolute relative error of every run."""
        return np.asarray(np.abs(np.exp(self.log_errors(x)) - 1))

    def jacobian(self, x: Array, at: Array) -> Array:
        columns = []
        for i in range(len(x)):
            step = -STEP if x[i] + STEP > self.high[i] else STEP
            moved = x.copy()
            moved[i] += step
            columns.append((self.log_errors(moved) - at) / step)
        return np.stack(columns, axis=1)

    def minimum(self, x: Array, weights: Array, rounds: int = 20) -> Array:
        """Returns the most probable constants within the bounds, by Levenberg-Marquardt with Huber weights."""

        def cost(errors: Array, x: Array) -> float:
            size = np.abs(errors) / self.noise
            huber = np.where(size <= HUBER, 0.5 * size**2, HUBER * (size - 0.5 * HUBER))
            return float((weights * huber).sum() + 0.5 * (self.precision * x**2).sum())

        damping = 1e-2
        at = self.log_errors(x)
        best = cost(at, x)
        for _ in range(rounds):
            jacobian = self.jacobian(x, at)
            pull = weights * np.minimum(1.0, HUBER * self.noise / np.maximum(np.abs(at), 1e-12)) / self.noise**2
            curvature = (jacobian * pull[:, None]).T @ jacobian + np.diag(self.precision)
            slope = jacobian.T @ (pull * at) + self.precision * x
            # A constant at a bound that is pulled outwards stays there.
            free = ~(((x <= self.low) & (slope > 0)) | ((x >= self.high) & (slope < 0)))
            gained = 0.0
            for _ in range(8):
                matrix = curvature[np.ix_(free, free)]
                step = np.zeros_like(x)
                step[free] = -np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), slope[free])
                trial = np.clip(x + step, self.low, self.high)
                errors = self.log_errors(trial)
                value = cost(errors, trial)
                if value < best:
                    gained, x, at, best, damping = best - value, trial, errors, value, max(damping / 5, 1e-6)
                    break
                damping *= 4
            if gained < 1e-3:
                break
        return x

    def posterior(self, x: Array) -> Array:
        """Returns each constant's posterior over prior standard deviation, by curvature at `x`; 1: nothing learned."""
        jacobian = self.jacobian(x, self.log_errors(x)) / self.noise
        covariance = np.linalg.inv(jacobian.T @ jacobian + np.diag(self.precision))
        return np.asarray(np.sqrt(np.diag(covariance) * self.precision))


def save_profile(name: str, found: Calibration, runs: str) -> Path:
    """Writes the calibrated engine as a TOML profile, replacing any profile of that name, and returns its path."""
    path, engine, plain = profile_path(name), found.engine, TrainingEngine("")
    basis = f"{found.runs} runs of {Path(runs).name}"
    document: dict[str, Any] = {"source": f"calibrated on {basis}"}
    for key in (field.name for field in fields(TrainingEngine) if field.name not in ("name", "source", "frameworks")):
        if (value := getattr(engine, key)) != getattr(plain, key):
            document[key] = value
    document |= {constant.name: float(f"{constant.after:.5g}") for constant in found.constants}
    head = (
        f"# Calibrated by `ironlaw calibrate` on {basis}. Mean error of step time: {found.error_before:.1%} before,\n"
        f"# {found.error_in_sample:.1%} on these runs, {found.error_left_out:.1%} with each run left out. "
        "docs/accuracy.md explains the constants.\n\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, head + tomli_w.dumps(document))
    return path
