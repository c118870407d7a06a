"""A stack of layers traced one of each kind: the others are the same rows again, and are not run.

A decoder of 64 Mamba layers, or of 28 Mamba and 4 attention layers, has one or two kinds. The first layer of each kind
runs; later ones hand on what they are given. Their rows are copies, in the order in which the layers run, so that
FLOPs, saved bytes and the highest moment are those of the whole stack.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ironlaw.errors import UserError
from ironlaw.ledger import Phase
from ironlaw.workload.trace_kernels import TracedOperation

_PER_LAYER = ("layer_idx", "layer_id", "layer_index", "block_idx", "training")


@dataclass(frozen=True)
class Stack:
    """`first[i]` is the first layer of the kind of layer i; the list of layers is at `path`."""

    path: str
    first: tuple[int, ...]


def longest_stack(module: nn.Module) -> Stack | None:
    """The list of layers in which most repeat, if any does."""
    lists = [(path, child) for path, child in module.named_modules() if type(child) is nn.ModuleList]
    found = [Stack(path, _kinds(child, module)) for path, child in lists if not _shares(child)]
    repeats = {stack: len(stack.first) - len(set(stack.first)) for stack in found}
    best = max(found, key=lambda stack: repeats[stack], default=None)
    return best if best is not None and repeats[best] else None


def _shares(layers: nn.ModuleList) -> bool:
    """Whether layers have parameters together, whose gradients then meet."""
    owned = [id(p) for layer in layers for p in layer.parameters()]
    return len(owned) != len(set(owned))


def _kinds(layers: nn.ModuleList, module: nn.Module) -> tuple[int, ...]:
    """Layers are of a kind when classes, shapes and settings are equal, and what the config lists of them."""
    config = getattr(module, "config", None)
    values = getattr(config, "__dict__", {}).values()
    listed = [v for v in values if isinstance(v, list | tuple) and len(v) == len(layers)]
    seen: dict[Any, int] = {}
    return tuple(
        seen.setdefault((_signature(layer), *(repr(of_layer[i]) for of_layer in listed)), i)
        for i, layer in enumerate(layers)
    )


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    def settings(child: nn.Module) -> tuple[Any, ...]:
        plain = {k: v for k, v in vars(child).items() if isinstance(v, int | float | str) and k not in _PER_LAYER}
        return tuple(sorted((key, repr(value)) for key, value in plain.items()))

    return (
        tuple((name, type(child).__qualname__, settings(child)) for name, child in layer.named_modules()),
        tuple((name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in layer.named_parameters()),
    )


@contextmanager
def one_of_each(module: nn.Module, stack: Stack) -> Iterator[None]:
    """Only the first layer of each kind runs inside."""
    layers = module.get_submodule(stack.path)
    assert isinstance(layers, nn.ModuleList)
    returned: dict[int, int] = {}  # by layer: how many values, 0 for a tensor alone
    for i, (layer, first) in enumerate(zip(layers, stack.first, strict=True)):
        layer.forward = _first(layer.forward, i, returned) if first == i else _again(first, returned)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _first(forward: Callable[..., Any], i: int, returned: dict[int, int]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        if not isinstance(out, Tensor) and any(part is not None for part in out[1:]):
            raise UserError("layers that return more than one tensor are not repeated")
        returned[i] = 0 if isinstance(out, Tensor) else len(out)
        return out

    return run


def _again(first: int, returned: dict[int, int]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, *[None] * (returned[first] - 1)) if returned[first] else hidden

    return run


def whole(operations: list[TracedOperation], stack: Stack) -> list[TracedOperation]:
    """The rows of all layers from those of one of each kind."""
    forward = [op for op in operations if op.phase is Phase.FORWARD]
    backward = [op for op in operations if op.phase is Phase.BACKWARD]
    order = range(len(stack.first))
    return _repeated(forward, stack, order) + _repeated(backward, stack, order[::-1])


def _repeated(rows: list[TracedOperation], stack: Stack, order: Any) -> list[TracedOperation]:
    pattern = re.compile(re.escape(stack.path) + r"\.(\d+)(?=\.|$)")
    blocks: dict[int, list[TracedOperation]] = {i: [] for i in set(stack.first)}
    before: dict[int, list[TracedOperation]] = {i: [] for i in blocks}  # rows between layers
    waiting: list[TracedOperation] = []
    made: list[TracedOperation] = []
    for op in rows:
        match = pattern.match(op.name)
        if match is None:
            waiting.append(op)
            continue
        i = int(match[1])
        where = blocks[i] if blocks[i] else before[i] if any(blocks.values()) else made
        where += waiting
        waiting = []
        blocks[i].append(op)
    for i in order:
        first = stack.first[i]
        made += before[i] if i == first else []
        different = {id(op): op for op in blocks[first]}  # a loop's rows are the same objects again and again
        mine = {k: replace(op, name=pattern.sub(f"{stack.path}.{i}", op.name, count=1)) for k, op in different.items()}
        made += [mine[id(op)] for op in blocks[first]]
    return made + waiting
