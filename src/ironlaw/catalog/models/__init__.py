"""Published decoder shapes: one TOML file each, or a line in `families/`. `parameters` is the published count, as a
check."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from ironlaw.catalog.figures import read_toml, stems
from ironlaw.errors import UserError, did_you_mean

_BESIDE = ("family", "parameters", "source")
"""Keys of a line that are not fields of ModelConfig."""


def model_names() -> list[str]:
    """Return the names of models with their own file."""
    return list(stems("models"))


def released_names() -> list[str]:
    """Return the names of models with a line in `families/`, and their aliases."""
    return sorted({*_released()["models"], *_released()["taken"]})


def is_model(name: str) -> bool:
    return name in model_names() or name in released_names()


def alias_of_model(name: str) -> tuple[str, str] | None:
    """Return the catalogue's name for an alias of a model and how the two differ; None if `name` is no alias."""
    line = _released()["taken"].get(name)
    return (line["name"], line.get("why", "")) if line else None


def model_entry(name: str) -> dict[str, Any]:
    """Return a model's file: `[model]` with the fields of ModelConfig, `parameters`, `source`."""
    if name in model_names():
        return read_toml("models", f"{name}.toml")
    if other := alias_of_model(name):
        return model_entry(other[0])
    if name not in _released()["models"]:
        raise UserError(f"unknown model {name!r}: {did_you_mean(name, [*model_names(), *released_names()])}")
    line = _released()["models"][name]
    shape = {key: value for key, value in line.items() if key not in _BESIDE}
    return {"source": line["source"], "parameters": line["parameters"], "model": _family(line.get("family")) | shape}


def repository(name: str) -> str:
    """Return a catalogued model's repository on huggingface.co. Other names are repositories or folders already."""
    return str(read_toml("models", "families", "repositories.toml").get(name, name))


def model_figures(name: str) -> dict[str, Any]:
    return deepcopy(model_entry(name)["model"])


def _family(name: str | None) -> dict[str, Any]:
    if name is None:
        return {}
    own = dict(_released()["families"][name])
    return _family(own.pop("like", None)) | own


def _released() -> dict[str, Any]:
    return read_toml("models", "families", "released.toml")
