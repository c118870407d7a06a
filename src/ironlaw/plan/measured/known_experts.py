"""Experts of models that a table of runs calls by name: most tables have no columns for them.

known_experts("Mixtral 8x7B", hidden=4096, layers=32)     # {"experts": 8.0, "experts_per_token": 2.0, ...}
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ironlaw.files import read_toml
from ironlaw.model.latent_config import LatentConfig


@dataclass(frozen=True)
class KnownExperts:
    """What the name says: columns of a job, and the shape of attention where it is not the usual one."""

    name: str
    columns: dict[str, float]  # experts, experts_per_token, expert_ffn, shared_ffn, expert_layers
    dense_ffn: float | None  # width of the layers without experts; None: there are none
    head_size: float | None
    latent: dict[str, float]  # columns of latent attention, with its head size; empty: usual attention


def known_experts(model: str, hidden: float, layers: float) -> KnownExperts | None:
    """The experts of the model with the longest name that stands in `model`, if its hidden size is this."""
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
    first = min(float(entry.get("dense_layers", 0)), layers - 1)
    columns = {key: float(entry[key]) for key in ("experts", "experts_per_token", "expert_ffn")}
    columns["shared_ffn"] = float(entry.get("shared_ffn", 0))
    columns["expert_layers"] = max((layers - first) // float(entry.get("every", 1)), 1.0)
    columns |= {"expert_groups": float(entry.get("groups", 1))}
    columns["groups_per_token"] = float(entry.get("groups_per_token", columns["expert_groups"]))
    dense = float(entry["dense_ffn"]) if "dense_ffn" in entry else None
    head = float(entry["head_size"]) if "head_size" in entry else None
    return KnownExperts(name, columns, dense, head, _latent(*entry["latent"]) if "latent" in entry else {})


def _latent(rank: int, query_rank: int) -> dict[str, float]:
    """All models here have DeepSeek-V2's sizes of a head, which are the defaults."""
    sizes = LatentConfig(key_value_rank=rank, query_rank=query_rank or None)
    return {
        "latent_rank": float(rank), "query_rank": float(query_rank), "rotary_size": float(sizes.rotary_size),
        "value_size": float(sizes.value_size), "head_size": float(sizes.head_size),
    }  # fmt: skip


@lru_cache(maxsize=1)
def _table() -> dict[str, dict[str, Any]]:
    return read_toml(Path(__file__).with_name("known_experts.toml"))


def _plain(name: str) -> str:
    """Letters and digits only: people write Mixtral-8x7B, mixtral_8x7b and Mixtral 8x7B."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
