"""What one operation of a training step is, before any hardware is known."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ironlaw.ledger import Kind, Phase
from ironlaw.workload.sizes import Size


@dataclass(frozen=True)
class Operation:
    """One kernel call. Quantities are per call; `repeat` says how often a micro-batch (or a step) makes it.

    `kernel` names the curve that sets its time: `matmul`, `attention_forward`, `gelu_tanh_forward`, ...
    FLOPs are those of matrix products only, as PyTorch's own counter counts them; `None` where it counts none.

    Memory: what the call allocates and what is freed when it is done, in two pools. *Saved* bytes wait for the
    backward pass; *temporary* bytes die within the same phase. `gradient_bytes` are parameter gradients it creates.
    """

    name: str
    kind: Kind
    phase: Phase
    group: str  # "embedding", "block", "moe_block" (one with experts), "head" or "optimizer"
    kernel: str
    repeat: Size = 1
    matmul: tuple[Size, Size, Size] | None = None  # (m, n, k) of C[m, n] = A[m, k] B[k, n]
    batch: Size = 1  # products of that shape in the call: of a batch, groups of a convolution, experts
    attention: tuple[Size, Size, Size, Size, Size] | None = None  # sequences, tokens, heads, kv_heads, head_size
    flops: Size | None = None
    precision: str | None = None  # where it is not the step's
    elements: Size = 0  # of the main tensor: what an elementwise kernel's time is counted in
    bytes_moved: Size = 0  # read once plus written once: the least traffic
    saved_bytes: Size = 0
    temporary_bytes: Size = 0
    frees_saved_bytes: Size = 0
    frees_temporary_bytes: Size = 0
    gradient_bytes: Size = 0


def total_flops(operations: Iterable[Operation]) -> int:
    return sum((op.flops or 0) * op.repeat for op in operations)


def saved_bytes(operations: Iterable[Operation]) -> int:
    """Bytes a forward pass leaves waiting for the backward pass."""
    return sum(op.saved_bytes * op.repeat for op in operations if op.phase is Phase.FORWARD)


_LAYER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.)")


def line_name(operation: str) -> str:
    """Layers of a stack share a line: `blocks.3.attention.qkv` is `blocks.*.attention.qkv`; a last number stays."""
    return _LAYER.sub("*", operation)
