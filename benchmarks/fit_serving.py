"""Fit the constants of the serving planner, and the intervals it states, to published measurements.

    python benchmarks/fit_serving.py ../shared/calibration/inference.csv    # constants and intervals are written
    python benchmarks/fit_serving.py ... --record group                     # record of sources left out, one by one
    python benchmarks/fit_serving.py ... --record device                    # or of devices, engines, versions

Constants are a base and effects (`plan/serving/rates.py`). Residuals are logarithms of planned over measured, in units
of 15%, with a robust loss; every effect has a prior of mean 0, so that one that few rows support stays small. A group
counts as 60 rows at most. Effects are means of fits with random weights of groups. Intervals come from residuals of
groups that were left out of the fit.
"""

from __future__ import annotations

import argparse
import csv
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from scipy.linalg import cho_factor, cho_solve
from scipy.sparse import bsr_array, csr_array

from ironlaw.plan.measured.inference import ServingRun, read_serving
from ironlaw.plan.serving import rates as serving_rates
from ironlaw.plan.serving.demand import Demand
from ironlaw.plan.serving.rates import NAMES, Rates, effect_names, link
from ironlaw.plan.serving.timing import System, at_concurrency, decode_seconds, prompt_seconds, room_tokens, unlimited

FOLDER = Path(serving_rates.__file__).parent

# Which effects a constant has, how far they may stray (natural logarithms or logits), and where its base starts.
KERNELS = ("engine", "release", "class", "vendor", "format", "pair", "kernel", "mixture")
EFFECTS: dict[str, tuple[tuple[str, ...], float, float]] = {
    "weights": (KERNELS, 0.7, 0.8),
    "products": ((*KERNELS, "support"), 0.7, 0.0),
    "decode_products": (("engine", "vendor", "support"), 1.0, 0.0),
    "cache": (("engine", "vendor", "support"), 0.5, 0.3),
    "attention": (("engine", "pair", "vendor"), 0.7, -0.5),
    "layer_seconds": (("engine", "release", "host", "class", "vendor", "mixture"), 0.5, float(np.log(2e-5))),
    "launch_seconds": (("engine",), 0.5, float(np.log(2.5e-5))),
    "step_seconds": (("age", "host", "release", "vendor"), 1.0, float(np.log(3e-4))),
    "sequence_seconds": (("age",), 0.7, float(np.log(5e-6))),
    "prompt_seconds": (("age", "host", "vendor"), 1.0, float(np.log(1e-3))),
    "ramp_tokens": (("engine", "vendor"), 1.0, float(np.log(30.0))),
    "request_seconds": (("engine",), 1.0, float(np.log(0.02))),
    "collective_seconds": (("engine", "release", "host", "bus", "vendor"), 0.4, float(np.log(1e-5))),
    "throughput": (("engine", "age", "mixture"), 0.3, -0.1),
    "most_requests": (("engine", "age"), 1.5, float(np.log(512.0))),  # no source says it: 256 to 4,096 by default
}
STRAYS = {"": 1.5}
"""Of a base, how much further it may stray than effects."""
MEANS = {
    ("collective_seconds", "bus", "pcie"): float(np.log(3.0)),
    ("collective_seconds", "host", "eager"): float(np.log(3.0)),
}
"""Prior means of effects other than 0: sums over PCIe pass through the host's memory; engines that launch every
operation call a library's ring, those with captured graphs have a kernel in which each rank reads all others."""
SLOW = {("attention", "", ""): -3.0}
"""Where descent begins away from the prior's means: a part that is too fast shows in no row, and no slope leads from
there to kernels that are slow."""
ALIKE = {("products", "format", "16"), ("products", "format", "fp8")}
LITTLE = 0.1
"""How far these may: units for 8 bits reach about the share of their peak that units for 16 do. Left free, 8 bits took
what engines and devices that nobody ran in 16 do better, and 16 bits on these were planned 5 to 6 times slower."""
UNIT, LOSS_SCALE, GROUP_ROWS = 0.15, 1.5, 60
DIFFERENCE = 1e-5
FITS = 6
MOST_STEPS, LONGEST, DONE = 60, 1.5, 3e-5  # of a fit; step of an effect; share of the loss that a step must gain
WEIGHTS = {"decode": 1.0, "prompt": 0.8, "first": 0.5, "requests": 0.8, "unlimited": 0.6}
PARTS = ("group", "device", "engine", "version")

