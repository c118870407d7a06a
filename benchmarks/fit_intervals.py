"""Learn the 80% intervals from runs that took no part in the fit, and measure their coverage.

    python benchmarks/fit_intervals.py runs.csv [--write]

Every run is planned three times by constants that never saw it: by its engine fitted without its group; without its
accelerator generation; and by the generic engine, as if its software were not known. The constants of
`plan/cluster/intervals.py` are those with the least quantile loss at 10 and 90% over all of them, every group weighing
by the 0.3rd power of its size. Coverage of a group is that of intervals learned from the other groups.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import numpy as np
from fit_engines import PLAN, fit, left_out, log_errors, start_of, value
from fit_engines import blocks as blocks_of
from scipy.optimize import minimize

from ironlaw.plan.cluster.intervals import Distance, comparable, spread_factors
from ironlaw.plan.engines.named import GENERIC
from ironlaw.plan.engines.named import engine as engine_named
from ironlaw.plan.measured.parsing import Cells
from ironlaw.plan.measured.read import Run, read_runs
from ironlaw.plan.measured.validate import of_runs, settled

LEARNED = ("within", "between", "unknown_engine", "skew")
FIXED = {"assumed_hardware": 0.4, "doubling": 0.02, "unknown_format": 0.15, "experts": 0.15}
"""Not learned: the factor 1.5 that constants of another generation may be off by (docs/notes/operations.md); what plans
of 2 to 128 times the accelerators that an engine was fitted on add, by fits to the small runs of six engines; what
plans in 8-bit numbers were off by before an engine's casts in them were known: 2% (torchtitan) to 18% (JAX); what
published speeds of mixtures of experts are off by beyond dense ones: 17% (root mean square of eleven, 1 to 37%).
"""

WEIGHT = {"group": 1.0, "generation": 0.5, "software": 0.5}
"""How much the errors at each distance count: most plans are for software that was measured somewhere."""


@dataclass
class Left:
    """A run planned without what `unseen` says, and how much its engine knew of its generation then."""

    run: Run
    unseen: str  # group, generation or software
    log_error: float
    distance: Distance

    @property
    def fold(self) -> str:
        return f"{self.unseen}, {self.run.engine.name}, {self.run.group}, {self.run.cluster.accelerator.generation}"


def usable(runs: list[Run], kind: str) -> list[Run]:
    return [r for r in runs if r.ran and kind in r.checks and value(r, kind)]


def errors_at_a_distance(path: Path, kind: str) -> list[Left]:
    runs = usable(settled(read_runs(path)[0]), kind)
    sizes = parameters_of(runs)
    found: list[Left] = []
    for name, plan in PLAN.items():
        names = plan[("time", "memory").index(kind)]
        mine = [r for r in runs if r.engine.name == name]
        if not mine or not names:
            continue
        for u in left_out(name, mine, names, kind, quiet=True):
            rest = [r for r in mine if r.group != u.run.group]
            found.append(Left(u.run, "group", u.log_error, _seen(u.run, rest, sizes)))
        generations = {r.cluster.accelerator.generation for r in mine}
        for generation in sorted(generations) if len(generations) > 1 else []:
            out = [r for r in mine if r.cluster.accelerator.generation == generation]
            rest = [r for r in mine if r.cluster.accelerator.generation != generation]
            engine = replace(fit(start_of(name), blocks_of(rest, kind), names, kind), by_generation={})
            found += [Left(r, "generation", e, _seen(r, rest, sizes)) for r, e in log_errors(out, engine, kind)]
    generic = usable(settled(read_runs(path, engine_named(GENERIC))[0]), kind)
    own = {r.id: r for r in runs}
    found += [
        Left(own[r.id], "software", e, Distance(0, True, False, 0.0))
        for r, e in log_errors(generic, engine_named(GENERIC), kind)
    ]
    return found


def _seen(run: Run, rest: list[Run], sizes: dict[str, float]) -> Distance:
    """How far a run is from the `rest` of its engine's, which the fit saw."""
    here = [r for r in rest if r.cluster.accelerator.generation == run.cluster.accelerator.generation]
    ranges = [(min(s), max(s)) for s in ([sizes[r.id] for r in of] for of in _by_group(here).values())]
    groups = sum(comparable(sizes[run.id], low, high) for low, high in ranges)
    return Distance(groups, not rest, False, 0.0)


