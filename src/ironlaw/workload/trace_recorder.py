"""Recording of one training step on fake or real tensors: every kernel, its module, and each storage's lifetime.

`build_operations` converts a recording to a table of operations: kernels with names, storages as bytes.

Private parts of torch used here (tested: 2.13; 2.11 has the same names):
- `torch._C._current_autograd_node` and `torch._C._autograd._get_sequence_nr`: a forward call and its backward node
  share a sequence number, which gives backward kernels the name of their module;
- a storage keeps its Python object while it lives, so that a weak reference shows when it is freed (torch's own
  MemTracker relies on this too).
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from ironlaw.errors import UserError
from ironlaw.ledger import Kind, Phase
from ironlaw.workload.blocks import attention_score_pairs
from ironlaw.workload.trace_kernels import (
    NO_KERNEL,
    TracedOperation,
    base_name,
    kernels_of,
    scratch_bytes,
    storages,
    tensors,
)

FUSED_MODULES: dict[type[nn.Module], str] = {nn.RMSNorm: "rmsnorm"}
"""Modules that are one kernel on accelerators and in a measured machine's curves, but six calls on a CPU."""


@dataclass(frozen=True)
class CallOrigin:
    """The module that makes a call; a backward node has the origin of its forward call."""

    path: str = ""  # of the module, "" for the outermost
    leaf: bool = False  # whether the module has no children
    fused: str = ""  # name of the kernel that replaces the whole module
    scope: str = ""  # "attention": inside scaled_dot_product_attention; "loss": inside the loss function
    causal_share: float = 1.0  # share of unmasked scores in this attention


@dataclass(frozen=True)
class RecordedKernel:
    """One executed kernel."""

    call: TracedOperation
    function: str  # ATen's name
    origin: CallOrigin


@dataclass
class Lifetime:
    """A storage: bytes, index of the record that allocates it, and of the last one before it is freed (None: never)."""

    bytes: int
    born: int
    died: int | None = None
    gradient: bool = False
    output: bool = False
    kept: bool = False  # by autograd, for the backward pass
    padding: int = 0  # zeros that a padding call appended to each row
    merged: bool = False  # shares the bytes of another storage, because the addition is in place


IN_PLACE = ("add", "index_add", "index_put", "scatter", "scatter_add")  # write over their first operand in autograd


