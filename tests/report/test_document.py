"""One document, two renderers: what one shows the other shows too, and text stays text."""

from __future__ import annotations

import io
import re
from html import unescape

import pytest
from rich.console import Console

from ironlaw import units
from ironlaw.report.document import BAR, Bar, Cell, Document, quantity, strong
from ironlaw.report.page import render
from ironlaw.report.terminal import show

HOSTILE = "[red]x[/red] <script> & `code`"


@pytest.fixture
def document() -> Document:
    made = Document(HOSTILE, "footer")
    made.title(strong("A plan of "), HOSTILE, above="above", below="below")
    made.heading(f"Time {HOSTILE}")
    made.items(["first", HOSTILE])
    figure = Cell("0.100 s", "strong", 0.1, below="0.09 to 0.12 s", why="FLOPs / rate")
    made.table(
        ["part", "<kind", "planned", "measured", BAR],
        [[HOSTILE, "matmul", figure, quantity(None, units.seconds), Bar(0.5)]],
        total=[strong("total"), "", "0.100 s", "", ""], caption="Seconds per step.",
    )  # fmt: skip
    made.facts([("Machine", HOSTILE)])
    made.fold("More").text("only a page has room")
    return made


def words(text: str) -> set[str]:
    return set(re.sub(r"[─█▏▎▍▌▋▊▉·`]", " ", text).split())


def test_both_renderers_show_the_same(document: Document) -> None:
    out = io.StringIO()
    show(Console(file=out, width=100, markup=False, highlight=False), document)
    page = render(document)
    visible = unescape(re.sub(r"<[^>]*>", " ", page.partition("<body>")[2]))
    assert words(out.getvalue()) <= words(visible)
    assert "not measured" in out.getvalue() and "0.09 to 0.12 s" in out.getvalue()
    assert "only a page has room" in visible and "only a page" not in out.getvalue()


def test_text_stays_text_and_figures_keep_their_value(document: Document) -> None:
    page = render(document)
    assert "<script" not in page and "[red]x[/red]" in page
    assert '<data value="0.1" class="strong" title="FLOPs / rate">0.100 s</data>' in page
    assert page.count("<th scope=") == 9 and page.count("<td") == 7  # the bar is under the name of its row
