"""The record's page and plots, from a made-up document."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from ironlaw import units
from ironlaw.report.page import render
from ironlaw.report.record_view import over_limit, record_view, worst_rows
from ironlaw.report.svg import Cloud, scatter, short, short_seconds, ticks


def errors(n: int, size: float = 0.1) -> dict[str, Any]:
    known = {"median": size, "mean": size, "p90": size, "bias": -size}
    return {"n": n} | (known if n else dict.fromkeys(known))


def entry(n: int, memory: int) -> dict[str, Any]:
    return {
        "n": n, "not_planned": 0, "time": errors(n) | {"coverage": 0.8, "baseline": errors(n, 0.4)},
        "memory": errors(memory) | {"coverage": None, "baseline": errors(memory)},
        "regret": {"n": 0, "mean": None, "worst": None, "rank_correlation": None},
        "fits": {"ran_said_to_fit": n, "ran_denied": 0, "failed_said_to_fit": 0, "failed_denied": 1},
    }  # fmt: skip


def row(name: str, group: str, planned: float, measured: float, **more: Any) -> dict[str, Any]:
    return {
        "id": name, "group": group, "engine": "generic", "accelerator": "h200", "accelerators": 8, "ran": True,
        "checks": "time", "predicted_step_seconds": planned, "step_seconds": measured, "predicted_peak_bytes": 1e10,
        "peak_bytes": None, "over_limit": 0.5, "assumed": ["zero = 0 (assumed)"],
    } | more  # fmt: skip


@pytest.fixture
def document() -> dict[str, Any]:
    rows = [row("a/1", "a", 1.1, 1.0), row("a/2", "a", 3.0, 6.0), row("b & <c>/1", "b & <c>", 40.0, 41.0)]
    rows.append(row("b/2", "b & <c>", 1.0, 0.0, ran=False, step_seconds=None, over_limit=1.5))
    return {
        "runs": "/home/somebody/runs.csv", "profile": None, "rows": rows, "overall": entry(3, 0),
        "groups": {"a": entry(2, 0), "b & <c>": entry(1, 0)},
        "not_planned": [{"id": "x", "group": "a", "reason": "layers is not given"}], "unread_columns": [],
    }  # fmt: skip


class Balanced(HTMLParser):
    """Raises on a tag that closes another one."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_stands_alone(document):
    page = render(record_view(document))
    parser = Balanced()
    parser.feed(page)
    assert not parser.open
    assert not re.search(r"https?://|<script", page)
    assert "/home/somebody" not in page and "runs.csv" in page
    assert "b &amp; &lt;c&gt;/1" in page and "<c>" not in page
    assert page.count("<circle") + page.count("<rect") >= 3 and "layers is not given" in page
    assert "a/2: planned 3.00 s, measured 6.00 s, -50.0%" in page
    assert "No run gives it" in page  # memory


def test_a_record_of_nothing_is_still_a_page(document):
    empty = document | {"rows": [], "groups": {}, "overall": entry(0, 0), "not_planned": []}
    assert "No step time to compare with" in render(record_view(empty))


def test_a_perfect_plan_lies_on_the_diagonal():
    drawing = scatter("t", "d", [Cloud(0, [(1.0, 1.0, ""), (100.0, 100.0, "")])], short_seconds)
    places = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', drawing)]
    x0, y0, x1, y1 = map(float, re.findall(r'class="diagonal" d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', drawing)[0])
    for x, y in places:
        assert y == pytest.approx(y0 + (y1 - y0) * (x - x0) / (x1 - x0), abs=0.3)
    assert places[0][0] < places[1][0] and places[0][1] > places[1][1]  # larger to the right and up
    assert scatter("t", "d", [], short_seconds) == ""


def test_ticks_are_round_and_few():
    assert ticks(0.9, 11) == [1.0, 2.0, 5.0, 10.0]
    assert ticks(2.0**30, 2.0**36, base=2) == [2.0**n for n in range(30, 37)]
    for low, high in ((1e-3, 1e3), (1.0, 1.2), (1e-9, 1e9)):
        assert len(ticks(low, high)) <= 8
    assert [short_seconds(v) for v in (0.003, 0.5, 30.0)] == ["3 ms", "500 ms", "30 s"]
    assert [short(units.bytes_(v)) for v in (2.0**29, 2.0**33)] == ["512 MiB", "8 GiB"]


def test_failed_runs_fall_into_classes(document):
    names, counts = over_limit([r for r in document["rows"] if not r["ran"]])
    assert len(names) == len(counts) and sum(counts) == 1 and counts[names.index("125 to 200%")] == 1
    assert over_limit([{"over_limit": 1e9}, {"over_limit": 0.0}])[1] == [1, 0, 0, 0, 0, 0, 1]


def test_the_worst_come_first(document):
    assert [r["id"] for r in worst_rows(document["rows"])] == ["a/2", "a/1", "b & <c>/1"]
