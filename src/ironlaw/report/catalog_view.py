"""The catalogue on the terminal: names by section, or one entry with the source of every figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Console
from rich.text import Text

from ironlaw import units
from ironlaw.report.tables import heading, paragraph, show, table

# How a figure is printed, by how its key ends.
_PRINT: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("flops_per_second", lambda v: units.rate(v, "FLOP")),
    ("bytes_per_second", lambda v: units.rate(v, "B")),
    ("bytes", units.bytes_),
    ("hz", lambda v: units.si(v, "Hz")),
    ("watts", lambda v: units.si(v, "W")),
    ("per_kwh", lambda v: f"{v:g} kg CO2/kWh"),
)


def show_names(console: Console, names: Mapping[str, Sequence[str]]) -> None:
    for section, members in names.items():
        heading(console, section.capitalize())
        console.print(Columns([Text(name) for name in members], padding=(0, 3), column_first=True))
    paragraph(console, "ironlaw catalog NAME shows one of them, each figure with its source.", style="dim")


def show_entry(console: Console, entry: Mapping[str, Any]) -> None:
    paragraph(console, f"{entry['title']} ({entry['kind']} {entry['name']})", style="bold")
    facts = table("", "", left=("",))
    for key, value in entry["facts"].items():
        facts.add_row(key, Text(value))
    show(console, facts)
    console.print()
    figures = table("figure", "value", "source", left=("source",))
    for key, figure in entry["figures"].items():
        remark = figure["source"] + (f". {figure['note']}" if figure["note"] else "")
        figures.add_row(key.replace("_", " "), Text(_printed(key, figure["value"]), style="bold"), Text(remark, "dim"))
    show(console, figures)


def _printed(key: str, value: float) -> str:
    name = key.split(" ")[0].split(".")[0] if "." in key else key.split(" ")[0]
    if "usd" in name:
        return f"${value:,.2f}"
    for ending, printer in _PRINT:
        if name.endswith(ending):
            return printer(value)
    return f"{value:,g}" if value < 1e6 else units.count(value)
