"""Shared pieces of the terminal reports: plain tables that never cut a word off, headings and bars."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

BAR_WIDTH = 16
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, style="bold"))


def table(*columns: str, left: Sequence[str] = (), tight: bool = False) -> Table:
    """A table whose first column, and those in `left`, are text; the others are numbers. Cells wrap, never shorten.

    `tight`: one space between columns instead of three, where seven columns have to fit 80.
    """
    made = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0 if tight else 1), show_edge=False, header_style="dim"
    )
    for index, name in enumerate(columns):
        is_text = index == 0 or name in left
        made.add_column(name, justify="left" if is_text else "right", overflow="fold")
    return made


def bar(fraction: float | None, style: str = "cyan", width: int = BAR_WIDTH) -> Text:
    """A horizontal bar in eighths of a character; empty when unknown."""
    if fraction is None or fraction <= 0:
        return Text("")
    eighths = max(1, round(min(1.0, fraction) * width * 8))
    return Text("█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip(), style=style)


def paragraph(console: Console, text: str | Text, indent: int = 0, style: str = "") -> None:
    """Wrapped text; numbers are not coloured, so that colour keeps a meaning."""
    content = Text(text, style=style) if isinstance(text, str) else text
    content.overflow = "fold"
    console.print(Padding(content, (0, 0, 0, indent)))


def show(console: Console, made: Table) -> None:
    console.print(Padding(made, (0, 0, 0, 2)))
