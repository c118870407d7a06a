"""Makes ledger lines of a few profiled steps: self time by phase, kind and the plan's own operation names.

Read from raw events, because the profiler's aggregation takes minutes on long traces. While recording, every
module pushes a named scope; a backward operation is given the scope of the forward operation with the same
autograd sequence number.
"""

from __future__ import annotations

import os
import re
import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from ironlaw.ledger import Key, Kind, Line, Phase
from ironlaw.model import transformer
from ironlaw.model.adapters import LayerAdapters
from ironlaw.model.packed import PackedNorm, ReadOnlyLinear
from ironlaw.model.partition import ComputePartition, Draw
from ironlaw.observe.events import DEVICE, Allocation, Event, recorded_allocations, recorded_events
from ironlaw.observe.memory_peak import KnownStorages, find_peak
from ironlaw.observe.spans import BACKWARD_NODE, FUSED, MODULE_SCOPE, Span, StepSums, nest, scopes_recorded
from ironlaw.workload.kinds import COMPILED, EXPERT
from ironlaw.workload.sections import FROZEN

STEP_SCOPE, PHASE_SCOPE = "ironlaw.step", "ironlaw.phase/"
COPY_SCOPE = "ironlaw.copy"  # of the state, for a checkpoint: held beside the steps, and counted by whoever makes it
SHARDING = "FSDP::"  # marks of PyTorch's own around what it does for a block
COMMUNICATION_SCOPE = "ironlaw.communication"  # waiting for other ranks: counted by whoever waits
RECOMPUTE_SCOPE = "ironlaw.recompute"
COMPILED_SCOPE = "Torch-Compiled Region"  # PyTorch's mark, around what dynamo made of a block
NATIVE = "ironlaw::"  # operations of our own, which PyTorch does not mark
_PRODUCT_WITH_BIAS = "aten::addmm"

_KINDS = {
    Kind.MATMUL: ("mm", "addmm", "bmm", "baddbmm", "_int_mm", "_scaled_mm", "_linear_pointwise", "product",
                  "transposed", "linear_dynamic", "_weight_int4pack_mm_for_cpu"),
    Kind.ATTENTION: ("causal_attention", "causal_attention_backward"),
    Kind.NORM: ("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward"),
    Kind.LOSS: ("_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward"),
    Kind.EMBEDDING: ("embedding", "index_select", "embedding_dense_backward"),
    Kind.OPTIMIZER: ("_fused_adamw_", "_foreach_norm"),
}  # fmt: skip
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}
_FUSED_ATTENTION = re.compile(r"scaled_dot_product|attention_(forward|backward)$")

# What touches no data: views, allocations and the outer layers of composed operations. Their time is the host's.
_NO_WORK = frozenset({
    "alias", "as_strided", "chunk", "cross_entropy_loss", "detach", "dropout", "empty", "empty_like", "empty_strided",
    "expand", "flatten", "layer_norm", "linear", "matmul", "narrow", "reshape", "resize_", "resolve_conj",
    "resolve_neg", "result_type", "rms_norm", "select", "slice", "split", "split_with_sizes", "t", "to", "_to_copy",
    "transpose", "unflatten", "unsafe_split", "_unsafe_view", "unsqueeze", "view", "view_as", "zeros", "zeros_like",
})  # fmt: skip
_LINEARS = frozenset({
    "qkv", "attention_out", "ffn_gate", "ffn_up", "ffn_down", "head", "expert_gate", "expert_up", "expert_down",
    "shared_ffn_gate", "shared_ffn_up", "shared_ffn_down", "query_down", "query_up", "latent_down", "latent_up",
})  # fmt: skip
# Of scopes in which all work is of one kind.
_KIND_OF_SCOPE = {"attention": Kind.ATTENTION, "mask": Kind.ATTENTION, "cache": Kind.ELEMENTWISE}
# Parts of a model that are functions, not modules: attention may be one kernel or many operations.
MODEL_FUNCTIONS = (
    *((owner, name, f"{MODULE_SCOPE}attention") for owner, name in (
        (transformer, "attend"), (ComputePartition, "attend"), (Draw, "attention"),
    )),
    (transformer.Transformer, "attention_mask", f"{MODULE_SCOPE}mask"), (Draw, "residual", f"{MODULE_SCOPE}dropout"),
)  # fmt: skip
_QK_NORMS = {"query_norm": "qk_norm", "key_norm": "qk_norm"}
# Autograd functions of our own, which no module's scope tells apart.
_FUNCTIONS = {"Dispatch": "dispatch", "Combine": "combine"}
_FROZEN_PRODUCT, _DEQUANTISES = "FrozenProduct", "_dequantise"  # of a quantised base; what else it does than multiply
# Backward nodes of a container that belong to one of its operations.
_NODE_SCOPES = {
    ("Attention", "SplitWithSizesBackward0"): "qkv",  # gathers the gradients of query, key and value
    ("Transformer", "AddBackward0"): "positions",
    ("Transformer", "SliceBackward0"): "positions",
}

