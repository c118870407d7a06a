"""Events nested into each other: whose time is whose, in which module, and what kind of work.

An operation's own kernel is the outermost call below it that is not composed of others (PyTorch says which are); what
that calls belongs to it. A backward operation has the module of the forward operation with the same sequence number.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ironlaw.ledger import Kind
from ironlaw.observe.events import CPU, Event
from ironlaw.workload.operations import line_name
from ironlaw.workload.trace_kernels import _KIND_OF as TRACED_KINDS

MODULE_SCOPE, MARK = "ironlaw.module/", "ironlaw.mark"
RECOMPUTED = "_recomputed"
LEAF = "!"  # ends the scope of a module without children
BACKWARD_NODE = "autograd::engine::evaluate_function: "
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_int_mm", "_scaled_mm", "convolution", "convolution_backward", "addmv")
_VIEWS = frozenset({
    "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "new_empty",
    "new_empty_strided", "permute", "resize_", "select", "set_", "slice", "split", "split_with_sizes", "squeeze", "t",
    "transpose", "unbind", "unfold", "unsafe_split", "unsqueeze", "view", "_reshape_alias", "_unsafe_view",
    "_local_scalar_dense", "item", "is_nonzero", "result_type", "resolve_conj", "resolve_neg", "lift_fresh",
})  # fmt: skip
_OUTER = ("Optimizer.step#", "Optimizer.zero_grad#", "enumerate(DataLoader)#", "ProfilerStep#")


@dataclass(slots=True)
class Span:
    """An event of a processor's thread, in its place."""

    event: Event
    parent: Span | None = None
    self_ns: int = 0
    scope: str = ""  # path of the module, ending in "!" when it has no children
    attention: bool = False  # inside scaled_dot_product_attention
    again: bool = False  # a forward pass within the backward pass: recomputation
    backward: bool = False  # inside a node of the autograd engine
    outer: str = ""  # the optimizer, data loader or profiler step around it
    kernel: Event | None = None  # the operation that this is part of


def nest(events: Sequence[Event]) -> list[Span]:
    """Spans of all threads, sorted by start. `events` are sorted by (start, -end)."""
    stacks: dict[int | str, list[Span]] = defaultdict(list)
    forward: dict[int, tuple[str, bool]] = {}
    spans = []
    for event in events:
        if event.where != CPU or event.name == MARK:
            continue
        stack = stacks[event.lane]
        while stack and stack[-1].event.end <= event.start:
            stack.pop()
        parent = stack[-1] if stack else None
        span = Span(event, parent, event.end - event.start)
        if parent is not None:
            parent.self_ns -= span.self_ns
            span.scope, span.attention, span.backward = parent.scope, parent.attention, parent.backward
            span.outer, span.kernel, span.again = parent.outer, parent.kernel, parent.again
        _place(span, forward)
        stack.append(span)
        spans.append(span)
    return spans


def _place(span: Span, forward: dict[int, tuple[str, bool]]) -> None:
    event, name = span.event, span.event.name
    if name.startswith(MODULE_SCOPE):
        span.scope, span.attention = name.removeprefix(MODULE_SCOPE), False
        span.again = span.backward
    elif name.startswith(BACKWARD_NODE):
        span.backward = True
        span.scope, span.attention = forward.get(event.sequence, ("", False))
        if "AccumulateGrad" in name:
            span.scope = "accumulate" + LEAF
    elif name.startswith(_OUTER):
        span.outer = name
    elif name.startswith("nn.Module: "):
        span.scope = _python_scope(span.scope, name)
    elif name.startswith("aten::"):
        operation = name[6:]
        span.attention |= operation == "scaled_dot_product_attention"
        if span.kernel is None and operation not in _VIEWS and not composed(operation):
            span.kernel = event
    elif span.kernel is None and name.startswith(("nccl:", "gloo:", "c10d::", "mpi:")):
        span.kernel = event
    if (span.again or not span.backward) and event.sequence >= 0 and name.startswith("aten::"):
        forward[event.sequence] = (span.scope, span.attention)


def _python_scope(outer: str, name: str) -> str:
    """`nn.Module: Linear_3` of a trace with modules: the class, layers of a stack together."""
    own = name.removeprefix("nn.Module: ").rsplit("_", 1)[0]
    return ".".join(part for part in (outer.removesuffix(LEAF), own) if part) + LEAF


@functools.cache
def composed(operation: str) -> bool:
    """Whether PyTorch implements it by calling other operations, so that it does no work of its own."""
    packet = getattr(torch.ops.aten, operation, None)
    if packet is None:
        return False
    for overload in packet.overloads():
        name = f"aten::{operation}" if overload == "default" else f"aten::{operation}.{overload}"
        try:
            if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
                return True
        except RuntimeError:  # an overload that only the interpreter knows
            continue
    return False


def kind_of(operation: str) -> Kind:
    """Kind of work of an ATen operation, a collective or a device kernel that was launched outside of any."""
    if operation.startswith(("nccl:", "gloo:", "c10d::", "mpi:")):
        return Kind.COLLECTIVE
    bare = operation.removeprefix("aten::")
    if bare in _PRODUCTS or "mkldnn_linear" in bare or bare.startswith(("mkldnn_convolution", "cudnn_convolution")):
        return Kind.MATMUL
    if "scaled_dot_product" in bare or "flash_attn" in bare or "efficient_attention" in bare:
        return Kind.ATTENTION
    if bare in ("_fused_adamw_", "_fused_adam_", "_foreach_norm"):
        return Kind.OPTIMIZER
    return TRACED_KINDS.get(bare) or TRACED_KINDS.get(bare.removesuffix("_backward")) or Kind.ELEMENTWISE


def operation_name(span: Span) -> str:
    return _name(span) + (RECOMPUTED if span.again else "")


def _name(span: Span) -> str:
    """As a plan by tracing names it: the module's path, then the function unless that is all the module does."""
    assert span.kernel is not None
    name = span.kernel.name.removeprefix("aten::")
    path, leaf = span.scope.removesuffix(LEAF), span.scope.endswith(LEAF)
    if kind_of(name) is Kind.LOSS and not leaf:
        return line_name(f"{path}.loss".lstrip("."))
    if leaf and path and not span.attention:
        return line_name(path)
    function = "attention" if span.attention else name.strip("_").removesuffix("_data").removesuffix("_backward")
    return line_name(".".join(part for part in (path, function) if part))
