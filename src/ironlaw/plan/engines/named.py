"""Engines by name: the shipped ones, and the user's own, saved by `ironlaw calibrate`.

engine("nemo")
engine("my-cluster")                       # ~/.cache/ironlaw/engines/my-cluster.toml
engine_of_framework("Megatron-LM")         # a framework's name as users write it
"""

from __future__ import annotations

import re
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from ironlaw.errors import MAX_INTEGER, UserError, did_you_mean
from ironlaw.files import cache_folder, read_toml
from ironlaw.plan.engines.engine import TrainingEngine

GENERIC = "generic"
"""The engine for unknown software."""

_FOLDER = Path(__file__).parent
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@lru_cache(maxsize=1)
def engines() -> dict[str, TrainingEngine]:
    """Returns all shipped engines by name."""
    return {path.stem: _loaded(path.stem, path) for path in sorted(_FOLDER.glob("*.toml"))}


def engine(name: str) -> TrainingEngine:
    """Returns a shipped engine, or one that `ironlaw calibrate` saved under this name."""
    if name in engines():
        return engines()[name]
    own = own_profiles()
    if name not in own:
        raise UserError(f"unknown engine '{name}': {did_you_mean(name, [*own, *engines()])}")
    return _loaded(name, own[name], frameworks=())


def engine_of_framework(framework: str, attention: str = "flash") -> TrainingEngine:
    """Returns the engine of a framework's name as users write it: the longest name that an engine lists.

    A listed name at the start takes precedence over one at a later word, as in "NVIDIA NeMo" or "ROCm (Megatron-LM)".
    Megatron-LM is two engines: before and after fused attention.
    """
    typed = framework.strip().lower()
    listed = [(name, e) for e in engines().values() for name in e.frameworks if e.attention in ("", attention)]
    first = [pair for pair in listed if typed.startswith(pair[0])]
    later = [pair for pair in listed if re.search(rf"(?<![a-z0-9]){re.escape(pair[0])}", typed)]
    best = max(first or later, key=lambda pair: len(pair[0]), default=None)
    if best is None:
        raise UserError(f"no engine is known for framework '{framework}': {did_you_mean(typed, engines())}")
    return best[1]


def own_profiles() -> dict[str, Path]:
    return {path.stem: path for path in sorted(profile_folder().glob("*.toml"))}


def profile_folder() -> Path:
    return cache_folder() / "engines"


def profile_path(name: str) -> Path:
    """Returns a profile's path. Raises UserError if the name cannot be a file's or belongs to a shipped engine."""
    if not _NAME.fullmatch(name):
        raise UserError(f"'{name}' cannot name a profile: use letters, digits, '.', '_' and '-'")
    if name in engines():
        raise UserError(f"'{name}' is an engine that comes with Ironlaw: choose another name")
    return profile_folder() / f"{name}.toml"


def _loaded(name: str, path: Path, **fixed: Any) -> TrainingEngine:
    """Returns the engine of a file. Raises UserError for an unknown key, and for a value of another kind."""
    try:
        data: dict[str, Any] = read_toml(path)
    except (OSError, UserError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    _check(data, path)
    for table in data.get("by_generation", {}).values():
        _check(table if isinstance(table, dict) else {"by_generation": table}, path)
    tuples = {key: tuple(value) for key, value in data.items() if isinstance(value, list)}
    return TrainingEngine(**(data | tuples | fixed | {"name": name}))


def _check(table: dict[str, Any], path: Path) -> None:
    kinds = {field.name: type(getattr(TrainingEngine(""), field.name)) for field in fields(TrainingEngine)}
    for key, value in table.items():
        if key not in kinds:
            raise UserError(f"{path}: unknown key '{key}': {did_you_mean(key, kinds)}")
        kind = kinds[key]
        if kind in (int, float):  # times, bytes and ratios: none is negative
            fine = type(value) in (int, kind) and 0 <= value < MAX_INTEGER
        elif kind is tuple:
            fine = isinstance(value, list) and all(isinstance(word, str) for word in value)
        else:
            fine = isinstance(value, kind)
        if not fine:
            raise UserError(f"{path}: {key} must be {kind.__name__}, not {value!r}")