_LAST_OF_UNIT = {"embedding": "embedding", "head": "head", "experts": "expert_down"}  # where FSDP gathers by itself

_NAMED = (nn.Linear, nn.Embedding, nn.Dropout, nn.LayerNorm, nn.RMSNorm, PackedNorm, ReadOnlyLinear)
# Where a module computes something itself, outside its named children.
_OWN_WORK: dict[str, dict[Kind | None, str]] = {
    "Attention": {Kind.ATTENTION: "attention", None: "rotary"},
    "LatentAttention": {Kind.ATTENTION: "attention", None: "rotary"},
    "FeedForward": {None: "activation"},
    "Router": {Kind.MATMUL: "router", None: "route"},
    "Experts": {None: "activation"},
    "MixtureOfExperts": {None: "route"},
    "Block": {None: "residual"},
    "Transformer": {Kind.EMBEDDING: "positions", Kind.LOSS: "loss", None: "loss"},
}


@dataclass
class StepProfile:
    """Lines and peak of a few recorded steps; seconds are per step."""

    lines: list[Line] = field(default_factory=list)
    peak_bytes: int | None = None  # allocated above what was there when recording began
    peak_parts: dict[str, int] = field(default_factory=dict)  # gradients, activations, temporaries at the peak


def scope(name: str, recording: bool = True) -> AbstractContextManager[Any]:
    """Returns a context that is marked in the trace; it costs nothing without a recording."""
    return record_function(name) if recording else nullcontext()


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Drop what the profiler's library writes to the process's stderr when it starts and stops."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextmanager
def profiled(device: str = "cpu") -> Iterator[profile]:
    """Record with PyTorch's profiler, every allocation too, and drop what it prints."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    recorder = profile(activities=activities, profile_memory=True)
    with silent_stderr():
        recorder.start()
    try:
        yield recorder
    finally:
        with silent_stderr():
            recorder.stop()


def module_scopes(model: nn.Module, compiled: bool = False) -> dict[nn.Module, str]:
    """Returns the plan's operation name of each module, for `scopes_recorded`. Containers have their class's name, see
    `_OWN_WORK`.

    Compiled blocks have none but those of experts, which run uncompiled: a hook in them would have them compiled again,
    in the recorded steps.
    """
    names: dict[nn.Module, str] = {}
    latent = {path for path, module in model.named_modules() if _class_name(module) == "LatentAttention"}
    for path, module in model.named_modules():
        parts = path.split(".")
        leaf = parts[-1]
        if isinstance(module, LayerAdapters):
            names[module] = f"{names[model.get_submodule(path.rpartition('.')[0])]}_adapter"
        elif _class_name(module) in _OWN_WORK:
            names[module] = _class_name(module)
        elif _class_name(module) == "ExpertLinear":
            names[module] = f"{EXPERT}{leaf}"
        elif isinstance(module, _NAMED):
            parent = parts[-2] if len(parts) > 1 else ""
            name = leaf if path.rpartition(".")[0] in latent else _QK_NORMS.get(leaf, leaf)
            if parent == "attention" and leaf == "out":
                name = "attention_out"
            elif parent == "qkv":  # three projections, where a layout divides rows
                name = "qkv"
            elif parent == "ffn" and leaf != "shared_gate":
                name = f"ffn_{leaf}"
            elif parent == "shared":
                name = f"shared_ffn_{leaf}"
            names[module] = name
    if compiled:
        blocks = [module for module in names if _class_name(module) == "Block"]
        inside = {module for block in blocks for module in block.modules()}
        names = {m: name for m, name in names.items() if m not in inside or name.startswith(EXPERT)}
    return names


def scopes_of(model: nn.Module, compiled: bool) -> AbstractContextManager[None]:
    """Returns a context in which a model's modules, and its functions if they are not compiled, push their scopes."""
    return scopes_recorded(module_scopes(model, compiled), () if compiled else MODEL_FUNCTIONS)


