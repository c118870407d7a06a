"""What is installed is whole, and what is said about it in several files is the same."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ironlaw
from ironlaw.machine.doctor import CORE, EXTRAS

from .conftest import environment_with

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    assert ironlaw.__version__ in wheel.name
    files = {path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    wanted = {str(path.relative_to(ROOT / "src")) for path in files if ".egg-info" not in str(path)}
    assert "ironlaw/py.typed" in wanted and "ironlaw/examples/gpt-tiny.toml" in wanted
    assert wanted <= set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.long
def test_the_wheel_works_alone(wheel: Path, user_cache: Path, tmp_path: Path) -> None:
    """In an environment that sees the dependencies and no repository."""
    here = environment_with(wheel, tmp_path / "venv")
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    script = ["sh", str(ROOT / "scripts" / "check_install.sh")]
    done = subprocess.run(
        script, env=clean | {"IRONLAW": str(here / "ironlaw")}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and f"installed and working: {ironlaw.__version__}" in done.stdout, done.stderr


def distributions(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=]", requirement)[0] for requirement in requirements}


def test_the_doctor_knows_every_extra() -> None:
    extras = PROJECT["optional-dependencies"]
    assert EXTRAS.keys() == extras.keys()
    for name, (parts, gives) in EXTRAS.items():
        assert set(parts) <= distributions(extras[name]) and gives
    assert set(CORE) <= distributions(PROJECT["dependencies"])


def test_versions_agree() -> None:
    version = ironlaw.__version__
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert (ROOT / "CHANGELOG.md").read_text("utf-8").split("## ")[1].startswith(version)
    pythons = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c}
    assert pythons == set(re.findall(r'"(3\.\d+)"', (ROOT / ".github/workflows/ci.yml").read_text("utf-8")))


def test_the_doctor(ironlaw_here: Callable[..., tuple[int, str, str]], user_cache: Path) -> None:
    code, text, _ = ironlaw_here("doctor", "--json")
    found = json.loads(text)
    assert code == 0 and found["healthy"] and found["problems"] == []
    assert (
        found["versions"]["torch"] and found["devices"][0]["device"] == "cpu" and found["measured"]["device"] == "cpu"
    )
    assert {extra["name"] for extra in found["extras"]} == EXTRAS.keys()
    code, text, _ = ironlaw_here("doctor")
    assert code == 0 and "Optional parts" in text and "Trainer callback" in text


def test_a_broken_profile_is_a_problem(ironlaw_here: Callable[..., tuple[int, str, str]], user_cache: Path) -> None:
    (user_cache / "ironlaw" / "machine" / "this.json").write_text("{}")
    code, text, _ = ironlaw_here("doctor")
    assert code == 1 and "run `ironlaw measure` again" in " ".join(text.split())
    (user_cache / "ironlaw" / "machine" / "this.json").unlink()
    code, text, _ = ironlaw_here("doctor")
    assert code == 0 and "not measured" in text


def test_a_cache_that_cannot_be_written_is_said_before_measuring(
    ironlaw_here: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    code, text, _ = ironlaw_here("doctor", "--json")
    assert code == 1 and "set XDG_CACHE_HOME" in json.loads(text)["problems"][0]
    code, _, messages = ironlaw_here("measure")
    assert code == 2 and "set XDG_CACHE_HOME" in messages and "Measuring" not in messages


def test_examples_come_with_the_package(ironlaw_here: Callable[..., tuple[int, str, str]], user_cache: Path) -> None:
    code, text, _ = ironlaw_here("plan", "examples/gpt-tiny.toml", "--json")
    assert code == 0 and json.loads(text)["parameters"]["value"] > 4e6
    code, _, messages = ironlaw_here("plan", "examples/no-such.toml")
    assert code == 2 and "no config file at examples/no-such.toml" in messages
