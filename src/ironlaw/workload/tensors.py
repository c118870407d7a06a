"""What a rank of our trainer holds from one step to the next: weights, optimizer state, the batch, copies.

Gradients, activations and what ZeRO gathers come and go: the planner walks them (`plan/memory.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ironlaw.model.config import ModelConfig
from ironlaw.model.parameters import Parameter
from ironlaw.workload.blocks import FP32, INDEX
from ironlaw.workload.kinds import has_experts, layer_groups
from ironlaw.workload.layout import Layout
from ironlaw.workload.optimizers import PAGED, state_bytes
from ironlaw.workload.recipe import Recipe, StepBatch

DOCUMENT_BYTES = 4  # int32: the number of each token's document, where attention asks for it


class Tensor(NamedTuple):
    """What a rank holds throughout, by component: weights, the optimizer's state, a cache, ..."""

    component: str
    bytes: float
    note: str = ""


def lasting_tensors(
    model: ModelConfig, layout: Layout, batch: StepBatch, recipe: Recipe, layers: Sequence[int],
    shards: Sequence[Parameter], frozen: int = 0,
) -> Iterator[Tensor]:  # fmt: skip
    """Of a rank with these layers, which updates `shards`, beside so many bytes of what is frozen. Weights are fp32."""
    elements = sum(p.elements for p in shards) * FP32
    buffers = rotary_table_bytes(model) + routing_buffer_bytes(model, layers)
    hosted, paged = recipe.offloads_optimizer, PAGED.get(recipe.optimizer.name)
    state = 0 if hosted else state_bytes(shards, recipe.optimizer)
    average = elements if recipe.average else 0
    yield Tensor("weights", frozen + elements + buffers)
    where = ", on the host" if hosted else f", {paged}" if paged else ""
    yield Tensor("optimizer", state, f"{recipe.optimizer.name}{where}")
    yield Tensor("batch", batch_bytes(batch) // layout.dp, "tokens and targets")
    if recipe.average:
        yield Tensor("average", average, "exponential average of the weights")
    if recipe.checkpoints and not recipe.cuda:
        note = "on a CPU beside the steps that run while a checkpoint is written"
        yield Tensor("checkpoint copy", elements + state + average, note)


def rotary_table_bytes(model: ModelConfig) -> int:
    tables = 1 + (model.rope_theta_local is not None) + (model.rope_long is not None)
    return tables * model.context * model.size_of_rotary * FP32 if model.positions == "rope" else 0


def routing_buffer_bytes(model: ModelConfig, layers: Sequence[int]) -> int:
    """Load per expert and dropped choices of every layer with experts, and the biases of the choice."""
    if model.moe is None:
        return 0
    kinds = layer_groups(model)
    routed = sum(has_experts(kinds[layer]) for layer in layers)
    return routed * (model.moe.experts * (INDEX + FP32 * (model.moe.balance == "bias")) + INDEX)


def batch_bytes(batch: StepBatch) -> int:
    """Tokens and targets of a step, int64, and where attention asks for it the number of each one's document."""
    return batch.sequences * batch.tokens * (2 * INDEX + (DOCUMENT_BYTES if batch.documents else 0))
