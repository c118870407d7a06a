"""Measured or assumed runs, each with a model and a layout of its own, as columns of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ironlaw.model.config import ModelConfig
from ironlaw.model.latent_config import LatentConfig
from ironlaw.model.moe_config import MoEConfig
from ironlaw.plan.cluster.candidates import Candidates, columns_of, extra_launches
from ironlaw.plan.cluster.layout_table import layout_table
from ironlaw.workload.layout import Layout
from ironlaw.workload.moe import GROUP as MOE_GROUP
from ironlaw.workload.sizes import Size

MODEL_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_size", "ffn", "vocab", "context")
MOE_SIZES = ("experts", "experts_per_token", "expert_ffn", "shared_ffn", "groups", "groups_per_token")
LATENT_SIZES = ("key_value_rank", "query_rank", "rotary_size", "plain_size", "value_size")
"""Fields of a model that may differ between the jobs of one `Candidates`."""


@dataclass(frozen=True)
class TrainingJob:
    """One training step: what it computes and how it is laid out."""

    model: ModelConfig
    layout: Layout
    sequence: float  # tokens
    global_batch: float  # sequences per step
    flash: bool = True  # else attention's scores are materialised
    imbalance: float = 0.0  # rows of the busiest expert parallel rank over the mean; 0: as in training
    every: float | None = None  # full recomputation of one block in so many; None: as the layout says


def candidates_of_jobs(jobs: Sequence[TrainingJob]) -> Candidates:
    """Several models of one `structure`, each in a layout of its own."""
    first = structure(jobs[0])
    assert len({structure(job) for job in jobs}) == 1
    columns: dict[str, Any] = columns_of(layout_table(job.layout for job in jobs))
    strides = [job.layout.recompute.stride if job.every is None else job.every for job in jobs]
    columns["every"] = np.array(strides, dtype=float)
    for name in ("sequence", "global_batch", "imbalance"):
        columns[name] = np.array([getattr(job, name) for job in jobs], dtype=float)
    model, kinds = _stacked([job.model for job in jobs], MODEL_SIZES), dict[str, Size](block=1.0)
    if model.moe is not None:
        share = np.array([job.model.moe_layers / job.model.layers for job in jobs])
        kinds = {"block": 1 - share, MOE_GROUP: share}
        moe = _stacked([job.model.moe for job in jobs], MOE_SIZES)
        moe = moe.model_copy(update={"dense_layers": 0, "every": 1})  # which layers have them is in `kinds`
        model = model.model_copy(update={"moe": moe})
    if model.latent is not None:
        model = model.model_copy(update={"latent": _stacked([job.model.latent for job in jobs], LATENT_SIZES)})
    return Candidates(model, kinds, jobs[0].flash, *extra_launches(plain_model(first[1:])), **columns)


def _stacked(tables: Sequence[Any], sizes: Sequence[str]) -> Any:
    """The first table with sizes as arrays, one entry per table; what the first leaves open all do."""
    given = [name for name in sizes if getattr(tables[0], name) is not None]
    arrays = {name: np.array([getattr(table, name) for table in tables], dtype=float) for name in given}
    return tables[0].model_copy(update=arrays)


def structure(job: TrainingJob) -> tuple[bool, ...]:
    """What jobs of one `Candidates` have in common: flash, and the arguments of `plain_model`."""
    model, moe, latent = job.model, job.model.moe, job.model.latent
    experts = moe is not None, moe is not None and moe.shared_experts > 0
    queries = latent is not None and latent.query_rank is not None
    return job.flash, model.gated_ffn, model.tied, *experts, latent is not None, queries


@lru_cache(maxsize=64)
def plain_model(structure: tuple[bool, ...]) -> ModelConfig:
    """A model of that structure whose sizes stand for others."""
    gated, tied, experts, shared, narrow, narrow_queries = structure
    biased = not (gated or narrow or experts)
    return ModelConfig(
        layers=1, hidden=64, heads=2, vocab=64, context=64, gated_ffn=gated, tied=tied, bias=biased,
        activation="silu" if gated else "gelu", norm="layernorm" if biased else "rmsnorm",
        positions="learned" if biased else "rope",
        moe=MoEConfig(experts=2, experts_per_token=1, shared_experts=int(shared)) if experts else None,
        latent=LatentConfig(query_rank=32 if narrow_queries else None) if narrow else None,
    )  # fmt: skip
