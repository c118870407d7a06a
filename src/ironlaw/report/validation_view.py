"""The planner's record on the terminal: errors beside the trivial baseline's, ranking, what fits, what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.text import Text

from ironlaw.report.tables import heading, paragraph, show, table

Document = Mapping[str, Any]
MOST_LISTED = 12  # rows listed one by one; the JSON has them all

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


def percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{100 * value:.{digits}f}"


def with_all(document: Document) -> list[tuple[str, Document]]:
    """Groups, and all together where there are several."""
    groups = list(document["groups"].items())
    return [*groups, ("all", document["overall"])] if len(groups) > 1 else groups


def show_validation(console: Console, document: Document) -> None:
    """From the document of `Record.to_json`."""
    overall = document["overall"]
    planned = overall["n"] - overall["not_planned"]
    runs = f"{overall['n']} runs, {planned} planned"
    paragraph(
        console, runs + (f" with the profile {document['profile']}" if document.get("profile") else ""), style="bold"
    )
    for key in ("time", "memory"):
        _errors(console, document, key)
    _ranking(console, document)
    _feasibility(console, document)
    _failed(console, [row for row in document["rows"] if not row["ran"]])
    _not_planned(console, document["not_planned"])
    _generic(console, document["rows"])


def _errors(console: Console, document: Document, key: str) -> None:
    entries = [(name, entry[key]) for name, entry in with_all(document) if entry[key]["n"]]
    title, meaning = EXPLAINED[key]
    heading(console, f"{title}: error in percent")
    if not entries:
        paragraph(console, "No run gives it, or none that could be planned.", indent=2, style="dim")
        return
    made = table(
        "group", "runs", "median", "mean", "p90", "bias", "baseline: median", "mean", "in interval", tight=True
    )
    for name, e in entries:
        base = e["baseline"]
        style = "bold" if name == "all" else ""
        bias = f"{100 * e['bias']:+.1f}"
        made.add_row(
            Text(name, style=style), str(e["n"]), Text(percent(e["median"]), style="bold"),
            Text(percent(e["mean"]), style="bold"), percent(e["p90"]), bias, Text(percent(base["median"]), style="dim"),
            Text(percent(base["mean"]), style="dim"), percent(e["coverage"], 0),
        )  # fmt: skip
    show(console, made)
    paragraph(console, meaning, indent=2, style="dim")


def _ranking(console: Console, document: Document) -> None:
    entries = [(name, entry["regret"]) for name, entry in with_all(document) if entry["regret"]["n"]]
    if not entries:
        return
    heading(console, "Choosing the layout, where a group varies it on the same work: percent")
    made = table(
        "group", "choices", "throughput of the pick over the best", "worst choice", "rank correlation", tight=True
    )
    for name, e in entries:
        made.add_row(name, str(e["n"]), percent(e["mean"]), percent(e["worst"]), percent(e["rank_correlation"]))
    show(console, made)


def _feasibility(console: Console, document: Document) -> None:
    heading(console, "Does it fit?")
    made = table("group", "ran: said to fit", "ran: denied", "failed: said to fit", "failed: denied", tight=True)
    plain = 0
    for name, entry in with_all(document):
        f = entry["fits"]
        nothing_said = not (f["ran_denied"] or f["failed_denied"] or f["failed_said_to_fit"])
        if nothing_said and name != "all" and len(document["groups"]) > 1:
            plain += 1
            continue
        denied = Text(str(f["ran_denied"]), style="yellow" if f["ran_denied"] else "")
        made.add_row(name, str(f["ran_said_to_fit"]), denied, str(f["failed_said_to_fit"]), str(f["failed_denied"]))
    show(console, made)
    if plain:
        paragraph(console, f"In {plain} more groups every run ran and is said to fit.", indent=2, style="dim")


def _failed(console: Console, failed: Sequence[Document]) -> None:
    """Failed runs by the planned peak over the limit: out of memory is likely above 100%, a crash below."""
    if not failed:
        return
    heading(console, f"The {len(failed)} failed runs, by planned peak over what the device can hand out")
    names, counts = over_limit(failed)
    made = table("planned peak", "runs", "share", left=("share",))
    for name, count in zip(names, counts, strict=True):
        made.add_row(name, str(count), Text("█" * round(30 * count / len(failed)), style="cyan"))
    show(console, made)
    nearest = sorted(failed, key=lambda row: abs(row["over_limit"] - 1))[:MOST_LISTED]
    listed = ", ".join(f"{row['id']} {100 * row['over_limit']:.0f}%" for row in nearest)
    paragraph(console, f"Nearest to the limit: {listed}", indent=2, style="dim")
    paragraph(console, "Why they failed is not known: below the limit a crash is as likely.", indent=2, style="dim")


def over_limit(failed: Sequence[Document]) -> tuple[list[str], list[int]]:
    """Failed runs by planned peak over the limit: names of the classes, and how many fall into each."""
    edges = (0.0, 0.5, 0.75, 0.9, 1.0, 1.25, 2.0, float("inf"))
    pairs = list(pairwise(edges))
    counts = [sum(low <= row["over_limit"] < high for row in failed) for low, high in pairs]
    middle = [f"{100 * low:.0f} to {100 * high:.0f}%" for low, high in pairs[1:-1]]
    return ["under 50%", *middle, "above 200%"], counts


def _not_planned(console: Console, missing: Sequence[Document]) -> None:
    if not missing:
        return
    heading(console, f"{len(missing)} runs could not be planned")
    reasons: dict[str, list[str]] = {}
    for entry in missing:
        reasons.setdefault(entry["reason"], []).append(entry["id"])
    made = table("runs", "reason", "which", left=("reason", "which"))
    for reason, ids in sorted(reasons.items(), key=lambda pair: -len(pair[1]))[:MOST_LISTED]:
        more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
        made.add_row(str(len(ids)), reason, ", ".join(ids[:3]) + more)
    show(console, made)
    if len(reasons) > MOST_LISTED:
        paragraph(
            console, f"and {len(reasons) - MOST_LISTED} more reasons: --json lists every row", indent=2, style="dim"
        )


def _generic(console: Console, rows: Sequence[Document]) -> None:
    generic = sum(row["engine"] == "generic" for row in rows)
    if generic:
        text = f"{generic} runs are of software without constants of its own: planned with the generic engine's."
        paragraph(console, text + " `ironlaw calibrate` makes constants from 16 to 32 of them.", style="dim")


def worst_rows(rows: Sequence[Document], count: int = MOST_LISTED) -> list[Document]:
    """The runs whose step time is planned worst: where to look first."""
    timed = [row for row in rows if row["ran"] and row["step_seconds"] and "time" in row["checks"]]
    return sorted(timed, key=lambda row: -abs(row["predicted_step_seconds"] / row["step_seconds"] - 1))[:count]
