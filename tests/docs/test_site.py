"""The site builds without a warning, is whole, and needs no network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_nothing_comes_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:)?//([^"]+)"', text)
        assert not loaded, (page, loaded)
    assert (site / "search" / "search_index.js").is_file()  # found without a server
