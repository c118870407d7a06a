"""Identify the accelerator and the model's experts of a measured run from the names that people write.

    found, assumed = accelerator_of("NVIDIA H100-SXM5-80GB")     # h100-sxm-80gb
    found, assumed = accelerator_of("A100")                      # a100-sxm-80gb, and a note that this is assumed
    named_experts("Mixtral 8x7B", hidden=4096, layers=32)[1]["moe"]     # MoEConfig(experts=8, experts_per_token=2, ...)

Most tables have no columns for experts, only a model's name.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from ironlaw.catalog.accelerators import Accelerator, accelerator, closest
from ironlaw.files import read_toml
from ironlaw.model.dimensions import LatentConfig, MoEConfig

IN_RACK = {"b200-sxm": "gb200", "b300": "gb300"}
"""Chips of nodes of eight, and their names in a rack of 72, where they have more power, another clock and an Arm
processor. Tables of racks often give the chip's name alone."""


PACKAGES = {"mi250x": ("mi250x-gcd", 4)}
"""Packages of several dies -> a die, and the packages of a node. Software sees dies, and runs are counted in them."""


def accelerator_of(cell: str, per_node: int | None = None) -> tuple[Accelerator, str]:
    """Returns the accelerator and a note of what was assumed. Raises the catalogue's UserError if none is similar."""
    name, difference = closest(cell)
    die, packages = PACKAGES.get(name, (name, None))
    if name != die and per_node != packages:
        difference = f"software sees the dies of a package as devices; per_node = {packages} means packages"
        name = die
    if difference is None:
        return accelerator(name), ""
    return accelerator(name), f"accelerator = {name} (for '{cell.strip()}'{': ' + difference if difference else ''})"


def in_rack(acc: Accelerator, interconnect: str) -> tuple[Accelerator, str]:
    """Returns the rack variant of the accelerator and a note, if the description of the network names a rack."""
    name = IN_RACK.get(acc.name)
    rack = re.search(r"nvl\s*(?:36|72)\b", interconnect, re.IGNORECASE)
    if name is None or rack is None:
        return acc, ""
    return accelerator(name), f"accelerator = {name} ({acc.name} in a rack of 72 is that: '{rack[0]}')"


def named_experts(model: str, hidden: int, layers: int) -> tuple[str, dict[str, Any]] | None:
    """Returns the longest known name contained in `model` with this hidden size, and the fields of ModelConfig:
    `moe` and, where unusual, `latent`, `head_size` and the `ffn` of layers without experts. None if there is none.
    """
    words = _plain(model)
    fitting = [
        (len(_plain(word)), name)
        for name, entry in _table().items()
        for word in (name, *entry.get("also", ()))
        if _plain(word) in words and entry["hidden"] == hidden
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
    """Returns letters and digits only, as people write Mixtral-8x7B, mixtral_8x7b and Mixtral 8x7B."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
