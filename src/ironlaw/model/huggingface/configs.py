"""Hugging Face `config.json` files as ModelConfig, and back. Needs no torch.

    model = read_config(Path("checkpoint/config.json"))     # or its directory
    to_fields(model)                                        # for the equivalent family

A config that cannot be expressed exactly (another architecture, an exotic position encoding) raises a UserError, as a
plan for the nearest model would be a plan for a different one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ironlaw.errors import InvalidConfig, UserError, did_you_mean
from ironlaw.files import read_json
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.families import FAMILIES, REFUSED
from ironlaw.model.huggingface.spec import Family, Fields, Names, differences

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Keys that indicate a mixture of experts."""


def is_config_file(path: Path) -> bool:
    """Whether this is a `*.json` file, or a directory with a `config.json`."""
    return (path.is_file() and path.suffix == ".json") or (path.is_dir() and (path / "config.json").is_file())


def read_config(path: Path) -> ModelConfig:
    """Read the model config in a `config.json`, given as a file or its directory."""
    file = path / "config.json" if path.is_dir() else path
    try:
        document = read_json(file)
    except FileNotFoundError:
        raise UserError(f"no config.json at {path}: give the file or its directory") from None
    if not isinstance(document.get("model_type"), str):
        raise UserError(f"{file} has no model_type: it is not a Hugging Face model config")
    return from_fields(document, where=str(file))


def left_out(path: Path) -> tuple[str, ...]:
    """Return the parts of a config that `transformers` does not build: DeepSeek-V3's extra prediction layers."""
    file = path / "config.json" if path.is_dir() else path
    count = read_json(file).get("num_nextn_predict_layers") or 0
    return (f"{count} of the layers, for predicting tokens further ahead (num_nextn_predict_layers)",) if count else ()


def from_fields(fields: Fields, where: str = "config.json") -> ModelConfig:
    """Convert a parsed `config.json` to a model config; `where` names it in errors."""
    kind = fields["model_type"]
    if "text_config" in fields:
        raise UserError(f"{where}: '{kind}' has parts beside a decoder: save its text_config as a config.json")
    if kind in REFUSED:
        raise UserError(f"{where}: '{kind}' {REFUSED[kind]}, which is not supported")
    if kind not in FAMILIES:
        raise UserError(f"{where}: architecture '{kind}' is not supported: {did_you_mean(str(kind), FAMILIES)}")
    family = FAMILIES[kind]
    if "moe.experts" not in family.parts and any(fields.get(key) for key in EXPERT_COUNTS):
        known = ", ".join(sorted(kind for kind, other in FAMILIES.items() if "moe.experts" in other.parts))
        raise UserError(f"{where}: '{kind}' with experts is not supported: those of {known} are")
    try:
        return family.read(fields, _name(fields, where))
    except KeyError as error:
        raise InvalidConfig(f"{where} has no {error.args[0]}, which a {kind} config needs") from None
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except (TypeError, ValueError, AttributeError, OverflowError, ArithmeticError) as error:
        if not isinstance(error, ValidationError):
            raise InvalidConfig(f"{where} has a value of another type than a {kind} config has: {error}") from None
        first = error.errors()[0]
        message = f"{'.'.join(str(p) for p in first['loc'])} {first['msg'].removeprefix('Value error, ')}"
        raise InvalidConfig(f"{where}: {message.strip()}") from None


def _name(fields: Fields, where: str) -> str:
    named = str(fields.get("_name_or_path") or "")
    if named and not named.startswith((".", "/")):
        return named
    path = Path(where)
    folder = path.parent.name if path.name == "config.json" else path.stem
    return folder or str(fields["model_type"])


def family_of(config: ModelConfig) -> Family:
    """Return the first family that can write the model and read the same back. UserError if there is none."""
    return FAMILIES[str(to_fields(config)["model_type"])]


def names_of(folder: Path, config: ModelConfig) -> Names:
    """Return the tensor names of the family in the directory's `config.json`, else of the family for export."""
    try:
        kind = read_json(folder / "config.json")["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        kind = None
    return (FAMILIES[kind] if kind in FAMILIES else family_of(config)).names


def to_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the content of `config.json` for the first equivalent family. UserError if there is none."""
    nearest: list[str] | None = None
    name = ""
    for kind, family in FAMILIES.items():
        if family.architecture is None:
            continue
        try:
            fields = family.write(config)
            missed = differences(family.read(fields), config)
        except (KeyError, UserError, ValidationError):
            continue
        if not missed:
            return fields
        if nearest is None or len(missed) < len(nearest):
            nearest, name = missed, kind
    why = f"{name} is nearest, and differs in {', '.join(nearest[:3])}" if nearest else "none has its parts"
    raise UserError(f"no Hugging Face architecture computes {config.name} ({why}): it cannot be exported")
