"""The package as a user installs it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the repository."""
    copy = tmp_path_factory.mktemp("build")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    made = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return copy / made.stdout.splitlines()[-1]


def environment_with(what: Path, folder: Path) -> Path:
    """`bin` of an environment that sees the dependencies and has Ironlaw from a wheel or a clone."""
    venv.create(folder, with_pip=True)
    # Of Python 3.11: older than what builds us. The one beside PyTorch is seen when it is gone.
    subprocess.run([folder / "bin" / "pip", "uninstall", "-q", "-y", "setuptools"], check=True)
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    how = ["--no-deps", "--no-index", *([what] if what.is_file() else ["--no-build-isolation", "-e", what])]
    subprocess.run([folder / "bin" / "pip", "install", "-q", "--force-reinstall", *how], check=True)
    return folder / "bin"
