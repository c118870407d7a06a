"""Finds gradients that no update reads, and rows of embeddings that had none."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ironlaw.observe.user_code import line_calling, user_line
from ironlaw.workload.trace_kernels import tensors

CLIPPING = torch.nn.utils.clip_grad.__file__
_NOT_READING = ("zero_", "detach", "_amp_")  # filled with zeros, dropped, unscaled


def _is_clipping() -> bool:
    return any(frame.f_code.co_filename == CLIPPING for frame, _ in traceback.walk_stack(None))


@dataclass
class _ModuleCall:
    """One call of a module with weights: its line, its weights, and whether its inputs have gradients too."""

    place: str
    parameters: set[int]
    has_gradient_input: bool


@dataclass
class _BackwardPass:
    """One backward pass: its line, the calls before it, weights whose gradients it wrote in order, and those read."""

    place: str
    calls: list[_ModuleCall]
    written: list[Tensor] = field(default_factory=list)
    read: set[int] = field(default_factory=set)


class GradientUse:
    """Watches one step between `begin` and `end`. Whether its gradients are read may show later, until `facts`.

    All modules count: a teacher beside the observed model has its gradients computed too.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._module, self._optimizers = module, optimizers
        self._handles: dict[int, Any] = {}
        self._passes: list[_BackwardPass] = []
        self._calls: list[_ModuleCall] = []
        self._unread: dict[int, tuple[Tensor, list[_BackwardPass]]] = {}
        self._owner_of_address: dict[int, int] = {}  # address of a gradient that waits -> id of its parameter
        self._untouched: tuple[float, float] | None = None

    def begin(self) -> None:
        self._handles[0] = nn.modules.module.register_module_forward_pre_hook(self._module_called)

    def end(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _module_called(self, module: nn.Module, args: Any) -> None:
        own = {id(p) for p in module.parameters() if p.requires_grad} if torch.is_grad_enabled() else None
        if own:
            self._calls.append(_ModuleCall(user_line(), own, any(t.requires_grad for t in tensors(args))))

    def backward_begins(self, roots: Any) -> None:
        self._forget_cleared()
        if self._handles:
            self._passes.append(_BackwardPass(user_line(), self._calls))
            self._calls = []
            owned = _updated(self._optimizers)
            for leaf in _leaves(roots):
                is_weight = isinstance(leaf, nn.Parameter) or id(leaf) in owned  # no batch, to be differentiated by
                if is_weight and id(leaf) not in self._handles:
                    self._handles[id(leaf)] = leaf.register_post_accumulate_grad_hook(self._gradient_written)

    def backward_ended(self) -> None:
        if self._handles and self._untouched is None:
            self._untouched = self._untouched_parts()
        strided = (p for p, _ in self._unread.values() if p.grad is not None and p.grad.layout is torch.strided)
        self._owner_of_address = {p.grad.data_ptr(): id(p) for p in strided if p.grad is not None}

    def operation_called(self, name: str, operands: Any) -> None:
        """Gradients that the loop itself computes with are read, unless it fills them with zeros."""
        if not self._unread or any(word in name for word in _NOT_READING):
            return
        addresses = {t.data_ptr() for t in tensors(operands) if t.layout is torch.strided}
        for at in addresses & self._owner_of_address.keys():
            weight, passes = self._unread.get(self._owner_of_address[at], (None, []))
            if weight is not None and weight.grad is not None and weight.grad.data_ptr() == at and not _is_clipping():
                for one in passes:
                    one.read.add(id(weight))

    def update_begins(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in parameters_of((optimizer,)):
            for one in self._unread.pop(id(parameter), (None, ()))[1] if parameter.grad is not None else ():
                one.read.add(id(parameter))

    def _gradient_written(self, parameter: Tensor) -> None:
        if self._passes:
            self._passes[-1].written.append(parameter)
            self._unread.setdefault(id(parameter), (parameter, []))[1].append(self._passes[-1])

    def _forget_cleared(self) -> None:
        """Drop gradients that were cleared before any update read them."""
        gone = [i for i, (p, _) in self._unread.items() if p.grad is None or not bool(p.grad.any())]
        for parameter in gone:
            del self._unread[parameter]

    def facts(self, files: Sequence[str], tables_part: float) -> dict[str, Any]:
        """Parts of the elements of all gradients of the step: `gradients_idle` were read by no update; `rows_untouched`
        are zeros of embedding rows that no token of the batch used, which an optimizer still goes through.
        `tables_part`: of the backward pass, for gradients of embeddings."""
        names = tuple(type(optimizer).__name__ for optimizer in self._optimizers)
        owned = _updated(self._optimizers)
        for parameter, (_, passes) in self._unread.items() if self._passes else ():
            for one in passes if parameter in owned else ():  # those of an accumulation that goes on
                one.read.add(parameter)
        whole = sum(p.numel() for one in self._passes for p in one.written)
        if not whole:
            return {"gradients_idle": None, "rows_untouched": None}
        not_owned = {id(p) for p in self._module.parameters()} - owned
        idle = [_idle_elements(one, owned, not_owned) for one in self._passes]
        worst = max(range(len(idle)), key=lambda n: idle[n][0])
        untouched, of_tables = self._untouched or (0.0, 0.0)
        return {
            "gradients_idle": {
                "part": sum(part for part, _ in idle) / whole,
                "place": idle[worst][1][0] if idle[worst][1] else line_calling(names, files),
                "lines": [*idle[worst][1][1:3], line_calling(names, files) or "?"],
            },
            "rows_untouched": {"part": untouched, "of_backward": of_tables * tables_part,
                               "place": line_calling(("Embedding", "EmbeddingBag"), files)},
        }  # fmt: skip

    def _untouched_parts(self) -> tuple[float, float]:
        """Returns what untouched rows are of the elements of all gradients, and of those of embeddings."""
        updated = _updated(self._optimizers)
        whole = sum(p.numel() for p in self._module.parameters() if p.grad is not None)
        tables = {id(m.weight): m.weight.grad for m in self._module.modules()
                  if isinstance(m, nn.Embedding | nn.EmbeddingBag)}  # fmt: skip
        rows = [g for p, g in tables.items() if type(g) is torch.Tensor and not g.is_sparse and p in updated]
        untouched = sum(float((g == 0).all(dim=1).sum()) * g.shape[1] for g in rows)
        return untouched / max(1, whole), untouched / max(1, sum(g.numel() for g in rows))


def parameters_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def _updated(optimizers: Sequence[torch.optim.Optimizer]) -> set[int]:
    return {id(p) for p in parameters_of(optimizers)}


def graph_of(roots: Any) -> list[Any]:
    """Returns the nodes of autograd's graph that a backward pass from these roots visits."""
    nodes = [t.grad_fn for t in tensors(roots) if t.grad_fn is not None]
    seen = set(nodes)
    for node in nodes:  # which grows meanwhile
        before = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= before
        nodes += before
    return nodes


def _leaves(roots: Any) -> list[Tensor]:
    """Returns the tensors whose gradients a backward pass from these roots writes."""
    return [node.variable for node in graph_of(roots) if hasattr(node, "variable")]


def _idle_elements(one: _BackwardPass, owned: set[int], not_owned: set[int]) -> tuple[float, list[str]]:
    """Returns elements of gradients that nothing reads, and the lines of the calls they belong to, then of the pass.

    All that a pass computes after the last gradient that is read is wasted, and so is all of a module whose inputs have
    no gradients. Elsewhere gradients of activations are needed, and those of weights, half of the work, are not: these
    count if no optimizer has the weight at all, and not for a discriminator through which a generator learns.
    """
    last = max((n for n, p in enumerate(one.written) if id(p) in one.read), default=-1)
    unread = {id(p) for p in one.written if id(p) not in one.read}
    ends = [c for c in one.calls if c.parameters <= unread and not c.parameters & owned and not c.has_gradient_input]
    behind = {id(p) for p in one.written[last + 1 :]}
    whole = behind.union(*(c.parameters for c in ends)) & unread
    elements = sum(p.numel() * (1 if id(p) in whole else 0 if id(p) in owned else 0.5) for p in one.written
                   if id(p) in unread)  # fmt: skip
    thrown_away = behind & owned
    begins = [c.place for c in one.calls if c.parameters & thrown_away]
    begins = begins or [c.place for c in ends if not c.parameters <= not_owned]
    if not begins:  # weights of the model that no optimizer has: its constructor is the line
        return elements, []
    through = [c.place for c in one.calls if thrown_away and not c.parameters & thrown_away]
    return elements, list(dict.fromkeys((*begins, *through, one.place)))
