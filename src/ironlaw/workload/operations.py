"""Operations, the hardware-independent parts of a step, each with its backward pass.

    forward = [call("activation", "silu_forward", ..., gradient=[call("activation", "silu_backward", ...)]), ...]
    backward = differentiate(forward)

Each operation of a forward pass declares the operations of its backward pass and the memory these free. A whole
backward pass is never listed: it consists of the gradients of the operations in reverse order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ironlaw.ledger import Kind, Phase
from ironlaw.workload.sizes import Size, is_nonzero


@dataclass(frozen=True)
class Operation:
    """One kernel call. Quantities are per call; `repeat` is the number of calls per micro-batch (or step).

    `kernel` names the efficiency curve that sets its time: `matmul`, `attention_forward`, `gelu_tanh_forward`, ...
    FLOPs are those of matrix products only, as counted by PyTorch's FLOP counter; `None` where it counts none.

    Memory: the bytes that the call allocates, and those freed when it is done, in two pools. *Saved* bytes are held for
    the backward pass, *temporary* bytes are freed within the same phase. `gradient_bytes` are new parameter gradients.

    `gradient`: the operations of its backward pass, in order; empty for operations of a backward pass.
    """

    name: str
    kind: Kind
    phase: Phase
    group: str  # "embedding", "block", "moe_block" (one with experts), "head" or "optimizer"
    kernel: str
    repeat: Size = 1
    matmul: tuple[Size, Size, Size] | None = None  # (m, n, k) of C[m, n] = A[m, k] B[k, n]
    batch: Size = 1  # products of that shape in the call, as of batches, groups of a convolution or experts
    attention: tuple[Size, Size, Size, Size, Size] | None = None  # sequences, tokens, heads, kv_heads, head_size
    flops: Size | None = None
    precision: str | None = None  # if it differs from the step's
    elements: Size = 0  # of the main tensor; sets the time of elementwise kernels
    bytes_moved: Size = 0  # minimal traffic: inputs read once, outputs written once
    saved_bytes: Size = 0
    temporary_bytes: Size = 0
    frees_saved_bytes: Size = 0
    frees_temporary_bytes: Size = 0
    gradient_bytes: Size = 0
    on_stream: bool = False  # acts on the residual stream, which sequence parallel ranks divide
    gathered: bool = False  # layers read its output: sequence parallel ranks gather it and sum its gradient
    summed: bool = False  # tensor parallel ranks multiply parts of its inputs and sum the results
    gradient: tuple[Operation, ...] = field(default=(), repr=False, compare=False)


T = TypeVar("T")


def fast_replace(one: T, **changes: Any) -> T:
    """`dataclasses.replace` in a quarter of its time (no constructor): a plan makes tens of thousands of calls."""
    assert changes.keys() <= one.__dict__.keys()
    made: T = object.__new__(type(one))
    made.__dict__.update(one.__dict__ | changes)
    return made


def with_memory(
    op: Operation, *, saved: Size = 0, temporary: Size = 0, frees_saved: Size = 0, frees_temporary: Size = 0,
    scratch: Size = 0,
) -> Operation:  # fmt: skip
    """Return `op` with bytes added to each pool. `scratch`: bytes allocated only while it runs."""
    return fast_replace(
        op, saved_bytes=op.saved_bytes + saved, temporary_bytes=op.temporary_bytes + temporary + scratch,
        frees_saved_bytes=op.frees_saved_bytes + frees_saved,
        frees_temporary_bytes=op.frees_temporary_bytes + frees_temporary + scratch,
    )  # fmt: skip


def call(
    name: str, kernel: str, elements: Size, moved: Size, *, kind: Kind = Kind.ELEMENTWISE, held: Size = 0,
    saved: Size = 0, temporary: Size = 0, frees_saved: Size = 0, frees_temporary: Size = 0, scratch: Size = 0,
    parameters: Size = 0, precision: str | None = None, on_stream: bool = False, gathered: bool = False,
    summed: bool = False, gradient: Sequence[Operation] = (),
) -> Operation:  # fmt: skip
    """Return an operation other than a matrix product, which moves `moved` bytes. `scratch`: bytes allocated only while
    it runs; `parameters`: bytes of the parameter gradients it creates. `kinds.py` sets its group to that of its layer.

    `held`: bytes saved for its own gradient, whose first operation frees them; `saved`: for the gradients of others.
    """
    if is_nonzero(held):
        first, *others = gradient
        gradient = (with_memory(first, frees_saved=held), *others)
    return Operation(
        name, kind, Phase.FORWARD, "", kernel, elements=elements, precision=precision, bytes_moved=moved,
        saved_bytes=saved + held, temporary_bytes=temporary + scratch, frees_saved_bytes=frees_saved,
        frees_temporary_bytes=frees_temporary + scratch, gradient_bytes=parameters, on_stream=on_stream,
        gathered=gathered, summed=summed, gradient=tuple(gradient),
    )  # fmt: skip


def product(
    name: str, shape: tuple[Size, Size, Size], element_bytes: Size, *, kernel: str = "matmul", batch: Size = 1,
    flops: Size | None = None, moved: Size | None = None, **memory: Any,
) -> Operation:  # fmt: skip
    """C[m, n] = A[m, k] B[k, n], `batch` times: 2 m n k FLOPs each; every matrix is read or written once."""
    m, n, k = shape
    return fast_replace(
        call(name, kernel, 0, element_bytes * batch * (m * k + k * n + m * n) if moved is None else moved, **memory),
        kind=Kind.MATMUL, matmul=shape, batch=batch, flops=2 * batch * m * n * k if flops is None else flops,
    )  # fmt: skip


def without_work(op: Operation, **memory: Size) -> Operation:
    """Return `op` with other memory, and no work or time."""
    return fast_replace(op, repeat=0, flops=None, matmul=None, attention=None, **memory)


def differentiate(operations: Sequence[Operation]) -> list[Operation]:
    """Return the backward pass: the gradients of the operations, in reverse order."""
    return [fast_replace(op, phase=Phase.BACKWARD) for forward in reversed(operations) for op in forward.gradient]


def gradient_first(operations: Sequence[Operation], *more: Operation) -> list[Operation]:
    """Return the operations with `more` put first in their backward pass."""
    *others, last = operations
    return [*others, fast_replace(last, gradient=(*more, *last.gradient))]


def gradient_last(operations: Sequence[Operation], *more: Operation) -> list[Operation]:
    """Return the operations with `more` put last in their backward pass, such as the sum of an input's gradients."""
    first, *others = operations
    return [fast_replace(first, gradient=(*first.gradient, *more)), *others]


def total_flops(operations: Iterable[Operation]) -> int:
    return sum((op.flops or 0) * op.repeat for op in operations)


def saved_bytes(operations: Iterable[Operation]) -> int:
    """Return the bytes that a forward pass saves for the backward pass."""
    return sum(op.saved_bytes * op.repeat for op in operations if op.phase is Phase.FORWARD)


_LAYER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.)")


def line_name(operation: str) -> str:
    """Return the name shared by all layers of a stack: `blocks.3.attention.qkv` -> `blocks.*.attention.qkv`."""
    return _LAYER.sub("*", operation)
