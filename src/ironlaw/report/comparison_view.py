"""Two runs beside each other on the terminal: what changed, and whether it is more than noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from ironlaw import units
from ironlaw.report import words
from ironlaw.report.tables import heading, paragraph, show, table

Document = Mapping[str, Any]
MOST_OPERATIONS, MOST_SETTINGS = 8, 20
TOTALS = ("step_seconds", "tokens_per_second", "mfu", "peak_bytes", "resident_bytes", "total_seconds", "train_loss",
          "validation_loss")  # fmt: skip


def show_comparison(console: Console, document: Document) -> None:
    paragraph(console, f"A {document['before']}", style="dim")
    paragraph(console, f"B {document['after']}", style="dim")
    console.print()
    paragraph(console, Text(document["sentence"], style="bold"))
    noise = document["noise"]
    if noise is not None:
        paragraph(
            console, f"Noise: {units.percent(noise)}, from blocks of steps and the halves of each run.", indent=2,
            style="dim",
        )  # fmt: skip
    grade = document.get("grade")
    if grade is not None:
        paragraph(
            console, f"B is A with the remedy {grade['remedy']}: it promised {units.signed_percent(grade['predicted'])}"
            f" and brought {units.signed_percent(grade['measured'])}.", indent=2,
        )  # fmt: skip
    if document["settings"]:
        heading(console, "What differs")
        made = table("", "A", "B")
        for row in document["settings"][:MOST_SETTINGS]:
            made.add_row(row["name"], _text(row["before"]), _text(row["after"]))
        show(console, made)
    heading(console, "Totals")
    made = table("", "A", "B", "change")
    for name in TOTALS:
        row = document["totals"].get(name)
        if row is not None and row["before"] is not None and row["after"] is not None:
            ratio = row["after"] / row["before"] - 1 if row["before"] else None
            made.add_row(words.label(name), words.quantity(name, row["before"]), words.quantity(name, row["after"]),
                         units.signed_percent(ratio))  # fmt: skip
    show(console, made)
    _rows(console, "Step time by phase", document["phases"], units.seconds)
    _rows(console, "Step time by kind of operation", document["kinds"], units.seconds)
    operations = [row | {"name": f"{row['name']} ({row['phase']})"} for row in document["operations"]]
    _rows(console, "Operations that changed the most", operations[:MOST_OPERATIONS], units.seconds)
    _rows(console, "Memory at the peak", document["memory"], units.bytes_)
    console.print()
    for side, sentence in zip("AB", document["bottlenecks"], strict=True):
        paragraph(console, f"{side}: {sentence}", style="dim")


def _rows(console: Console, title: str, rows: Sequence[Document], print_: Callable[[float | None], str]) -> None:
    known = [row for row in rows if row["before"] is not None or row["after"] is not None]
    if not known:
        return
    heading(console, title)
    made = table("", "A", "B", "difference")
    for row in known:
        difference = (row["after"] or 0.0) - (row["before"] or 0.0)
        sign = "+" if difference >= 0 else "−"
        made.add_row(row["name"], _amount(row["before"], print_), _amount(row["after"], print_),
                     f"{sign}{print_(abs(difference))}")  # fmt: skip
    show(console, made)


def _amount(value: float | None, print_: Callable[[float | None], str]) -> str:
    return "–" if value is None else print_(value)


def _text(value: Any) -> str:
    return "–" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
