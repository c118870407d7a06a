"""Nests events into each other: their own time, their module, and their kind of work.

An operation's own kernel is the outermost call below it that is not composed of others (PyTorch says which are); what
that calls belongs to it. A backward operation has the module of the forward operation with the same sequence number.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function

from ironlaw.ledger import Key, Kind, Line, Origin, Phase
from ironlaw.observe.events import CPU, Event
from ironlaw.workload.operations import line_name
from ironlaw.workload.trace_kernels import _KIND_OF as TRACED_KINDS

MODULE_SCOPE, MARK = "ironlaw.module/", "ironlaw.mark"
RECOMPUTED = "_recomputed"
LEAF = "!"  # ends the scope of a module without children
BACKWARD_NODE = "autograd::engine::evaluate_function: "
FUSED = ("## Call CompiledFxGraph", "triton_")  # loops of compiled code, on a CPU and on CUDA
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
    is_recomputed: bool = False  # a forward pass within the backward pass: recomputation
    backward: bool = False  # inside a node of the autograd engine
    outer: str = ""  # the optimizer, data loader or profiler step around it
    kernel: Event | None = None  # the operation that this is part of
    phase: Phase | None = None  # where the recording marks phases
    step: int = -1  # where it marks steps; the reader of a loop's marks sets both

    @property
    def name(self) -> str:
        return self.event.name

    @property
    def inside(self) -> str:
        """Name of the span around it."""
        return self.parent.event.name if self.parent is not None else ""


@contextmanager
def scopes_recorded(names: Mapping[nn.Module, str], functions: Iterable[tuple[Any, str, str]] = ()) -> Iterator[None]:
    """Push a scope with its name around every module's forward while recording; removed afterwards. The same around
    `functions`: what has each, its name there, and the whole name of its scope."""
    open_scopes: list[Any] = []

    def enter(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any) -> None:
            scope = record_function(MODULE_SCOPE + name)
            scope.__enter__()
            open_scopes.append(scope)

        return hook

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        open_scopes.pop().__exit__(None, None, None)

    with ExitStack() as handles:
        for module, name in names.items():
            handles.callback(module.register_forward_pre_hook(enter(name)).remove)
            # Always: a recomputation leaves a block as soon as it has what the backward pass needs, by an exception.
            handles.callback(module.register_forward_hook(leave, always_call=True).remove)
        for owner, attribute, scope in functions:
            original = getattr(owner, attribute)
            setattr(owner, attribute, record_function(scope)(original))
            handles.callback(setattr, owner, attribute, original)
        yield


Place = Callable[["Span", dict[int, Any]], None]


def nest(events: Sequence[Event], place: Place | None = None, by_thread: bool = True) -> list[Span]:
    """Spans of all threads, sorted by start. `events` are sorted by (start, -end).

    `place` says where a span is, from its name and what it inherited; it may keep something of forward operations by
    sequence number. Without `by_thread` there is one stack: whatever lies within a span belongs to it.
    """
    place = place or _place
    stacks: dict[int | str, list[Span]] = defaultdict(list)
    forward: dict[int, Any] = {}
    spans = []
    for event in events:
        if event.where != CPU or event.name == MARK:
            continue
        stack = stacks[event.lane if by_thread else 0]
        while stack and stack[-1].event.end <= event.start:
            stack.pop()
        parent = stack[-1] if stack else None
        span = Span(event, parent, event.end - event.start)
        if parent is not None:
            parent.self_ns -= span.self_ns
            span.scope, span.attention, span.backward = parent.scope, parent.attention, parent.backward
            span.outer, span.kernel, span.is_recomputed = parent.outer, parent.kernel, parent.is_recomputed
            span.phase = parent.phase
        place(span, forward)
        stack.append(span)
        spans.append(span)
    return spans


def innermost(spans: Sequence[Span]) -> Callable[[float], Span | None]:
    """Returns a function from a moment to the innermost of these spans, of one thread and in order, around it."""
    starts = [span.event.start for span in spans]

    def at(moment: float) -> Span | None:
        index = bisect_right(starts, moment) - 1
        span: Span | None = spans[index] if index >= 0 else None
        while span is not None and span.event.end < moment:
            span = span.parent
        return span

    return at


def main_lane(spans: Sequence[Span]) -> int | str:
    """Returns the thread that is busiest outside of backward passes: the autograd engine has its own on a device."""
    busy = Counter[int | str]()
    for span in spans:
        busy[span.event.lane] += 0 if span.backward else span.self_ns
    return max(busy, key=busy.__getitem__, default=0)


def _place(span: Span, forward: dict[int, tuple[str, bool]]) -> None:
    event, name = span.event, span.event.name
    if name.startswith(MODULE_SCOPE):
        span.scope, span.attention = name.removeprefix(MODULE_SCOPE), False
        span.is_recomputed = span.backward
    elif name.startswith(BACKWARD_NODE):
        span.backward = True
        span.scope, span.attention = forward.get(event.sequence, ("", False))
        if "AccumulateGrad" in name:
            span.scope = "accumulate" + LEAF
    elif name.startswith(_OUTER):
        span.outer = name
    elif name.startswith("nn.Module: "):
        span.scope = _python_scope(span.scope, name)
    elif name.startswith(FUSED):
        span.kernel = event
    elif name.startswith("aten::"):
        operation = name[6:]
        span.attention |= operation == "scaled_dot_product_attention"
        own = span.kernel is None or span.kernel.name.startswith(FUSED)  # compiled code calls products
        if own and operation not in _VIEWS and not composed(operation):
            span.kernel = event
    elif span.kernel is None and name.startswith(("nccl:", "gloo:", "c10d::", "mpi:")):
        span.kernel = event
    if (span.is_recomputed or not span.backward) and event.sequence >= 0 and name.startswith("aten::"):
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
    """Returns the kind of work of an ATen operation, a collective or a device kernel launched outside of any."""
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
    return _name(span) + (RECOMPUTED if span.is_recomputed else "")


def _name(span: Span) -> str:
    """Returns the name in a plan by tracing: the module's path, and the function unless it is all the module does."""
    assert span.kernel is not None
    name = "fused" if span.kernel.name.startswith(FUSED) else span.kernel.name.removeprefix("aten::")
    path, leaf = span.scope.removesuffix(LEAF), span.scope.endswith(LEAF)
    if kind_of(name) is Kind.LOSS and not leaf:
        return line_name(f"{path}.loss".lstrip("."))
    if leaf and path and not span.attention:
        return line_name(path)
    function = "attention" if span.attention else name.strip("_").removesuffix("_data").removesuffix("_backward")
    return line_name(".".join(part for part in (path, function) if part))


