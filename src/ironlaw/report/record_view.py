"""Views of the planner's record (errors beside the trivial baseline, ranking, memory fit) and of a calibration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ironlaw import units
from ironlaw.report import svg
from ironlaw.report.document import BAR, Bar, Cards, Cell, Chart, Document, Print, Row, dim, quantity, strong

Found = Mapping[str, Any]
MAX_LISTED = 12  # rows listed individually; the JSON has all
UNINFORMED_SPREAD = 0.95  # remaining share of the prior's spread, above which the runs tell nothing about a constant
EXPLAINED = {
    "time": (
        "Step time, planned against measured",
        "Absolute error relative to the measurement. Bias: the median signed error, above 0 planned too slow. "
        "Baseline: hardware FLOPs, recomputation included, at 45% of the dense peak. In interval: measurements "
        "inside the plan's 80% interval.",
    ),
    "memory": (
        "Peak memory, planned against measured",
        "The same; baseline: weights, gradients and optimizer state alone, as the layout shards them.",
    ),
}
# Kind of error -> planned key, measured key, how values and ticks are printed, base in which ticks are round.
QUANTITIES: dict[str, tuple[str, str, Print, Callable[[float], str], int]] = {
    "time": ("predicted_step_seconds", "step_seconds", units.seconds, svg.short_seconds, 10),
    "memory": ("predicted_peak_bytes", "peak_bytes", units.bytes_, lambda v: svg.short(units.bytes_(v)), 2),
}
SERVED = {
    "tpot_seconds": "Time per output token", "ttft_seconds": "Time to the first token",
    "prefill_tokens_per_second": "Prompt tokens per second", "output_tokens_per_second": "Output tokens per second",
    "kv_tokens": "Tokens the cache holds",
}  # fmt: skip


def percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{100 * value:.{digits}f}"


def record_view(found: Found) -> Document:
    """Return the view of a document of `Record.to_json`."""
    footer = (
        "Errors are relative to the measurement. Each group's constants are those of its software (the engine), never "
        "of the group."
    )
    view, overall = Document("Ironlaw: the planner's record", footer), found["overall"]
    planned = overall["n"] - overall["not_planned"]
    profile = f" with the profile {found['profile']}" if found.get("profile") else ""
    source = Path(found.get("runs") or "measured runs").name
    view.title(_headline(overall["time"]), above=f"{source}: {overall['n']} runs, {planned} planned{profile}")
    view.add(Cards(_cards(overall, planned)))
    for key in ("time", "memory"):
        _errors(view, found, key)
    _ranking(view, found)
    _feasibility(view, found)
    _failed(view, [row for row in found["rows"] if not row["ran"]])
    _worst(view, found["rows"])
    _not_planned(view, found["not_planned"])
    if found["unread_columns"]:
        view.text(f"Columns that mean nothing here: {', '.join(found['unread_columns'])}.", role="caution")
    _assumed(view, found["rows"])
    generic = sum(row["engine"] == "generic" for row in found["rows"])
    if generic:
        text = f"{generic} runs are of software without constants of its own: planned with the generic engine's."
        view.note(text + " `ironlaw calibrate` makes constants from 16 to 32 of them.")
    return view


def _headline(errors: Found) -> str:
    if not errors["n"]:
        return "No step time to compare with"
    median, mean = percent(errors["median"]), percent(errors["mean"])
    return f"Step time of {errors['n']} runs planned with a median error of {median}%, mean {mean}%"


def _cards(overall: Found, planned: int) -> list[tuple[str, str, str]]:
    time, memory, regret = overall["time"], overall["memory"], overall["regret"]
    cards = [("Runs", str(overall["n"]), f"{planned} planned, {overall['not_planned']} not")]
    if time["n"]:
        baseline = f"baseline {percent(time['baseline']['mean'])}%"
        cards.append(("Step time, mean error", f"{percent(time['mean'])} %", baseline))
        cards.append(("In the 80% interval", f"{percent(time['coverage'], 0)} %", "of step times"))
    if memory["n"]:
        beside = f"mean {percent(memory['mean'])}%, {memory['n']} runs"
        cards.append(("Peak memory, median error", f"{percent(memory['median'])} %", beside))
    if regret["n"]:
        beside = f"of the best throughput, {regret['n']} choices"
        cards.append(("Layout picked", f"{percent(regret['mean'])} %", beside))
    return cards


def _with_all(found: Found) -> list[tuple[str, Found]]:
    """Return the groups, followed by their total if there are several."""
    groups = list(found["groups"].items())
    return [*groups, ("all", found["overall"])] if len(groups) > 1 else groups


def _errors(view: Document, found: Found, key: str) -> None:
    entries = [(name, entry[key]) for name, entry in _with_all(found) if entry[key]["n"]]
    title, meaning = EXPLAINED[key]
    view.heading(f"{title}: error in percent")
    if not entries:
        view.note("No run gives it, or none that could be planned.", indent=2)
        return
    view.add(_plot(found, key))
    rows: list[Row] = []
    for name, e in entries:
        baseline = [dim(percent(e["baseline"][which])) for which in ("median", "mean")]
        rows.append([*_error(name, e), *baseline, percent(e["coverage"], 0)])
    columns = ["group", "runs", "median", "mean", "p90", "~bias", "~baseline: median", "mean", "~in interval"]
    view.table(columns, rows, caption=meaning)


def _error(name: str, errors: Found) -> Row:
    """Return a row with the group, the number of runs, and their errors."""
    return [
        Cell(name, "strong" if name == "all" else ""), str(errors["n"]), strong(percent(errors["median"])),
        strong(percent(errors["mean"])), percent(errors["p90"]), f"{100 * errors['bias']:+.1f}",
    ]  # fmt: skip


def _plot(found: Found, key: str) -> Chart:
    planned, measured, show, tick, base = QUANTITIES[key]
    indices = {name: index for index, name in enumerate(found["groups"])}
    clouds: dict[str, list[tuple[float, float, str]]] = {}
    for row in found["rows"]:
        if row["ran"] and row[measured] and key in row["checks"]:
            error = 100 * (row[planned] / row[measured] - 1)
            title = f"{row['id']}: planned {show(row[planned])}, measured {show(row[measured])}, {error:+.1f}%"
            clouds.setdefault(row["group"], []).append((row[measured], row[planned], title))
    errors = found["overall"][key]
    described = f"{errors['n']} runs, median error {percent(errors['median'])} percent, mean {percent(errors['mean'])}"
    drawing = svg.scatter(
        EXPLAINED[key][0], described, [svg.Cloud(indices[name], points) for name, points in clouds.items()],
        tick, base,
    )  # fmt: skip
    caption = (
        "One mark per run, logarithmic axes. On the diagonal the plan is right; above it the plan is too "
        f"{'slow' if key == 'time' else 'large'}. The band is ±10%. Hold the pointer over a mark for the run."
    )
    return Chart(drawing, caption, [(svg.legend_mark(indices[name]), name) for name in clouds])


def _ranking(view: Document, found: Found) -> None:
    entries = [(name, entry["regret"]) for name, entry in _with_all(found) if entry["regret"]["n"]]
    if not entries:
        return
    view.heading("Choosing the layout, where a group varies it on the same work: percent")
    view.table(
        ["group", "choices", "throughput of the pick over the best", "worst choice", "rank correlation"],
        [[name, str(e["n"]), percent(e["mean"]), percent(e["worst"]), percent(e["rank_correlation"])]
         for name, e in entries],
        caption="Rank correlation: Spearman's, of planned and measured step time.",
    )  # fmt: skip


def _feasibility(view: Document, found: Found) -> None:
    view.heading("Does it fit?")
    rows: list[Row] = []
    plain = 0
    for name, entry in _with_all(found):
        fits = entry["fits"]
        said = fits["ran_denied"] or fits["failed_denied"] or fits["failed_said_to_fit"]
        if not said and name != "all" and len(found["groups"]) > 1:
            plain += 1
            continue
        denied = Cell(str(fits["ran_denied"]), "caution" if fits["ran_denied"] else "")
        rows.append([name, str(fits["ran_said_to_fit"]), denied, str(fits["failed_said_to_fit"]),
                     str(fits["failed_denied"])])  # fmt: skip
    columns = ["group", "ran: said to fit", "ran: denied", "failed: said to fit", "failed: denied"]
    caption = f"In {plain} more groups every run ran and is said to fit." if plain else ""
    view.table(columns, rows, caption=caption)


def _failed(view: Document, failed: Sequence[Found]) -> None:
    """Add the failed runs by planned peak over the limit: above 100% out of memory is likely, below it a crash."""
    if not failed:
        return
    view.heading(f"The {len(failed)} failed runs, by planned peak over what the device can hand out")
    classes = zip(*over_limit(failed), strict=True)
    view.table(["planned peak", "runs", BAR], [[name, str(n), Bar(n / len(failed), width=30)] for name, n in classes])
    nearest = sorted(failed, key=lambda row: abs(row["over_limit"] - 1))
    listed = [f"{row['id']} {100 * row['over_limit']:.0f}%" for row in nearest]
    view.note(f"Nearest to the limit: {', '.join(listed[:MAX_LISTED])}", indent=2)
    view.note("Why they failed is not known: below the limit a crash is as likely.", indent=2)
    view.fold("Every failed run").note(", ".join(listed))


def over_limit(failed: Sequence[Found]) -> tuple[list[str], list[int]]:
    """Return the classes of planned peak over the limit, and the number of failed runs in each."""
    edges = (0.0, 0.5, 0.75, 0.9, 1.0, 1.25, 2.0, float("inf"))
    pairs = list(pairwise(edges))
    counts = [sum(low <= row["over_limit"] < high for row in failed) for low, high in pairs]
    middle = [f"{100 * low:.0f} to {100 * high:.0f}%" for low, high in pairs[1:-1]]
    return ["under 50%", *middle, "above 200%"], counts


def worst_rows(rows: Sequence[Found]) -> list[Found]:
    """Return the runs with the largest errors of step time."""
    timed = [row for row in rows if row["ran"] and row["step_seconds"] and "time" in row["checks"]]
    return sorted(timed, key=lambda row: -abs(row["predicted_step_seconds"] / row["step_seconds"] - 1))[:MAX_LISTED]


def _worst(view: Document, rows: Sequence[Found]) -> None:
    cells: list[Row] = []
    for row in worst_rows(rows):
        planned, measured = row["predicted_step_seconds"], row["step_seconds"]
        what = f"{row['accelerators']} x {row['accelerator']}, engine {row['engine']}"
        cells.append([Cell(row["id"], note=what), quantity(planned, units.seconds), quantity(measured, units.seconds),
                      f"{100 * (planned / measured - 1):+.0f}%"])  # fmt: skip
    if cells:
        page = view.fold()
        page.heading("Missed most")
        page.table(["run", "planned", "measured", "error"], cells)


def _not_planned(view: Document, missing: Sequence[Found]) -> None:
    if not missing:
        return
    view.heading(f"{len(missing)} runs could not be planned")
    reasons: dict[str, list[str]] = {}
    for entry in missing:
        reasons.setdefault(entry["reason"], []).append(entry["id"])
    rows = []
    for reason, ids in sorted(reasons.items(), key=lambda pair: -len(pair[1]))[:MAX_LISTED]:
        more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
        rows.append([str(len(ids)), reason, ", ".join(ids[:3]) + more])
    rest = len(reasons) - MAX_LISTED
    view.table(["runs", "<reason", "<which"], rows,
               caption=f"and {rest} more reasons: --json lists every row" if rest > 0 else "")  # fmt: skip
    every = view.fold("Every one of them")
    every.table(["run", "<reason"], [[entry["id"], entry["reason"]] for entry in missing])


def _assumed(view: Document, rows: Sequence[Found]) -> None:
    """Add the assumptions made for incomplete rows, with the number of runs."""
    counts = Counter(text for row in rows for text in row["assumed"])
    if counts:
        folded = view.fold("What was assumed for rows that leave something open")
        folded.table(["assumed", "runs"], [[text, str(count)] for text, count in counts.most_common()])


def calibration_view(found: Found) -> Document:
    """Return the view of a document of `Calibration.to_json`, extended by profile name and rows not planned: constants
    before and after with their meaning, and their errors."""
    view, errors = Document(), found["errors"]
    view.heading(f"Profile {found['profile']}, from {found['start']} and {found['runs']} runs")
    view.table(
        ["mean error of step time", "<"],
        [
            [quantity(errors[name], units.percent, role="strong"), label]
            for name, label in (
                ("before", f"with the constants of {found['start']}"),
                ("in_sample", "calibrated, on the runs it was fitted to"),
                ("left_out", "calibrated, each run planned without itself: expect this on new runs"),
            )
        ],
    )
    if not found["improved"]:
        view.text(
            "With runs left out the calibrated constants did no better than those it started from, so these are kept "
            "as they were.", role="caution",
        )  # fmt: skip
    view.heading("Constants")
    rows: list[Row] = []
    for one in (c for c in found["constants"] if c["spread"] < UNINFORMED_SPREAD):
        unit = "ratio" if one["unit"] == "1" else one["unit"]
        rows.append([one["name"], f"{one['before']:.3g}", strong(f"{one['after']:.3g}"), unit, one["meaning"]])
    view.table(["constant", "before", "after", "<unit", "<what it stands for"], rows)
    unseen = ", ".join(c["name"] for c in found["constants"] if c["spread"] >= UNINFORMED_SPREAD)
    if unseen:
        view.note(f"These runs say nothing of {unseen}: left where they were, or nearly.")
    for entry in found["not_planned"]:
        view.note(f"Not used: {entry['id']}: {entry['reason']}")
    return view


def serving_record_view(found: Found) -> Document:
    """Return the serving planner's record: its errors on measured servers."""
    view = Document()
    for name, title in SERVED.items():
        groups = {group: errors[name] for group, errors in found["groups"].items() if name in errors}
        if groups:
            view.heading(f"{title}, planned against measured: error in percent")
            rows: list[Row] = []
            for group, e in [*groups.items(), ("all", found["overall"][name])]:
                rows.append([*_error(group, e), dim(percent(e["baseline_median"])), percent(e["in_interval"], 0)])
            view.table(["group", "rows", "median", "mean", "p90", "bias", "baseline: median", "in interval"], rows)
    view.note(
        "Baseline: weight bytes over 60% of the memory's rate; 2 N FLOPs a prompt token over 40% of the dense peak. "
        "In interval: measurements inside the plan's 80% interval.", indent=2,
    )  # fmt: skip
    _not_planned(view, found["not_planned"])
    return view
