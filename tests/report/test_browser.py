"""The report as a browser shows it: it renders, complains of nothing, and fits a phone, in light and dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ironlaw.explain.explanation import Explanation
from ironlaw.report.document import Cell
from ironlaw.report.page import write
from ironlaw.report.run_view import run_view

from ..docs.browser import CHROMIUM, Browser

BROKEN = """[...document.querySelectorAll("code span")].filter(
  e => e.innerText.startsWith("--") && e.getClientRects().length > 1).length"""  # a box on each line
# Tab goes through what can hold the focus.
ASKED = """(() => {
  const seen = [...document.querySelectorAll("a[href], summary, button, [tabindex]")].filter(e => e.offsetParent);
  const reached = seen.filter(e => { e.focus(); return document.activeElement === e && e.tabIndex >= 0; });
  const drawn = [...document.querySelectorAll("svg")].map(e => e.getBoundingClientRect());
  const brightness = color => color.match(/[\\d.]+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0);
  const style = getComputedStyle(document.body);
  return { inner: innerWidth, scroll: document.documentElement.scrollWidth, focusable: seen.length,
    reached: reached.length, drawn: drawn.filter(r => r.width > 0 && r.height > 0).length,
    background: brightness(style.backgroundColor), color: brightness(style.color),
    unnamed: [...document.querySelectorAll("svg")].filter(
      e => e.offsetParent !== null && !e.closest("[aria-hidden=true]") && !e.getAttribute("aria-label")
        && !e.getAttribute("aria-labelledby") && !e.querySelector("title")).length };
})()"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: install it to see the report as a browser does")
def test_it_is_shown_as_it_should(explanation: Explanation, tmp_path: Path) -> None:
    view = run_view(explanation.to_json(), explanation.metrics, explanation.config_text)
    view.text(Cell("--set train.steps=425 " * 9, "code"))
    page = write(tmp_path / "report.html", view)
    with Browser(tmp_path / "profile") as browser:

        def seen(*window: Any) -> Any:
            browser.view(*window)
            browser.open(page)
            found = browser.run(ASKED)
            assert found["drawn"] > 0 and found["unnamed"] == 0
            assert found["focusable"] > 0 and found["reached"] == found["focusable"]
            assert found["inner"] == window[0] >= found["scroll"]
            return found

        light, dark = seen(1200, 900, "light"), seen(390, 844, "dark")
        assert light["color"] + 200 < light["background"] and dark["background"] + 200 < dark["color"]
        for width in range(320, 400, 8):
            browser.view(width, 844)
            assert browser.run(BROKEN) == 0, width
        assert browser.complaints == []
