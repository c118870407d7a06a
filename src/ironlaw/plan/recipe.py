"""What a config asks of our trainer, in the words of the planner."""

from __future__ import annotations

from typing import cast

from ironlaw.catalog.formats import number_format
from ironlaw.config import LayoutConfig, RunConfig
from ironlaw.workload.blocks import FP32, Precision
from ironlaw.workload.layout import Layout
from ironlaw.workload.recipe import Batch, Recipe
from ironlaw.workload.recompute import policies

FULL_LOGITS_BYTES = 64 * 2**20  # above, the three copies of the logits rule the peak of a small machine
CHUNK_BYTES = 128 * 2**20


def batch_of(config: RunConfig) -> Batch:
    return Batch(
        config.train.global_batch, config.sequence, config.data.masks_documents, config.data.packing == "best_fit",
        config.micro_batch,
    )  # fmt: skip


def layout_of(layout: LayoutConfig, micro_batch: int, dp: int = 1) -> Layout:
    """A config's layout with what it leaves open: the replicas, and the sequences of a forward pass of each."""
    return Layout(**layout.model_dump() | {"dp": layout.dp or dp}, micro_batch=micro_batch)


def micro_batch_of(config: RunConfig, share: int, stages: int | None = None) -> int:
    """Sequences per forward pass of a replica that has `share` of them: train.micro_batch, or the largest divisor
    below it, so that a job that goes on with fewer ranks need not be configured anew.

    Where it is not given, pipeline stages (the config's layout's unless given) get four micro-batches each, or as many
    as there are: their bubble is then a fifth of the step at most (arXiv 2104.04473, section 2.2).
    """
    if stages is None:
        stages = config.layout.pp if config.layout is not None else 1
    wanted = config.micro_batch
    if config.train.micro_batch is None and stages > 1:
        wanted = max(1, share // (4 * stages))
    return next(size for size in range(min(wanted, share), 0, -1) if share % size == 0)


def recipe_of(
    config: RunConfig, precision: str, *, cuda: bool = False, onednn: bool = False, gloo: bool = True
) -> Recipe:
    """Nothing is recomputed for a budget until it is solved (`recompute.py`)."""
    return Recipe(
        cast(Precision, number_format(precision).held_as), cuda, onednn, gloo,
        policies(config.recompute, config.model), loss_chunk(config), config.optimizer, config.communication,
        config.train.offload, config.train.average_decay is not None,
        0 < config.checkpoint.every < config.train.steps,
    )  # fmt: skip


def loss_chunk(config: RunConfig) -> int:
    """Tokens whose logits exist at a time; 0: all of a micro-batch.

    An eighth of the micro-batch, but at most 128 MiB of logits; fewer than 64 tokens make a poor product. None where
    logits are more than a product.
    """
    if not config.model.logits_are_a_product:
        return 0
    tokens, row = config.micro_batch * config.sequence, config.model.vocab * FP32
    wanted = config.train.loss == "chunked" or (config.train.loss == "auto" and tokens * row > FULL_LOGITS_BYTES)
    return max(64, min(-(-tokens // 8), CHUNK_BYTES // row)) if wanted else 0
