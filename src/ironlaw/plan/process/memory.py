"""Bytes held over one step: walk the operations in order, allocate and free, and keep the highest moment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ironlaw.config import RunConfig
from ironlaw.ledger import MemoryLine, Phase
from ironlaw.model.config import ModelConfig
from ironlaw.plan.process.offload import held_operations
from ironlaw.workload.kinds import is_block
from ironlaw.workload.moe import routing_buffer_bytes
from ironlaw.workload.operations import Operation
from ironlaw.workload.optimizers import state_bytes, update_temporary_bytes
from ironlaw.workload.parameters import model_parameters
from ironlaw.workload.program import unfolded
from ironlaw.workload.transformer import FP32, INDEX, Shape


@dataclass(frozen=True)
class Peak:
    """The highest moment of a step: where it is, and what it is made of, in bytes."""

    where: str
    saved_bytes: int
    temporary_bytes: int
    gradient_bytes: int


def in_execution_order(operations: Sequence[Operation], layers: int | Sequence[str]) -> Iterator[Operation]:
    """Unfold the layers: each run of block operations of one phase is walked layer by layer.

    `layers`: how many, or of each layer the group of its operations, where there are several kinds of blocks.
    """
    kinds = ["block"] * layers if isinstance(layers, int) else list(layers)
    start = 0
    while start < len(operations):
        first, end = operations[start], start
        blocks = is_block(first.group)
        while end < len(operations) and operations[end].phase == first.phase and (
            is_block(operations[end].group) if blocks else operations[end].group == first.group
        ):  # fmt: skip
            end += 1
        if not blocks:
            yield from operations[start:end]
        for kind in (kinds if first.phase is Phase.FORWARD else reversed(kinds)) if blocks else ():
            yield from (op for op in operations[start:end] if op.group == kind)
        start = end


def walk(operations: Sequence[Operation], layers: int | Sequence[str], gradients_held: int = 0) -> Peak:
    """The peak of one micro-batch of folded operations."""
    return highest(in_execution_order(operations, layers), gradients_held)


def highest(operations: Iterable[Operation], gradients_held: int = 0) -> Peak:
    """The peak of one micro-batch. `gradients_held`: bytes of gradients that earlier micro-batches left."""
    saved = temporary = 0
    gradients = gradients_held
    peak = Peak("start", 0, 0, gradients)
    for op in operations:
        saved += op.saved_bytes
        temporary += op.temporary_bytes
        if gradients_held:
            temporary += op.gradient_bytes  # freed again once added to the gradient that is there
        else:
            gradients += op.gradient_bytes
        if saved + temporary + gradients > peak.saved_bytes + peak.temporary_bytes + peak.gradient_bytes:
            peak = Peak(f"{op.name}, {op.phase}", saved, temporary, gradients)
        if gradients_held:
            temporary -= op.gradient_bytes
        saved -= op.frees_saved_bytes
        temporary -= op.frees_temporary_bytes
    return peak


def rotary_table_bytes(model: ModelConfig) -> int:
    tables = 1 + (model.rope_theta_local is not None) + (model.rope_long is not None)
    return tables * model.context * model.size_of_rotary * FP32 if model.positions == "rope" else 0


def batch_bytes(config: RunConfig) -> int:
    """Tokens and targets of a step, int64, and where attention asks for it the number of each one's document, int32."""
    return config.tokens_per_step * (2 * INDEX + (4 if config.data.masks_documents else 0))


def peak_memory(config: RunConfig, shape: Shape) -> tuple[list[MemoryLine], str]:
    """Memory at the peak of a training step by component, and where in the step that is. Weights are fp32."""
    model = shape.model
    parameters = model_parameters(model)
    total_gradients = model.parameters * FP32
    order = held_operations if config.train.offloads_activations else unfolded
    peaks = [highest(order(shape))]
    whole, rest = divmod(config.train.global_batch, shape.micro_batch)
    if whole > 1:
        peaks.append(highest(order(shape), gradients_held=total_gradients))
    if rest:
        peaks.append(highest(order(replace(shape, micro_batch=rest)), gradients_held=total_gradients))
    update = update_temporary_bytes(parameters, config.optimizer, cuda=shape.fused_rmsnorm)
    hosted = config.train.offloads_optimizer
    if hosted:
        update = 0
    peaks.append(Peak(f"update, {Phase.OPTIMIZER}", 0, update, total_gradients))
    peak = max(peaks, key=lambda p: p.saved_bytes + p.temporary_bytes + p.gradient_bytes)
    lines = [
        MemoryLine("weights", model.parameters * FP32 + rotary_table_bytes(model) + routing_buffer_bytes(shape)),
        MemoryLine("gradients", peak.gradient_bytes),
        MemoryLine(
            "optimizer",
            0 if hosted else state_bytes(parameters, config.optimizer),
            note=f"{config.optimizer.name}{', on the host' if hosted else ''}",
        ),
        MemoryLine("activations", peak.saved_bytes, note="saved for the backward pass"),
        MemoryLine("temporaries", peak.temporary_bytes),
        MemoryLine("batch", batch_bytes(config), note="tokens and targets"),
    ]
    if config.train.average_decay is not None:
        lines.append(MemoryLine("average", model.parameters * FP32, note="exponential average of the weights"))
    if not shape.fused_rmsnorm and 0 < config.checkpoint.every < config.train.steps:
        state = sum(line.bytes or 0 for line in lines if line.component in ("optimizer", "average"))
        note = "on a CPU beside the steps that run while a checkpoint is written"
        lines.append(MemoryLine("checkpoint copy", model.parameters * FP32 + state, note=note))
    return lines, peak.where
