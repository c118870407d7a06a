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
    """Print a table. If it is too wide, text wraps between words and figures stay whole; it loses padding if that does
    not fit, or if it has seven or more columns. If words do not fit either, they are broken."""
    rows = [*block.rows, *([block.total] if block.total else [])]
    shown = [i for i, name in enumerate(block.columns) if name != BAR or console.width >= ROOM_FOR_BARS]
    heads = [block.columns[i].lstrip("<|~") for i in shown]
    cells = [[_text(row[i]) for row in rows] for i in shown]
    is_figure, whole, least = list[bool](), list[int](), list[int]()  # widths: of whole lines, of what is not broken
    for i, head, column in zip(shown, heads, cells, strict=True):
        is_figure.append(i > 0 and not block.columns[i].startswith(("<", "|")))
        lines = [line for text in column for line in text.plain.split("\n")]
        words = lines if is_figure[-1] else " ".join(lines).split()
        whole.append(max(map(cell_len, [head, *lines])))
        least.append(max(map(cell_len, [*head.split(), *words]), default=0))
    between, margin = len(shown) - 1, 2
    room = console.width - 3 * between - margin
    tight = sum(whole) > room and (len(shown) > 6 or sum(least) > room)
    if tight and sum(whole) + between + margin > console.width:
        margin = 0
    widths = _narrowed(console.width - (1 if tight else 3) * between - margin, whole, least)
    named = any(head.strip() for head in heads)
    grid = Grid(
        box=box.SIMPLE_HEAD if named else None, pad_edge=False, padding=(0, 0 if tight else 1), show_edge=False,
        header_style="dim", show_header=named,
    )  # fmt: skip
    for head, figure, width, narrow in zip(heads, is_figure, widths or whole, least, strict=True):
        fixed = width if widths else narrow if figure else None  # else words are broken, figures not
        grid.add_column(Text(head), justify="right" if figure else "left", overflow="fold", width=fixed)
    for row in zip(*cells, strict=True):
        grid.add_row(*row)
    console.print(Padding(grid, (0, 0, 0, margin)))
    if block.caption:
        console.print(Padding(_wrapped(Text(block.caption, style="dim")), (0, 0, 0, 2)))


def _narrowed(room: int, whole: list[int], least: list[int]) -> list[int] | None:
    """Return the columns' widths: the widest give way first, none below its least. None if even these do not fit."""
    widths = list(whole)
    while sum(widths) > room:
        wider = [i for i, width in enumerate(widths) if width > least[i]]
        if not wider:
            return None
        widths[max(wider, key=widths.__getitem__)] -= 1
    return widths


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
