"""Experts of models that a table of runs calls by name: most tables have no columns for them.

named_experts("Mixtral 8x7B", hidden=4096, layers=32)[1]["moe"]     # MoEConfig(experts=8, experts_per_token=2, ...)
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from ironlaw.files import read_toml
from ironlaw.model.latent_config import LatentConfig
from ironlaw.model.moe_config import MoEConfig


def named_experts(model: str, hidden: int, layers: int) -> tuple[str, dict[str, Any]] | None:
    """The model with the longest name that stands in `model`, if its hidden size is this, and fields of a ModelConfig
    that follow: `moe`, and where they are not as usual `latent`, `head_size` and the `ffn` of layers without experts.
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
    if "latent" in entry:  # all models here have DeepSeek-V2's sizes of a head, which are the defaults
        rank, query_rank = entry["latent"]
        found["latent"] = LatentConfig(key_value_rank=rank, query_rank=query_rank or None)
    return name, {field: value for field, value in found.items() if value is not None}


@lru_cache(maxsize=1)
def _table() -> dict[str, dict[str, Any]]:
    return read_toml(Path(__file__).with_name("named_experts.toml"))


def _plain(name: str) -> str:
    """Letters and digits only: people write Mixtral-8x7B, mixtral_8x7b and Mixtral 8x7B."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
