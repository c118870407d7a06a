"""The output of a verb, built once: headings, paragraphs, tables and charts. `terminal.py` and `page.py` render it.

view = Document()
view.heading("Step time by phase")
view.table(["", "planned", "share", BAR], [["forward", quantity(0.1, units.seconds), "60%", Bar(0.6)]])
view.text(good("Fits: "), "12 GiB of 16.")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from markupsafe import Markup

from ironlaw import units

NOT_MEASURED = "not measured"
NOT_PLANNED = "not planned"
_ABSENT = {"planned": NOT_PLANNED, "measured": NOT_MEASURED}
BAR = "| "  # heading of a column of bars, which has no name
Print = Callable[[float | None], str]


@dataclass(frozen=True)
class Cell:
    """A piece of text, with the value it shows if it is a figure."""

    text: str
    role: str = ""  # strong, dim, good, bad, caution or code
    value: float | None = None  # in SI units
    below: str = ""  # shown on its own line: an interval
    note: str = ""  # explanation, shown where the page has room for it
    why: str = ""  # the formula behind a figure


@dataclass(frozen=True)
class Bar:
    """A fraction of a whole, which the row also has as a figure."""

    fraction: float | None
    width: int = 16  # characters of a terminal


Piece = Cell | Bar | str
Row = Sequence[Piece]


strong, dim, good, bad = (partial(Cell, role=role) for role in ("strong", "dim", "good", "bad"))


def quantity(value: float | None, show: Print, absent: str = NOT_MEASURED, role: str = "", below: str = "") -> Cell:
    """Return a figure with its unit, or `absent` in words: never 0 for an unknown value."""
    return Cell(absent, "dim") if value is None else Cell(show(value), role, value, below)


def interval(low: str, high: str) -> str:
    """Return `22.6 to 30.5 s`: a unit that both bounds share is printed once."""
    number, _, unit = low.partition(" ")
    return f"{number if unit and high.endswith(' ' + unit) else low} to {high}"


def between(bounds: Any, show: Print) -> str:
    """Return `[low, high]` as text; empty if a bound is missing."""
    return "" if not bounds or None in bounds else interval(*(show(bound) for bound in bounds))


@dataclass(frozen=True)
class Title:
    pieces: Sequence[Cell]
    above: str = ""
    below: str = ""


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2
    tail: str = ""  # shown less prominently


@dataclass(frozen=True)
class Paragraph:
    pieces: Sequence[Cell]
    indent: int = 0
    item: bool = False  # of a bulleted list


@dataclass(frozen=True)
class Table:
    """A table. The first column, and those whose heading begins with `<` or `|`, are text; the others are numbers.

    A narrow page leaves out columns whose heading begins with `~` or `<~`.
    """

    columns: Sequence[str]
    rows: Sequence[Row]
    total: Row | None = None
    caption: str = ""  # explains the figures


@dataclass(frozen=True)
class NameList:
    """A list of many short names."""

    names: Sequence[str]


@dataclass(frozen=True)
class Chart:
    """A drawing, shown on a page only."""

    drawing: Markup
    caption: str = ""
    legend: Sequence[tuple[str, str]] = ()  # style, name


@dataclass(frozen=True)
class Cards:
    """The figures at the head of a page: name, value, remark. A terminal shows only the table."""

    cards: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Listing:
    """The text of a file, shown on a page only."""

    text: str


@dataclass(frozen=True)
class Fold:
    """Content for a page only, folded behind its summary; open if the summary is empty."""

    summary: str
    content: Document


Block = Title | Heading | Paragraph | Table | NameList | Chart | Cards | Listing | Fold


@dataclass
class Document:
    page: str = ""  # the name and the footer of its HTML page, if it has one
    footer: str = ""
    blocks: list[Block] = field(default_factory=list)

    def add(self, block: Block) -> None:
        self.blocks.append(block)

    def title(self, *pieces: Cell | str, above: str = "", below: str = "") -> None:
        self.add(Title(_cells(pieces, "strong"), above, below))

    def heading(self, text: str, level: int = 2, tail: str = "") -> None:
        self.add(Heading(text, level, tail))

    def text(self, *pieces: Cell | str, indent: int = 0, role: str = "") -> None:
        self.add(Paragraph(_cells(pieces, role), indent))

    def note(self, words: str, indent: int = 0) -> None:
        """Add a remark, which is shown less prominently than text."""
        self.text(words, indent=indent, role="dim")

    def items(self, lines: Iterable[str], indent: int = 2, role: str = "") -> None:
        self.blocks += [Paragraph(_cells([line], role), indent, item=True) for line in lines]

    def table(self, columns: Sequence[str], rows: Iterable[Row], total: Row | None = None, caption: str = "") -> None:
        self.add(Table(columns, list(rows), total, caption))

    def facts(self, pairs: Iterable[tuple[str, Piece]]) -> None:
        """Add a table of names and their values."""
        self.table(["", "<"], pairs)

    def fold(self, summary: str = "") -> Document:
        """Add content that only a page shows, and return it as a document to be filled."""
        content = Document()
        self.add(Fold(summary, content))
        return content

    def extend(self, other: Document) -> None:
        self.blocks += other.blocks

    def shares(
        self, parts: Iterable[tuple[str, float | None, str]], show: Print, total: bool = True, least: float = -math.inf,
        side: str = "planned", meanings: bool = True,
    ) -> None:  # fmt: skip
        """Add a table of the parts of a whole, (name, value, meaning), with their shares. Unknown parts are ignored."""
        parts = list(parts)
        whole = sum(value for _, value, _ in parts if value is not None)
        rows: list[Row] = []
        for name, value, meaning in parts:
            share = None if value is None or not whole else value / whole
            if share is None or share >= least:
                cells = (quantity(value, show, _ABSENT[side]), units.percent(share), Bar(share))
                rows.append([name, *cells, *([dim(meaning)] if meanings else [])])
        columns = ["", side, "share", BAR, *(["<what it is"] if meanings else [])]
        self.table(columns, rows, [strong("total"), strong(show(whole)), *[""] * (len(columns) - 2)] if total else None)


def _cells(pieces: Iterable[Cell | str], role: str) -> list[Cell]:
    return [Cell(piece, role) if isinstance(piece, str) else piece for piece in pieces]
