"""Fit the constants of the serving planner, and the intervals it states, to published measurements.

    python benchmarks/fit_serving.py ../shared/calibration/inference.csv    # constants and intervals are written
    python benchmarks/fit_serving.py ... --record group                     # record of sources left out, one by one
    python benchmarks/fit_serving.py ... --record device                    # or of devices, engines, versions

Constants are a base and effects (`plan/serving/rates.py`). Residuals are logarithms of planned over measured, in units
of 15%, with a robust loss; every effect has a prior of mean 0, so that one that few rows support stays small. A group
counts as 60 rows at most. Intervals come from residuals of groups that were left out of the fit.
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from scipy.linalg import cho_factor, cho_solve

from ironlaw.plan.measured.inference import ServingRun, read_serving
from ironlaw.plan.serving import rates as serving_rates
from ironlaw.plan.serving.demand import Demand
from ironlaw.plan.serving.rates import NAMES, Rates, effect_names, link
from ironlaw.plan.serving.timing import System, at_concurrency, decode_seconds, prompt_seconds, room_tokens, unlimited

FOLDER = Path(serving_rates.__file__).parent

# Which effects a constant has, how far they may stray (natural logarithms or logits), and where its base starts.
KERNELS = ("engine", "release", "class", "vendor", "format", "pair", "side", "kernel", "mixture")
EFFECTS: dict[str, tuple[tuple[str, ...], float, float]] = {
    "weights": (KERNELS, 0.7, 0.8),
    "products": ((*KERNELS, "support"), 0.7, 0.0),
    "decode_products": (("engine", "vendor", "side", "support"), 1.0, 0.0),
    "cache": (("engine", "side"), 0.5, 0.3),
    "attention": (("engine", "pair", "side"), 0.7, -0.5),
    "layer_seconds": (("engine", "release", "host", "class", "vendor", "mixture"), 1.0, float(np.log(8e-6))),
    "step_seconds": (("engine", "host", "release", "vendor"), 1.0, float(np.log(3e-4))),
    "prompt_seconds": (("engine", "age", "host", "vendor"), 1.0, float(np.log(1e-3))),
    "ramp_tokens": (("engine", "vendor", "side"), 1.0, float(np.log(30.0))),
    "collective_seconds": (("engine", "host", "release"), 0.7, float(np.log(1e-5))),
    "most_requests": (("engine", "age"), 1.5, float(np.log(512.0))),  # no source says it: 256 to 4,096 by default
    "throughput": (("engine", "age", "mixture"), 0.3, -0.1),
}
STRAYS = {"": 3.0, "host": 3.0}
"""Of a base and of what a kind of host costs, how much further they may stray than other effects."""
ALIKE = {("products", "format", "16"), ("products", "format", "fp8")}
LITTLE = 0.1
"""How far these may: units for 8 bits reach about the share of their peak that units for 16 do. Left free, 8 bits took
what engines and devices that nobody ran in 16 do better, and 16 bits on these were planned 5 to 6 times slower."""
UNIT, LOSS_SCALE, GROUP_ROWS = 0.15, 1.5, 60
LARGEST = 3.0  # error (natural logarithm) beyond which a row is a mistake
DIFFERENCE = 1e-5
MOST_STEPS, LONGEST, DONE = 60, 1.5, 3e-5  # of a fit; step of an effect; share of the loss that a step must gain
WEIGHTS = {"decode": 1.0, "prompt": 0.8, "first": 0.5, "requests": 0.8, "unlimited": 0.6}
NONE = -1  # place of what has no effect
ENDS = {"low": min, "high": max}
PARTS = ("group", "device", "engine", "version")

DROPPED = 0.03  # effects smaller than this are left out of the file


class Problem:
    """All rows as arrays."""

    def __init__(self, runs: list[ServingRun]) -> None:
        self.runs = runs
        demand = Demand(**{f.name: _stack([getattr(r.system.demand, f.name) for r in runs]) for f in fields(Demand)})
        plain = [f.name for f in fields(System) if f.name not in ("demand", "rates", "draft")]
        self.system = System(
            demand=demand,
            rates=runs[0].system.rates,
            **{n: _stack([getattr(r.system, n) for r in runs]) for n in plain},
        )
        self.inputs, self.outputs = _stack([r.inputs for r in runs]), _stack([r.outputs for r in runs])
        self.requests = _stack([r.concurrency for r in runs])
        self.together = np.array([r.together for r in runs])
        self.fraction = _stack([r.engine.memory_fraction for r in runs])
        self.of_free = np.array([r.engine.of_free for r in runs])
        self.groups = np.array([r.group for r in runs])
        named = [
            effect_names(r.engine, r.device, r.formats.weights, r.backend, r.year, r.system.demand.experts > 0)
            for r in runs
        ]
        self.engines, self.pairs = ([one[kind] for one in named] for kind in ("engine", "pair"))
        self.index: dict[tuple[str, str], tuple[int, np.ndarray]] = {}
        self.names: list[tuple[str, str, str]] = []
        self.base: dict[str, int] = {}
        for constant, (kinds, _, _) in EFFECTS.items():
            self.base[constant] = len(self.names)
            self.names.append((constant, "", ""))
            for kind in kinds:
                levels = sorted({n[kind] for n in named} - {""})
                first = len(self.names)
                self.names += [(constant, kind, level) for level in levels]
                place = {level: first + i for i, level in enumerate(levels)}
                self.index[constant, kind] = (first, np.array([place.get(n[kind], NONE) for n in named]))
        self.start = np.array([EFFECTS[c][2] if not kind else 0.0 for c, kind, _ in self.names])
        stray = [LITTLE if name in ALIKE else STRAYS.get(name[1], 1.0) for name in self.names]
        self.spread = np.array([EFFECTS[name[0]][1] * by for name, by in zip(self.names, stray, strict=True)])
        self.targets = self._targets()
        counted = {g: int((self.groups == g).sum()) for g in set(self.groups)}
        self.weight = np.array([1 / np.sqrt(max(counted[g] / GROUP_ROWS, 1.0)) for g in self.groups])

    def totals(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """Of each constant, base and effects of each row."""
        x = np.append(x, 0.0)  # where an effect has no name
        found = {}
        for constant, (kinds, _, _) in EFFECTS.items():
            found[constant] = x[self.base[constant]] + sum(x[self.index[constant, kind][1]] for kind in kinds)
        return found

    def predicted(self, totals: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        s = replace(self.system, rates=Rates(**{name: link(name, total) for name, total in totals.items()}))
        inputs, outputs, requests = np.maximum(self.inputs, 1.0), self.outputs, self.requests
        prompt = prompt_seconds(s, np.where(self.together, requests, 1.0), inputs)
        steady = [at_concurrency(s, requests, self.inputs, outputs, which) for which in (True, False)]
        room = room_tokens(s, self.fraction, self.of_free)
        kept = s.demand.cached_tokens(np.maximum(self.inputs + outputs, 1.0))
        most = np.clip(room / np.maximum(kept, 1.0), 1.0, s.rates.most_requests * s.attention_dp)
        rate = np.where(self.together, steady[0].tokens_per_second, steady[1].tokens_per_second)
        return {
            "decode": decode_seconds(s, requests, self.inputs + outputs / 2),
            "prompt": prompt,
            "first": steady[1].ttft_seconds,
            "requests": requests / rate,
            "unlimited": 1 / unlimited(s, most, self.inputs, outputs),
        }

    def _targets(self) -> dict[str, np.ndarray]:
        """What each row measured of each kind: seconds; NaN where it did not."""
        found = {kind: np.full(len(self.runs), np.nan) for kind in WEIGHTS}
        for i, run in enumerate(self.runs):
            m = run.measured
            rate = m.get("output_tokens_per_second") or (m.get("requests_per_second", 0.0) * run.outputs) or None
            rate = rate and rate / run.layout.replicas
            if run.scenario == "decode" and not run.whole:
                found["decode"][i] = run.concurrency / rate if rate else m.get("tpot_seconds", np.nan)
            elif run.scenario == "decode" and rate:
                found["requests"][i] = run.concurrency / rate
            elif run.scenario == "fixed-concurrency":
                if not run.together:
                    found["first"][i] = m.get("ttft_seconds", np.nan)
                if "tpot_seconds" in m and run.together:
                    found["decode"][i] = m["tpot_seconds"]
                elif rate:
                    found["requests"][i] = run.concurrency / rate
            elif run.scenario in ("offline", "server") and rate:
                found["unlimited"][i] = 1 / rate
            if run.inputs and run.together and run.scenario != "offline":
                speed = m.get("prefill_tokens_per_second")
                found["prompt"][i] = run.concurrency * run.inputs / speed if speed else m.get("ttft_seconds", np.nan)
        return found

    def residuals(self, x: np.ndarray, used: np.ndarray) -> np.ndarray:
        parts = []
        planned = self.predicted(self.totals(x))
        for kind, weight in WEIGHTS.items():
            rows = used & ~np.isnan(self.targets[kind])
            error = np.log(planned[kind][rows] / self.targets[kind][rows])
            parts.append(weight * self.weight[rows] * np.clip(error, -LARGEST, LARGEST) / UNIT)
        return np.concatenate([*parts, (x - self.start) / self.spread])

    def jacobian(self, x: np.ndarray, used: np.ndarray) -> np.ndarray:
        """A row's prediction hangs on the sum of a constant's effects alone: one difference for each constant."""
        totals = self.totals(x)
        planned = self.predicted(totals)
        rows = {kind: np.flatnonzero(used & ~np.isnan(self.targets[kind])) for kind in WEIGHTS}
        found = [np.zeros((len(rows[kind]), len(x) + 1)) for kind in WEIGHTS]
        for constant, (kinds, _, _) in EFFECTS.items():
            moved = self.predicted(totals | {constant: totals[constant] + DIFFERENCE})
            for part, (kind, weight) in zip(found, WEIGHTS.items(), strict=True):
                at = rows[kind]
                slope = np.log(moved[kind][at] / planned[kind][at]) / DIFFERENCE * weight * self.weight[at] / UNIT
                slope *= np.abs(np.log(planned[kind][at] / self.targets[kind][at])) < LARGEST
                part[:, self.base[constant]] += slope
                for effect in kinds:
                    part[np.arange(len(at)), self.index[constant, effect][1][at]] += slope
        return np.concatenate([*(part[:, :-1] for part in found), np.diag(1 / self.spread)])

    def fit(self, used: np.ndarray) -> np.ndarray:
        """Levenberg-Marquardt with a soft L1 loss of the rows and a square one of the effects."""
        x, damping = self.start, 1e-3
        residual = self.residuals(x, used)
        for _ in range(MOST_STEPS):
            rows = len(residual) - len(x)
            slope, error = self.jacobian(x, used)[:rows], residual[:rows]
            weight = 1 / np.sqrt(1 + (error / LOSS_SCALE) ** 2)
            weighted = (slope * np.sqrt(weight)[:, None]).astype(np.float32)
            curvature = (weighted.T @ weighted).astype(float) + np.diag(1 / self.spread**2)
            gradient = slope.T @ (weight * error) + residual[rows:] / self.spread
            for _ in range(6):
                damped = curvature + np.diag(damping * curvature.diagonal())
                tried = x - np.clip(cho_solve(cho_factor(damped), gradient), -LONGEST, LONGEST)
                after = self.residuals(tried, used)
                gained = _loss(residual, rows) - _loss(after, rows)
                if gained > 0:
                    break
                damping *= 8
            else:
                return x
            done = gained < DONE * _loss(residual, rows)
            x, residual, damping = tried, after, max(damping / 5, 1e-5)
            if done:
                break
        return x

    def errors(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """Of each kind ln(measured / planned) of every row, NaN where it did not measure it."""
        planned = self.predicted(self.totals(x))
        return {kind: np.log(self.targets[kind] / planned[kind]) for kind in WEIGHTS}

    def known(self, used: np.ndarray) -> np.ndarray:
        """Rows whose engine, and whose engine's family on such devices, other rows that are used speak of."""
        seen = [
            {name for name, there in zip(names, used, strict=True) if there} for names in (self.engines, self.pairs)
        ]
        return np.array([e in seen[0] and p in seen[1] for e, p in zip(self.engines, self.pairs, strict=True)])


