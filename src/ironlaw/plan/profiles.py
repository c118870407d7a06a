"""Engines by name: those shipped, and the user's own, which `ironlaw calibrate` saves.

save_profile("my-cluster", calibration, "my_runs.csv")     # ~/.cache/ironlaw/engines/my-cluster.toml
engine = load_engine("my-cluster")                         # what plan and validate call for --profile
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from ironlaw.errors import UserError, did_you_mean
from ironlaw.machine.host import cache_folder
from ironlaw.plan.calibrate import Calibration
from ironlaw.plan.engine import Engine, engines
from ironlaw.plan.engine_words import MEANING

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def profile_folder() -> Path:
    return cache_folder() / "engines"


def profile_path(name: str) -> Path:
    """Where a profile is kept; a UserError for what cannot be a file's name or is a shipped engine's."""
    if not _NAME.fullmatch(name):
        raise UserError(f"'{name}' cannot name a profile: use letters, digits, '.', '_' and '-'")
    if name in engines():
        raise UserError(f"'{name}' is an engine that comes with Ironlaw: choose another name")
    return profile_folder() / f"{name}.toml"


def own_profiles() -> dict[str, Path]:
    return {path.stem: path for path in sorted(profile_folder().glob("*.toml"))}


def load_engine(name: str) -> Engine:
    """A profile of the user's, else a shipped engine."""
    own = own_profiles()
    if name in own:
        return _read(name, own[name])
    if name not in engines():
        raise UserError(f"unknown engine '{name}': {did_you_mean(name, [*own, *engines()])}")
    return engines()[name]


def _read(name: str, path: Path) -> Engine:
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    kinds = {field.name: type(getattr(Engine(""), field.name)) for field in fields(Engine)}
    for key, value in data.items():
        if key not in kinds:
            raise UserError(f"{path}: unknown key '{key}': {did_you_mean(key, kinds)}")
        wanted = (int, float) if kinds[key] is float else (list, tuple) if kinds[key] is tuple else kinds[key]
        if not isinstance(value, wanted) or (isinstance(value, bool) and kinds[key] is not bool):
            raise UserError(f"{path}: {key} must be {kinds[key].__name__}, not {value!r}")
    tuples = {key: tuple(value) for key, value in data.items() if kinds[key] is tuple}
    return Engine(**({"name": name} | data | tuples | {"frameworks": ()}))


def save_profile(name: str, found: Calibration, runs: str) -> Path:
    """Write the calibrated engine as a readable file; a profile of that name is replaced."""
    path = profile_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(_text(found, runs), encoding="utf-8")
    return partial.replace(path)


def _text(found: Calibration, runs: str) -> str:
    engine, plain = found.engine, Engine("")
    skipped = ("name", "source", "frameworks", "by_generation", *(c.name for c in found.constants))
    head = f"{found.runs} runs of {Path(runs).name}"
    lines = [
        f"# Calibrated by `ironlaw calibrate` on {head}. Mean error of step time:",
        f"# {100 * found.error_before:.1f}% before, {100 * found.error_in_sample:.1f}% on these runs,",
        f"# {100 * found.error_left_out:.1f}% with each run left out.",
        "",
        f"source = {json.dumps(f'calibrated on {head}')}",
        "",
        "# conventions",
    ]
    for field in fields(Engine):
        value = getattr(engine, field.name)
        if field.name in skipped or value == getattr(plain, field.name):
            continue
        lines.append(f"{field.name} = {json.dumps(value)}  # {_words(field.name)}")
    lines += ["", "# calibrated"]
    for constant in found.constants:
        value = float(f"{constant.after:.5g}")
        lines.append(f"{constant.name} = {value}  # {_words(constant.name)}; was {constant.before:.4g}")
    for generation, entries in sorted(engine.by_generation.items()):
        lines += ["", f"[by_generation.{generation}]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in entries.items()]
    return "\n".join(lines) + "\n"


def _words(key: str) -> str:
    unit, meaning = MEANING.get(key, ("", "convention of the engine"))
    return f"{unit}; {meaning}" if unit else meaning
