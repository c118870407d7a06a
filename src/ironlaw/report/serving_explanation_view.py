"""A measured server on the terminal: its phases beside the plan's, what binds, what to change."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from ironlaw import units
from ironlaw.report.tables import bar, heading, paragraph, show, table

_WORDS = {
    "prefill": "prompts", "decode": "next tokens", "sampling": "choice of tokens", "host": "host: schedule, text",
    "idle": "nobody asked",
}  # fmt: skip


def show_serving_explanation(console: Console, document: dict[str, Any]) -> None:
    totals, facts = document["totals"], document["facts"]
    paragraph(console, f"{facts.get('name', 'a model')} served by {facts.get('engine', 'an engine')}", style="bold")
    for name, words, printer in (
        ("ttft_seconds", "first token, median", units.seconds), ("tpot_seconds", "per token, median", units.seconds),
        ("output_tokens_per_second", "output tokens per second", units.count),
        ("decode_batch", "requests that decode, mean", units.count),
    ):  # fmt: skip
        if name in totals:
            paragraph(console, f"{words}: {printer(totals[name]['value'])}", indent=2)
    heading(console, "A mean engine step, measured beside planned")
    rows = table("", "measured", "planned", "measured / planned", "")
    whole = sum(row["measured_seconds"] or 0.0 for row in document["phases"])
    for row in document["phases"]:
        measured, planned = row["measured_seconds"], row["planned_seconds"]
        ratio = f"{measured / planned:.2f}" if measured and planned else ""
        shown = Text("not planned", style="dim") if planned is None else Text(units.seconds(planned))
        rows.add_row(_WORDS[row["phase"]], units.seconds(measured), shown, ratio, bar((measured or 0.0) / whole))
    show(console, rows)
    if document["plan_note"]:
        paragraph(console, document["plan_note"], indent=2, style="dim")
    heading(console, "What binds")
    for finding in document["findings"]:
        gain = f" (gain about {finding['gain']:.0%}, {finding['basis']})" if finding["gain"] else ""
        paragraph(console, f"{finding['name']}: {finding['says']}", indent=2)
        if finding["remedy"]:
            paragraph(console, f"{finding['remedy']}{gain}", indent=4, style="dim")
