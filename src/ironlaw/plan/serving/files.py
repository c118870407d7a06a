"""Data files of this room."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from ironlaw.files import read_toml


@cache
def read(name: str) -> dict[str, Any]:
    return read_toml(Path(__file__).with_name(name))
