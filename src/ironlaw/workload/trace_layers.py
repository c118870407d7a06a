"""Rows of a trace that need not be run: layers like an earlier one, and lengths that nobody waits for.

A decoder of 64 Mamba layers, or of 28 Mamba and 4 attention layers, has one or two kinds. The first layer of each kind
runs; later ones hand on what they are given. Their rows are copies, in the order in which the layers run, so that
FLOPs, saved bytes and the highest moment are those of the whole stack.

A loop over tokens in Python makes the same calls for every token, a hundred per layer and pass. So the rows of a
recurrent decoder's trace are some that come once and bodies that repeat; how often, and every size in a row, is a
polynomial of the length, as products of shapes are: of degree one for the repeats, at most two for sizes. Three lengths
determine it, a longer one must agree to the last unit, as must the first kernels at the length wanted; else, and where
windows or chunks lie between, the whole sequence is traced. The rows that a body repeats are the same objects.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from ironlaw.errors import UserError
from ironlaw.ledger import Phase
from ironlaw.workload.module_source import Input
from ironlaw.workload.trace_inputs import Assumed, Inputs
from ironlaw.workload.trace_kernels import TracedOperation
from ironlaw.workload.trace_store import ModuleTrace

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


ROWS = 10_000
"""More kernels than this in one pass over layers of each kind are a loop over tokens: 5 seconds of tracing."""

STEP, LENGTHS = 16, (1, 2, 3, 5)
"""Multiples of 16 tokens; the last is past the chunks of 64 that recurrences are computed in."""

LONGEST = STEP * (LENGTHS[-1] + 1) - 1
"""Tokens of a sequence that is traced."""

SHORTEST = 2 * STEP * sum(LENGTHS)
"""Tokens from which four short sequences take less than the whole."""

LONGEST_BODY, LEAST_REPEATS = 1024, 6

AS_SHORTER: Assumed = ("loop over tokens", f"as in shorter sequences, of up to {LONGEST} tokens", "its length", "")

_COMPUTED = ("name", "kernel", "phase", "flops", "matmul", "attention", "elements", "bytes_moved")


def changes_between(module: nn.Module, length: int) -> bool:
    """Whether a window or a chunk of the module is longer than what would be traced and shorter than `length`."""
    settings = [vars(getattr(module, "config", None) or module), *(vars(child) for child in module.modules())]
    numbers = [
        value
        for each in settings
        for name, value in each.items()
        if ("window" in name or "chunk" in name) and isinstance(value, int)
    ]
    return any(LONGEST < number < length for number in numbers)


def common_length(inputs: Inputs) -> int:
    """The last dimension of all inputs; 0 where they differ in it, or one is not described by its shape."""
    lengths = {each.shape[-1] if isinstance(each, Input) and each.shape else 0 for each in inputs}
    return lengths.pop() if len(lengths) == 1 else 0


def shortened(inputs: Iterable[Any], length: int) -> list[Input]:
    """Inputs that have a common length at another one."""
    return [replace(each, shape=(*each.shape[:-1], length)) for each in inputs]


class NotAlike(Exception):
    """Rows or sizes are no polynomial of the length."""


def at_length(
    traced: Callable[[int], tuple[ModuleTrace, Stack | None]], length: int, begun: Sequence[TracedOperation] = ()
) -> tuple[ModuleTrace, Stack | None]:
    """What `traced` gives for that many tokens, from shorter ones; NotAlike where it has to be run, also where it
    does not begin with the kernels of `begun`."""
    found, stacks = zip(*(traced(length % STEP + STEP * n) for n in LENGTHS), strict=True)
    segments = [_segments(one.operations) for one in found]
    if len({tuple(len(body) for body, _ in each) for each in segments}) > 1:
        raise NotAlike
    operations: list[TracedOperation] = []
    for parts in zip(*segments, strict=True):
        times = _value([times for _, times in parts], length)
        operations += [_value(rows, length) for rows in zip(*(body for body, _ in parts), strict=True)] * times
    same = zip(operations, begun[:-1], strict=False)  # the last may have been cut short
    if any(getattr(mine, name) != getattr(theirs, name) for mine, theirs in same for name in _COMPUTED):
        raise NotAlike
    others = _value([replace(one, operations=[], inputs={}) for one in found], length)
    return replace(others, operations=operations), stacks[-1]


def _value(values: Sequence[Any], length: int) -> Any:
    """At `length`, of what is known at the four: numbers by their polynomial, the rest must be equal."""
    first = values[0]
    if all(value == first for value in values):
        return first
    if any(type(value) is not type(first) for value in values):
        raise NotAlike
    if is_dataclass(first) and not isinstance(first, type):
        names = [each.name for each in fields(first)]
        return replace(first, **{n: _value([getattr(v, n) for v in values], length) for n in names})
    if isinstance(first, tuple) and len({len(value) for value in values}) == 1:
        return tuple(_value(parts, length) for parts in zip(*values, strict=True))
    if type(first) is not int:
        raise NotAlike

    def polynomial(at: int) -> int:
        """Through the first three, by differences."""
        u = at - LENGTHS[0]
        slope, bend = values[1] - first, values[2] - 2 * values[1] + first
        return first + u * slope + u * (u - 1) // 2 * bend

    if polynomial(LENGTHS[3]) != values[3]:
        raise NotAlike
    return polynomial(length // STEP)


def _segments(rows: Sequence[TracedOperation]) -> list[tuple[Sequence[TracedOperation], int]]:
    """Rows in order as bodies and how often each comes."""
    number: dict[TracedOperation, int] = {}
    ids = np.array([number.setdefault(row, len(number)) for row in rows])
    return [(rows[start:end], times) for start, end, times in _loops(ids, 0)]


def _loops(ids: np.ndarray[Any, Any], offset: int) -> list[tuple[int, int, int]]:
    """Start and end of each body and its repeats: the longest loop first, then what is before and behind it."""
    size, best, start, period = len(ids), 0, 0, 0
    for p in range(1, min(LONGEST_BODY, size // LEAST_REPEATS) + 1):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], ids[:-p] == ids[p:], [0]))))
        begins, ends = edges[::2], edges[1::2]
        covered = ends - begins + p
        covered[covered < LEAST_REPEATS * p] = 0
        if len(covered) and covered.max() > best:
            best, period = int(covered.max()), p
            start = int(begins[covered.argmax()])
    if not best:
        return [(offset, offset + size, 1)] if size else []
    times = best // period
    after = start + times * period
    loop = (offset + start, offset + start + period, times)
    return [*_loops(ids[:start], offset), loop, *_loops(ids[after:], offset + after)]
