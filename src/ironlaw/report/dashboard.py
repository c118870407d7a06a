"""A page in the browser while training: `ironlaw train --dashboard`. Served to this machine only, drawn when asked for.

page = Dashboard(Path("runs/mine"))
with page:                              # page.address: "http://127.0.0.1:8421/"
    page.planned(plan)
    page.step(report)                   # after each step; costs an append
"""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from ironlaw import units
from ironlaw.ledger import Ledger, relative_error
from ironlaw.report import charts
from ironlaw.report.document import Cards, Document
from ironlaw.report.page import render

PORT = 8421
REFRESH_SECONDS = 2
RECENT = 50  # steps behind the figures on the cards


class Dashboard:
    """Takes what the terminal's live line takes; the page reloads itself every two seconds."""

    def __init__(self, folder: Path, port: int = PORT) -> None:
        self.folder = folder
        self._plan: Ledger | None = None
        self._steps: list[dict[str, Any]] = []
        self._began, self._ended = time.monotonic(), False
        self._server = _serve(self, port)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, name="ironlaw-dashboard", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def planned(self, plan: Ledger) -> None:
        self._plan = plan

    def step(self, report: Any) -> None:
        self._steps.append(asdict(report))

    def html(self) -> str:
        """The page as it stands."""
        steps, page = list(self._steps), Document()
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
        footer = f"The page ends with the run; `ironlaw explain {self.folder}` says afterwards where the time went."
        return render(page, f"{self.folder}: training", footer, refresh=REFRESH_SECONDS)

    def _cards(self, steps: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
        """Heading figures: name, value, what stands beside it."""
        if not steps:
            return [("Step", "none yet", "preparing data, or the first step")]
        last, plan = steps[-1], self._plan.totals if self._plan is not None else {}
        usual = [s["seconds"] for s in steps[-RECENT:] if not s["recorded"]] or [last["seconds"]]
        seconds = statistics.median(usual)
        cards = [("Step", f"{last['step']:,}", f"of {last['steps']:,}")]
        cards.append(("Loss", f"{last['loss']:.3f}", "nats per token"))
        validated = [s["validation_loss"] for s in steps if s["validation_loss"] is not None]
        if validated:
            cards.append(("Validation loss", f"{validated[-1]:.3f}", "nats per token"))
        if "step_seconds" in plan:
            off = relative_error(plan["step_seconds"].value, seconds)
            cards.append(("Step time", units.seconds(seconds), f"plan {units.signed_percent(off, 0)}"))
            tokens = plan["tokens_per_second"].value * plan["step_seconds"].value
            cards.append(("Throughput", units.count(tokens / seconds), "tokens per second"))
            mfu = plan["mfu"].value * plan["step_seconds"].value / seconds
            cards.append(("MFU", units.percent(mfu, 0), "of what was measured here"))
        else:
            cards.append(("Step time", units.seconds(seconds), ""))
        waited = sum(s["data_seconds"] for s in steps[-RECENT:]) / sum(s["seconds"] for s in steps[-RECENT:])
        cards.append(("Waiting for data", units.percent(waited), "of the step"))
        cards.append(("Memory", units.bytes_(last["resident_bytes"]), "of this process"))
        cards.append(("Left", units.seconds((last["steps"] - last["step"]) * seconds), "at this pace"))
        return cards


def _serve(page: Dashboard, port: int) -> ThreadingHTTPServer:
    """On the wanted port, or on any that is free."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/":
                self.send_error(404)
                return
            body = page.html().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are no news for the terminal."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError:
        return ThreadingHTTPServer(("127.0.0.1", 0), Handler)
