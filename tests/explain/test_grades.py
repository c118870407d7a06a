"""The record of what remedies promised and brought, and the table in the docs that is made of it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from ironlaw.explain import grades
from ironlaw.explain.grades import Grade

REPOSITORY = Path(__file__).parents[2]
RECORD, PAGE = REPOSITORY / "benchmarks/results/remedies.jsonl", REPOSITORY / "docs/remedies.md"
_spec = importlib.util.spec_from_file_location("remedies_page", REPOSITORY / "benchmarks/remedies_page.py")
assert _spec is not None and _spec.loader is not None
remedies_page = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(remedies_page)


def grade(predicted: float, measured: float, remedy: str = "precision") -> Grade:
    return Grade(remedy, predicted, measured, "tune", "a machine", "2026-11-21")


@pytest.mark.parametrize(
    ("predicted", "measured", "near"),
    [(0.30, 0.30, True), (0.21, 0.30, True), (0.20, 0.30, False), (0.40, 0.30, False), (0.30, -0.05, False),
     (0.0, 0.01, True), (0.03, -0.02, True), (0.10, 0.0, False)],
)  # fmt: skip
def test_a_promise_is_near_within_a_third_of_what_was_found(predicted: float, measured: float, near: bool) -> None:
    assert remedies_page.is_near(grade(predicted, measured)) is near


def test_grades_are_kept_line_by_line_and_torn_ones_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "remedies.jsonl"
    assert remedies_page.read(path) == []
    for one in (grade(0.3, 0.2), grade(0.1, 0.1, "threads")):
        grades.keep(one, path)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"remedy": "half')
    assert remedies_page.read(path) == [grade(0.3, 0.2), grade(0.1, 0.1, "threads")]


def test_the_date_is_todays_unless_given(tmp_path: Path) -> None:
    grades.keep(Grade("loss", 0.1, 0.1, "tune", "a machine"), tmp_path / "r.jsonl")
    assert json.loads((tmp_path / "r.jsonl").read_text(encoding="utf-8"))["date"][:2] == "20"


def test_the_table_counts_what_was_near() -> None:
    table = remedies_page.table([grade(0.3, 0.3), grade(0.3, 0.1), grade(0.5, 0.4, "data")])
    assert "| `data` | 1 | 50% | 40% | 1 of 1 | 10.0 |" in table
    assert "| `precision` | 2 | 30% | 20% | 1 of 2 | 10.0 |" in table


def test_a_second_run_with_the_remedy_applied_grades_it() -> None:
    remedies = [{"name": "precision", "settings": {"train.precision": "bf16"}, "gain": 0.4}]
    setting = {"name": "train.precision", "before": "fp32", "after": "bf16", "of": "config"}
    other = {"name": "train.steps", "before": 10, "after": 20, "of": "config"}
    found = grades.graded_pair(remedies, [setting], -0.35, "a machine")
    assert found is not None and (found.predicted, found.measured) == (0.4, 0.35)
    assert grades.graded_pair(remedies, [setting, other], -0.35, "a machine") is None
    assert grades.graded_pair(remedies, [setting], None, "a machine") is None


def test_the_page_shows_the_record() -> None:
    """`python benchmarks/remedies_page.py` writes it anew."""
    found = remedies_page.read(RECORD)
    assert found, "no record"
    assert remedies_page.table(found) in PAGE.read_text(encoding="utf-8")