def _loss(residual: np.ndarray, rows: int) -> float:
    robust = 2 * LOSS_SCALE**2 * (np.sqrt(1 + (residual[:rows] / LOSS_SCALE) ** 2) - 1)
    return float(robust.sum() + (residual[rows:] ** 2).sum())


def _stack(values: list[Any]) -> np.ndarray:
    return np.array(values, dtype=float)


def left_out(problem: Problem, parts: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Errors of each part by constants fitted without it, and whether the rest knew its engine on such devices. A fit
    starts anew: from constants that had seen the part, descent ended beside them, and errors came out too small."""
    errors = {kind: np.full(len(parts), np.nan) for kind in WEIGHTS}
    known = np.zeros(len(parts), dtype=bool)
    for part in sorted(set(parts)):
        there = parts == part
        known[there] = problem.known(~there)[there]
        for kind, found in problem.errors(problem.fit(~there)).items():
            errors[kind][there] = found[there]
    return errors, known


def parts_of(problem: Problem, by: str) -> np.ndarray:
    """Names of what is left out together: a source, a twelfth of the devices, an engine, or its releases of a year."""
    devices = sorted({run.device.name for run in problem.runs})
    name = {
        "group": lambda run: run.group, "device": lambda run: devices.index(run.device.name) % 12,
        "engine": lambda run: run.engine.name, "version": lambda run: f"{run.engine.name} {run.year}",
    }[by]  # fmt: skip
    return np.array([name(run) for run in problem.runs])


def off(errors: np.ndarray) -> str:
    """Of ln(measured / planned): how many, and the error relative to what was measured."""
    share = 100 * np.abs(np.expm1(-errors[~np.isnan(errors)]))
    return f"{len(share):4d}  median {np.median(share):5.1f}  mean {share.mean():5.1f}"


def show(problem: Problem, errors: dict[str, np.ndarray], each: bool = True) -> None:
    """By kind and source, then by what the record is judged by."""
    for kind, found in errors.items():
        groups = sorted(set(problem.groups[~np.isnan(found)])) if each else []
        for group in groups:
            print(f"{kind:10s} {group:34s} {off(found[problem.groups == group])}")
        print(f"{kind:10s} {'all':34s} {off(found)}")
    scenario = np.array([run.scenario for run in problem.runs])
    answer = np.where(np.isnan(errors["decode"]), errors["requests"], errors["decode"])
    single = (scenario == "decode") & (problem.requests == 1)
    print(f"{'judged':10s} {'one stream decodes':34s} {off(answer[single])}")
    print(f"{'judged':10s} {'prompts alone':34s} {off(errors['prompt'][scenario == 'prefill'])}")
    print(f"{'judged':10s} {'rate at fixed concurrency':34s} {off(answer[scenario == 'fixed-concurrency'])}")


def intervals(problem: Problem, errors: dict[str, np.ndarray], used: np.ndarray) -> dict[str, dict[str, float]]:
    """10th and 90th percentile of ln(measured / planned) of rows `used`; a source counts by the root of its rows."""
    found = {}
    for kind, every in errors.items():
        rows = used & ~np.isnan(every)
        values, groups = every[rows], np.tile(problem.groups, len(every) // len(problem.groups))[rows]
        weights = np.array([1 / np.sqrt((groups == group).sum()) for group in groups])
        order = np.argsort(values)
        share = np.cumsum(weights[order]) / weights.sum()
        low, high = (float(values[order][np.searchsorted(share, q)]) for q in (0.1, 0.9))
        found[kind] = {"low": round(min(low, -0.03), 3), "high": round(max(high, 0.03), 3)}
    return found


def coverage(errors: dict[str, np.ndarray], known: np.ndarray, stated: dict[str, Any]) -> str:
    """Share of rows within the intervals, by kind."""
    told = []
    for kind, found in errors.items():
        low, high = (np.where(known, *(stated[seen][kind][end] for seen in ("known", "unseen"))) for end in ENDS)
        rows = ~np.isnan(found)
        told.append(f"{kind} {100 * np.mean((found >= low)[rows] & (found <= high)[rows]):.0f}%")
    return ", ".join(told)


def write(problem: Problem, x: np.ndarray, stated: dict[str, Any]) -> None:
    document: dict[str, Any] = {name: {"base": 0.0} for name in NAMES}
    for (constant, kind, level), value in zip(problem.names, x, strict=True):
        if not kind:
            document[constant]["base"] = round(float(value), 3)
        elif level and abs(value) >= DROPPED:
            document[constant].setdefault(kind, {})[level] = round(float(value), 3)
    document["evidence"] = {
        "engines": sorted(set(problem.engines)), "pairs": sorted(set(problem.pairs)), "rows": len(problem.runs)
    }  # fmt: skip
    document["interval"] = stated
    head = (
        "# Made by benchmarks/fit_serving.py from published measurements (docs/plan-serving.md). Bases and effects:\n"
        "# logits of fractions, natural logarithms of the rest. Intervals: ln(measured / planned) of sources and\n"
        "# devices left out of the fit, whose engine on such devices the rest knew (known), or not (unseen).\n\n"
    )
    (FOLDER / "constants.toml").write_text(head + tomli_w.dumps(document), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--record", choices=PARTS, help="only print errors of what is left out")
    arguments = parser.parse_args()
    with arguments.csv.open(encoding="utf-8", newline="") as file:
        runs, rejected = read_serving(csv.DictReader(file))
    print(f"{len(runs)} rows, {len(rejected)} cannot be planned: {sorted({reason for _, _, reason in rejected})[:5]}")
    problem = Problem([run for run in runs if not run.suspect])
    if arguments.record:
        errors, known = left_out(problem, parts_of(problem, arguments.record))
        show(problem, errors)
        stated = serving_rates.read("constants.toml")["interval"]
        print(f"within the 80% intervals: {coverage(errors, known, stated)}")
        return
    best = problem.fit(np.ones(len(problem.runs), dtype=bool))
    show(problem, problem.errors(best))
    found = [left_out(problem, parts_of(problem, by)) for by in ("group", "device")]
    errors = {kind: np.concatenate([errors[kind] for errors, _ in found]) for kind in WEIGHTS}
    known = np.concatenate([known for _, known in found])
    stated = {"known": intervals(problem, errors, known), "unseen": intervals(problem, errors, ~known)}
    for kind, ends in stated["unseen"].items():  # what nobody measured is not known better than the rest
        for end, pick in ENDS.items():
            ends[end] = pick(ends[end], stated["known"][kind][end])
    for by, (errors, known) in zip(("group", "device"), found, strict=True):
        print(f"{by}s left out:")
        show(problem, errors, each=False)
        print(f"within the 80% intervals: {coverage(errors, known, stated)}")
    write(problem, best, stated)
    print(stated)


if __name__ == "__main__":
    main()