class LongLoop(UserError):
    """Raised if a step has more kernels than `Recorder.max_kernels`; holds the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(f"more than {len(recorder.records):,} kernels")
        self.recorder = recorder


class Recorder(TorchDispatchMode):
    """A dispatch mode that records kernels and storages; the caller sets `phase`."""

    def __init__(self) -> None:
        super().__init__()
        self.max_kernels = math.inf  # kernels before LongLoop is raised
        self.phase = Phase.FORWARD
        self.records: list[RecordedKernel] = []
        self.lifetimes: list[Lifetime] = []
        self.accumulations: list[tuple[int, Lifetime, Lifetime]] = []  # record, earlier gradient, sum
        self._keeps_all = False
        self._running = [CallOrigin()]
        self._origins: dict[int, CallOrigin] = {}
        self._alive: dict[int, tuple[weakref.ref[Any], Lifetime | None]] = {}

    @property
    def path(self) -> str:
        """Path of the running module."""
        return self._running[-1].path

    def ignore(self, value: Any) -> None:
        """Exclude storages that exist before the step: parameters, buffers, inputs, constants of a module."""
        for storage in _storages(value):
            self._remember(storage, None)

    def mark(self, value: Any, attribute: str) -> None:
        """Set a flag in the lifetimes of these tensors' storages."""
        for storage in _storages(value):
            life = self._alive.get(storage._cdata, (None, None))[1]
            if life is not None:
                setattr(life, attribute, True)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Flag the storages that autograd keeps inside the context, as hooks for saved tensors see them. Transforms of
        `torch.func` allow no hooks: of their calls, all that lives until the backward pass counts as kept."""
        graph, original = torch.autograd.graph, torch.autograd.graph.disable_saved_tensors_hooks

        def keep(tensor: Tensor) -> Tensor:
            self.mark(tensor, "kept")
            return tensor.detach()  # a graph that holds itself is never freed

        @contextmanager
        def disable(error_message: str) -> Iterator[None]:
            outermost, self._keeps_all = not self._keeps_all, True
            if outermost:
                hooks.__exit__()
            try:
                with original(error_message):
                    yield
            finally:
                if outermost:
                    self._keeps_all = False
                    hooks.__enter__()

        hooks = graph.saved_tensors_hooks(keep, lambda kept: kept)
        graph.disable_saved_tensors_hooks = disable
        try:
            with hooks:
                yield
        finally:
            graph.disable_saved_tensors_hooks = original

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Track the running submodule, and the causal share of its attention, inside the context."""
        handles = []
        for path, child in module.named_modules():
            origin = CallOrigin(path, not any(child.children()), FUSED_MODULES.get(type(child), ""))
            handles.append(child.register_forward_pre_hook(lambda *_, origin=origin: self._running.append(origin)))
            handles.append(child.register_forward_hook(self._leave, always_call=True))
        original = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = self._attention(original)
        try:
            yield
        finally:
            F.scaled_dot_product_attention = original
            for handle in handles:
                handle.remove()

    @contextmanager
    def scope(self, name: str, causal_share: float = 1.0) -> Iterator[None]:
        """Assign calls inside the context to the scope `name` of the running module."""
        self._running.append(replace(self._running[-1], scope=name, causal_share=causal_share))
        try:
            yield
        finally:
            self._running.pop()

    def _leave(self, *_: Any) -> None:
        self._running.pop()

    def _attention(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attention(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            causal = kwargs.get("is_causal", args[3] if len(args) > 3 else False)
            queries, keys = query.shape[-2], key.shape[-2]
            share = attention_score_pairs(queries, keys) / (2 * queries * keys) if causal else 1.0
            with self.scope("attention", share):
                return original(query, key, *args, **kwargs)

        return attention

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if any(is_traceable_wrapper_subclass(t) for t in tensors((args, kwargs))):
            return NotImplemented  # a tensor made of others, such as a nested one: its own calls on them come next
        if not func.has_kernel_for_dispatch_key(torch.DispatchKey.CPU):
            with self:  # calls composed of others, such as linear, arrive whole in inference mode or from such a tensor
                composed = func.decompose(*args, **kwargs)
            if composed is not NotImplemented:
                return composed
        if base_name(func) != "lift_fresh":  # lift_fresh makes a tensor from Python numbers
            self.ignore((args, kwargs))  # storages not made by a recorded call are constants of the module
        origin = self._origin()  # before the call: fake tensors may use up sequence numbers inside
        out = func(*args, **kwargs)
        written = [storage for storage in _storages(out) if storage._cdata not in self._alive]
        if not written and not func._schema.is_mutable:
            return out  # a view
        # Autograd writes over the earlier gradient, or over zeros, unless that is a view, of its base's storage.
        earlier = self._lifetime(args[0]) if base_name(func) in IN_PLACE and not args[0]._is_view() else None
        index = len(self.records)
        if index > self.max_kernels:
            raise LongLoop(self)
        if base_name(func) not in NO_KERNEL:
            scratch = scratch_bytes(func, args, out)
            for call in kernels_of(func, args, kwargs, out):
                if call.attention is not None:
                    call = self._without_padding(call, args)
                if origin.scope == "attention" and call.kind is Kind.MATMUL:
                    call = replace(call, kind=Kind.ATTENTION)
                call = replace(call, phase=self.phase, cpu_scratch_bytes=scratch)
                self.records.append(RecordedKernel(call, base_name(func), origin))
                scratch = 0  # of several kernels, the first gets the scratch memory, and the results
        for storage in written:
            padding = _zeros_at_the_end(func, args)
            born = Lifetime(storage.nbytes(), index, kept=self._keeps_all, padding=padding)
            if self._remember(storage, born):
                self.lifetimes.append(born)
                if self.phase is Phase.BACKWARD and earlier is not None:
                    self.accumulations.append((index, earlier, born))
        return out

    def _origin(self) -> CallOrigin:
        forward = self.phase is Phase.FORWARD or len(self._running) > 1  # a module runs in backward: recomputation
        if forward:
            # The node of this call has just taken its number; calls without a node keep the earlier entry.
            self._origins.setdefault(torch._C._autograd._get_sequence_nr() - 1, self._running[-1])
            return self._running[-1]
        node = torch._C._current_autograd_node()
        return self._origins.get(node._sequence_nr(), CallOrigin()) if node is not None else CallOrigin()

    def _without_padding(self, call: TracedOperation, args: tuple[Any, ...]) -> TracedOperation:
        """Returns attention without the FLOPs of zeros that pad values to the width of keys."""
        value = args[3 if call.kernel.endswith("backward") else 2]
        life = self._lifetime(value)
        if life is None or not life.padding or call.flops is None:
            return call
        whole = args[1].shape[-1] + value.shape[-1]
        return replace(call, flops=call.flops * (whole - life.padding) // whole)

    def _lifetime(self, tensor: Tensor) -> Lifetime | None:
        return next((self._alive.get(storage._cdata, (None, None))[1] for storage in storages(tensor)), None)

    def _remember(self, storage: torch.UntypedStorage, lifetime: Lifetime | None) -> bool:
        key = storage._cdata
        if key in self._alive:
            return False

        def freed(_: object) -> None:
            self._alive.pop(key, None)
            if lifetime is not None:
                lifetime.died = len(self.records) - 1

        self._alive[key] = (weakref.ref(storage, freed), lifetime)
        return True


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    return (storage for tensor in tensors(value) for storage in storages(tensor))


def _zeros_at_the_end(func: Any, args: tuple[Any, ...]) -> int:
    """Returns the zeros that this call appends to the last dimension; 0 if it pads anything else."""
    if base_name(func) != "constant_pad_nd":
        return 0
    pads, value = args[1], args[2] if len(args) > 2 else 0
    return int(pads[1]) if pads[1] > 0 and not value and not any(p for i, p in enumerate(pads) if i != 1) else 0


ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}


def build_operations(recorder: Recorder) -> list[TracedOperation]:
    """Returns the recorded operations: a row per kernel, with the bytes that it allocates and frees."""
    records = recorder.records
    if not records:
        return []
    for index, earlier, total in recorder.accumulations:  # in place, but not for tensor subclasses such as fakes
        if earlier.died == index and earlier.bytes == total.bytes:
            # The sum takes over the earlier gradient's bytes.
            total.born, earlier.merged = earlier.born, True
    groups = _merged(records)
    place = {index: i for i, group in enumerate(groups) for index in group}
    operations = [_operation([records[index] for index in group]) for group in groups]
    memory: list[dict[str, Any]] = [defaultdict(int) for _ in operations]
    backward = next((i for i, op in enumerate(operations) if op.phase is Phase.BACKWARD), None)
    for life in recorder.lifetimes:
        if life.merged:
            continue
        born = place[min(life.born, len(records) - 1)]
        died = None if life.died is None else max(place[max(life.died, 0)], born)
        if died == born and len(groups[born]) > 1:
            continue  # inside a fused kernel
        is_saved = life.kept and backward is not None and born < backward and (died is None or died >= backward)
        kind = "gradient" if life.gradient else "saved" if is_saved and not life.output else "temporary"
        memory[born][f"{kind}_bytes"] += life.bytes
        if died is not None and kind != "gradient":
            memory[died][f"frees_{kind}_bytes"] += life.bytes
    return [replace(op, **sizes) for op, sizes in zip(operations, memory, strict=True)]


def _merged(records: list[RecordedKernel]) -> list[list[int]]:
    """Returns the indices of records by operation: the calls of a module that is one kernel form one operation.

    Such a module, composed of calls, uses its input twice: one addition of gradients is its own, a second is not.
    """
    groups: list[list[int]] = []
    for index, record in enumerate(records):
        before = records[groups[-1][-1]] if groups else None
        if (
            before is not None
            and record.origin.fused
            and (before.origin, before.call.phase) == (record.origin, record.call.phase)
            and not (_accumulates(record) and any(_accumulates(records[i]) for i in groups[-1]))
        ):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _accumulates(record: RecordedKernel) -> bool:
    return record.call.phase is Phase.BACKWARD and record.function == "add"


def _operation(group: list[RecordedKernel]) -> TracedOperation:
    first = group[0]
    call, origin = first.call, first.origin
    if len(group) > 1:
        elements = max(r.call.elements for r in group)
        passes = 2 if call.phase is Phase.FORWARD else 3
        call = replace(
            call, kind=Kind.NORM, kernel=f"{origin.fused}_{call.phase}", elements=elements,
            bytes_moved=passes * elements * ELEMENT_BYTES[call.dtype],
        )  # fmt: skip
    elif _accumulates(first):
        call = replace(call, kernel="add_in_place")
    flops = call.flops
    if flops is not None and call.attention is None:
        flops = round(flops * origin.causal_share)
    return replace(call, name=_operation_name(first), flops=flops)


def _operation_name(record: RecordedKernel) -> str:
    """Returns the module's path, followed by scope or function unless the module is a leaf; the same in both phases."""
    origin = record.origin
    function = record.function.strip("_").removesuffix("_data").removesuffix("_backward")
    if record.call.kind is Kind.LOSS and not origin.leaf:
        return f"{origin.path}.loss".lstrip(".")
    if origin.leaf and origin.path and not origin.scope:
        return origin.path
    return ".".join(part for part in (origin.path, origin.scope or function) if part)
