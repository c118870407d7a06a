"""What the verbs share: consoles, JSON on stdout and nothing else there, progress on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

PLAIN_WIDTH = 100  # where the output is not a terminal, and has no width of its own


def output() -> Console:
    """Results, on stdout."""
    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False, soft_wrap=False)


def messages() -> Console:
    """Progress and remarks, on stderr."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else PLAIN_WIDTH, highlight=False)


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=1, allow_nan=False))


@contextmanager
def progress(label: str) -> Iterator[Any]:
    """`with progress("Measuring") as update: update(0.5, "round 3")`: a bar, or a line now and then."""
    console = messages()
    if not console.is_terminal:
        last = -1.0

        def line(fraction: float, what: str = "") -> None:
            nonlocal last
            if fraction >= last + 0.25:
                last = fraction
                console.print(f"{label} {100 * fraction:.0f}%{' ' + what if what else ''}")

        yield line
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(label), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda fraction, what="": bar.update(task, completed=fraction, description=what)
