"""Renders a document on a terminal: words are never cut, and colour never carries a meaning alone."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.cells import cell_len
from rich.columns import Columns
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from ironlaw.report.document import (
    BAR,
    Bar,
    Block,
    Cell,
    Document,
    Heading,
    NameList,
    Paragraph,
    Piece,
    Table,
    Title,
)

STYLES = {"": "", "strong": "bold", "dim": "dim", "good": "bold green", "bad": "bold red", "caution": "yellow",
          "code": "cyan"}  # fmt: skip
ROOM_FOR_BARS = 64  # columns of a terminal; a narrower one needs the space for words
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_FIGURES = (Table, NameList)


def show(console: Console, document: Document) -> None:
    """Print a document. A paragraph without indent and a table are separated by a blank line; other blocks are not."""
    before: Block | None = None
    for block in document.blocks:
        if before is not None and not isinstance(block, Heading) and _apart(before, block):
            console.print()
        if _print(block, console):
            before = block


def _apart(before: Block, block: Block) -> bool:
    if isinstance(before, _FIGURES):
        return isinstance(block, Paragraph) and (block.item or not block.indent)
    figures = isinstance(block, _FIGURES)
    if isinstance(before, Title):
        return figures or (isinstance(block, Paragraph) and not block.indent)
    return figures and isinstance(before, Paragraph) and not before.indent


def _print(block: Block, console: Console) -> bool:
    """Print a block and return True, or return False for blocks that only a page shows."""
    match block:
        case Title():
            if block.above:
                console.print(_wrapped(Text(block.above, style="dim")))
                console.print()
            console.print(_wrapped(_joined(block.pieces)))
            if block.below:
                console.print(_wrapped(Text(block.below, style="dim")))
        case Heading():
            console.print()
            console.print(_wrapped(Text(block.text, style="bold").append(block.tail, style="not bold dim")))
        case Paragraph():
            pieces = [Cell("· ", block.pieces[0].role), *block.pieces] if block.item else block.pieces
            console.print(Padding(_wrapped(_joined(pieces)), (0, 0, 0, block.indent)))
        case Table():
            _print_table(block, console)
        case NameList():
            console.print(Columns([Text(name) for name in block.names], padding=(0, 3), column_first=True))
        case _:
            return False
    return True


def _print_table(block: Table, console: Console) -> None:
    """Print a table. If it is too wide, text wraps but figures stay whole, and seven or more columns lose padding."""
    rows = [*block.rows, *([block.total] if block.total else [])]
    shown = [i for i, name in enumerate(block.columns) if name != BAR or console.width >= ROOM_FOR_BARS]
    heads = [block.columns[i].lstrip("<|~") for i in shown]
    cells = [[_text(row[i]) for row in rows] for i in shown]
    whole = sum(max(map(cell_len, [head, *_lines(column)])) for head, column in zip(heads, cells, strict=True))
    is_wide = whole + 3 * (len(shown) - 1) + 2 > console.width
    tight = is_wide and len(shown) > 6
    margin = 0 if tight and whole + len(shown) + 1 > console.width else 2
    named = any(head.strip() for head in heads)
    grid = Grid(
        box=box.SIMPLE_HEAD if named else None, pad_edge=False, padding=(0, 0 if tight else 1), show_edge=False,
        header_style="dim", show_header=named,
    )  # fmt: skip
    for i, head, column in zip(shown, heads, cells, strict=True):
        is_figure = i > 0 and not block.columns[i].startswith(("<", "|"))
        width = max(map(cell_len, [*head.split(), *_lines(column)]), default=0) if is_figure and is_wide else None
        grid.add_column(Text(head), justify="right" if is_figure else "left", overflow="fold", width=width)
    for row in zip(*cells, strict=True):
        grid.add_row(*row)
    console.print(Padding(grid, (0, 0, 0, margin)))
    if block.caption:
        console.print(Padding(_wrapped(Text(block.caption, style="dim")), (0, 0, 0, 2)))


def _lines(column: list[Text]) -> list[str]:
    return [line for text in column for line in text.plain.split("\n")]


def _text(piece: Piece) -> Text:
    if isinstance(piece, Bar):
        return bar(piece.fraction, piece.width)
    if isinstance(piece, str):
        return Text(piece)
    text = Text(piece.text, style=STYLES[piece.role])
    return text.append(f"\n{piece.below}", style="not bold dim") if piece.below else text


def bar(fraction: float | None, width: int = 16) -> Text:
    """Draw a horizontal bar in eighths of a character; empty if the fraction is unknown."""
    if fraction is None or fraction <= 0:
        return Text("")
    eighths = max(1, round(min(1.0, fraction) * width * 8))
    return Text("█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip(), style="cyan")


def _joined(pieces: Any) -> Text:
    return Text().join(_text(piece) for piece in pieces)


def _wrapped(text: Text) -> Text:
    """Let long words wrap."""
    text.overflow = "fold"
    return text
