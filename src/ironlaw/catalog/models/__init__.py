"""Published decoder shapes: one TOML file each, or a line in `families/`. `parameters` is the published count, for
checking."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from ironlaw.errors import UserError, did_you_mean

_FOLDER = Path(__file__).parent
_BESIDE = ("family", "parameters", "source")
"""Of a line, what is no field of ModelConfig."""


def model_names() -> list[str]:
    """Those with a file of their own."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def released_names() -> list[str]:
    """Those with a line in `families/`, and other names that are known."""
    return sorted({*_released()["models"], *_released()["taken"]})


def is_model(name: str) -> bool:
    return name in model_names() or name in released_names()


def taken_model(name: str) -> tuple[str, str] | None:
    """The catalogue's name for another name of a model, and what it differs in; None where it is the catalogue's."""
    line = _released()["taken"].get(name)
    return (line["name"], line.get("why", "")) if line else None


def model_entry(name: str) -> dict[str, Any]:
    """The whole file: `[model]` with the fields of ModelConfig, `parameters`, `source`."""
    if name in model_names():
        return tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    if other := taken_model(name):
        return model_entry(other[0])
    if name not in _released()["models"]:
        raise UserError(f"unknown model {name!r}: {did_you_mean(name, [*model_names(), *released_names()])}")
    line = _released()["models"][name]
    shape = {key: value for key, value in line.items() if key not in _BESIDE}
    return {"source": line["source"], "parameters": line["parameters"], "model": _family(line.get("family")) | shape}


def repository(name: str) -> str:
    """On huggingface.co, of a catalogued model; another name is one already, or a folder."""
    return str(_families("repositories").get(name, name))


def model_figures(name: str) -> dict[str, Any]:
    figures: dict[str, Any] = model_entry(name)["model"]
    return figures


def _family(name: str | None) -> dict[str, Any]:
    if name is None:
        return {}
    own = dict(_released()["families"][name])
    return _family(own.pop("like", None)) | own


def _released() -> dict[str, Any]:
    return _families("released")


@cache
def _families(name: str) -> dict[str, Any]:
    return tomllib.loads((_FOLDER / "families" / f"{name}.toml").read_text(encoding="utf-8"))