def group_of(scope: str) -> str:
    """`model.layers.3.mlp.up!` is `model.layers.*`."""
    parts = ["*" if part.isdigit() else part for part in scope.removesuffix(LEAF).split(".")]
    if "*" in parts:
        parts = parts[: parts.index("*") + 1]
    return ".".join(parts) or "outside"


def span_key(span: Span, phase: Phase) -> Key:
    """Returns the key under which the span's own time counts."""
    if phase is Phase.OPTIMIZER:  # the plan prices the update with its calls
        # PyTorch marks it so, as in Optimizer.step#SGD.step.
        _, stepped, whose = span.outer.partition("Optimizer.step#")
        return phase, Kind.OPTIMIZER, whose.partition(".")[0].lower() if stepped else "clip"
    if span.kernel is None:  # Python, module calls, the autograd engine, composed operations, views
        return phase, Kind.HOST, "dispatch" + (RECOMPUTED if span.is_recomputed else "")
    return phase, kind_of(span.kernel.name), operation_name(span)


class StepSums:
    """Sums nanoseconds and calls of recorded steps by key."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.nanoseconds: dict[Key, list[int]] = defaultdict(lambda: [0] * steps)
        self.counts: dict[Key, int] = defaultdict(int)

    def add(self, step: int, key: Key, nanoseconds: int, count: int = 0) -> None:
        self.nanoseconds[key][step] += nanoseconds
        self.counts[key] += count

    def lines(self) -> list[Line]:
        """Returns per key the quickest step: stalls, and pages that the profiler's own events cost, only add.

        Whoever compares them with phases timed without a profiler scales them to those.
        """
        return [
            Line(*key, count=round(self.counts[key] / self.steps) or None, seconds=min(times) / 1e9,
                 origin=Origin.MEASURED)
            for key, times in sorted(self.nanoseconds.items()) if any(times)
        ]  # fmt: skip


COLLECTIVE = re.compile(r"nccl|rccl|oneccl|all_?reduce|all_?gather|reduce_?scatter", re.IGNORECASE)
_DEVICE_KINDS = (
    (Kind.COLLECTIVE, COLLECTIVE),
    (Kind.ATTENTION, re.compile(r"flash|fmha|attention|sdpa", re.IGNORECASE)),
    (Kind.MATMUL, re.compile(r"gemm|cutlass|xmma|wgmma|matmul|conv|nvjet", re.IGNORECASE)),
    (Kind.NORM, re.compile(r"norm", re.IGNORECASE)),
    (Kind.LOSS, re.compile(r"softmax|nll|cross_entropy", re.IGNORECASE)),
    (Kind.OPTIMIZER, re.compile(r"adam|multi_tensor|sgd", re.IGNORECASE)),
    (Kind.EMBEDDING, re.compile(r"embedding|index_select", re.IGNORECASE)),
)


def device_kind(kernel: str) -> Kind:
    """Returns the kind of work of a kernel, by its name."""
    return next((kind for kind, pattern in _DEVICE_KINDS if pattern.search(kernel)), Kind.ELEMENTWISE)


def device_key(event: Event, launcher: Span | None, phase: Phase) -> Key:
    """Returns the key of a kernel or copy of a device: by the operation that launched it, else by its name."""
    kind, name = device_kind(event.name), _short(event.name)
    if launcher is not None and launcher.kernel is not None:
        kind, name = kind_of(launcher.kernel.name), operation_name(launcher)
    if COLLECTIVE.search(event.name):
        return Phase.COMMUNICATION, Kind.COLLECTIVE, name
    if "HtoD" in event.name:
        return Phase.TRANSFER, Kind.ELEMENTWISE, "copy to the device"
    return phase, Kind.OPTIMIZER if phase is Phase.OPTIMIZER else kind, name


def _short(kernel: str) -> str:
    """`void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>(...)` without what is the same in all."""
    bare = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", bare)[0].split("::")[-1][:60] or kernel[:60]
