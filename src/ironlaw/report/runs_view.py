"""A table of runs, and their losses as one line of blocks each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from ironlaw.report import words
from ironlaw.report.tables import show, table

_BLOCKS = "▁▂▃▄▅▆▇█"
COLUMNS = {"step_seconds": "step", "tokens_per_second": "throughput", "mfu": "MFU", "validation_loss": "val. loss"}


def show_runs(console: Console, runs: Sequence[Mapping[str, Any]], curves: Mapping[str, Sequence[float]]) -> None:
    made = table("run", "model", "steps", *COLUMNS.values(), "loss", left=("model", "loss"))
    for run in runs:
        figures = [_figure(name, run.get(name)) for name in COLUMNS]
        name = run["run"] if run["state"] == "done" else f"{run['run']} ({run['state']})"
        made.add_row(name, run.get("model") or "", str(run.get("steps") or ""), *figures,
                     sparkline(curves.get(run["run"], ())))  # fmt: skip
    show(console, made)


def _figure(name: str, value: float | None) -> str:
    return "" if value is None else words.quantity(name, value).removesuffix(" nats/token")


def sparkline(values: Sequence[float], width: int = 12) -> str:
    """The course of a curve in eighths of a line; empty for fewer than two values."""
    if len(values) < 2:
        return ""
    size = max(1, len(values) // width)
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)][:width]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[min(7, int(8 * (v - low) / span))] for v in means)