DROPPED = 0.05  # effects smaller than this are left out of the file


class Problem:
    """Runs, and their observations: what a run measured of one kind, in seconds. Arrays of observations go by kind."""

    def __init__(self, runs: list[ServingRun]) -> None:
        self.runs = runs
        self.groups = np.array([run.group for run in runs])
        names = [
            effect_names(r.engine, r.device, r.formats.weights, r.backend, r.year, r.system.demand.experts > 0)
            for r in runs
        ]
        self.engines, self.pairs = ([one[kind] for one in names] for kind in ("engine", "pair"))
        self._effects(names)
        measured = [_measured(run) for run in runs]
        self.of = {kind: np.array([i for i, m in enumerate(measured) if kind in m]) for kind in WEIGHTS}
        self.rows = np.concatenate([*self.of.values()])
        self.kind = np.repeat([*WEIGHTS], [len(rows) for rows in self.of.values()])
        self.target = np.array([measured[i][kind] for kind, rows in self.of.items() for i in rows])
        counted = {g: int((self.groups == g).sum()) for g in set(self.groups)}
        share = np.array([1 / np.sqrt(max(counted[g] / GROUP_ROWS, 1.0)) for g in self.groups[self.rows]])
        self.weight = share * [WEIGHTS[kind] for kind in self.kind] / UNIT
        self.parts = {kind: _stacked([runs[i] for i in rows]) for kind, rows in self.of.items()}

    def _effects(self, names: list[dict[str, str]]) -> None:
        """Name the effects; `design` sums those of each constant, for every combination of them that occurs."""
        keys = [tuple(one.values()) for one in names]
        combinations = [*dict.fromkeys(keys)]
        self.combination = np.array([combinations.index(key) for key in keys])
        self.names = [(constant, "", "") for constant in EFFECTS]
        place, at = {name: i for i, name in enumerate(self.names)}, []
        for one in (dict(zip(names[0], key, strict=True)) for key in combinations):
            for constant, (kinds, _, _) in EFFECTS.items():
                row = [(constant, "", ""), *((constant, kind, one[kind]) for kind in kinds if one[kind])]
                at.append([place.setdefault(name, len(place)) for name in row])
        self.names = [*place]
        ends = np.cumsum([0, *map(len, at)])
        self.design = csr_array((np.ones(ends[-1]), np.concatenate(at), ends), (len(at), len(place)))
        self.start = np.array([MEANS.get(name, 0.0) if name[1] else EFFECTS[name[0]][2] for name in self.names])
        stray = [LITTLE if name in ALIKE else STRAYS.get(name[1], 1.0) for name in self.names]
        self.spread = np.array([EFFECTS[name[0]][1] * by for name, by in zip(self.names, stray, strict=True)])

    def planned(self, totals: np.ndarray) -> np.ndarray:
        """Return the natural logarithms of planned seconds. `totals`: of each combination, sums of each constant."""
        found = []
        for kind, (system, *sizes) in self.parts.items():
            of = totals[self.combination[self.of[kind]]].T
            rates = Rates(**{name: link(name, total) for name, total in zip(EFFECTS, of, strict=True)})
            found.append(_seconds(kind, replace(system, rates=rates), *sizes))
        return np.log(np.concatenate(found))

    def totals(self, x: np.ndarray) -> np.ndarray:
        return (self.design @ x).reshape(-1, len(EFFECTS))

    def errors(self, x: np.ndarray) -> np.ndarray:
        """Return ln(measured / planned) of each observation."""
        return np.log(self.target) - self.planned(self.totals(x))

    def fit(self, used: np.ndarray) -> np.ndarray:
        """Return the mean of the effects of `FITS` fits to runs `used`, each with sources of random weights (a Bayesian
        bootstrap): what hangs on one source, or on the minimum in which a descent ends, counts less."""
        sources, source = np.unique(self.groups, return_inverse=True)
        draws = np.clip(np.random.default_rng(0).exponential(size=(FITS, len(sources))), 0.1, 3.0)
        weights = (self.weight * (np.sqrt(draw[source]) * used)[self.rows] for draw in draws)
        return np.mean([self.descend(weight) for weight in weights], axis=0)

    def descend(self, weight: np.ndarray) -> np.ndarray:
        """Levenberg-Marquardt with a soft L1 loss of observations of these weights and a square one of the effects.

        A prediction hangs on the sums of effects alone: slopes are one difference for each constant, and the curvature
        is that of combinations, in which observations add up."""
        at, count = np.arange(len(self.totals(self.start))), len(self.rows)
        members = csr_array((np.ones(count), (self.combination[self.rows], np.arange(count))), (len(at), count))

        def loss(x: np.ndarray) -> tuple[np.ndarray, float]:
            error = -self.errors(x) * weight
            robust = 2 * LOSS_SCALE**2 * (np.sqrt(1 + (error / LOSS_SCALE) ** 2) - 1)
            return error, float(robust.sum() + (((x - self.start) / self.spread) ** 2).sum())

        x, damping = self.start + [SLOW.get(name, 0.0) for name in self.names], 1e-3
        error, now = loss(x)
        for _ in range(MOST_STEPS):
            totals = self.totals(x)
            before = self.planned(totals)
            slopes = [self.planned(totals + DIFFERENCE * one) - before for one in np.eye(len(EFFECTS))]
            slope = np.array(slopes).T * (weight / DIFFERENCE)[:, None]
            counts = 1 / np.sqrt(1 + (error / LOSS_SCALE) ** 2)
            squares = members @ np.einsum("n,ni,nj->nij", counts, slope, slope).reshape(len(slope), -1)
            each = bsr_array((squares.reshape(-1, *(len(EFFECTS),) * 2), at, np.append(at, len(at))))
            pull = members @ (slope * (counts * error)[:, None])
            curvature = (self.design.T @ (each @ self.design)).toarray() + np.diag(self.spread**-2)
            gradient = self.design.T @ pull.ravel() + (x - self.start) / self.spread**2
            for _ in range(6):
                damped = curvature + np.diag(damping * curvature.diagonal())
                tried = x - np.clip(cho_solve(cho_factor(damped), gradient), -LONGEST, LONGEST)
                error, after = loss(tried)
                if after < now:
                    break
                damping *= 8
            else:
                return x
            x, gained, now, damping = tried, now - after, after, max(damping / 5, 1e-5)
            if gained < DONE * now:
                break
        return x

    def known(self, used: np.ndarray) -> np.ndarray:
        """Rows whose engine, and whose engine's family on such devices, other rows that are used speak of."""
        seen = [
            {name for name, there in zip(names, used, strict=True) if there} for names in (self.engines, self.pairs)
        ]
        return np.array([e in seen[0] and p in seen[1] for e, p in zip(self.engines, self.pairs, strict=True)])


