"""Console output shared by the verbs: results or only JSON on stdout, progress on stderr."""

from __future__ import annotations

import io
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.segment import Segment

from ironlaw.errors import printable
from ironlaw.report.document import Document

PLAIN_EVERY_SECONDS = 5.0  # between lines of progress if the output is not a terminal
PLAIN_WIDTH = 100  # if the output is not a terminal and has no width of its own


class _Printable:
    """A renderable with control characters escaped: names and texts come from untrusted files."""

    def __init__(self, drawn: ConsoleRenderable) -> None:
        self._drawn = drawn

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._drawn, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


class _PrintableOnly(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Printable(drawn) for drawn in renderables]


class Unfailing:
    """A stream whose reader may disappear: a closed terminal, or a log on a full disk. After a failed write, the output
    and the stream's buffer are discarded: a run is worth more than its messages."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            silence(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            silence(self._stream)


def has_reader(stream: TextIO) -> bool:
    """Return whether anybody can read what is written to a stream: not so when `| head` has ended."""
    watch = select.poll()
    watch.register(stream.fileno(), 0)
    return not watch.poll(0)


def silence(stream: TextIO) -> None:
    """Discard everything written to a stream from now on, including what the interpreter flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _console(stream: Any, **options: Any) -> Console:
    """Return a console without markup: square brackets are text, and styles are passed as arguments."""
    width = None if stream.isatty() else PLAIN_WIDTH
    console = Console(file=stream, width=width, highlight=False, markup=False, emoji=False, **options)
    console.push_render_hook(_PrintableOnly())
    return console


def output() -> Console:
    """Return the console for results, on stdout."""
    return _console(sys.stdout)


def messages() -> Console:
    """Return the console for progress and messages, on stderr."""
    return _console(Unfailing(sys.stderr))


def recorder() -> Console:
    """Return a console that keeps its output, for export as text or HTML."""
    return _console(io.StringIO(), record=True, force_terminal=False, force_jupyter=False, color_system=None)


def show(*views: Document) -> None:
    """Print views on stdout, one after the other."""
    from ironlaw.report.terminal import show as show_on

    console = output()
    for view in views:
        show_on(console, view)


answered: list[Any] = []  # the document of this command, if it is printed: an error after it prints no second one


def print_json(document: Any) -> None:
    answered.append(document)
    print(json.dumps(document, indent=1, allow_nan=False), flush=True)


def answer(as_json: bool, document: Any, view: Callable[[Any], Document]) -> None:
    """Print a verb's JSON document, or the view of it."""
    if as_json:
        print_json(document)
    else:
        show(view(document))


@contextmanager
def progress(label: str, console: Console | None = None) -> Iterator[Any]:
    """Show a bar, or lines if not on a terminal: `with progress("Measuring") as update: update(0.5, "round 3")`."""
    console = console or messages()
    if not console.is_terminal:
        last = -PLAIN_EVERY_SECONDS

        def line(fraction: float, what: str = "") -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= PLAIN_EVERY_SECONDS or fraction >= 1:
                last = now
                console.print(f"{label} {100 * fraction:.0f}%{' ' + what if what else ''}")

        yield line
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    what = TextColumn("{task.description}", markup=False)
    columns = (TextColumn(label, markup=False), BarColumn(), what, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda fraction, what="": bar.update(task, completed=fraction, description=what)
