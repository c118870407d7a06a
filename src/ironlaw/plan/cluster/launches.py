"""How many more kernels a block with experts or latent attention launches than a plain one, counted from the workload.

    expert_launches(ModelConfig.named("mixtral-8x7b"))     # 0.64: 54 calls forward and backward in place of 33

A grouped product of all experts is one launch. Engines know what a dense block costs the host; another block costs it
in proportion. That another trainer's blocks have the same proportion is assumed: no measured run has experts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ironlaw.model.config import ModelConfig
from ironlaw.model.latent_config import LatentConfig
from ironlaw.model.moe_config import MoEConfig
from ironlaw.workload.backward import block_backward
from ironlaw.workload.blocks import Shape
from ironlaw.workload.forward import block
from ironlaw.workload.moe import moe_block, moe_block_backward


def expert_launches(model: ModelConfig) -> float:
    """Kernels that experts add to a block, over those of a dense one with usual attention; 0 for a dense model."""
    return 0.0 if model.moe is None else _launches(model.model_dump_json())[0]


def latent_launches(model: ModelConfig) -> float:
    """Kernels that latent attention adds to a block, over those of a dense one with usual attention; 0 without."""
    return 0.0 if model.latent is None else _launches(model.model_dump_json())[1]


@lru_cache(maxsize=16)
def _launches(document: str) -> tuple[float, float]:
    model = ModelConfig.model_validate_json(document)  # not hashable itself
    shape = Shape(model, micro_batch=1, sequence=min(64, model.context), fused_rmsnorm=True)
    dense = usual = len(block(shape)) + len(block_backward(shape))
    if model.latent is not None:
        plain = replace(shape, model=model.model_copy(update={"latent": None, "head_size": model.size_of_head}))
        usual = len(block(plain)) + len(block_backward(plain))
    experts = len(moe_block(shape)) + len(moe_block_backward(shape)) if model.moe is not None else dense
    return (experts - dense) / usual, dense / usual - 1


@lru_cache(maxsize=4)
def usual_expert_launches(gated: bool, shared: bool) -> float:
    """The same of a model of which only that is known."""
    model = ModelConfig(
        layers=1, hidden=64, heads=2, vocab=64, context=64, gated_ffn=gated, activation="silu" if gated else "gelu",
        norm="rmsnorm", positions="rope", bias=False,
        moe=MoEConfig(experts=2, experts_per_token=1, shared_experts=int(shared)),
    )  # fmt: skip
    return expert_launches(model)


@lru_cache(maxsize=2)
def usual_latent_launches(query_rank: bool) -> float:
    """What latent attention adds in a model of which only that is known."""
    model = ModelConfig(
        layers=1, hidden=64, heads=2, vocab=64, context=64, gated_ffn=True, activation="silu", norm="rmsnorm",
        positions="rope", bias=False, latent=LatentConfig(query_rank=32 if query_rank else None),
    )  # fmt: skip
    return latent_launches(model)