def _measured(run: ServingRun) -> dict[str, float]:
    """Return the seconds that a run measured, by kind."""
    m, found = run.measured, dict[str, float | None]()
    rate = m.get("output_tokens_per_second") or (m.get("requests_per_second", 0.0) * run.outputs) or None
    each = run.concurrency * run.layout.replicas / rate if rate else None
    tpot, ttft, speed = (m.get(name) for name in ("tpot_seconds", "ttft_seconds", "prefill_tokens_per_second"))
    if run.scenario == "decode":
        found["requests" if run.whole else "decode"] = each if run.whole else each or tpot
    elif run.scenario == "fixed-concurrency":
        found |= {"decode": tpot} if tpot and run.together else {"requests": each}
        found["first"] = None if run.together else ttft
    elif run.scenario in ("offline", "server"):
        found["unlimited"] = each and each / run.concurrency
    if run.inputs and run.together and run.scenario != "offline":
        found["prompt"] = run.concurrency * run.inputs / speed if speed else ttft
    return {kind: seconds for kind, seconds in found.items() if seconds}


def _stacked(runs: list[ServingRun]) -> tuple[Any, ...]:
    """Return runs as one system of arrays, and arrays of their lengths, requests and what bounds these."""

    def stack(values: list[Any]) -> np.ndarray:
        return np.array(values, dtype=float)

    demand = Demand(**{f.name: stack([getattr(r.system.demand, f.name) for r in runs]) for f in fields(Demand)})
    plain = [f.name for f in fields(System) if f.name not in ("demand", "rates", "draft")]
    system = System(
        demand=demand, rates=runs[0].system.rates, **{n: stack([getattr(r.system, n) for r in runs]) for n in plain}
    )
    kept = demand.cached_tokens(np.maximum(stack([r.inputs + r.outputs for r in runs]), 1.0))
    room = room_tokens(
        system, stack([r.engine.memory_fraction for r in runs]), np.array([r.engine.of_free for r in runs])
    )
    lists = ([r.inputs for r in runs], [r.outputs for r in runs], [r.concurrency for r in runs])
    at_once = np.minimum(room / np.maximum(kept, 1.0), [r.queued for r in runs])
    return system, *map(stack, lists), np.array([r.together for r in runs]), at_once


