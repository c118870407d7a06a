"""A calibration on the terminal: constants before and after with their meaning, and how well they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from ironlaw import units
from ironlaw.report.tables import heading, paragraph, show, table

SEEN = 0.95  # of the prior's spread left: above it the runs have said nothing of a constant


def show_calibration(console: Console, document: Mapping[str, Any]) -> None:
    """From the document of `Calibration.to_json`, the profile's name and the rows not planned."""
    errors = document["errors"]
    heading(console, f"Profile {document['profile']}, from {document['start']} and {document['runs']} runs")
    made = table("mean error of step time", "", left=("",))
    for name, label in (
        ("before", f"with the constants of {document['start']}"),
        ("in_sample", "calibrated, on the runs it was fitted to"),
        ("left_out", "calibrated, each run planned without itself: expect this on new runs"),
    ):
        made.add_row(Text(units.percent(errors[name]), style="bold"), label)
    show(console, made)
    if not document["improved"]:
        paragraph(
            console,
            "With runs left out the calibrated constants did no better than those it started from, "
            "so these are kept as they were.",
            style="yellow",
        )
    seen = [c for c in document["constants"] if c["spread"] < SEEN]
    unseen = [c for c in document["constants"] if c["spread"] >= SEEN]
    heading(console, "Constants")
    made = table("constant", "before", "after", "unit", "what it stands for", left=("unit", "what it stands for"))
    for constant in seen:
        unit = "ratio" if constant["unit"] == "1" else constant["unit"]
        after = Text(f"{constant['after']:.3g}", style="bold")
        made.add_row(constant["name"], f"{constant['before']:.3g}", after, unit, constant["meaning"])
    show(console, made)
    if unseen:
        names = ", ".join(c["name"] for c in unseen)
        paragraph(console, f"These runs say nothing of {names}: left where they were, or nearly.", style="dim")
    for entry in document["not_planned"]:
        paragraph(console, f"Not used: {entry['id']}: {entry['reason']}", style="dim")
