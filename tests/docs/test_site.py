"""The site builds without a warning, is whole, needs no network, and is shown as it should by a browser."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .browser import CHROMIUM, Browser

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Strict: a dead link, a missing anchor or a page outside of the navigation fails the build."""
    pytest.importorskip("mkdocs", reason="pip install 'ironlaw[docs]'")
    pytest.importorskip("mkdocstrings")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "-d", str(out)]
    built = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
    return out


@pytest.mark.slow
def test_the_reference_has_every_verb_key_and_function(site: Path) -> None:
    import ironlaw
    from ironlaw.cli.main import VERBS
    from ironlaw.config import RunConfig

    verbs, keys, api = ((site / "reference" / f"{name}.html").read_text("utf-8") for name in ("cli", "config", "api"))
    assert (
        all(f'id="{verb}"' in verbs for verb in VERBS) and "--global-batch" in verbs and "--engine, --profile" in verbs
    )
    for section, field in RunConfig.model_fields.items():
        for key in getattr(field.annotation, "model_fields", ()):
            assert f"{section}.{key}" in keys
    assert "sequences per optimizer step" in keys and "serve.token_budget" in keys
    assert all(f"ironlaw.api.{name}" in api for name in ironlaw.CALLABLE)
    documents = (site / "reference" / "documents.html").read_text("utf-8")
    for page in (verbs, keys, documents):  # name, meaning, ...: a comment in the code is missing where it is empty
        rows = re.findall(r"<tr>\s*<td><code>(.*?)</code></td>\s*<td>(.*?)</td>", page, re.S)
        assert len(rows) > 20 and [name for name, meaning in rows if not meaning] == []


@pytest.mark.slow
def test_nothing_comes_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:)?//([^"]+)"', text)
        assert not loaded, (page, loaded)
    assert (site / "search" / "search_index.js").is_file()  # found without a server


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium: install it to see the site as a browser does")
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


VIEWS = {"desktop": (1280, 900, "light"), "phone": (390, 844, "light"), "dark": (1280, 900, "dark")}
SOME = ["index.html", "tutorial.html", "howto/cluster.html", "reference/config.html", "accuracy.html"]
BRIGHTNESS = """(element => getComputedStyle(element).backgroundColor.match(/[\\d.]+/g).slice(0, 3)
    .reduce((sum, part) => sum + Number(part), 0))(document.body)"""


def looked_at(browser: Browser, view: str, pages: list[Path]) -> None:
    """Each page in this window: no complaint, nothing wider than the window, and dark only where that is asked."""
    browser.view(*VIEWS[view])
    for page in pages:
        browser.open(page)
        assert browser.run("document.documentElement.scrollWidth") <= VIEWS[view][0], page.name
        assert browser.run("document.querySelector('h1').getBoundingClientRect().width") > 0, page.name
        assert (browser.run(BRIGHTNESS) < 200) == (view == "dark"), page.name
    assert browser.complaints == []


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS)
def test_a_browser_shows_it(site: Path, browser: Browser, view: str) -> None:
    looked_at(browser, view, [site / page for page in SOME])


@pytest.mark.long
@pytest.mark.parametrize("view", VIEWS)
def test_a_browser_shows_every_page(site: Path, browser: Browser, view: str) -> None:
    looked_at(browser, view, sorted(page for page in site.rglob("*.html") if page.name != "404.html"))


FOUND = """new Promise(done => {
  const look = () => {
    const links = [...document.querySelectorAll(".md-search-result__link")].map(link => link.getAttribute("href"));
    links.length ? done(links) : setTimeout(look, 20);
  };
  look();
})"""


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_search_finds_without_a_server(site: Path, browser: Browser) -> None:
    browser.view(*VIEWS["desktop"])
    browser.open(site / "index.html")
    browser.run("document.querySelector('input.md-search__input').focus()")
    browser.ask("Input.insertText", text="roofline")
    for kind in ("keyDown", "keyUp"):  # the page reads its field when a key is let go
        browser.ask("Input.dispatchKeyEvent", type=kind, key="Shift")
    assert any("explanation/roofline.html" in link for link in browser.run(FOUND))
    assert browser.complaints == []