def _seconds(
    kind: str, s: System, inputs: np.ndarray, outputs: np.ndarray, requests: np.ndarray, together: np.ndarray,
    room: np.ndarray,
) -> np.ndarray:  # fmt: skip
    if kind == "decode":
        return decode_seconds(s, requests, inputs + outputs / 2)
    if kind == "prompt":
        return prompt_seconds(s, requests, np.maximum(inputs, 1.0))
    if kind == "unlimited":
        return 1 / unlimited(s, np.clip(room, 1.0, s.rates.most_requests * s.attention_dp), inputs, outputs)
    steady = at_concurrency(s, requests, inputs, outputs, together)
    return steady.ttft_seconds if kind == "first" else requests / steady.tokens_per_second


def left_out(problem: Problem, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Errors of each part by constants fitted without it, and whether the rest knew its engine on such devices. A fit
    starts anew: from constants that had seen the part, descent ended beside them, and errors came out too small."""
    errors = np.zeros(len(problem.rows))
    known = np.zeros(len(parts), dtype=bool)
    for part in sorted(set(parts)):
        there = parts == part
        known[there] = problem.known(~there)[there]
        rows = there[problem.rows]
        errors[rows] = problem.errors(problem.fit(~there))[rows]
    return errors, known[problem.rows]


def parts_of(problem: Problem, by: str) -> np.ndarray:
    """Names of what is left out together: a source, a twelfth of the devices, an engine, or its releases of a year."""
    devices = sorted({run.device.name for run in problem.runs})
    name = {
        "group": lambda run: run.group, "device": lambda run: devices.index(run.device.name) % 12,
        "engine": lambda run: run.engine.name, "version": lambda run: f"{run.engine.name} {run.year}",
    }[by]  # fmt: skip
    return np.array([name(run) for run in problem.runs])


def off(errors: np.ndarray, groups: np.ndarray) -> str:
    """Of ln(measured / planned): how many, the error relative to what was measured, and the median of its sources."""
    share = 100 * np.abs(np.expm1(-errors))
    medians = [float(np.median(share[groups == group])) for group in set(groups)]
    return f"{len(share):4d}  median {np.median(share):5.1f}  mean {share.mean():5.1f}  sources {np.mean(medians):5.1f}"


def show(problem: Problem, errors: np.ndarray, each: bool = True) -> None:
    """By kind and source, then by what the record is judged by."""
    groups = problem.groups[problem.rows]
    for kind in WEIGHTS:
        for group in [*sorted(set(groups[problem.kind == kind])) * each, ""]:
            rows = (problem.kind == kind) & ((groups == group) | (not group))
            print(f"{kind:10s} {group or 'all':34s} {off(errors[rows], groups[rows])}")
    scenario = np.array([problem.runs[i].scenario for i in problem.rows])
    alone = np.array([problem.runs[i].concurrency == 1 for i in problem.rows])
    answers = np.isin(problem.kind, ("decode", "requests"))
    judged = {
        "one stream decodes": answers & alone & (scenario == "decode"),
        "prompts alone": (problem.kind == "prompt") & (scenario == "prefill"),
        "rate at fixed concurrency": answers & (scenario == "fixed-concurrency"),
    }
    for name, rows in judged.items():
        print(f"{'judged':10s} {name:34s} {off(errors[rows], groups[rows])}")


def intervals(problem: Problem, errors: list[np.ndarray], used: list[np.ndarray]) -> dict[str, list[float]]:
    """10th and 90th percentile of ln(measured / planned) of rows `used`; a source counts by the root of its rows."""
    found = {}
    for kind in WEIGHTS:
        rows = [(problem.kind == kind) & these for these in used]
        values = np.concatenate([error[row] for error, row in zip(errors, rows, strict=True)])
        groups = np.concatenate([problem.groups[problem.rows[row]] for row in rows])
        weights = np.array([1 / np.sqrt((groups == group).sum()) for group in groups])
        order = np.argsort(values)
        share = np.cumsum(weights[order]) / weights.sum()
        low, high = (float(values[order][np.searchsorted(share, q)]) for q in (0.1, 0.9))
        found[kind] = [round(min(low, -0.03), 3), round(max(high, 0.03), 3)]
    return found


def coverage(problem: Problem, errors: np.ndarray, known: np.ndarray, stated: dict[str, Any]) -> str:
    """Share of rows within the intervals, by kind."""
    told = []
    for kind in WEIGHTS:
        rows = problem.kind == kind
        low, high = (np.where(known, *(stated[seen][kind][end] for seen in ("known", "unseen"))) for end in (0, 1))
        told.append(f"{kind} {100 * np.mean((errors >= low)[rows] & (errors <= high)[rows]):.0f}%")
    return ", ".join(told)


def write(problem: Problem, x: np.ndarray, stated: dict[str, Any]) -> None:
    document: dict[str, Any] = {name: {"base": 0.0} for name in NAMES}
    for (constant, kind, level), value in zip(problem.names, x, strict=True):
        if not kind:
            document[constant]["base"] = round(float(value), 3)
        elif level and abs(value) >= DROPPED:
            document[constant].setdefault(kind, {})[level] = round(float(value), 3)
    document["interval"] = stated
    head = (
        "# Made by benchmarks/fit_serving.py from published measurements (docs/plan-serving.md). Bases and effects:\n"
        "# logits of fractions, natural logarithms of the rest. Intervals: ln(measured / planned) of sources and\n"
        "# devices left out of the fit, whose engine on such devices the rest knew (known), or not (unseen).\n\n"
    )
    pairs_in_line = re.sub(r"\[\n +(\S+),\n +(\S+),\n\]", r"[\1, \2]", tomli_w.dumps(document))
    (FOLDER / "constants.toml").write_text(head + pairs_in_line, encoding="utf-8")


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
        print(f"within the 80% intervals: {coverage(problem, errors, known, stated)}")
        return
    best = problem.fit(np.ones(len(problem.runs), dtype=bool))
    show(problem, problem.errors(best))
    found = [left_out(problem, parts_of(problem, by)) for by in ("group", "device")]
    errors, known = ([one[i] for one in found] for i in (0, 1))
    stated = {"known": intervals(problem, errors, known), "unseen": intervals(problem, errors, [~k for k in known])}
    for kind, (low, high) in stated["known"].items():  # what nobody measured is not known better than the rest
        unseen = stated["unseen"][kind]
        stated["unseen"][kind] = [min(low, unseen[0]), max(high, unseen[1])]
    for by, (error, seen) in zip(("group", "device"), found, strict=True):
        print(f"{by}s left out:")
        show(problem, error, each=False)
        print(f"within the 80% intervals: {coverage(problem, error, seen, stated)}")
    write(problem, best, stated)
    print(stated)


if __name__ == "__main__":
    main()
