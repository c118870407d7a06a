"""Write the planner's record, docs/accuracy.md, from measured runs.

    python benchmarks/accuracy_report.py runs.csv

In-sample errors come from the shipped constants; errors of unseen groups from refitting the engine without them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import fit_engines
import numpy as np
from fit_intervals import Left, coverage, errors_at_a_distance

from ironlaw.plan.cluster.intervals import factors
from ironlaw.plan.engines.engine import MEANING, TrainingEngine
from ironlaw.plan.engines.named import engines
from ironlaw.plan.measured.read import read_runs
from ironlaw.plan.measured.validate import validate

ROOT = Path(__file__).parents[1]


def percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{100 * value:.{digits}f}"


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)] + ["| " + " | ".join(r) + " |" for r in rows]


def unseen(left: dict[str, list[Left]]) -> dict[tuple[str, str], list[float]]:
    """Signed relative errors of runs planned by engines that were fitted without them, by group and quantity."""
    result: dict[tuple[str, str], list[float]] = {}
    for kind, entries in left.items():
        for entry in entries:
            if entry.unseen == "group":
                result.setdefault((entry.run.group, kind), []).append(float(np.exp(-entry.log_error) - 1))
    return result


def intervals(left: dict[str, list[Left]]) -> list[str]:
    """Constants of the intervals, then errors and coverage of every group at each distance."""
    lines = ["## Intervals", "", *INTERVALS.strip().splitlines(), ""]
    names = [name for name in factors()["time"] if name not in ("checked", "formats")]
    rows = [[kind, *(f"{factors()[kind][name]:.3f}" for name in names)] for kind in left]
    lines += table(["quantity", *(f"`{name}`" for name in names)], rows)
    for kind, entries in left.items():
        inside = coverage(entries)
        groups = sorted({entry.run.group for entry in entries})
        rows = []
        for group in groups:
            cells = [group]
            for distance in DISTANCES:
                errors = [e.log_error for e in entries if e.run.group == group and e.unseen == distance]
                size = np.abs(np.exp(-np.array(errors)) - 1)
                cells += [percent(float(np.median(size))) if errors else "", percent(inside[distance].get(group), 0)]
            rows.append(cells)
        means, pooled = ["**mean of groups**"], ["**all runs**"]
        for distance in DISTANCES:
            shares = inside[distance]
            counts = [sum(e.run.group == group and e.unseen == distance for e in entries) for group in shares]
            means += ["", percent(float(np.mean(list(shares.values()))), 0)]
            pooled += ["", percent(float(np.average(list(shares.values()), weights=counts)), 0)]
        head = ["group", *(text for d in DISTANCES for text in (f"{d} unseen: median error", "inside"))]
        lines += ["", f"### Inside the interval: {kind}", "", *table(head, [*rows, means, pooled])]
    return lines


OPERATIONS = """
## Single operations

Planned against 57,644 matmuls, 41,247 attention calls, 8,666 collectives and 109 streaming kernels measured by others:
absolute error of the time in percent on shapes that took no part in any fit (`python benchmarks/fit_operations.py
FOLDER`). A group is a generation, a format and, where formats need a cast, a library. *Baseline* is the best single
fraction of the peak (of the link, of the bandwidth), fitted to all rows: the median group's median. Every accelerator's
errors, what is assumed for want of measurements and what did not help: docs/notes/operations.md.
"""

DISTANCES = ("group", "generation", "software")

INTERVALS = """
The error ln(measured / planned) has a part that the runs of a group share and one of their own, so an interval is the
wider, the fewer comparable groups (same engine, same accelerator generation, models within a factor of eight in size;
none for a mixture of experts) the constants were checked on; wider again for software that no runs are known of, for
hardware that not even a matmul was measured on, and for more accelerators than any checked run had:

    spread^2 = within^2 + between^2 / (1 + groups) + unknown_engine^2 + assumed_hardware^2 + unknown_format^2
               + experts^2 + doubling^2 x doublings
    interval = planned x exp(-spread / skew) ... planned x exp(spread x skew)

