"""The operations of one training step of a decoder: forward, backward, update.

The list mirrors `model/transformer.py` line by line, as PyTorch executes it without fusion. FLOPs equal
`torch.utils.flop_counter` on that module exactly (the counter ignores the causal mask; here a masked score costs
nothing, so causal attention counts half). Saved bytes equal what autograd holds.

Symbols: T = micro-batch x sequence tokens, H hidden, Q and KV widths of all query and key/value heads, F FFN width,
V vocabulary, `w` bytes of a matmul input or output, 4 bytes everywhere else.
"""

from __future__ import annotations

from ironlaw.errors import UserError
from ironlaw.ledger import Kind, Phase
from ironlaw.model.config import ModelConfig
from ironlaw.workload.backward import block_backward, embedding_backward, head_backward
from ironlaw.workload.blocks import FP32, INDEX, Precision, Shape, attention_score_pairs
from ironlaw.workload.forward import block, embedding, head
from ironlaw.workload.operations import Operation

__all__ = [
    "FP32",
    "INDEX",
    "Precision",
    "Shape",
    "adamw_operations",
    "attention_score_pairs",
    "optimizer_operations",
    "training_operations",
]


def training_operations(shape: Shape) -> list[Operation]:
    """Every call of one micro-batch, forward then backward, in the order of execution (layers folded)."""
    if shape.model.moe is not None:
        raise UserError("mixtures of experts are not planned yet")
    forward = embedding(shape) + block(shape) + head(shape)
    backward = head_backward(shape) + block_backward(shape) + embedding_backward(shape)
    return forward + backward


def optimizer_operations(model: ModelConfig, *, accumulation: int = 1) -> list[Operation]:
    """Gradient clipping by global norm and AdamW (arXiv 1711.05101), fused; fp32 states."""
    return adamw_operations(model.parameters, model.parameter_tensors, accumulation=accumulation)


def adamw_operations(parameters: int, tensors: int, *, accumulation: int = 1) -> list[Operation]:
    """The update of any `parameters` elements in `tensors` tensors."""
    gradient = parameters * FP32

    def step(name: str, kernel: str, bytes_moved: int) -> Operation:
        return Operation(
            name, Kind.OPTIMIZER, Phase.OPTIMIZER, "optimizer", kernel, elements=parameters, bytes_moved=bytes_moved
        )

    # The norm reads every gradient, the scaling reads and writes it.
    operations = [step("clip", "clip", 3 * gradient)]
    # AdamW reads and writes weight and two moments, and reads the gradient.
    operations.append(step("adamw", "adamw", 7 * gradient))
    # On top, what clipping and updating cost per tensor however small it is.
    operations.append(
        Operation("adamw", Kind.OPTIMIZER, Phase.OPTIMIZER, "optimizer", "update_tensors", elements=tensors)
    )
    if accumulation > 1:
        # From the second micro-batch on, every gradient is added to the one already there.
        operations.append(
            Operation(
                "accumulate", Kind.ELEMENTWISE, Phase.BACKWARD, "optimizer", "add_in_place", accumulation - 1,
                elements=parameters, bytes_moved=3 * gradient,
            )
        )  # fmt: skip
    return operations
