"""What tuning tried and kept, on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from ironlaw import units
from ironlaw.report.tables import paragraph, show, table


def show_tuned(console: Console, document: Mapping[str, Any], path: str) -> None:
    made = table("remedy", "change", "planned", "measured", "noise", "loss", "", left=("change", ""))
    for trial in document["trials"]:
        change = ", ".join(f"{key} = {value}" for key, value in trial["settings"].items())
        made.add_row(
            trial["remedy"], change,
            "" if trial["predicted_gain"] is None else units.signed_percent(trial["predicted_gain"]),
            units.signed_percent(trial["measured_gain"]), f"± {units.percent(trial['noise'])}",
            f"{trial['loss_change']:+.3f}", "kept" if trial["kept"] else trial["reason"],
        )  # fmt: skip
    if document["trials"]:
        show(console, made)
        console.print()
    kept = ", ".join(f"{key} = {value}" for key, value in document["settings"].items())
    text = f"{units.percent(document['gain'])} less time per token: {kept}." if kept else "Nothing pays: kept as it is."
    paragraph(console, Text(text, style="bold"))
    paragraph(
        console, f"{document['runs']} short runs in {units.seconds(document['seconds'])}; {document['stopped']}. Gains "
        f"are fractions of the time per token, each against the unchanged config run before and after it. {path}",
        style="dim",
    )  # fmt: skip
