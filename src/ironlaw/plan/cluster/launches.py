"""How many more kernels a block with experts or latent attention launches than a plain one, counted from the workload.

    extra_launches(ModelConfig.named("mixtral-8x7b"))     # (0.64, 0.0): 54 calls forward and backward in place of 33

A grouped product of all experts is one launch. Engines know what a dense block costs the host; another block costs it
in proportion. That another trainer's blocks have the same proportion is assumed: no measured run has experts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ironlaw.model.config import ModelConfig
from ironlaw.workload.blocks import Shape
from ironlaw.workload.kinds import both_passes
from ironlaw.workload.moe import GROUP as MOE_GROUP


def extra_launches(model: ModelConfig) -> tuple[float, float]:
    """Kernels that experts, and that latent attention, add to a block, over those of a dense one with neither."""
    return (0.0, 0.0) if model.moe is None and model.latent is None else _launches(model.model_dump_json())


@lru_cache(maxsize=16)
def _launches(document: str) -> tuple[float, float]:
    model = ModelConfig.model_validate_json(document)  # not hashable itself
    shape = Shape(model, micro_batch=1, sequence=min(64, model.context), fused_rmsnorm=True)
    dense = usual = _calls(shape, "block")
    if model.latent is not None:
        plain = replace(shape, model=model.model_copy(update={"latent": None, "head_size": model.size_of_head}))
        usual = _calls(plain, "block")
    experts = _calls(shape, MOE_GROUP) if model.moe is not None else dense
    return (experts - dense) / usual, dense / usual - 1


def _calls(shape: Shape, kind: str) -> int:
    return sum(map(len, both_passes(shape, kind)))
