"""Published decoder shapes, one TOML file each. `parameters` in a file is the published count, for checking."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from ironlaw.errors import UserError, did_you_mean

_FOLDER = Path(__file__).parent


def model_names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def model_entry(name: str) -> dict[str, Any]:
    """The whole file: `[model]` with the fields of ModelConfig, `parameters`, `source`."""
    path = _FOLDER / f"{name}.toml"
    if not path.is_file() or path.parent != _FOLDER:
        raise UserError(f"unknown model {name!r}: {did_you_mean(name, model_names())}")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def model_figures(name: str) -> dict[str, Any]:
    figures: dict[str, Any] = model_entry(name)["model"]
    return figures
