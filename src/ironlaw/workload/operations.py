"""What a step is made of, before any hardware is known: operations, their backward passes, and parameters.

    forward = [call("activation", "silu_forward", ..., gradient=[call("activation", "silu_backward", ...)]), ...]
    backward = differentiate(forward)

Whoever lists an operation of a forward pass says in the same place what its backward pass computes and lets go of.
Nothing lists a backward pass: it is the gradients of the operations, the last one first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ironlaw.ledger import Kind, Phase
from ironlaw.workload.sizes import Size


@dataclass(frozen=True)
class Operation:
    """One kernel call. Quantities are per call; `repeat` says how often a micro-batch (or a step) makes it.

    `kernel` names the curve that sets its time: `matmul`, `attention_forward`, `gelu_tanh_forward`, ...
    FLOPs are those of matrix products only, as PyTorch's own counter counts them; `None` where it counts none.

    Memory: what the call allocates and what is freed when it is done, in two pools. *Saved* bytes wait for the
    backward pass; *temporary* bytes die within the same phase. `gradient_bytes` are parameter gradients it creates.

    `gradient`: the operations of its backward pass, in order; none of an operation that is in a backward pass itself.
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
    on_stream: bool = False  # on the residual stream, of which each sequence parallel rank has a part
    gathered: bool = False  # what it gives layers read: sequence parallel ranks gather it, and add up its gradient
    summed: bool = False  # a product of parts of its inputs on tensor parallel ranks, which add up what they get
    gradient: tuple[Operation, ...] = field(default=(), repr=False, compare=False)


T = TypeVar("T")


def changed(one: T, **changes: Any) -> T:
    """`dataclasses.replace` in a quarter of its time, for no constructor runs: a plan changes tens of thousands."""
    assert changes.keys() <= one.__dict__.keys()
    made: T = object.__new__(type(one))
    made.__dict__.update(one.__dict__ | changes)
    return made


def grown(
    op: Operation, *, saved: Size = 0, temporary: Size = 0, frees_saved: Size = 0, frees_temporary: Size = 0,
    passing: Size = 0,
) -> Operation:  # fmt: skip
    """With so many bytes more, or fewer, of each kind; `passing`: bytes that are there only while it runs."""
    return changed(
        op, saved_bytes=op.saved_bytes + saved, temporary_bytes=op.temporary_bytes + temporary + passing,
        frees_saved_bytes=op.frees_saved_bytes + frees_saved,
        frees_temporary_bytes=op.frees_temporary_bytes + frees_temporary + passing,
    )  # fmt: skip


def call(
    name: str, kernel: str, elements: Size, moved: Size, *, kind: Kind = Kind.ELEMENTWISE, saved: Size = 0,
    temporary: Size = 0, frees_saved: Size = 0, frees_temporary: Size = 0, parameters: Size = 0,
    precision: str | None = None, on_stream: bool = False, gathered: bool = False, gradient: Sequence[Operation] = (),
) -> Operation:  # fmt: skip
    """An operation that is no product, on `elements`, which moves `moved` bytes; `parameters`: bytes of gradients of
    parameters that it makes. Its group is that of the layer that it ends up in (`kinds.py`)."""
    return Operation(
        name, kind, Phase.FORWARD, "", kernel, elements=elements, precision=precision, bytes_moved=moved,
        saved_bytes=saved, temporary_bytes=temporary, frees_saved_bytes=frees_saved,
        frees_temporary_bytes=frees_temporary, gradient_bytes=parameters, on_stream=on_stream, gathered=gathered,
        gradient=tuple(gradient),
    )  # fmt: skip


def product(
    name: str, shape: tuple[Size, Size, Size], element_bytes: Size, *, kernel: str = "matmul", batch: Size = 1,
    flops: Size | None = None, moved: Size | None = None, **memory: Any,
) -> Operation:  # fmt: skip
    """C[m, n] = A[m, k] B[k, n], `batch` times: 2 m n k FLOPs each, and every matrix read or written once."""
    m, n, k = shape
    return changed(
        call(name, kernel, 0, element_bytes * batch * (m * k + k * n + m * n) if moved is None else moved, **memory),
        kind=Kind.MATMUL, matmul=shape, batch=batch, flops=2 * batch * m * n * k if flops is None else flops,
    )  # fmt: skip


def differentiate(operations: Sequence[Operation]) -> list[Operation]:
    """The backward pass: what each operation says of its own, in reverse."""
    return [changed(op, phase=Phase.BACKWARD) for forward in reversed(operations) for op in forward.gradient]


def gradient_first(operations: Sequence[Operation], *more: Operation) -> list[Operation]:
    """The same with `more` first in their backward pass."""
    *others, last = operations
    return [*others, changed(last, gradient=(*more, *last.gradient))]


def gradient_last(operations: Sequence[Operation], *more: Operation) -> list[Operation]:
    """The same with `more` last in their backward pass: where what they read is read elsewhere too, gradients meet."""
    first, *others = operations
    return [changed(first, gradient=(*first.gradient, *more)), *others]


def total_flops(operations: Iterable[Operation]) -> int:
    return sum((op.flops or 0) * op.repeat for op in operations)


def saved_bytes(operations: Iterable[Operation]) -> int:
    """Bytes a forward pass leaves waiting for the backward pass."""
    return sum(op.saved_bytes * op.repeat for op in operations if op.phase is Phase.FORWARD)


_LAYER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.)")


def line_name(operation: str) -> str:
    """Layers of a stack share a line: `blocks.3.attention.qkv` is `blocks.*.attention.qkv`; a last number stays."""
    return _LAYER.sub("*", operation)
