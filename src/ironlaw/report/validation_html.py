"""The planner's record as one file that opens offline: scatter plots, tables, and every run that was missed most."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ironlaw import units
from ironlaw.files import write_text
from ironlaw.report.scatter import Cloud, Point, legend_mark, scatter, short_bytes, short_seconds
from ironlaw.report.validation_view import EXPLAINED, over_limit, percent, with_all, worst_rows

Document = Mapping[str, Any]
QUANTITIES: dict[str, tuple[str, str, Callable[[float | None], str], Callable[[float], str], int]] = {
    # key of the errors: planned, measured, how it is printed, how a tick is printed and in which base ticks are round
    "time": ("predicted_step_seconds", "step_seconds", units.seconds, short_seconds, 10),
    "memory": ("predicted_peak_bytes", "peak_bytes", units.bytes_, short_bytes, 2),
}


def render_validation(document: Document) -> str:
    """The page, from the document of `Record.to_json`."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"percent": percent, "seconds": units.seconds}
    failed = [row for row in document["rows"] if not row["ran"]]
    names, counts = over_limit(failed)
    colours = {name: index for index, name in enumerate(document["groups"])}
    return environment.get_template("validation.html.j2").render(
        d=document,
        source=Path(document.get("runs") or "measured runs").name,
        explained=EXPLAINED,
        entries=with_all(document),
        marks={name: legend_mark(index) for name, index in colours.items()},
        plots={key: _plot(document, key, colours) for key in QUANTITIES},
        failed=sorted(failed, key=lambda row: -row["over_limit"]),
        failed_classes=list(zip(names, counts, strict=True)),
        worst=worst_rows(document["rows"]),
        assumptions=_assumptions(document),
        planned=document["overall"]["n"] - document["overall"]["not_planned"],
    )


def write_validation(path: Path, document: Document) -> Path:
    """Render and write the page whole."""
    write_text(path, render_validation(document))
    return path


def _plot(document: Document, key: str, colours: Mapping[str, int]) -> Any:
    planned, measured, text, tick, base = QUANTITIES[key]
    clouds: dict[str, list[Point]] = {}
    for row in document["rows"]:
        if row["ran"] and row[measured] and key in row["checks"]:
            error = row[planned] / row[measured] - 1
            title = f"{row['id']}: planned {text(row[planned])}, measured {text(row[measured])}, {100 * error:+.1f}%"
            clouds.setdefault(row["group"], []).append(Point(row[measured], row[planned], title))
    errors = document["overall"][key]
    if not errors["n"]:
        return None
    description = (
        f"{errors['n']} runs, median error {percent(errors['median'])} percent, mean {percent(errors['mean'])}"
    )
    found = [Cloud(name, colours[name], points) for name, points in clouds.items()]
    return {"drawing": scatter(EXPLAINED[key][0], description, found, tick, base), "groups": list(clouds)}


def _assumptions(document: Document) -> list[tuple[str, int]]:
    """What was assumed for rows that leave something open, and for how many."""
    counts: dict[str, int] = {}
    for row in document["rows"]:
        for text in row["assumed"]:
            counts[text] = counts.get(text, 0) + 1
    return sorted(counts.items(), key=lambda pair: -pair[1])
