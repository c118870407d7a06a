"""An explained run on the terminal: the bottleneck, plan beside run, what to change next, and how far to trust it.

Takes the document that `Explanation.to_json` makes, so that what is printed is what scripts read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from ironlaw import units
from ironlaw.report import words
from ironlaw.report.data_view import loaded_words, supply_words
from ironlaw.report.ranks_view import show_ranks_explained
from ironlaw.report.tables import bar, heading, paragraph, show, table
from ironlaw.report.waterfall_view import show_energy, show_timeline, show_waterfall

MOST_OPERATIONS = 8
Document = Mapping[str, Any]


def show_explanation(console: Console, document: Document) -> None:
    """The whole explanation, the most important first."""
    _headline(console, document)
    heading(console, "Plan beside run")
    _totals(console, document)
    time = document["time"]
    unattributed = {"name": "unattributed", "planned": None, "measured": time["unattributed_seconds"], "error": None}
    heading(console, "Step time by phase")
    _rows(console, [*time["phases"], unattributed], time["step"], units.seconds)
    heading(console, "Step time by kind of operation")
    _rows(console, [*time["kinds"], unattributed] if time["kinds"] else [], time["step"], units.seconds)
    _operations(console, time["operations"])
    show_waterfall(console, document)
    show_timeline(console, document)
    if document["memory"]["components"]:
        heading(console, "Memory at the peak")
        _rows(console, document["memory"]["components"], document["memory"]["peak"], units.bytes_)
    show_ranks_explained(console, document.get("ranks"))
    _wall(console, time.get("wall"))
    _how(console, document["facts"])
    show_energy(console, document)
    if any(value is not None for value in document["losses"].values()):
        _losses(console, document["losses"])
    _remedies(console, document)
    _accuracy(console, document)
    console.print()
    for note in document["notes"]:
        paragraph(console, f"· {note}", indent=2, style="dim")


def _headline(console: Console, document: Document) -> None:
    diagnosis = document["diagnosis"]
    paragraph(console, f"Run {document['run']}", style="dim")
    console.print()
    style = "bold" if diagnosis["healthy"] or diagnosis["abstained"] else "bold yellow"
    paragraph(console, Text("Bottleneck: ", style="bold").append(document["bottleneck"], style=style))
    for line in diagnosis["evidence"]:
        paragraph(console, f"· {line}", indent=2)
    if diagnosis["advice"]:
        paragraph(console, f"· What helps: {diagnosis['advice']}.", indent=2)
    if not diagnosis["abstained"]:
        paragraph(console, f"Axis: {diagnosis['axis']}. Confidence: {diagnosis['confidence']}.", indent=2, style="dim")
    others = [f for f in diagnosis["findings"] if f["fault"] and f["sentence"] != document["bottleneck"]]
    for finding in others:
        paragraph(console, f"Also: {finding['sentence']}", indent=2)


def _totals(console: Console, document: Document) -> None:
    made = table("", "planned", "measured", "plan error")
    for name, path in words.EXPLAINED:
        row = words.dig(document, path)
        if row is None or (row["planned"] is None and row["measured"] is None):
            continue
        made.add_row(
            words.label(name),
            _with_interval(name, row["planned"], row.get("planned_interval"), words.NOT_PLANNED),
            _with_interval(name, row["measured"], row.get("measured_interval"), words.NOT_MEASURED),
            _error(row["error"]),
        )
    show(console, made)
    console.print()
    paragraph(
        console,
        "Plan error = (planned − measured) / measured. Below a figure: 80% of comparable runs (planned), "
        "80% of the steps (measured). MFU: model FLOPs as a share of the machine's measured matmul rate. Total time: "
        "planned for steps and evaluations, measured for the whole command.",
        indent=2,
        style="dim",
    )


def _with_interval(name: str, value: float | None, bounds: Any, absent: str) -> Text:
    shown = Text(words.quantity(name, value, absent), style="dim" if value is None else "bold")
    text = words.interval(name, bounds)
    return shown.append(f"\n{text}", style="not bold dim") if text else shown


def _rows(console: Console, rows: Sequence[Document], whole: Document, print_: Callable[[float | None], str]) -> None:
    """Parts of a whole, planned and measured, each with its share of the measured (else the planned) whole."""
    side = "measured" if whole["measured"] is not None else "planned"
    made = table("", "planned", "measured", "plan error", "share", " ", left=(" ",))
    for row in rows:
        share = row[side] / whole[side] if row[side] is not None and whole[side] else None
        made.add_row(
            row["name"], *_amounts(row, print_), _error(row["error"]), units.percent(share), bar(share),
        )  # fmt: skip
    made.add_row(Text("total", style="bold"), *_amounts(whole, print_), _error(whole["error"]), "", "")
    show(console, made)


def _amounts(row: Document, print_: Callable[[float | None], str]) -> tuple[Text, Text]:
    planned = Text(words.NOT_PLANNED, style="dim") if row["planned"] is None else Text(print_(row["planned"]))
    measured = Text(words.NOT_MEASURED, style="dim") if row["measured"] is None else Text(print_(row["measured"]))
    return planned, measured


def _error(value: float | None) -> Text:
    return Text(words.error(value), style="yellow" if value is not None and abs(value) > 0.10 else "")


def _operations(console: Console, operations: Sequence[Document]) -> None:
    timed = [row for row in operations if row["measured"] is not None][:MOST_OPERATIONS]
    if not timed:
        return
    heading(console, f"The {len(timed)} operations furthest from the plan, per step")
    made = table("operation", "kind", "phase", "planned", "measured", "difference", left=("kind", "phase"))
    for row in timed:
        gap = row["measured"] - (row["planned"] or 0.0)
        sign = "+" if gap > 0 else "−"
        if abs(gap) < 1e-3 * row["measured"]:  # not a difference that the other columns would show
            gap, sign = 0.0, ""
        made.add_row(
            row["name"], row["kind"], row["phase"], *_amounts(row, units.seconds), f"{sign}{units.seconds(abs(gap))}",
        )  # fmt: skip
    show(console, made)


def _wall(console: Console, wall: Document | None) -> None:
    if not wall:
        return
    heading(console, "Wall time of the training command")
    known = {name: seconds for name, seconds in wall.items() if seconds is not None}
    whole = sum(known.values())
    made = table("", "measured", "share", " ", left=(" ",))
    for name, seconds in wall.items():
        share = None if seconds is None or not whole else seconds / whole
        amount = words.NOT_MEASURED if seconds is None else units.seconds(seconds)
        made.add_row(words.WALL.get(name, name), amount, units.percent(share), bar(share))
    made.add_row(Text("total", style="bold"), Text(units.seconds(whole), style="bold"), "", "")
    show(console, made)


def _how(console: Console, facts: Document) -> None:
    """Which attention kernel ran, and what the loader could have delivered."""
    run, supply = facts["run"], facts["plan"].get("data_supply")
    data = run.get("data") or {}
    if not run.get("attention") and not data.get("tokens_per_second"):
        return
    heading(console, "How it ran")
    if run.get("attention"):
        paragraph(console, f"Attention: {run['attention']}.", indent=2)
    if data.get("tokens_per_second"):
        paragraph(console, f"Data: {loaded_words(data)}.", indent=2)
    if supply:
        paragraph(console, f"Planned: {supply_words(supply)}", indent=2, style="dim")


def _losses(console: Console, losses: Document) -> None:
    validation, unigram, below = (losses.get(k) for k in ("validation", "unigram", "below_unigram"))
    heading(console, "What it learned")
    if validation is None or unigram is None or below is None:
        paragraph(console, "The validation loss was not measured.", indent=2)
        return
    verdict = (
        f"{below:.3f} below a model that knows only how often each token occurs ({unigram:.3f})."
        if below > 0
        else f"not below a model that knows only how often each token occurs ({unigram:.3f}): nothing was learned yet."
    )
    paragraph(console, f"Validation loss {validation:.3f} nats/token, {verdict}", indent=2)


def _remedies(console: Console, document: Document) -> None:
    heading(console, "What to change next")
    paragraph(console, document["remedies_note"], indent=2, style="dim" if document["remedies"] else "")
    for number, remedy in enumerate(document["remedies"], 1):
        paragraph(console, Text(f"{number}. {remedy['title']}", style="bold"), indent=2)
        paragraph(console, "; ".join(words.remedy_facts(remedy)) + f" ({remedy['basis']})", indent=5)
        paragraph(console, f"Risk: {remedy['risk']}.", indent=5)
        paragraph(console, Text(remedy["apply"], style="cyan"), indent=5)


def _accuracy(console: Console, document: Document) -> None:
    heading(console, "How far to trust this")
    made = table("", "error", "promised", "", left=("",))
    for name, text in words.CHECKS.items():
        check = document["accuracy_met"][name]
        style = {True: "green", False: "bold red", None: "dim"}[check["met"]]
        made.add_row(
            text, words.error(check["error"]), f"within {units.percent(check['limit'], 0)}",
            Text(words.verdict(check["met"]), style=style),
        )  # fmt: skip
    show(console, made)
