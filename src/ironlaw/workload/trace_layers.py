"""Rows of a trace without running them: repeated layers, and long loops over tokens.

A decoder of 64 Mamba layers, or of 28 Mamba and 4 attention layers, has one or two kinds. Only the first layer of each
kind runs; later ones return their input. Their rows are copied in the order in which the layers run, so that FLOPs,
saved bytes and the peak are those of the whole stack.

A Python loop over tokens makes the same calls for every token, a hundred per layer and pass. The rows of a recurrent
decoder are thus single rows and repeated bodies; the number of repeats, and every size in a row, is a polynomial of the
length, like products of shapes: of degree one for the repeats, at most two for sizes. Three lengths determine it; a
fourth, longer one must agree exactly, as must the first kernels at the requested length. Otherwise, or if a window or
chunk size lies in between, the whole sequence is traced. Repeats of a body share the same row objects.
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
    """A list of layers at `path`; `first[i]` is the index of the first layer of the same kind as layer i."""

    path: str
    first: tuple[int, ...]


def longest_stack(module: nn.Module) -> Stack | None:
    """Returns the list with the most repeated layers; None if no layer repeats."""
    lists = [(path, child) for path, child in module.named_modules() if type(child) is nn.ModuleList]
    found = [Stack(path, _kinds(child, module)) for path, child in lists if not _shares(child)]
    repeats = {stack: len(stack.first) - len(set(stack.first)) for stack in found}
    best = max(found, key=lambda stack: repeats[stack], default=None)
    return best if best is not None and repeats[best] else None


def _shares(layers: nn.ModuleList) -> bool:
    """Returns whether layers share parameters, whose gradients are then added."""
    owned = [id(p) for layer in layers for p in layer.parameters()]
    return len(owned) != len(set(owned))


def _kinds(layers: nn.ModuleList, module: nn.Module) -> tuple[int, ...]:
    """Returns, for each layer, the first of its kind: equal classes, shapes, settings and per-layer config values."""
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
def run_one_of_each_kind(module: nn.Module, stack: Stack) -> Iterator[None]:
    """Replaces `forward` such that only the first layer of each kind runs inside the context."""
    layers = module.get_submodule(stack.path)
    assert isinstance(layers, nn.ModuleList)
    returned: dict[int, int] = {}  # by layer: number of returned values, 0 for a single tensor
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


def repeat_layers(operations: list[TracedOperation], stack: Stack) -> list[TracedOperation]:
    """Returns the rows of all layers, given those of one layer of each kind."""
    forward = [op for op in operations if op.phase is Phase.FORWARD]
    backward = [op for op in operations if op.phase is Phase.BACKWARD]
    order = range(len(stack.first))
    return _repeated(forward, stack, order) + _repeated(backward, stack, order[::-1])


def _repeated(rows: list[TracedOperation], stack: Stack, order: Any) -> list[TracedOperation]:
    pattern = re.compile(re.escape(stack.path) + r"\.(\d+)(?=\.|$)")
    blocks: dict[int, list[TracedOperation]] = {i: [] for i in set(stack.first)}
    before: dict[int, list[TracedOperation]] = {i: [] for i in blocks}  # rows between layers
    pending: list[TracedOperation] = []
    result: list[TracedOperation] = []
    for op in rows:
        match = pattern.match(op.name)
        if match is None:
            pending.append(op)
            continue
        i = int(match[1])
        where = blocks[i] if blocks[i] else before[i] if any(blocks.values()) else result
        where += pending
        pending = []
        blocks[i].append(op)
    for i in order:
        first = stack.first[i]
        result += before[i] if i == first else []
        different = {id(op): op for op in blocks[first]}  # repeats of a loop are the same objects
        copies = {
            k: replace(op, name=pattern.sub(f"{stack.path}.{i}", op.name, count=1)) for k, op in different.items()
        }
        result += [copies[id(op)] for op in blocks[first]]
    return result + pending


MAX_KERNELS = 10_000
"""A trace of one layer of each kind with more kernels is taken for a loop over tokens: 5 seconds of tracing."""

STEP, LENGTHS = 16, (1, 2, 3, 5)
"""Traced lengths in multiples of 16 tokens; the last exceeds the usual chunk size of recurrences, 64."""

MAX_TRACED = STEP * (LENGTHS[-1] + 1) - 1
"""Most tokens of a sequence that is traced in place of a longer one."""

MIN_EXTRAPOLATED_TOKENS = 2 * STEP * sum(LENGTHS)
"""Tokens from which tracing four short sequences takes less time than tracing the whole."""

MAX_BODY_KERNELS, MIN_REPEATS = 1024, 6

EXTRAPOLATED: Assumed = (
    "loop over tokens",
    f"as in shorter sequences, of up to {MAX_TRACED} tokens",
    "its length",
    "",
)

_COMPUTED = ("name", "kernel", "phase", "flops", "matmul", "attention", "elements", "bytes_moved")


def has_window_between(module: nn.Module, length: int) -> bool:
    """Returns whether a window or chunk size of the module is between the traced lengths and `length`."""
    settings = [vars(getattr(module, "config", None) or module), *(vars(child) for child in module.modules())]
    numbers = [
        value
        for each in settings
        for name, value in each.items()
        if ("window" in name or "chunk" in name) and isinstance(value, int)
    ]
    return any(MAX_TRACED < number < length for number in numbers)


def common_length(inputs: Inputs) -> int:
    """Returns the last dimension of all inputs; 0 if it differs, or if an input is not described by its shape."""
    lengths = {each.shape[-1] if isinstance(each, Input) and each.shape else 0 for each in inputs}
    return lengths.pop() if len(lengths) == 1 else 0


def shortened(inputs: Iterable[Any], length: int) -> list[Input]:
    """Returns the inputs with another length in their last dimension."""
    return [replace(each, shape=(*each.shape[:-1], length)) for each in inputs]


class NotExtrapolable(Exception):
    """Raised if rows or sizes are not a polynomial of the length."""


def extrapolate(
    traced: Callable[[int], tuple[ModuleTrace, Stack | None]],
    length: int,
    begin: Sequence[TracedOperation] = (),
) -> tuple[ModuleTrace, Stack | None]:
    """Extrapolates `traced(length)` from shorter lengths. Raises NotExtrapolable if that is impossible, or if the
    result does not start with the kernels in `begin`."""
    found, stacks = zip(*(traced(length % STEP + STEP * n) for n in LENGTHS), strict=True)
    segments = [_segments(one.operations) for one in found]
    if len({tuple(len(body) for body, _ in each) for each in segments}) > 1:
        raise NotExtrapolable
    operations: list[TracedOperation] = []
    for parts in zip(*segments, strict=True):
        times = _value([times for _, times in parts], length)
        operations += [_value(rows, length) for rows in zip(*(body for body, _ in parts), strict=True)] * times
    same = zip(operations, begin[:-1], strict=False)  # the last kernel may be incomplete
    if any(getattr(mine, name) != getattr(theirs, name) for mine, theirs in same for name in _COMPUTED):
        raise NotExtrapolable
    others = _value([replace(one, operations=[], inputs={}) for one in found], length)
    return replace(others, operations=operations), stacks[-1]


def _value(values: Sequence[Any], length: int) -> Any:
    """Returns the value at `length`, given those at the four lengths: integers by polynomial, others must be equal."""
    first = values[0]
    if all(value == first for value in values):
        return first
    if any(type(value) is not type(first) for value in values):
        raise NotExtrapolable
    if is_dataclass(first) and not isinstance(first, type):
        names = [each.name for each in fields(first)]
        return replace(first, **{n: _value([getattr(v, n) for v in values], length) for n in names})
    if isinstance(first, tuple) and len({len(value) for value in values}) == 1:
        return tuple(_value(parts, length) for parts in zip(*values, strict=True))
    if type(first) is not int:
        raise NotExtrapolable

    def polynomial(at: int) -> int:
        """The polynomial through the first three values, by differences."""
        u = at - LENGTHS[0]
        slope, bend = values[1] - first, values[2] - 2 * values[1] + first
        return first + u * slope + u * (u - 1) // 2 * bend

    if polynomial(LENGTHS[3]) != values[3]:
        raise NotExtrapolable
    return polynomial(length // STEP)


def _segments(rows: Sequence[TracedOperation]) -> list[tuple[Sequence[TracedOperation], int]]:
    """Divides rows into consecutive bodies, each with its number of repeats."""
    number: dict[TracedOperation, int] = {}
    ids = np.array([number.setdefault(row, len(number)) for row in rows])
    return [(rows[start:end], times) for start, end, times in _loops(ids, 0)]


def _loops(ids: np.ndarray[Any, Any], offset: int) -> list[tuple[int, int, int]]:
    """Returns start, end and repeats of each body: finds the longest loop, then those before and after it."""
    size, best, start, period = len(ids), 0, 0, 0
    for p in range(1, min(MAX_BODY_KERNELS, size // MIN_REPEATS) + 1):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], ids[:-p] == ids[p:], [0]))))
        begins, ends = edges[::2], edges[1::2]
        covered = ends - begins + p
        covered[covered < MIN_REPEATS * p] = 0
        if len(covered) and covered.max() > best:
            best, period = int(covered.max()), p
            start = int(begins[covered.argmax()])
    if not best:
        return [(offset, offset + size, 1)] if size else []
    times = best // period
    after = start + times * period
    loop = (offset + start, offset + start + period, times)
    return [*_loops(ids[:start], offset), loop, *_loops(ids[after:], offset + after)]
