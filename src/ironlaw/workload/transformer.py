"""The operations of one training step of a decoder: forward, backward, update.

The list mirrors `model/transformer.py` line by line, as PyTorch executes it without fusion. FLOPs equal
`torch.utils.flop_counter` on that module exactly (the counter ignores the causal mask; here a masked score costs
nothing, so causal attention counts half). Saved bytes equal what autograd holds.

Symbols: T = micro-batch x sequence tokens, H hidden, Q and KV widths of all query and key/value heads, F FFN width,
V vocabulary, `w` bytes of a matmul input or output, 4 bytes everywhere else.
"""

from __future__ import annotations

from dataclasses import replace

from ironlaw.model.config import ModelConfig
from ironlaw.workload.blocks import FP32, INDEX, Precision, Shape, attention_score_pairs
from ironlaw.workload.kinds import layer_groups
from ironlaw.workload.operations import Operation
from ironlaw.workload.optimizers import adamw_operations
from ironlaw.workload.program import folded, layers_of_shape

__all__ = [
    "FP32",
    "INDEX",
    "Precision",
    "Shape",
    "attention_score_pairs",
    "layer_groups",
    "optimizer_operations",
    "training_operations",
]


def training_operations(shape: Shape) -> list[Operation]:
    """Every call of one micro-batch, forward then backward, layers folded into `repeat`."""
    return [replace(op, repeat=times) for op, times in folded(layers_of_shape(shape))]


def optimizer_operations(model: ModelConfig, *, accumulation: int = 1) -> list[Operation]:
    """Gradient clipping by global norm and AdamW, fused; fp32 states. Other optimizers: `optimizers.py`."""
    return adamw_operations(model.parameters, model.parameter_tensors, accumulation=accumulation)
