"""Renders a document as one HTML page that works offline, on a phone and in print."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from ironlaw.files import write_text
from ironlaw.report.document import BAR, Bar, Document, Heading, Paragraph, Piece, Row, Title


def render(document: Document, refresh: int | None = None) -> str:
    """Render a document, which begins with its title, as a page. `refresh`: seconds after which the page reloads."""
    title, *blocks = document.blocks
    assert isinstance(title, Title)
    sections = [Document()]
    for block in blocks:
        if isinstance(block, Heading) and block.level == 2:
            sections.append(Document())
        sections[-1].add(block)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    filters = (_ticks, _code, _kinds, _column, _key, _laid, _parted)
    environment.filters |= {function.__name__.lstrip("_"): function for function in filters}
    page = environment.get_template("page.html.j2")
    return page.render(name=document.page, title=title, sections=sections, footer=document.footer, refresh=refresh)


def write(path: Path, document: Document) -> Path:
    """Render the page and write it atomically: an old one stays until the new one is complete."""
    write_text(path, render(document))
    return path


def _kinds(document: Document) -> Iterator[tuple[str, Any]]:
    """Yield the blocks with their kinds; the items of a list are one entry."""
    for is_list, run in groupby(document.blocks, lambda block: isinstance(block, Paragraph) and block.item):
        if is_list:
            yield "Items", list(run)
        else:
            yield from ((type(block).__name__, block) for block in run)


def _ticks(text: str) -> Markup:
    """Return text with `code` marked by backticks, as in notes and advice."""
    parts = [escape(part) for part in text.split("`")]
    return Markup("").join(_code(part) if i % 2 else part for i, part in enumerate(parts))


def _code(text: str) -> Markup:
    """Return code as HTML whose words are not broken across lines, as a browser would break `--set` after a hyphen."""
    return Markup("<code>%s</code>") % Markup(" ").join(Markup("<span>%s</span>") % word for word in text.split())


def _column(heading: str) -> Markup:
    """Return the HTML attributes of a column's cells."""
    classes = [name for mark, name in (("<", "text"), ("~", "hide-narrow")) if mark in heading[:2]]
    return Markup(' class="%s"') % " ".join(classes) if classes else Markup("")


def _parted(figure: str) -> tuple[str, str]:
    """Split "205 ms" into number and unit; words for an unknown figure are all unit."""
    number, _, unit = figure.partition(" ")
    return (number, unit) if number[:1].isdigit() else ("", figure)


def _laid(cells: Row, columns: Sequence[str]) -> tuple[list[Bar], list[tuple[str, Piece]]]:
    """Return the bars of a row, and its other cells with their columns' headings."""
    bars = [cell for cell in cells if isinstance(cell, Bar)]
    return bars, [(name, cell) for name, cell in zip(columns, cells, strict=True) if name != BAR]


def _key(style: str) -> Markup:
    """Return the mark of a legend entry: a line if its style begins with `line-`; finished drawings are unchanged."""
    if isinstance(style, Markup):
        return style
    return Markup('<i class="%s"></i>') % (f"rule {style}" if style.startswith("line-") else style)
