"""The report as a browser shows it: it renders, complains of nothing, and fits a phone, in light and dark."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from ironlaw.explain.explanation import Explanation
from ironlaw.report.page import render
from ironlaw.report.run_view import FOOTER, run_view

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: install it to see the report as a browser does")
# What the browser made of the page, written into it for `--dump-dom`. Tab goes through what can hold the focus.
ASKED = """<script>addEventListener("load", () => {
  const seen = [...document.querySelectorAll("a[href], summary, button, [tabindex]")].filter(e => e.offsetParent);
  const reached = seen.filter(e => { e.focus(); return document.activeElement === e && e.tabIndex >= 0; });
  const drawn = [...document.querySelectorAll("svg")].map(e => e.getBoundingClientRect());
  const style = getComputedStyle(document.body);
  const answer = { inner: innerWidth, scroll: document.documentElement.scrollWidth, focusable: seen.length,
    reached: reached.length, drawn: drawn.filter(r => r.width > 0 && r.height > 0).length,
    background: style.backgroundColor, color: style.color, heading: document.querySelector("h1").innerText,
    unnamed: [...document.querySelectorAll("svg")].filter(
      e => e.offsetParent !== null && !e.closest("[aria-hidden=true]") && !e.getAttribute("aria-label")
        && !e.getAttribute("aria-labelledby") && !e.querySelector("title")).length };
  const out = document.createElement("pre"); out.id = "answer"; out.textContent = JSON.stringify(answer);
  parent.document.body.append(out);
});</script></body>"""


def looked_at(
    explanation: Explanation, folder: Path, *options: str, frame: int | None = None
) -> dict[str, Any]:  # fmt: skip
    """What the browser saw; whatever it said to its console fails the test. `frame`: pixels to see it in."""
    page = folder / "report.html"
    view = run_view(explanation.to_json(), explanation.metrics, explanation.config_text)
    source = render(view, "a run", FOOTER)
    text = source.replace("</body>", ASKED)
    if frame is not None:  # a window without a head is never narrower than 500
        text = f'<!doctype html><body><iframe width={frame} height=844 frameborder=0 srcdoc="{escape(text)}"></iframe>'
    page.write_text(text, encoding="utf-8")
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
         "--enable-logging=stderr", "--window-size=1200,900", *options, "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    found = re.search(r'<pre id="answer">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stdout[-500:]
    return dict(json.loads(unescape(found[1])))


def test_it_renders_and_every_control_is_reached_by_keyboard(explanation: Explanation, tmp_path: Path) -> None:
    seen = looked_at(explanation, tmp_path)
    assert seen["heading"] and seen["drawn"] > 0 and seen["unnamed"] == 0
    assert seen["focusable"] > 0 and seen["reached"] == seen["focusable"]
    assert seen["scroll"] <= seen["inner"]


def test_it_fits_a_phone(explanation: Explanation, tmp_path: Path) -> None:
    seen = looked_at(explanation, tmp_path, frame=390)
    assert seen["inner"] == 390 and seen["scroll"] <= seen["inner"]
    assert seen["drawn"] > 0


def test_dark_is_dark_and_light_is_light(explanation: Explanation, tmp_path: Path) -> None:
    def brightness(color: str) -> float:
        return sum(map(float, re.findall(r"[\d.]+", color)[:3]))

    for scheme, darker in ((0, "background"), (1, "color")):  # Blink's numbers: 0 is dark
        folder = tmp_path / str(scheme)
        folder.mkdir()
        seen = looked_at(explanation, folder, f"--blink-settings=preferredColorScheme={scheme}")
        lighter = "color" if darker == "background" else "background"
        assert brightness(seen[darker]) + 200 < brightness(seen[lighter]), (scheme, seen)
