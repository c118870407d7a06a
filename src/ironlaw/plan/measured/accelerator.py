"""Identify the accelerator and the model's experts of a measured run from the names that people write.

    found, assumed = accelerator_of("NVIDIA H100-SXM5-80GB")     # h100-sxm-80gb
    found, assumed = accelerator_of("A100")                      # a100-sxm-80gb, and a note that this is assumed
    named_experts("Mixtral 8x7B", hidden=4096, layers=32)[1]["moe"]     # MoEConfig(experts=8, experts_per_token=2, ...)

The catalogue's own names come first. Otherwise the chip decides, and a stated form or memory must agree. Most tables
have no columns for experts, only a model's name.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from ironlaw.catalog.accelerators import Accelerator, accelerator, accelerator_names, taken_for
from ironlaw.catalog.devices import lines
from ironlaw.errors import UserError
from ironlaw.files import read_toml
from ironlaw.model.latent_config import LatentConfig
from ironlaw.model.moe_config import MoEConfig

USUAL = ("h100-sxm-80gb", "a100-sxm-80gb", "v100-sxm-32gb", "a100-sxm-40gb", "v100-sxm-16gb")
"""The forms that most published runs used, for chips sold in several; the first that agrees with the cell is taken."""

SAME_CHIP = {"a800": ("a100", "with two thirds of its NVLink")}
"""Chips without their own figures: the catalogued chip they resemble, and the difference."""

IN_RACK = {"b200-sxm": "gb200", "b300": "gb300"}
"""Chips of nodes of eight, and their names in a rack of 72, where they have more power, another clock and an Arm
processor. Tables of racks often give the chip's name alone."""

_MAKERS = {"nvidia", "amd", "intel", "google", "tesla", "geforce", "instinct", "gpu", "tensor", "core", "cloud"}
_BRANDS = {"rtx", "tpu", "apple", "jetson"}  # a brand alone names no chip
_FORM = re.compile(r"(sxm|pcie|nvl|oam)\d*")
_MEMORY = re.compile(r"(\d+)(gb|gib|g)")


def accelerator_of(cell: str) -> tuple[Accelerator, str]:
    """Return the accelerator and a note of what was assumed. Raises the catalogue's UserError if none is similar."""
    try:
        found, other = accelerator(cell), taken_for(cell)
        if other is None:
            return found, ""
        return found, f"accelerator = {found.name} (for '{cell.strip()}'{': ' + other[1] if other[1] else ''})"
    except UserError as error:
        if (nearest := _nearest(cell)) is None:
            raise error
        return accelerator(nearest[0]), nearest[1]


def in_rack(acc: Accelerator, interconnect: str) -> tuple[Accelerator, str]:
    """Return the rack variant of the accelerator and a note, if the description of the network names a rack."""
    name = IN_RACK.get(acc.name)
    rack = re.search(r"nvl\s*(?:36|72)\b", interconnect, re.IGNORECASE)
    if name is None or rack is None:
        return acc, ""
    return accelerator(name), f"accelerator = {name} ({acc.name} in a rack of 72 is that: '{rack[0]}')"


def _nearest(cell: str) -> tuple[str, str] | None:
    """Return the name of the most similar accelerator and a note of what was assumed, or None."""
    words = _joined([word for word in re.split(r"[^a-z0-9]+", cell.lower()) if word and word not in _MAKERS])
    chip = next((word for word in words if word in SAME_CHIP or _names_of(word)), None)
    if chip is None:
        return None
    same, difference = SAME_CHIP.get(chip, (chip, ""))
    form = next((match[1] for word in words if (match := _FORM.fullmatch(word))), "")
    memory = next((match[1] for word in words if (match := _MEMORY.fullmatch(word))), "")
    good = [name for name in _names_of(same) if _agrees(name, form, "" if difference else memory)]
    good = [name for name in good if not re.search(r"-\d+w$", name)] or good  # a special power limit is never implied
    best = next((name for name in USUAL if name in good), good[0] if good else None)
    if best is None:
        return None
    return best, f"accelerator = {best} (for '{cell.strip()}'{': ' + difference if difference else ''})"


def _joined(words: list[str]) -> list[str]:
    """Join words: `80 gb` to `80gb`, `tpu v5p` to `tpu-v5p`, `rtx 4090` to `rtx-4090`."""
    result: list[str] = []
    for word in words:
        if result and word in ("gb", "gib") and result[-1].isdigit():
            result[-1] += "gb"
        elif result and result[-1] in _BRANDS:
            result[-1] += "-" + word
        else:
            result.append(word)
    return result


def _names_of(chip: str) -> list[str]:
    """Return the catalogue's names of one chip: its name alone, or followed by form and memory."""
    if chip in _BRANDS:
        return []
    return [name for name in (*accelerator_names(), *lines()) if name == chip or name.startswith(chip + "-")]


def _agrees(name: str, form: str, memory: str) -> bool:
    said = name.split("-")[1:]
    forms = [match[1] for word in said if (match := _FORM.fullmatch(word))]
    memories = [match[1] for word in said if (match := _MEMORY.fullmatch(word))]
    return (not form or not forms or form in forms) and (not memory or not memories or memory in memories)


def named_experts(model: str, hidden: int, layers: int) -> tuple[str, dict[str, Any]] | None:
    """Return the longest known name contained in `model` with this hidden size, and the ModelConfig fields that follow:
    `moe` and, where unusual, `latent`, `head_size` and the `ffn` of layers without experts. None if there is none.
    """
    said = _plain(model)
    fitting = [
        (len(_plain(word)), name)
        for name, entry in _table().items()
        for word in (name, *entry.get("also", ()))
        if _plain(word) in said and entry["hidden"] == hidden
    ]
    if not fitting:
        return None
    _, name = max(fitting)
    entry = _table()[name]
    first, groups = min(entry.get("dense_layers", 0), layers - 1), entry.get("groups", 1)
    moe = MoEConfig(
        experts=entry["experts"], experts_per_token=entry["experts_per_token"], expert_ffn=entry["expert_ffn"],
        shared_experts=int("shared_ffn" in entry), shared_ffn=entry.get("shared_ffn"),
        dense_layers=first, every=min(entry.get("every", 1), layers - first),
        groups=groups, groups_per_token=entry.get("groups_per_token", groups),
    )  # fmt: skip
    found = {"moe": moe, "ffn": entry.get("dense_ffn"), "head_size": entry.get("head_size")}
    if "latent" in entry:  # all models here have DeepSeek-V2's head sizes, which are the defaults
        rank, query_rank = entry["latent"]
        found["latent"] = LatentConfig(key_value_rank=rank, query_rank=query_rank or None)
    return name, {field: value for field, value in found.items() if value is not None}


@lru_cache(maxsize=1)
def _table() -> dict[str, dict[str, Any]]:
    return read_toml(Path(__file__).with_name("named_experts.toml"))


def _plain(name: str) -> str:
    """Return letters and digits only, as people write Mixtral-8x7B, mixtral_8x7b and Mixtral 8x7B."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
