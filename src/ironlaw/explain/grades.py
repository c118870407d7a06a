"""Records what remedies promised and what they brought: a line for each that was tried.

`ironlaw tune` adds a line per trial, `ironlaw explain RUN_A RUN_B` one when B is A with a remedy of A's applied. They
are kept in the user's cache; the project's own record is benchmarks/results/remedies.jsonl, of which
benchmarks/remedies_page.py makes the table of docs/remedies.md.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ironlaw.files import append_json_line, cache_folder, read_json_lines


@dataclass(frozen=True)
class Grade:
    """Gains are fractions of the time per step (per sample, where steps differ in size)."""

    remedy: str
    predicted: float
    measured: float
    source: str  # "tune", "explain" or the benchmark
    machine: str
    date: str = ""


def record_path() -> Path:
    return cache_folder() / "remedies.jsonl"


def keep(grade: Grade, path: Path | None = None) -> None:
    """Append one line; the date is today's unless given."""
    date = grade.date or datetime.date.today().isoformat()
    append_json_line(path or record_path(), asdict(grade) | {"date": date})


def read(path: Path | None = None) -> list[Grade]:
    """Returns every valid line; none without a record."""
    grades = []
    for entry in read_json_lines(path or record_path()):
        with suppress(TypeError, ValueError):
            grades.append(Grade(**entry))
    return grades


def graded_pair(
    remedies: Sequence[Mapping[str, Any]], settings: Sequence[Mapping[str, Any]], change: float | None, machine: str
) -> Grade | None:
    """Returns the grade of the first run's advice if the second run differs from it by one remedy's settings.

    `settings`: what differs, as `Comparison.settings`; `change`: of the time per token or step.
    """
    if change is None:
        return None
    changed = {s["name"]: s["after"] for s in settings if s.get("of") == "config"}
    for remedy in remedies:
        if remedy["settings"] and remedy["settings"] == changed:
            return Grade(remedy["name"], remedy["gain"], -change, "explain", machine)
    return None
