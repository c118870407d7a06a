"""What remedies promised and what they brought: a line for each that was tried, and the table made of all of them.

`ironlaw tune` adds a line per trial, `ironlaw explain RUN_A RUN_B` one when B is A with a remedy of A's applied. They
are kept in the user's cache; the project's own record is benchmarks/results/remedies.jsonl, and docs/remedies.md shows
the table of it.
"""

from __future__ import annotations

import datetime
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ironlaw.files import append_json_line, cache_folder, read_json_lines, write_text

NEAR = 0.30  # of the measured gain
LEAST = 0.04  # of the step: a smaller gain, promised and found, is in the noise of short runs


@dataclass(frozen=True)
class Grade:
    """Gains are fractions of the time per step (per sample, where steps differ in size)."""

    remedy: str
    predicted: float
    measured: float
    source: str  # "tune", "explain" or the benchmark
    machine: str
    date: str = ""

    @property
    def near(self) -> bool:
        """Within 30% of what was found; or there was nothing to find and nothing was promised."""
        if max(abs(self.predicted), abs(self.measured)) < LEAST:
            return True
        return abs(self.predicted - self.measured) <= NEAR * abs(self.measured)


def record_path() -> Path:
    return cache_folder() / "remedies.jsonl"


def keep(grade: Grade, path: Path | None = None) -> None:
    """Append one line; the date is today's unless given."""
    date = grade.date or datetime.date.today().isoformat()
    append_json_line(path or record_path(), asdict(grade) | {"date": date})


def read(path: Path | None = None) -> list[Grade]:
    """Every line that is one; none where there is no record."""
    grades = []
    for entry in read_json_lines(path or record_path()):
        with suppress(TypeError, ValueError):
            grades.append(Grade(**entry))
    return grades


def table(grades: Iterable[Grade]) -> str:
    """Markdown: per remedy how often it was tried, what it promised and brought, and how often that was near."""
    by_name: dict[str, list[Grade]] = {}
    for grade in grades:
        by_name.setdefault(grade.remedy, []).append(grade)
    lines = [
        "| remedy | tried | promised, median | measured, median | within 30% | median error, points of the step |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, found in sorted(by_name.items()):
        error = statistics.median(abs(g.predicted - g.measured) for g in found)
        near = sum(g.near for g in found)
        lines.append(
            f"| `{name}` | {len(found)} | {_percent(g.predicted for g in found)} | "
            f"{_percent(g.measured for g in found)} | {near} of {len(found)} | {100 * error:.1f} |"
        )
    return "\n".join(lines)


def _percent(values: Iterable[float]) -> str:
    return f"{100 * statistics.median(values):.0f}%"


def graded_pair(
    remedies: Sequence[Mapping[str, Any]], settings: Sequence[Mapping[str, Any]], change: float | None, machine: str
) -> Grade | None:
    """The grade that two runs give the first run's advice, when the second differs from it by one remedy's settings.

    `settings`: what differs, as `Comparison.settings`; `change`: of the time per token or step.
    """
    if change is None:
        return None
    changed = {s["name"]: s["after"] for s in settings if s.get("of") == "config"}
    for remedy in remedies:
        if remedy["settings"] and remedy["settings"] == changed:
            return Grade(remedy["name"], remedy["gain"], -change, "explain", machine)
    return None


BEGIN, END = "<!-- made by `python -m ironlaw.explain.grades RECORD PAGE` -->", "<!-- end -->"


def write_page(record: Path, page: Path) -> None:
    """Put the table of a record between the marks of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    write_text(page, f"{before}{BEGIN}\n\n{table(read(record))}\n\n{END}{after}")


if __name__ == "__main__":
    write_page(Path(sys.argv[1]), Path(sys.argv[2]))
