"""What a verb shows, made once: headings, paragraphs, tables and charts. `terminal.py` and `page.py` render it.

made = Document()
made.heading("Step time by phase")
made.table(["", "planned", "share", BAR], [["forward", quantity(0.1, units.seconds), "60%", Bar(0.6)]])
made.text(good("Fits: "), "12 GiB of 16.")
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
BAR = "| "  # heading of a column of bars: text without a name
Print = Callable[[float | None], str]


@dataclass(frozen=True)
class Cell:
    """A piece of text, and of a figure what it is printed from."""

    text: str
    role: str = ""  # strong, dim, good, bad, caution or code
    value: float | None = None  # in SI units
    below: str = ""  # on a line of its own: an interval
    note: str = ""  # what it is, where the page has room for it
    why: str = ""  # the formula behind a figure


@dataclass(frozen=True)
class Bar:
    """Of a whole; on a page two, planned above measured, where `pair` gives them and the longest of their table."""

    fraction: float | None
    width: int = 16  # characters
    pair: tuple[float | None, float | None, float, str] | None = None  # planned, measured, the longest, in words


Piece = Cell | Bar | str
Row = Sequence[Piece]


strong, dim, good, bad = (partial(Cell, role=role) for role in ("strong", "dim", "good", "bad"))


def quantity(value: float | None, show: Print, absent: str = NOT_MEASURED, role: str = "", below: str = "") -> Cell:
    """A figure with its unit, or words for its absence: never 0 for what is unknown."""
    return Cell(absent, "dim") if value is None else Cell(show(value), role, value, below)


def interval(low: str, high: str) -> str:
    """`22.6 to 30.5 s`: a unit that both share is printed once."""
    number, _, unit = low.partition(" ")
    return f"{number if unit and high.endswith(' ' + unit) else low} to {high}"


def between(bounds: Any, show: Print) -> str:
    """`[low, high]` as text; empty where one is missing."""
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
    tail: str = ""  # less loud


@dataclass(frozen=True)
class Paragraph:
    pieces: Sequence[Cell]
    indent: int = 0
    item: bool = False  # of a list


@dataclass(frozen=True)
class Table:
    """The first column, and those whose heading begins with `<` or `|`, are text; the others are numbers.

    `~` begins the heading of a column that a narrow page leaves out.
    """

    columns: Sequence[str]
    rows: Sequence[Row]
    total: Row | None = None
    caption: str = ""  # what its figures are


@dataclass(frozen=True)
class Facts:
    """Names and what they are."""

    pairs: Sequence[tuple[str, Piece]]


@dataclass(frozen=True)
class NameList:
    """Many short words."""

    names: Sequence[str]


@dataclass(frozen=True)
class Chart:
    """A drawing for the page, made for a width; on a terminal `line` stands for it, if there is one."""

    draw: Callable[[int], Markup]
    caption: str = ""
    legend: Sequence[tuple[str, str]] = ()  # style, name
    line: str = ""
    key: str = ""  # of the line's letters


@dataclass(frozen=True)
class Cards:
    """The figures at the head of a page: name, figure, what stands beside it. A terminal has the table."""

    cards: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Listing:
    """A file's text, on a page."""

    text: str


@dataclass(frozen=True)
class Fold:
    """What only a page has room for, folded away behind its summary; without one it is open."""

    summary: str
    content: Document


Block = Title | Heading | Paragraph | Table | Facts | NameList | Chart | Cards | Listing | Fold


@dataclass
class Document:
    blocks: list[Block] = field(default_factory=list)

    def add(self, block: Block) -> None:
        self.blocks.append(block)

    def title(self, *pieces: Cell | str, above: str = "", below: str = "") -> None:
        self.add(Title(_cells(pieces, "strong"), above, below))

    def heading(self, text: str, level: int = 2, tail: str = "") -> None:
        self.add(Heading(text, level, tail))

    def text(self, *pieces: Cell | str, indent: int = 0, role: str = "") -> None:
        self.add(Paragraph(_cells(pieces, role), indent))

    def items(self, lines: Iterable[str], indent: int = 2, role: str = "") -> None:
        self.blocks += [Paragraph(_cells([line], role), indent, item=True) for line in lines]

    def table(self, columns: Sequence[str], rows: Iterable[Row], total: Row | None = None, caption: str = "") -> None:
        self.add(Table(columns, list(rows), total, caption))

    def facts(self, pairs: Iterable[tuple[str, Piece]]) -> None:
        self.add(Facts(list(pairs)))

    def fold(self, summary: str = "") -> Document:
        """The document that is only on a page, to be filled."""
        content = Document()
        self.add(Fold(summary, content))
        return content

    def extend(self, other: Document) -> None:
        self.blocks += other.blocks

    def shares(
        self, parts: Iterable[tuple[str, float | None, str]], show: Print, total: bool = True, least: float = -math.inf,
        side: str = "planned", meanings: bool = True,
    ) -> None:  # fmt: skip
        """Parts of a whole, (name, value, meaning), with their shares; an absent part is not counted."""
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
