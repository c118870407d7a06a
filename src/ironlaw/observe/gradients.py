"""Which gradients of a step an update reads, and which rows of embeddings had any."""

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
_READS_NOTHING = ("zero_", "detach", "_amp_")  # filled with zeros, dropped, unscaled


def _clips() -> bool:
    return any(frame.f_code.co_filename == CLIPPING for frame, _ in traceback.walk_stack(None))


@dataclass
class _Call:
    """One call of a module with weights: where, which, and whether a gradient could go on behind it."""

    place: str
    parameters: set[int]
    passes_on: bool


@dataclass
class _Pass:
    """One backward pass: where it began and the calls before it, and what it wrote, in order."""

    place: str
    calls: list[_Call]
    written: list[Tensor] = field(default_factory=list)
    read: set[int] = field(default_factory=set)


class GradientUse:
    """Looks at one step between `begin` and `end`; whether gradients are read shows until the `facts` are asked for.

    Of any module: a teacher beside the model that is observed has its gradients computed too.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._module, self._optimizers = module, optimizers
        self._handles: dict[int, Any] = {}
        self._passes: list[_Pass] = []
        self._calls: list[_Call] = []
        self._waiting: dict[int, tuple[Tensor, list[_Pass]]] = {}
        self._held: dict[int, int] = {}  # address of a gradient that waits -> id of its parameter
        self._untouched: float | None = None

    def begin(self) -> None:
        self._handles[0] = nn.modules.module.register_module_forward_pre_hook(self._called)

    def end(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _called(self, module: nn.Module, args: Any) -> None:
        own = {id(p) for p in module.parameters() if p.requires_grad} if torch.is_grad_enabled() else None
        if own:
            self._calls.append(_Call(user_line(), own, any(t.requires_grad for t in tensors(args))))

    def backward_begins(self, roots: Any) -> None:
        self._forget_cleared()
        if self._handles:
            self._passes.append(_Pass(user_line(), self._calls))
            self._calls = []
            for leaf in _leaves(roots):
                if id(leaf) not in self._handles:
                    self._handles[id(leaf)] = leaf.register_post_accumulate_grad_hook(self._wrote)

    def backward_ended(self) -> None:
        if self._handles and self._untouched is None:
            self._untouched = self._untouched_part()
        strided = (p for p, _ in self._waiting.values() if p.grad is not None and p.grad.layout is torch.strided)
        self._held = {p.grad.data_ptr(): id(p) for p in strided if p.grad is not None}

    def operation_called(self, name: str, operands: Any) -> None:
        """Gradients that the loop itself computes with are read, but for filling them with zeros."""
        if not self._waiting or any(word in name for word in _READS_NOTHING):
            return
        for at in {t.data_ptr() for t in tensors(operands) if t.layout is torch.strided} & self._held.keys():
            weight, passes = self._waiting.get(self._held[at], (None, []))
            if weight is not None and weight.grad is not None and weight.grad.data_ptr() == at and not _clips():
                for one in passes:
                    one.read.add(id(weight))

    def update_begins(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._waiting:
            return
        self._forget_cleared()
        for parameter in _updated((optimizer,)):
            for one in self._waiting.pop(parameter, (None, ()))[1]:
                one.read.add(parameter)

    def _wrote(self, parameter: Tensor) -> None:
        if self._passes:
            self._passes[-1].written.append(parameter)
            self._waiting.setdefault(id(parameter), (parameter, []))[1].append(self._passes[-1])

    def _forget_cleared(self) -> None:
        """Gradients that are gone before any update came to read them."""
        gone = [i for i, (p, _) in self._waiting.items() if p.grad is None or not bool(p.grad.any())]
        for parameter in gone:
            del self._waiting[parameter]

    def facts(self, files: Sequence[str]) -> dict[str, Any]:
        """Parts of the elements of all gradients of the step: `gradients_idle` no update read, `rows_untouched` are
        rows of embeddings that no token of the batch was, zeros that an optimizer goes through all the same."""
        names = tuple(type(optimizer).__name__ for optimizer in self._optimizers)
        owned = _updated(self._optimizers)
        for parameter, (_, passes) in self._waiting.items() if self._passes else ():
            for one in passes if parameter in owned else ():  # those of an accumulation that goes on
                one.read.add(parameter)
        whole = sum(p.numel() for one in self._passes for p in one.written)
        if not whole:
            return {"gradients_idle": None, "rows_untouched": None}
        left_out = {id(p) for p in self._module.parameters()} - owned
        idle = [_idle(one, owned, left_out) for one in self._passes]
        worst = max(range(len(idle)), key=lambda n: idle[n][0])
        return {
            "gradients_idle": {
                "part": sum(part for part, _ in idle) / whole,
                "place": idle[worst][1][0] if idle[worst][1] else line_calling(names, files),
                "lines": [*idle[worst][1][1:3], line_calling(names, files) or "?"],
            },
            "rows_untouched": {"part": self._untouched or 0.0,
                               "place": line_calling(("Embedding", "EmbeddingBag"), files)},
        }  # fmt: skip

    def _untouched_part(self) -> float:
        updated = _updated(self._optimizers)
        whole = sum(p.numel() for p in self._module.parameters() if p.grad is not None)
        tables = {id(m.weight): m.weight.grad for m in self._module.modules()
                  if isinstance(m, nn.Embedding | nn.EmbeddingBag)}  # fmt: skip
        rows = [g for p, g in tables.items() if type(g) is torch.Tensor and not g.is_sparse and p in updated]
        return sum(float((g == 0).all(dim=1).sum()) * g.shape[1] for g in rows) / max(1, whole)


def parameters_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def _updated(optimizers: Sequence[torch.optim.Optimizer]) -> set[int]:
    return {id(p) for p in parameters_of(optimizers)}


def graph_of(roots: Any) -> list[Any]:
    """The nodes that a backward pass from here comes through."""
    nodes = [t.grad_fn for t in tensors(roots) if t.grad_fn is not None]
    seen = set(nodes)
    for node in nodes:  # which grows meanwhile
        before = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= before
        nodes += before
    return nodes


def _leaves(roots: Any) -> list[Tensor]:
    """Whatever a backward pass from here writes gradients of."""
    return [node.variable for node in graph_of(roots) if hasattr(node, "variable")]


def _idle(one: _Pass, owned: set[int], left_out: set[int]) -> tuple[float, list[str]]:
    """Elements of gradients that nothing read, and the lines of the calls they belong to, then of the pass.

    What a pass computes behind the last gradient that is read, it computes for nothing, and so what it computes of a
    module behind which nothing is learned. Elsewhere gradients of activations are needed, and those of weights, half of
    the work, are not: that counts where no optimizer has the weight at all, and not for a discriminator through which a
    generator learns.
    """
    last = max((n for n, p in enumerate(one.written) if id(p) in one.read), default=-1)
    unread = {id(p) for p in one.written if id(p) not in one.read}
    ends = [c for c in one.calls if c.parameters <= unread and not c.parameters & owned and not c.passes_on]
    behind = {id(p) for p in one.written[last + 1 :]}
    whole = behind.union(*(c.parameters for c in ends)) & unread
    elements = sum(p.numel() * (1 if id(p) in whole else 0 if id(p) in owned else 0.5) for p in one.written
                   if id(p) in unread)  # fmt: skip
    thrown = behind & owned
    begun = [c.place for c in one.calls if c.parameters & thrown]
    begun = begun or [c.place for c in ends if not c.parameters <= left_out]
    if not begun:  # weights of the model that no optimizer has: its constructor is the line
        return elements, []
    through = [c.place for c in one.calls if thrown and not c.parameters & thrown]
    return elements, list(dict.fromkeys((*begun, *through, one.place)))