The constants have the least quantile loss over runs planned at three distances: by their engine fitted without their
group, fitted without their accelerator generation, and by the generic engine, as if their software were not known
(`benchmarks/fit_intervals.py`). *Inside* is the share of a group's runs in intervals that were learned without it.
`assumed_hardware`, `unknown_format` (8- or 4-bit numbers that no checked run of the engine computed in), `experts`
(which no checked run had) and `doubling` are not learned from these runs. *Software unseen* is what to expect of a
framework that nobody has measured: the generic engine was set by the same runs, but by two constants only.
"""


def record(document: dict[str, Any], out: dict[tuple[str, str], list[float]]) -> list[str]:
    lines = ["## Step time", ""]
    rows = []
    for group, entry in [*document["groups"].items(), ("**all**", document["overall"])]:
        if not entry["time"]["n"]:
            continue
        t, b = entry["time"], entry["time"]["baseline"]
        left = np.array(out.get((group, "time"), [])) if group != "**all**" else np.concatenate(
            [np.array(v) for (_, kind), v in out.items() if kind == "time"]
        )  # fmt: skip
        shown = (
            [percent(float(np.median(np.abs(left)))), percent(float(np.abs(left).mean()))] if left.size else ["", ""]
        )
        rows.append(
            [group, str(t["n"]), percent(t["median"]), percent(t["mean"]), percent(t["p90"]), percent(t["bias"]),
             *shown, percent(b["median"]), percent(b["mean"]), percent(t["coverage"], 0)]
        )  # fmt: skip
    head = ["group", "runs", "median", "mean", "p90", "bias", "unseen median", "unseen mean", "baseline median",
            "baseline mean", "in 80% interval"]  # fmt: skip
    lines += table(head, rows)
    lines += ["", "## Peak memory", ""]
    rows = []
    for group, entry in [*document["groups"].items(), ("**all**", document["overall"])]:
        if not entry["memory"]["n"]:
            continue
        m = entry["memory"]
        left = np.array(out.get((group, "memory"), []))
        shown = (
            [percent(float(np.median(np.abs(left)))), percent(float(np.abs(left).mean()))] if left.size else ["", ""]
        )
        rows.append(
            [group, str(m["n"]), percent(m["median"]), percent(m["mean"]), percent(m["p90"]), percent(m["bias"]),
             *shown, percent(m["coverage"], 0)]
        )  # fmt: skip
    head = ["group", "runs", "median", "mean", "p90", "bias", "unseen median", "unseen mean", "in 80% interval"]
    lines += table(head, rows)
    lines += ["", "## Choosing a layout, and what fits", ""]
    rows = []
    for group, entry in [*document["groups"].items(), ("**all**", document["overall"])]:
        f = entry["fits"]
        counts = [str(f[k]) for k in ("ran_said_to_fit", "ran_denied", "failed_said_to_fit", "failed_denied")]
        rows.append([group, percent(entry["regret"]["mean"]), percent(entry["regret"]["worst"]),
                     percent(entry["regret"]["rank_correlation"]), *counts, str(entry["not_planned"])])  # fmt: skip
    head = ["group", "regret", "worst", "rank correlation", "ran, fits", "ran, denied", "failed, fits",
            "failed, denied", "not planned"]  # fmt: skip
    return lines + table(head, rows)


def constants() -> list[str]:
    lines = ["## Constants of the engines", ""]
    lines += ["Where a cell is empty the neutral value of the first column holds. `generation:` marks an override.", ""]
    fitted = {key for plan in fit_engines.PLAN.values() for names in plan for key in names}
    keys = sorted({n.rpartition(".")[2] for n in fitted}, key=list(MEANING).index)
    shipped = {name: e for name, e in engines().items() if name != "generic"}
    neutral = TrainingEngine("neutral")
    rows = []
    for key in keys:
        unit, meaning = MEANING[key]
        cells = []
        for name, engine in shipped.items():
            own = {n.rpartition(".")[2] for names in fit_engines.PLAN.get(name, ([], [])) for n in names}
            text = f"{getattr(engine, key):.3g}" if key in own else ""
            extra = [f"{g}: {v[key]:.3g}" for g, v in engine.by_generation.items() if key in v]
            cells.append("; ".join([text, *extra]).strip("; "))
        rows.append([f"`{key}`", unit, meaning, f"{getattr(neutral, key):.3g}", *cells])
    return lines + table(["constant", "unit", "meaning", "neutral", *shipped], rows)


def scatter(points: list[tuple[str, float, float]], unit: str) -> str:
    """Planned over measured, both logarithmic, as SVG: a dot per run, a colour per group, lines at +-10%."""
    size, edge = 640, 48
    values = np.log10(np.array([[m, p] for _, m, p in points]))
    low, high = np.floor(values.min()), np.ceil(values.max())
    groups = list(dict.fromkeys(g for g, _, _ in points))

    def at(value: float) -> float:
        return edge + (size - 2 * edge) * (value - low) / (high - low)

    def line(offset: float, style: str) -> str:
        ends = at(low), size - at(low + offset), at(high), size - at(high + offset)
        return '<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" stroke="#888" {}/>'.format(*ends, style)

    shapes = [line(0, ""), *(line(np.log10(f), 'stroke-dasharray="4 4"') for f in (0.9, 1.1))]
    for tick in range(int(low), int(high) + 1):
        label = f"{10.0**tick:g}"
        shapes.append(f'<text x="{at(tick):.0f}" y="{size - edge / 3:.0f}" text-anchor="middle">{label}</text>')
        shapes.append(f'<text x="{edge * 0.8:.0f}" y="{size - at(tick) + 4:.0f}" text-anchor="end">{label}</text>')
    for (group, _, _), (m, p) in zip(points, values, strict=True):
        hue = 360 * groups.index(group) // len(groups)
        shapes.append(f'<circle cx="{at(m):.1f}" cy="{size - at(p):.1f}" r="2" fill="hsl({hue},65%,45%)"/>')
    for row, group in enumerate(groups):
        hue = 360 * row // len(groups)
        shapes.append(f'<text x="{edge + 8}" y="{edge + 14 * row}" fill="hsl({hue},65%,35%)">{group}</text>')
    title = f'<text x="{size / 2}" y="20" text-anchor="middle">planned over measured, {unit}; dashed: 10%</text>'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" font-family="sans-serif" font-size="11">'
    )
    return "\n".join([head, f'<rect width="{size}" height="{size}" fill="white"/>', title, *shapes, "</svg>"]) + "\n"


def plots(document: dict[str, Any], path: Path) -> list[str]:
    """Write both scatter plots; lines that show them."""
    read, _ = read_runs(path)
    checks = {run.id: (run.checks, run.ran) for run in read}
    lines = []
    for kind, measured, planned, unit in (
        ("time", "step_seconds", "predicted_step_seconds", "s per step"),
        ("memory", "peak_bytes", "predicted_peak_bytes", "bytes"),
    ):
        rows = [r for r in document["rows"] if r[measured] and checks[r["id"]][1] and kind in checks[r["id"]][0]]
        svg = scatter([(r["group"], r[measured], r[planned]) for r in rows], unit)
        (ROOT / "docs" / "plots").mkdir(exist_ok=True)
        (ROOT / "docs" / "plots" / f"planner_{kind}.svg").write_text(svg, encoding="utf-8")
        lines.append(f"![planned over measured, {unit}](plots/planner_{kind}.svg)")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("csv", type=Path)
    path = parser.parse_args().csv
    document = validate(path).to_json()
    left = {kind: errors_at_a_distance(path, kind) for kind in ("time", "memory")}
    text = (ROOT / "benchmarks" / "accuracy_head.md").read_text(encoding="utf-8").rstrip().splitlines()
    lines = [
        *text,
        "",
        *plots(document, path),
        "",
        *record(document, unseen(left)),
        "",
        *OPERATIONS.strip().splitlines(),
        "",
        *(ROOT / "benchmarks" / "results" / "operations.md").read_text(encoding="utf-8").splitlines(),
        "",
        *intervals(left),
        "",
        *constants(),
    ]
    lines += ["", "## Runs that could not be planned", ""]
    lines += table(["id", "reason"], [[e["id"], e["reason"]] for e in document["not_planned"]])
    (ROOT / "docs" / "accuracy.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
