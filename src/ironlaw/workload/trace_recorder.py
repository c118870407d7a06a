"""Listening to one training step, fake or real: every kernel, who called it, and how long each storage lives.

Private parts of torch used here (tried: 2.13; 2.11 has the same names):
- `torch._C._current_autograd_node` and `torch._C._autograd._get_sequence_nr`: a forward call and the backward node
  that belongs to it share a sequence number, which gives backward kernels the name of their module;
- a storage keeps its Python object for as long as it lives, so that a weak reference tells when it is freed (torch's
  own MemTracker relies on the same).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ironlaw.errors import UserError
from ironlaw.ledger import Kind, Phase
from ironlaw.workload.blocks import attention_score_pairs
from ironlaw.workload.trace_kernels import NO_KERNEL, TracedOperation, base_name, calls_of, storages, tensors

FUSED_MODULES: dict[type[nn.Module], str] = {nn.RMSNorm: "rmsnorm"}
"""Modules that are one kernel on accelerators and on a measured machine's curves, and six calls on a CPU."""


@dataclass(frozen=True)
class CallOrigin:
    """Who makes a call; a backward node has that of its forward call."""

    path: str = ""  # of the module, "" for the outermost
    leaf: bool = False  # the module has no children: its calls are its whole work
    fused: str = ""  # name of the kernel that the whole module is
    scope: str = ""  # "attention": inside scaled_dot_product_attention; "loss": inside the loss function
    causal_share: float = 1.0  # of that attention's scores, how many count


@dataclass(frozen=True)
class RecordedKernel:
    """One kernel in the order of execution."""

    call: TracedOperation
    function: str  # ATen's name
    origin: CallOrigin


@dataclass
class Lifetime:
    """A storage: bytes, and the records (indices) that allocate it and after which it is gone (None: never)."""

    bytes: int
    born: int
    died: int | None = None
    gradient: bool = False
    output: bool = False
    padding: int = 0  # of each row of its tensor, how many zeros at the end a padding has put there
    merged: bool = False  # shares the bytes of another storage, because it is written in place


class LongLoop(UserError):
    """A step of more kernels than were asked for, and who recorded so many."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(f"more than {len(recorder.records):,} kernels")
        self.recorder = recorder


class Recorder(TorchDispatchMode):
    """Records kernels and storages while it is active; `phase` is set from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.most = math.inf  # kernels, before LongLoop is raised
        self.phase = Phase.FORWARD
        self.records: list[RecordedKernel] = []
        self.lifetimes: list[Lifetime] = []
        self.accumulations: list[tuple[int, list[Lifetime], Lifetime]] = []  # record, operands, sum
        self._running = [CallOrigin()]
        self._origins: dict[int, CallOrigin] = {}
        self._alive: dict[int, tuple[weakref.ref[Any], Lifetime | None]] = {}

    @property
    def path(self) -> str:
        """Of the module that is running."""
        return self._running[-1].path

    def ignore(self, value: Any) -> None:
        """Storages that exist before the step: parameters, buffers, inputs, other tensors that a module keeps."""
        for storage in (s for tensor in tensors(value) for s in storages(tensor)):
            self._remember(storage, None)

    def mark(self, value: Any, attribute: str) -> None:
        """Set a flag of the lifetimes of these tensors' storages."""
        for storage in (s for tensor in tensors(value) for s in storages(tensor)):
            known = self._alive.get(storage._cdata)
            if known is not None and known[1] is not None:
                setattr(known[1], attribute, True)

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Know which submodule is running, and which attention is causal."""
        handles = []
        for path, child in module.named_modules():
            origin = CallOrigin(path, not any(child.children()), FUSED_MODULES.get(type(child), ""))
            handles.append(child.register_forward_pre_hook(self._enter(origin)))
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
        """What is called inside belongs to the running module's `name`."""
        self._running.append(replace(self._running[-1], scope=name, causal_share=causal_share))
        try:
            yield
        finally:
            self._running.pop()

    def _enter(self, origin: CallOrigin) -> Callable[..., None]:
        return lambda *_: self._running.append(origin)

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
        if base_name(func) != "lift_fresh":  # which makes a tensor of the numbers that a module writes out
            self.ignore((args, kwargs))  # what no call made was there before: a constant of the module
        origin = self._origin()  # before the call, within which fakes may take numbers of nodes
        out = func(*args, **kwargs)
        written = [s for t in tensors(out) for s in storages(t) if s._cdata not in self._alive]
        if not written and not func._schema.is_mutable:
            return out  # a view
        operands = [self._lifetime(t) for t in tensors(args)] if base_name(func) == "add" else []
        index = len(self.records)
        if index > self.most:
            raise LongLoop(self)
        if base_name(func) not in NO_KERNEL:
            for call in calls_of(func, args, kwargs, out):
                if call.attention is not None:
                    call = self._without_padding(call, args)
                if origin.scope == "attention" and call.kind is Kind.MATMUL:
                    call = replace(call, kind=Kind.ATTENTION)
                self.records.append(RecordedKernel(replace(call, phase=self.phase), base_name(func), origin))
        for storage in written:
            born = Lifetime(storage.nbytes(), index, padding=_zeros_at_the_end(func, args))
            if self._remember(storage, born):
                self.lifetimes.append(born)
                if self.phase is Phase.BACKWARD and base_name(func) == "add":
                    self.accumulations.append((index, [o for o in operands if o is not None], born))
        return out

    def _origin(self) -> CallOrigin:
        forward = self.phase is Phase.FORWARD or len(self._running) > 1  # or recomputed within the backward pass
        if forward:
            # The node of this call has just taken its number. Calls without a node find the number taken.
            self._origins.setdefault(torch._C._autograd._get_sequence_nr() - 1, self._running[-1])
            return self._running[-1]
        node = torch._C._current_autograd_node()
        return self._origins.get(node._sequence_nr(), CallOrigin()) if node is not None else CallOrigin()

    def _without_padding(self, call: TracedOperation, args: tuple[Any, ...]) -> TracedOperation:
        """Zeros that make values as wide as keys are no work of the model."""
        value = args[3 if call.kernel.endswith("backward") else 2]
        life = self._lifetime(value)
        if life is None or not life.padding or call.flops is None:
            return call
        whole = args[1].shape[-1] + value.shape[-1]
        return replace(call, flops=call.flops * (whole - life.padding) // whole)

    def _lifetime(self, tensor: Tensor) -> Lifetime | None:
        known = next((self._alive.get(s._cdata) for s in storages(tensor)), None)
        return known[1] if known else None

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


def _zeros_at_the_end(func: Any, args: tuple[Any, ...]) -> int:
    """How far this call pads the last dimension with zeros, and nothing else."""
    if base_name(func) != "constant_pad_nd":
        return 0
    pads, value = args[1], args[2] if len(args) > 2 else 0
    return int(pads[1]) if pads[1] > 0 and not value and not any(p for i, p in enumerate(pads) if i != 1) else 0