def _class_name(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("FSDP")  # which makes a class of its own of each that it shards


def read_profile(recorded: Any, steps: int, gradient_pointers: set[int]) -> StepProfile:
    """`recorded`: a finished torch profiler. `gradient_pointers`: addresses of the gradients of the last step."""
    events = [
        event
        for event in recorded_events(recorded)
        if event.end > event.start and not event.name.startswith("gloo:")  # which lie across what runs meanwhile
    ]
    spans, allocations = nest(events, _place, by_thread=False), recorded_allocations(recorded)
    if any(event.where == DEVICE for event in events):
        lines = _device_lines(spans, events, steps)
        allocations = [allocation for allocation in allocations if allocation.on_device]
    else:
        lines = _lines(spans, steps)
    return StepProfile(lines, *_peak(allocations, spans, gradient_pointers))


def _place(span: Span, forward_scope: dict[int, str]) -> None:
    """Set scope and phase of a span by the marks of our own trainer."""
    name, sequence = span.name, span.event.sequence
    if name == COMMUNICATION_SCOPE:
        span.phase = None
    elif name.startswith(PHASE_SCOPE):
        span.phase, span.scope = Phase(name.removeprefix(PHASE_SCOPE)), ""
    elif name.startswith(SHARDING):
        span.scope, around = SHARDING, span.parent
        if around is not None and around.name.startswith(BACKWARD_NODE) and not around.scope:
            # A node with a hook of FSDP's has no sequence number; it is the last one of what the mark names.
            around.scope = _LAST_OF_UNIT.get(name.rpartition("(")[2].rstrip(")").rpartition(".")[2], "")
    elif name == RECOMPUTE_SCOPE:
        span.scope, span.is_recomputed = "Block", True
    elif span.scope == FROZEN and span.phase is Phase.FORWARD:
        pass  # one operation, though it may be the trained model's own layers
    elif name.startswith(MODULE_SCOPE):
        span.scope = name.removeprefix(MODULE_SCOPE)
    elif name.startswith(COMPILED_SCOPE):
        span.scope = COMPILED
    elif name in _FUNCTIONS:
        span.scope = forward_scope[sequence] = _FUNCTIONS[name]
    elif name == _FROZEN_PRODUCT:
        span.scope = forward_scope[sequence] = span.scope + _DEQUANTISES
    elif name.startswith(BACKWARD_NODE):
        scope, node = forward_scope.get(sequence, ""), name.removeprefix(BACKWARD_NODE)
        span.scope = "accumulate" if "AccumulateGrad" in name else _NODE_SCOPES.get((scope, node), scope)
    elif span.phase is Phase.FORWARD and sequence >= 0:
        forward_scope[sequence] = span.scope


def _lines(spans: list[Span], steps: int) -> list[Line]:
    sums, step = StepSums(steps), -1
    for span in spans:
        if span.name == STEP_SCOPE:
            step += 1
        if span.phase is None:
            continue
        counts = span.inside != _PRODUCT_WITH_BIAS  # what that calls is part of the product
        sums.add(step, _key(span, span.phase), span.self_ns, counts)
    return sums.lines()


def _device_lines(spans: list[Span], events: Sequence[Event], steps: int) -> list[Line]:
    """Kernels count where they were launched. The device's idle time counts where the next kernel belongs."""
    sums, step, launchers = StepSums(steps), -1, dict[int, tuple[int, Span]]()
    for span in spans:
        if span.name == STEP_SCOPE:
            step += 1
        if span.event.link:
            launchers[span.event.link] = step, span
    ends = [span.event.start for span in spans if span.name == STEP_SCOPE]
    for event in events:
        step, launcher = launchers.get(event.link, (-1, None))
        if event.where != DEVICE or launcher is None or launcher.phase is None or step < 0:
            continue
        key, update = _key(launcher, launcher.phase), launcher.phase is Phase.OPTIMIZER
        idle = max(0, event.start - ends[step])
        sums.add(step, key if update else (launcher.phase, Kind.HOST, "dispatch"), idle)
        sums.add(step, key, max(0, event.end - max(event.start, ends[step])), 1)  # of streams side by side, once
        ends[step] = max(ends[step], event.end)
    return sums.lines()


def _key(span: Span, phase: Phase) -> Key:
    kind, operation = _classify(span)
    return phase, kind, f"{operation} again" if span.is_recomputed and kind is not Kind.HOST else operation


def _classify(span: Span) -> tuple[Kind, str]:
    """Returns kind and operation name of a span, as the plan names them."""
    operation = (
        span.name.removeprefix("aten::").removeprefix("mkldnn::").removeprefix("quantized::").removeprefix(NATIVE)
    )
    if span.phase is Phase.OPTIMIZER:  # the plan prices the update with its calls
        return Kind.OPTIMIZER, span.scope or "adamw"
    if span.scope == COMPILED and span.name.startswith(FUSED):
        return Kind.ELEMENTWISE, COMPILED
    if operation == span.name or operation in _NO_WORK:  # Python, module calls, the autograd engine, views
        return Kind.HOST, "dispatch"
    if span.scope == SHARDING:  # gathers and gives back weights, and adds up gradients of micro-batches
        return (Kind.ELEMENTWISE, "accumulate") if operation in ("add", "add_") else (Kind.HOST, "dispatch")
    if operation == "copy_" and span.inside == _PRODUCT_WITH_BIAS:
        return Kind.MATMUL, span.scope or "other"  # the bias, written where the product is added to it
    if operation == "copy_" and span.inside == "aten::clone" and span.scope in _LINEARS:
        return Kind.MATMUL, span.scope  # oneDNN's weight gradient, turned into the layout of the weight
    kind = Kind.ATTENTION if _FUSED_ATTENTION.search(operation) else _KIND_OF.get(operation, Kind.ELEMENTWISE)
    if span.scope.endswith(_DEQUANTISES):
        if kind is Kind.ELEMENTWISE and not span.inside.startswith(BACKWARD_NODE):
            return kind, span.scope
        span.scope = span.scope.removesuffix(_DEQUANTISES)
    if span.scope in _KIND_OF_SCOPE:
        return _KIND_OF_SCOPE[span.scope], span.scope
    if span.scope in _FUNCTIONS.values():
        return Kind.ATTENTION if span.scope == "attention" else Kind.ELEMENTWISE, span.scope
    if span.scope in _OWN_WORK:
        return _own_work(span, kind, operation)
    if span.scope == COMPILED:
        return kind if kind in (Kind.MATMUL, Kind.ATTENTION) else Kind.ELEMENTWISE, COMPILED
    if kind is Kind.ELEMENTWISE:
        return _elementwise(span, operation)
    return kind, span.scope or "other"


def _own_work(span: Span, kind: Kind, operation: str) -> tuple[Kind, str]:
    """Returns kind and name of what a container computes outside its named children."""
    own = _OWN_WORK[span.scope]
    if span.scope in ("FeedForward", "Experts") and operation.startswith("mul"):
        return kind, "gate_product"
    if span.scope in ("Router", "MixtureOfExperts") and _gradients_meet(span, operation):
        return kind, "ffn_norm"
    if span.scope == "LatentAttention" and _is_cast(span, operation):
        return kind, "latent_cast"
    if span.scope == "MixtureOfExperts" and _is_cast(span, operation):
        return kind, "dispatch_cast"
    if span.scope == "MixtureOfExperts" and operation.startswith(("sigmoid", "mul", "add", "sum")):
        return kind, "shared_sum"
    if span.scope == "Block" and span.phase is Phase.BACKWARD and _is_cast(span, operation):
        return kind, "residual_cast"
    if span.scope == "Transformer":
        if kind is Kind.EMBEDDING or operation == "add":
            return Kind.EMBEDDING, "positions"
        return (kind, "head") if kind is Kind.MATMUL else (Kind.LOSS, "loss")  # the products of a chunked loss
    return kind, own.get(kind, own[None])


def _elementwise(span: Span, operation: str) -> tuple[Kind, str]:
    """Returns kind and name of other work, by the module it happens in."""
    scope = span.scope
    gradients_meet = _gradients_meet(span, operation)
    if scope in ("embedding", "positions"):
        return Kind.EMBEDDING, scope
    if scope in _LINEARS:
        if _is_cast(span, operation):
            return Kind.ELEMENTWISE, f"{scope}_cast"
        if gradients_meet and scope in ("query_down", "query_up", "latent_down"):
            return Kind.ELEMENTWISE, "attention_norm"
        return Kind.ELEMENTWISE, "ffn_norm" if gradients_meet and scope.endswith(("ffn_gate", "ffn_up")) else scope
    if scope in ("attention_norm", "ffn_norm") and gradients_meet:
        return Kind.ELEMENTWISE, "residual"
    if scope in ("attention_norm", "ffn_norm", "final_norm", "qk_norm", "query_norm", "latent_norm"):
        return Kind.NORM, scope
    return Kind.ELEMENTWISE, scope or "other"


def _gradients_meet(span: Span, operation: str) -> bool:
    """Whether the engine adds two gradients of one tensor, which it does in the node that delivers the second."""
    return span.phase is Phase.BACKWARD and operation in ("add", "add_")


def _is_cast(span: Span, operation: str) -> bool:
    return operation == "copy_" and span.inside == "aten::_to_copy"


def _peak(
    recorded: Sequence[Allocation], spans: list[Span], gradient_pointers: set[int]
) -> tuple[int | None, dict[str, int]]:
    """Returns bytes and parts of what was alive at the peak of the recorded steps."""
    copies = [(span.event.start, span.event.end) for span in spans if span.name == COPY_SCOPE]
    allocations = [a for a in recorded if not any(start <= a.moment <= end for start, end in copies)]
    named = {f"{PHASE_SCOPE}{phase}": phase for phase in (Phase.FORWARD, Phase.BACKWARD)}
    marks = sorted((span.event.end, named[span.name]) for span in spans if span.name in named)

    def phase_at(moment: int) -> Phase | None:
        index = bisect_left(marks, moment, key=lambda mark: mark[0])
        return marks[index][1] if index < len(marks) else None

    peak = find_peak(allocations, KnownStorages(gradient_addresses=gradient_pointers), phase_at, lambda moment: "")
    if peak is None or all(phase is not Phase.BACKWARD for _, phase in marks):
        return None, {}
    return peak.bytes, {name: peak.parts[name] for name in ("gradients", "activations", "temporaries")}


@dataclass
class Recorded:
    """`allocations` are in order of time, and complete when the block has ended.

    Only this thread's calls are recorded: a tensor that another thread lets go of seems to stay until its address is
    given out again, which the count takes as its end. Gloo's threads do so with the copies that a collective makes for
    itself. Those are gone when this thread goes on: a recording of ranks waits for each collective where it is called
    (`Traffic.synchronous` in `train/parallel/communication.py`).
    """

    allocations: list[Allocation] = field(default_factory=list)

    def peak_bytes(self, begin: int = 0, end: int | None = None) -> int:
        """Returns the peak between two times in nanoseconds, above what was held when the recording began."""
        live: dict[int, int] = {}
        of_collective: set[int] = set()
        held = most = 0
        for allocation in self.allocations:
            if not allocation.of_collective:
                held -= sum(live.pop(address, 0) for address in of_collective)
                of_collective.clear()
            held -= live.pop(allocation.address, 0)
            if allocation.bytes > 0:
                live[allocation.address] = allocation.bytes
                held += allocation.bytes
                if allocation.of_collective:
                    of_collective.add(allocation.address)
                if allocation.moment >= begin and (end is None or allocation.moment <= end):
                    most = max(most, held)
        return most


@contextmanager
def recording() -> Iterator[Recorded]:
    """Record this thread's allocations while the block runs."""
    result = Recorded()
    try:
        with profiled() as recorder:
            yield result
    finally:
        result.allocations = recorded_allocations(recorder)
