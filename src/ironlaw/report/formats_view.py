"""The table of number formats on the terminal, or one of them in full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from ironlaw import units
from ironlaw.report.tables import paragraph, show, table

REFERENCE_PARAMETERS = 8e9  # whose bytes the table gives, as something to hold on to


def show_formats(console: Console, entries: Sequence[Mapping[str, Any]]) -> None:
    rows = table("format", "bits", "largest", "smallest", "spacing", "scale", "8B weights", "on", left=("scale",))
    for entry in entries:
        weights = units.bytes_(REFERENCE_PARAMETERS * entry["bits_per_element"] / 8)
        rows.add_row(
            entry["name"], f"{entry['bits_per_element']:.4g}", _number(entry["largest"]), _number(entry["smallest"]),
            f"{entry['spacing']:.3g}", _scale(entry), weights, str(len(entry["multiplied_by"]) or ""),
        )  # fmt: skip
    show(console, rows)
    paragraph(
        console,
        "bits: with the share of block scales. largest, smallest, spacing (from 1 to the next): of one number, before "
        "its scale. on: how many catalogued accelerators multiply it. ironlaw formats NAME names them, and the source.",
        indent=2, style="dim",
    )  # fmt: skip


def show_format(console: Console, entry: Mapping[str, Any]) -> None:
    paragraph(console, f"{entry['name']}: {entry['title']}", style="bold")
    rows = table("", "", left=("",))
    for key, text in (
        ("bits per number, scales included", f"{entry['bits_per_element']:.6g}"),
        ("largest number", _number(entry["largest"])),
        ("smallest above 0", _number(entry["smallest"])),
        ("distance from 1 to the next", f"{entry['spacing']:.6g}"),
        ("scale", _scale(entry) or "none"),
        ("multiplied by", ", ".join(entry["multiplied_by"]) or "no catalogued accelerator; emulated"),
        ("source", f"{entry['source']}, {entry['url']}"),
    ):
        rows.add_row(key, Text(text))
    show(console, rows)


def _number(value: float) -> str:
    return f"{value:.4g}"


def _scale(entry: Mapping[str, Any]) -> str:
    if not entry["scale"]:
        return ""
    rows, columns = entry["block"]
    if not columns:
        return f"{entry['scale']} per {'row' if rows else 'tensor'}"
    return f"{entry['scale']} per {columns}" if rows == 1 else f"{entry['scale']} per {rows} x {columns}"
