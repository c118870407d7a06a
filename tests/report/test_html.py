"""report.html: one file that needs nothing else, says what the document says, and can be read by everyone."""

from __future__ import annotations

import copy
import itertools
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ironlaw import units
from ironlaw.explain import Explanation
from ironlaw.report.page import render, write
from ironlaw.report.run_view import run_view

VOID = {"meta", "link", "br", "img"}  # HTML elements that are never closed


class Page(HTMLParser):
    """Tags with their attributes, headings in order, visible text, and whether every tag is closed."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.problems: list[str] = []
        self.text = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(tag)

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def flat(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("\u00a0", " "))


def render_run(document: dict[str, Any], metrics: list[dict[str, Any]], config: str) -> str:
    return render(run_view(document, metrics, config))


@pytest.fixture(scope="module")
def source(explanation: Explanation) -> str:
    return render_run(explanation.to_json(), explanation.metrics, explanation.config_text)


@pytest.fixture(scope="module")
def page(source: str) -> Page:
    return Page(source)


def test_it_asks_for_nothing_from_outside(source: str, page: Page) -> None:
    assert not re.search(r"https?:|@import|url\(", source)
    assert not page.all("script") and not page.all("img") and not page.all("iframe")
    assert [link["href"] for link in page.all("link")] == ["data:,"]
    assert not [a for _, attributes in page.tags for a in attributes if a.startswith("on") or a == "src"]


def test_it_is_well_formed(page: Page) -> None:
    assert page.problems == [] and page.open == []
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_it_contains_the_figures(page: Page, document: dict[str, Any], explanation: Explanation) -> None:
    text = flat(page.text)
    assert document["bottleneck"] in text
    for row in (*document["time"]["phases"], *document["time"]["kinds"], *document["time"]["operations"]):
        assert row["name"] in text and units.seconds(row["measured"]) in text
    for row in document["memory"]["components"]:
        assert row["name"] in text and units.bytes_(row["planned"]) in text
    for remedy in document["remedies"]:
        assert remedy["apply"] in text and remedy["risk"] in text
    assert flat(explanation.config_text).strip() in text
    assert "torch 2.13.0+cpu" in text and "AMD EPYC" in text and "2026-01-02" in text
    assert "5.210" in text and "6.430" in text


def test_tables_and_drawings_can_be_read_aloud(page: Page, source: str) -> None:
    assert source.count("<table") == source.count("<caption")
    assert all("scope" in attributes for attributes in page.all("th"))
    drawings = page.all("svg")
    assert len(drawings) > 3
    labelled = {a["id"] for tag in ("title", "desc") for a in page.all(tag) if "id" in a}
    for drawing in drawings:
        assert drawing["role"] == "img"
        assert set((drawing["aria-labelledby"] or "").split()) <= labelled


def test_headings_descend_one_by_one(page: Page) -> None:
    levels = [int(name[1]) for name, _ in page.tags if re.fullmatch(r"h[1-6]", name)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    assert ("lang", "en") in page.all("html")[0].items()


def test_light_dark_phone_and_paper(source: str) -> None:
    assert "prefers-color-scheme: dark" in source and "@media print" in source and "max-width: 620px" in source
    assert 'name="viewport"' in source


def test_absent_is_words_everywhere(explanation: Explanation) -> None:
    bare = copy.deepcopy(explanation.to_json())
    time = bare["time"]
    for rows in (time["phases"], time["kinds"], time["operations"], bare["memory"]["components"]):
        for row in rows:
            row["measured"] = row["error"] = None
    for row in (time["step"], time["total"], time["tokens_per_second"], bare["memory"]["peak"], bare["mfu"]):
        row["measured"] = row["error"] = None
    time["unattributed_seconds"] = time["wall"] = None
    bare["losses"] = dict.fromkeys(bare["losses"])
    bare["facts"] = {"plan": {}, "run": {}}
    page = Page(render_run(bare, [], ""))
    assert "not measured" in page.text and "No steps were recorded" in page.text
    assert not re.search(r"\bNone\b|\bnan\b|Undefined", page.text)


def test_text_from_a_config_cannot_break_the_page(explanation: Explanation) -> None:
    hostile = copy.deepcopy(explanation.to_json())
    hostile["facts"]["plan"]["model"]["name"] = hostile["bottleneck"] = "<script>alert(1)</script>"
    page = Page(render_run(hostile, explanation.metrics, "</pre><script>"))
    assert not page.all("script") and page.problems == []


def test_a_long_run_stays_a_small_file(explanation: Explanation) -> None:
    metrics = [{"step": n, "loss": 5.0, "seconds": 0.1 + (n % 999 == 0)} for n in range(1, 50_001)]
    metrics[70]["loss"] = float("nan")
    source = render_run(explanation.to_json(), metrics, explanation.config_text)
    assert len(source) < 150_000 and not re.search(r"\bnan\b", source)
    assert "50 steps above" in flat(Page(source).text)


def test_written_whole(explanation: Explanation, tmp_path: Path) -> None:
    view = run_view(explanation.to_json(), explanation.metrics, explanation.config_text)
    path = write(tmp_path / "report.html", view)
    assert path.read_text(encoding="utf-8").endswith("</html>\n") or path.read_text(encoding="utf-8").endswith(
        "</html>"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
