"""How many more kernels a block with experts launches than a dense one, counted from the workload's own operations.

    expert_launches(ModelConfig.named("mixtral-8x7b"))     # 0.64: 54 calls forward and backward in place of 33

A grouped product of all experts is one launch. Engines know what a dense block costs the host; a block with experts
costs it in proportion. That another trainer's blocks have the same proportion is assumed: no measured run has experts.
"""

from __future__ import annotations

from functools import lru_cache

from ironlaw.model.config import ModelConfig
from ironlaw.model.moe_config import MoEConfig
from ironlaw.workload.backward import block_backward
from ironlaw.workload.blocks import Shape
from ironlaw.workload.forward import block
from ironlaw.workload.moe import moe_block, moe_block_backward


def expert_launches(model: ModelConfig) -> float:
    """Kernels of a block with experts over those of a dense one, less 1; 0 for a dense model."""
    if model.moe is None:
        return 0.0
    return _expert_launches(model.model_dump_json())


@lru_cache(maxsize=16)
def _expert_launches(document: str) -> float:
    model = ModelConfig.model_validate_json(document)  # not hashable itself
    shape = Shape(model, micro_batch=1, sequence=min(64, model.context))
    dense = len(block(shape)) + len(block_backward(shape))
    return (len(moe_block(shape)) + len(moe_block_backward(shape))) / dense - 1


@lru_cache(maxsize=4)
def usual_expert_launches(gated: bool, shared: bool) -> float:
    """The same of a model of which only that is known."""
    model = ModelConfig(
        layers=1, hidden=64, heads=2, vocab=64, context=64, gated_ffn=gated, activation="silu" if gated else "gelu",
        norm="rmsnorm", positions="rope", bias=False,
        moe=MoEConfig(experts=2, experts_per_token=1, shared_experts=int(shared)),
    )  # fmt: skip
    return expert_launches(model)
