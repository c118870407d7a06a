"""Progress of a run: a live line on a terminal, occasional lines elsewhere, a page in the browser.

The page of `ironlaw train --dashboard` is served to this machine only, and rendered on request.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ironlaw import units
from ironlaw.ledger import Ledger, relative_error
from ironlaw.report import charts
from ironlaw.report.console import PLAIN_EVERY_SECONDS, progress
from ironlaw.report.document import Cards, Document
from ironlaw.report.page import render

PORT = 8421
REFRESH_SECONDS = 2
RECENT = 50  # number of last steps behind the figures on the cards
MIN_PACE_CHANGE = 0.03  # of the machine's speed, to be reported
SMOOTHING = 0.9  # of the displayed step time, because single steps vary


@contextmanager
def serve_page(html: Callable[[], str]) -> Iterator[str]:
    """Serve the page that `html` renders on each request, and yield its address. A free one replaces a taken `PORT`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/":
                self.send_error(404)
                return
            body = html().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are not logged on the terminal."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", PORT), Handler)
    except OSError:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with server:
        threading.Thread(target=server.serve_forever, name="ironlaw-dashboard", daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()


def _pace(plan: Ledger, seconds: float) -> tuple[str, str, str]:
    """Return the plan's error, tokens per second and MFU at this step time."""
    step = plan.totals["step_seconds"].value
    tokens, mfu = (plan.totals[name].value * step / seconds for name in ("tokens_per_second", "mfu"))
    return units.signed_percent(relative_error(step, seconds), 0), units.count(tokens), units.percent(mfu, 0)


class DataProgress:
    """Progress of (bytes done, bytes in all): a bar with rate and time left, or occasional lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = ExitStack()
        self._update: Callable[[float, str], None] | None = None
        self._began, self._begun_bytes = 0.0, 0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._update is None:  # a resumed preparation does not begin at zero
            self._began, self._begun_bytes = now, done
            self._update = self._shown.enter_context(progress("Tokenising", self._console))
        self._update(done / total if total else 1.0, self._words(done, total, now - self._began))

    def _words(self, done: int, total: int, seconds: float) -> str:
        words = f"{units.bytes_(done)} of {units.bytes_(total)}"
        made = done - self._begun_bytes
        if made > 0 and seconds > 0:
            rate = made / seconds
            words += f"  {units.bytes_(rate)}/s"
            if done < total:
                words += f"  {units.seconds((total - done) / rate)} left"
        return words

    def close(self) -> None:
        self._shown.close()
        self._update = None


class LiveRun:
    """Everything that `train` prints on stderr while it runs, and its page. `data` is a `Dataset`, whose class this
    package may not import; `entry` is what the trainer passes to its watcher after a step."""

    def __init__(self, console: Console, folder: Path, dashboard: bool = False) -> None:
        self.console, self.folder = console, folder
        self._began = time.monotonic()
        self._shown = ExitStack()
        self._live: Live | None = None
        self._plan: Ledger | None = None
        self._steps: list[dict[str, Any]] | None = [] if dashboard else None  # for the page
        self._step_seconds: float | None = None
        self._last_line = 0.0
        self._has_printed_attention = False
        self.say: Callable[[str], None] = console.print
        self.data_progress = DataProgress(console)

    def __enter__(self) -> Self:
        if self._steps is not None:
            self.say(f"Dashboard  {self._shown.enter_context(serve_page(self.html))}")
        return self

    def __exit__(self, *error: object) -> None:
        self.data_progress.close()
        self._shown.close()

    def planned(self, plan: Ledger, data: Any) -> None:
        """Print the head of the run: the prepared data and the plan."""
        self.data_progress.close()
        totals, train, validation = plan.totals, len(data.train.tokens), len(data.validation.tokens)
        source = "from the cache" if data.reused else "prepared"
        text = f"{units.count(train)} training" if train else "tokenised while training,"
        self.say(
            f"Data       {text} and {units.count(validation)} held-out tokens, "
            f"{units.count(data.vocab)} vocabulary entries ({source})"
        )
        if left := ", ".join(f"{n:,} {reason}" for reason, n in data.skipped.items() if reason != "empty"):
            self.say(f"Left out   {left}")
        self.say(
            f"Model      {plan.facts['model']['name']}, {units.count(totals['parameters'].value)} parameters, "
            f"{units.si(totals['flops_per_step'].value, 'FLOP')} per step"
        )
        if plan.facts.get("finetune"):
            self.say(f"Fine-tuning {plan.facts['finetune']}")
        self.say(f"Precision  {plan.facts['precision']} ({plan.facts['precision_reason']})")
        step, pace = totals["step_seconds"], plan.facts.get("pace", 1.0)
        if abs(pace - 1) > MIN_PACE_CHANGE:
            self.say(f"Machine    runs at {1 / pace:.2f} of its usual speed just now, and is planned so in part")
        self.say(
            f"Plan       {units.seconds(step.value)} per step "
            f"({units.seconds(step.low)} to {units.seconds(step.high)}), "
            f"{units.seconds(totals['total_seconds'].value)} in all, "
            f"{units.bytes_(totals['peak_bytes'].value)} of tensors"
        )
        self.say(f"Run        {self.folder}")
        self._plan = plan

    def step(self, entry: dict[str, Any]) -> None:
        if entry["attention"] is not None and not self._has_printed_attention:
            self._has_printed_attention = True
            self.say(f"Attention  {entry['attention']}")
        if self._steps is not None:
            self._steps.append(entry)
        if not entry.get("recorded") and entry["step"] > 2:
            before = self._step_seconds or entry["seconds"]
            self._step_seconds = SMOOTHING * before + (1 - SMOOTHING) * entry["seconds"]
        line = self._line(entry)
        if "validation_loss" in entry:
            self.say(f"  step {entry['step']:>6,}  validation loss {entry['validation_loss']:.3f}")
        if self.console.is_terminal:
            if self._live is None:
                live = Live(line, console=self.console, refresh_per_second=4, transient=True)
                self._live = self._shown.enter_context(live)
            self._live.update(line)
        elif time.monotonic() - self._last_line > PLAIN_EVERY_SECONDS or entry["step"] in (1, entry["steps"]):
            self._last_line = time.monotonic()
            self.console.print(line)

    def _line(self, entry: dict[str, Any]) -> Text:
        assert self._plan is not None
        parts = [f"{entry['step']:>7,}/{entry['steps']:,}", f"loss {entry['loss']:.3f}"]
        seconds = self._step_seconds
        extras: list[str] = []
        if seconds is not None:
            off, rate, mfu = _pace(self._plan, seconds)
            parts += [f"{rate} tok/s", f"step {units.seconds(seconds)} (plan {off})"]
            extras.append(f"MFU {mfu}")
        left = (entry["steps"] - entry["step"]) * (seconds or self._plan.totals["step_seconds"].value)
        parts.append(f"{units.seconds(left)} left")
        # On a narrow terminal the last of these are left out: a line that wraps cannot be redrawn.
        waited = units.seconds(entry.get("data_seconds", 0.0))
        for extra in (*extras, units.bytes_(entry["resident_bytes"]), f"wait {waited}"):
            if len("  ".join([*parts, extra])) <= self.console.width:
                parts.insert(-1, extra)
        return Text("  ".join(parts), no_wrap=True, overflow="ignore")

    def html(self) -> str:
        """Return the page in its current state."""
        footer = f"The page ends with the run; `ironlaw explain {self.folder}` says afterwards where the time went."
        steps, page = list(self._steps or ()), Document(f"{self.folder}: training", footer)
        since = units.seconds(time.monotonic() - self._began)
        page.title(str(self.folder), above=f"Ironlaw, training for {since}")
        page.add(Cards(self._cards(steps)))
        planned = self._plan.totals.get("step_seconds") if self._plan is not None else None
        bounds = {"planned": planned.value, "planned_interval": (planned.low, planned.high)} if planned else {}
        step = {"planned": None, "measured": None} | bounds
        for title, chart in (("Loss", charts.losses(steps)), ("Step time", charts.step_times(steps, step))):
            if chart is not None and len(steps) > 1:
                page.heading(title)
                page.add(chart)
        return render(page, refresh=REFRESH_SECONDS)

    def _cards(self, steps: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
        """Return the figures at the head: name, value, remark."""
        if not steps:
            return [("Step", "none yet", "preparing data, or the first step")]
        last = steps[-1]
        recent = steps[-RECENT:]
        seconds = statistics.median([s["seconds"] for s in recent if not s.get("recorded")] or [last["seconds"]])
        cards = [("Step", f"{last['step']:,}", f"of {last['steps']:,}")]
        cards.append(("Loss", f"{last['loss']:.3f}", "nats per token"))
        validated = [s["validation_loss"] for s in steps if "validation_loss" in s]
        if validated:
            cards.append(("Validation loss", f"{validated[-1]:.3f}", "nats per token"))
        if self._plan is not None:
            off, rate, mfu = _pace(self._plan, seconds)
            cards.append(("Step time", units.seconds(seconds), f"plan {off}"))
            cards.append(("Throughput", rate, "tokens per second"))
            cards.append(("MFU", mfu, "of what was measured here"))
        else:
            cards.append(("Step time", units.seconds(seconds), ""))
        waited = sum(s.get("data_seconds", 0.0) for s in recent) / sum(s["seconds"] for s in recent)
        cards.append(("Waiting for data", units.percent(waited), "of the step"))
        cards.append(("Memory", units.bytes_(last["resident_bytes"]), "of this process"))
        cards.append(("Left", units.seconds((last["steps"] - last["step"]) * seconds), "at this pace"))
        return cards


def print_summary(folder: Path, ledger: Ledger, console: Console) -> None:
    """Print the state of the finished run and the next command."""
    totals, facts = ledger.totals, ledger.facts
    state = f"interrupted by {facts['interrupted']}" if facts["interrupted"] else "done"
    console.print(f"{facts['steps_done']:,} of {facts['steps']:,} steps, {state}")
    losses = {"validation": "", "unigram": ", the baseline that knows only how frequent tokens are"}
    for name, meaning in losses.items():
        if f"{name}_loss" in totals:
            console.print(f"{name + ' loss':<16} {totals[f'{name}_loss'].value:.3f} nats per token{meaning}")
    if facts["interrupted"]:
        console.print(f"go on with       ironlaw train {folder} --out {folder} --resume")
    else:
        console.print(f"next             ironlaw explain {folder}")
