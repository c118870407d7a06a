"""View of a sweep of formats: the frontier of loss against bytes and speed."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from ironlaw import units
from ironlaw.report.document import Cell, Chart, Document
from ironlaw.report.svg import Series, line_chart

AXES = {"bytes": "bytes of the weights", "tokens_per_second": "tokens per second of one sequence"}
HEADS = ("", "<", "weights", "change of the loss", "tokens/s", "read", "<kernel")

Point = Mapping[str, Any]


def sweep_view(found: Mapping[str, Any]) -> Document:
    title, points = f"Formats of {found['source']}", found["points"]
    view = Document(title, "Made by `ironlaw compress --sweep`.")
    view.title(title)
    rows = [
        [Cell(cell, "strong" if point["frontier"] else "dim") for cell in cells]
        for cells, point in zip(_rows(points), points, strict=True)
    ]
    view.table(HEADS, rows)
    page = view.fold()
    for axis, name in AXES.items():
        page.heading(f"Loss (upwards) against {name} (to the right)")
        page.add(Chart(_chart(points, axis)))
    for text in _notes(found):
        view.note(text, indent=2)
    return view


def _rows(points: Sequence[Point]) -> list[tuple[str, ...]]:
    whole = points[0]
    return [
        (
            f"{letter} {'*' if point['frontier'] else ' '}", point["name"], units.bytes_(point["bytes"]),
            f"{point['loss']:.4f}" if point is whole else f"{point['loss'] - whole['loss']:+.4f}",
            f"{point['tokens_per_second']:.1f}", f"{1e-9 * point['bytes_read'] * point['tokens_per_second']:.1f} GB/s",
            ", ".join(point["kernels"]) or ("" if point is whole else "none: dequantised"),
        )
        for letter, point in zip(string.ascii_letters, points, strict=False)
    ]  # fmt: skip


def _notes(found: Mapping[str, Any]) -> list[str]:
    notes = [
        "*: nothing else is smaller, faster and better at once. Read: weights a second while one sequence is decoded. "
        f"Loss of {found['held_out_tokens']:,} held-out tokens, by the kernels that decode."
    ]
    rate = found["read_bytes_per_second"]
    if rate is not None:
        notes.append(
            f"This machine copies {1e-9 * rate:.1f} GB/s (ironlaw measure): decoding reads no faster, but from caches."
        )
    if found.get("interrupted"):
        notes.append("Interrupted: the other formats were not tried.")
    if found["left_out"]:
        notes.append(f"Not tried within the budget: {'; '.join(found['left_out'])}.")
    return notes


def _frontier(points: Sequence[Point], axis: str) -> list[Point]:
    """Return the points that are best in loss and this axis (the Pareto frontier), in the order of the axis."""
    sign = 1 if axis == "bytes" else -1
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (sign * p[axis], p["loss"])):
        if not kept or point["loss"] < kept[-1]["loss"]:
            kept.append(point)
    return sorted(kept, key=lambda p: float(p[axis]))


def _chart(points: Sequence[Point], axis: str) -> Markup:
    scale, unit = 1.0, AXES[axis]
    if axis == "bytes":
        scale, unit = (1e-6, "MB") if points[0]["bytes"] > 1e8 else (1e-3, "kB")
    best = _frontier(points, axis)
    series = [
        Series([scale * p[axis]], [p["loss"]], "validation", dots=True, label=letter)
        for letter, p in zip(string.ascii_letters, points, strict=False)
    ]
    series.append(Series([scale * p[axis] for p in best], [p["loss"] for p in best], "measured"))
    described = ", ".join(f"{p['name']}: {p['loss']:.4f}" for p in best)
    return line_chart(f"Loss against {AXES[axis]}", described, series, y_text="{:.3f}".format, x_name=unit)
