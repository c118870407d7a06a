"""Fit the constants of the serving planner, and the intervals it states, to published measurements.

    python benchmarks/fit_serving.py ../shared/calibration/inference.csv            # constants, then intervals
    python benchmarks/fit_serving.py ... --left-out                                 # the record of groups left out
    python benchmarks/fit_serving.py ... --record device                            # of whole devices or engines

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
from scipy.optimize import least_squares

from ironlaw.plan.measured.inference import ServingRun, read_serving
from ironlaw.plan.serving import rates as serving_rates
from ironlaw.plan.serving.demand import Demand
from ironlaw.plan.serving.rates import NAMES, Rates, device_class, effect_names, link
from ironlaw.plan.serving.steady import at_concurrency, unlimited
from ironlaw.plan.serving.timing import System, decode_seconds, prompt_seconds, room_tokens

FOLDER = Path(serving_rates.__file__).parent

# Which effects a constant has, how far they may stray (natural logarithms or logits), and where its base starts.
EFFECTS: dict[str, tuple[tuple[str, ...], float, float]] = {
    "weights": (("engine", "age", "generation", "format", "pair", "kernel", "mixture"), 0.7, 0.8),
    "products": (("engine", "age", "generation", "format", "pair", "kernel", "mixture"), 0.7, 0.0),
    "decode_products": (("engine",), 0.5, 0.0),
    "cache": (("engine", "pair"), 0.5, 0.3),
    "attention": (("engine", "pair"), 0.7, -0.5),
    "layer_seconds": (("engine", "age", "generation", "pair"), 1.0, float(np.log(8e-6))),
    "step_seconds": (("engine", "age"), 1.0, float(np.log(3e-4))),
    "prompt_seconds": (("engine", "age"), 1.0, float(np.log(1e-3))),
    "ramp_tokens": (("engine", "pair"), 1.0, float(np.log(30.0))),
    "collective_seconds": (("engine", "age"), 0.7, float(np.log(1e-5))),
    "most_requests": (("engine", "age"), 0.5, float(np.log(512.0))),
    "throughput": (("engine", "age", "mixture"), 0.3, -0.1),
}
UNIT, LOSS_SCALE, GROUP_ROWS = 0.15, 1.5, 60
LARGEST = 3.0  # error (natural logarithm) beyond which a row is a mistake
DIFFERENCE = 1e-5
WEIGHTS = {"decode": 1.0, "prompt": 0.8, "first": 0.5, "requests": 0.8, "unlimited": 0.6}
NONE = -1  # place of what has no effect
KNOWN_FACTOR = 1.6
"""On the errors of rows that set the constants, for rows of the same engines and generations that did not. Assumed."""

DROPPED = 0.02  # effects smaller than this are left out of the file


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
        self.replicas = _stack([r.layout.replicas for r in runs])
        self.fraction = _stack([r.engine.memory_fraction for r in runs])
        self.groups = np.array([r.group for r in runs])
        named = [
            effect_names(
                r.engine,
                device_class(r.device),
                r.formats.weights,
                r.backend,
                r.year,
                r.system.demand.experts > 0,
            )
            for r in runs
        ]
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
        self.spread = np.array([EFFECTS[c][1] * (1.0 if kind else 3.0) for c, kind, _ in self.names])
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
        room = room_tokens(s, self.fraction)
        kept = s.demand.cached_tokens(np.maximum(self.inputs + outputs, 1.0))
        most = np.clip(room / np.maximum(kept, 1.0), 1.0, s.rates.most_requests)
        rate = np.where(self.together, steady[0].tokens_per_second, steady[1].tokens_per_second)
        return {
            "decode": decode_seconds(s, requests, self.inputs + outputs / 2),
            "prompt": prompt,
            "first": steady[1].ttft_seconds,
            "requests": requests / rate / self.replicas,
            "unlimited": 1 / (unlimited(s, most, self.inputs, outputs) * self.replicas),
        }

    def _targets(self) -> dict[str, np.ndarray]:
        """What each row measured of each kind: seconds; NaN where it did not."""
        found = {kind: np.full(len(self.runs), np.nan) for kind in WEIGHTS}
        for i, run in enumerate(self.runs):
            m = run.measured
            rate = m.get("output_tokens_per_second") or (m.get("requests_per_second", 0.0) * run.outputs) or None
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

    def fit(self, used: np.ndarray, start: np.ndarray | None = None, evaluations: int = 30) -> np.ndarray:
        first = self.start if start is None else start
        return least_squares(
            self.residuals,
            first,
            self.jacobian,
            args=(used,),
            loss="soft_l1",
            f_scale=LOSS_SCALE,
            max_nfev=evaluations,
        ).x

    def errors(self, x: np.ndarray, used: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
        """kind -> group -> ln(measured / planned)."""
        planned = self.predicted(self.totals(x))
        found: dict[str, dict[str, np.ndarray]] = {kind: {} for kind in WEIGHTS}
        for kind, values in planned.items():
            for group in sorted(set(self.groups[used])):
                rows = used & (self.groups == group) & ~np.isnan(self.targets[kind])
                if rows.any():
                    found[kind][group] = np.log(self.targets[kind][rows] / values[rows])
        return found


def _stack(values: list[Any]) -> np.ndarray:
    return np.array(values, dtype=float)


def left_out(problem: Problem, parts: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
    """Errors of each part by constants fitted without it: kind -> group -> ln(measured / planned). Every fit starts
    afresh: a few steps from constants that knew the part would not forget it."""
    collected: dict[str, dict[str, list[np.ndarray]]] = {kind: {} for kind in WEIGHTS}
    for part in sorted(set(parts)):
        there = parts == part
        for kind, found in problem.errors(problem.fit(~there, evaluations=12), there).items():
            for group, values in found.items():
                collected[kind].setdefault(group, []).append(values)
    return {kind: {g: np.concatenate(v) for g, v in groups.items()} for kind, groups in collected.items()}


def show(errors: dict[str, dict[str, np.ndarray]], each: bool = True) -> None:
    for kind, groups in errors.items():
        some = groups.items() if each else ()
        for group, values in [*some, ("all", np.concatenate(list(groups.values())))]:
            off = 100 * np.abs(np.expm1(-values))
            print(f"{kind:10s} {group:34s} {len(values):4d}  median {np.median(off):5.1f}  mean {off.mean():5.1f}")


def intervals(errors: dict[str, dict[str, np.ndarray]], factor: float = 1.0) -> dict[str, dict[str, float]]:
    """10th and 90th percentile of ln(measured / planned), every group counting alike."""
    found = {}
    for kind, groups in errors.items():
        values = np.concatenate(list(groups.values()))
        weights = np.concatenate([np.full(len(v), 1 / np.sqrt(len(v))) for v in groups.values()])
        order = np.argsort(values)
        share = np.cumsum(weights[order]) / weights.sum()
        low, high = (float(values[order][np.searchsorted(share, q)]) for q in (0.1, 0.9))
        found[kind] = {"low": round(min(factor * low, -0.03), 3), "high": round(max(factor * high, 0.03), 3)}
    return found


def write(problem: Problem, x: np.ndarray, stated: dict[str, Any]) -> None:
    document: dict[str, Any] = {name: {"base": 0.0} for name in NAMES}
    for (constant, kind, level), value in zip(problem.names, x, strict=True):
        if not kind:
            document[constant]["base"] = round(float(value), 3)
        elif level and abs(value) >= DROPPED:
            document[constant].setdefault(kind, {})[level] = round(float(value), 3)
    pairs = sorted({level for _, kind, level in problem.names if kind == "pair"})
    engines = sorted({level for _, kind, level in problem.names if kind == "engine"})
    document["evidence"] = {"engines": engines, "pairs": pairs, "rows": len(problem.runs)}
    document["interval"] = stated
    head = (
        "# Made by benchmarks/fit_serving.py from published measurements (docs/plan-serving.md). Bases and effects:\n"
        "# logits of fractions, natural logarithms of the rest. Intervals: ln(measured / planned), 1.6 times those of\n"
        "# these rows (known: assumed), or of groups left out of the fit (unseen).\n\n"
    )
    (FOLDER / "constants.toml").write_text(head + tomli_w.dumps(document), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--left-out", action="store_true", help="fit anew without each group, and set the intervals")
    parser.add_argument("--record", choices=("group", "device", "engine"), help="only print errors of what is left out")
    arguments = parser.parse_args()
    with arguments.csv.open(encoding="utf-8", newline="") as file:
        runs, rejected = read_serving(csv.DictReader(file))
    print(f"{len(runs)} rows, {len(rejected)} cannot be planned: {sorted({reason for _, _, reason in rejected})[:5]}")
    runs = [run for run in runs if not run.suspect]
    problem = Problem(runs)
    everything = np.ones(len(runs), dtype=bool)
    if arguments.record:
        parts = {"group": problem.groups, "device": np.array([run.device.name for run in runs]),
                 "engine": np.array([run.engine.name for run in runs])}[arguments.record]  # fmt: skip
        show(left_out(problem, parts), each=False)
        return
    best = problem.fit(everything)
    show(problem.errors(best, everything))
    stated: dict[str, Any] = {"known": intervals(problem.errors(best, everything), KNOWN_FACTOR)}
    stated["unseen"] = stated["known"]
    if arguments.left_out:
        collected = left_out(problem, problem.groups)
        print("left out:")
        show(collected)
        ends = {"low": min, "high": max}  # what nobody measured is not known better than the rest
        stated["unseen"] = {
            kind: {end: pick(found[end], stated["known"][kind][end]) for end, pick in ends.items()}
            for kind, found in intervals(collected).items()
        }
    write(problem, best, stated)
    print(stated)


if __name__ == "__main__":
    main()