def _by_group(runs: list[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.group, []).append(run)
    return found


def parameters_of(runs: list[Run]) -> dict[str, float]:
    return dict(
        zip([r.id for r in runs], of_runs(runs, lambda candidates: candidates.parameters).tolist(), strict=True)
    )


def learn(left: list[Left]) -> dict[str, float]:
    sizes: dict[str, int] = {}
    for entry in left:
        sizes[entry.fold] = sizes.get(entry.fold, 0) + 1
    weights = np.array([WEIGHT[entry.unseen] * sizes[entry.fold] ** -0.7 for entry in left])
    errors = np.array([entry.log_error for entry in left])
    columns = np.array([astuple(entry.distance) for entry in left], dtype=float).T
    together = Distance(*columns)

    def loss(logs: np.ndarray) -> float:
        known = dict(zip(LEARNED, np.exp(logs), strict=True)) | FIXED
        low, high = spread_factors(known, together)
        over, under = errors - high, low - errors
        pinball = np.maximum(0.9 * over, -0.1 * over) + np.maximum(0.9 * under, -0.1 * under)
        return float((weights * pinball).sum() / weights.sum() + 1e-5 * (logs**2).sum())

    starts = np.log([[0.05, 0.1, 0.2, 1.0], [0.1, 0.05, 0.4, 1.3]])
    options = {"maxiter": 4000, "xatol": 1e-4, "fatol": 1e-7}
    best = min((minimize(loss, s, method="Nelder-Mead", options=options) for s in starts), key=lambda r: r.fun)
    return dict(zip(LEARNED, (float(v) for v in np.exp(best.x)), strict=True)) | FIXED


def coverage(left: list[Left]) -> dict[str, dict[str, float]]:
    """What is unseen, to group, to the share of its runs inside intervals learned without the group."""
    result: dict[str, dict[str, float]] = {kind: {} for kind in WEIGHT}
    for group in sorted({entry.run.group for entry in left}):
        known = learn([entry for entry in left if entry.run.group != group])
        for unseen, groups in result.items():
            inside = []
            for entry in (e for e in left if e.run.group == group and e.unseen == unseen):
                low, high = spread_factors(known, entry.distance)
                inside.append(low <= entry.log_error <= high)
            if inside:
                groups[group] = float(np.mean(inside))
    return result


def checked(path: Path, kind: str) -> dict[str, dict[str, list[list[int]]]]:
    """Engine to generation to its groups: [fewest parameters, most parameters, most accelerators, runs]."""
    runs = usable(read_runs(path)[0], kind)
    sizes = parameters_of(runs)
    found: dict[str, dict[str, list[list[int]]]] = {}
    for name in sorted({r.engine.name for r in runs}):
        mine = [r for r in runs if r.engine.name == name]
        for generation in sorted({r.cluster.accelerator.generation for r in mine}):
            groups = _by_group([r for r in mine if r.cluster.accelerator.generation == generation])
            found.setdefault(name, {})[generation] = [
                [
                    round(min(sizes[r.id] for r in of)), round(max(sizes[r.id] for r in of)),
                    max(r.cluster.count for r in of), len(of),
                ]
                for of in groups.values()
            ]  # fmt: skip
    return found


def formats(path: Path, kind: str) -> dict[str, dict[str, dict[str, int]]]:
    """Engine to generation to the number formats that its runs state, with how many do."""
    stated = {row["id"] for row in csv.DictReader(path.open(encoding="utf-8")) if Cells(row).precision()}
    found: dict[str, dict[str, Counter[str]]] = {}
    for run in usable(read_runs(path)[0], kind):
        if run.id in stated:
            found.setdefault(run.engine.name, {}).setdefault(run.cluster.accelerator.generation, Counter()).update(
                [run.precision]
            )
    return {name: {on: dict(of) for on, of in sorted(by.items())} for name, by in sorted(found.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("csv", type=Path)
    parser.add_argument("--write", action="store_true", help="write interval_factors.toml")
    arguments = parser.parse_args()
    lines = [
        "# Constants of the 80% intervals (plan/cluster/intervals.py), in ln(measured / planned), and what engines",
        "# were checked on, a list per group of runs: fewest and most parameters, most accelerators, runs. `formats`:",
        "# runs by the number format that they state.",
        "# Written by benchmarks/fit_intervals.py.",
    ]
    for kind in ("time", "memory"):
        left = errors_at_a_distance(arguments.csv, kind)
        known = learn(left)
        print(kind, {name: round(v, 3) for name, v in known.items()})
        for unseen, groups in coverage(left).items():
            runs = [entry for entry in left if entry.unseen == unseen]
            if not runs:
                continue
            sizes = [sum(entry.run.group == group for entry in runs) for group in groups]
            mean, pooled = np.mean(list(groups.values())), np.average(list(groups.values()), weights=sizes)
            print(f"  {unseen} unseen, inside: mean of {len(groups)} groups {mean:.0%}, of all runs {pooled:.0%}")
            print("    " + ", ".join(f"{g} {100 * share:.0f}" for g, share in groups.items()))
        lines += ["", f"[{kind}]", *(f"{name} = {v:.3f}" for name, v in known.items())]
        for name, generations in formats(arguments.csv, kind).items():
            lines += ["", f"[{kind}.formats.{name}]"]
            for on, of in generations.items():
                lines += [f"{on} = {{ " + ", ".join(f"{word} = {runs}" for word, runs in sorted(of.items())) + " }"]
        for name, generations in checked(arguments.csv, kind).items():
            lines += ["", f"[{kind}.checked.{name}]", *(f"{key} = {entry}" for key, entry in generations.items())]
    if arguments.write:
        path = Path(__file__).parents[1] / "src/ironlaw/plan/cluster/interval_factors.toml"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
