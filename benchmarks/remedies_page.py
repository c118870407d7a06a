"""What remedies promised and what they brought: the table in docs/remedies.md, made of a record of grades.

    python benchmarks/remedies_page.py benchmarks/results/remedies.jsonl docs/remedies.md

The record has a line for each remedy that was tried (`ironlaw.explain.grades`).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ironlaw.explain.grades import Grade
from ironlaw.files import read_json_lines, write_text

NEAR = 0.30  # of the measured gain
LEAST = 0.04  # of the step: a smaller gain, promised and found, is in the noise of short runs
BEGIN, END = "<!-- made by `python benchmarks/remedies_page.py RECORD PAGE` -->", "<!-- end -->"


def is_near(grade: Grade) -> bool:
    """Within 30% of what was found; or there was nothing to find and nothing was promised."""
    if max(abs(grade.predicted), abs(grade.measured)) < LEAST:
        return True
    return abs(grade.predicted - grade.measured) <= NEAR * abs(grade.measured)


def read(path: Path) -> list[Grade]:
    """Every line that is one; none where there is no record."""
    grades = []
    for entry in read_json_lines(path):
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
        near = sum(map(is_near, found))
        lines.append(
            f"| `{name}` | {len(found)} | {_percent(g.predicted for g in found)} | "
            f"{_percent(g.measured for g in found)} | {near} of {len(found)} | {100 * error:.1f} |"
        )
    return "\n".join(lines)


def _percent(values: Iterable[float]) -> str:
    return f"{100 * statistics.median(values):.0f}%"


def write_page(record: Path, page: Path) -> None:
    """Put the table of a record between the marks of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    write_text(page, f"{before}{BEGIN}\n\n{table(read(record))}\n\n{END}{after}")


if __name__ == "__main__":
    write_page(Path(sys.argv[1]), Path(sys.argv[2]))
