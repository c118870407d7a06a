"""The operations of a layer with frozen tensors and adapters, derived from those of the fully trained layer.

Frozen tensors have no gradient: the products that compute one, their casts, the first block's input gradient and a
norm's copy of its normalised input are dropped. Each adapter adds two products forward and four backward, and saves a
(tokens, rank) tensor in between. The input of a matrix without an adapter, such as those of experts, is not saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ironlaw.ledger import Kind
from ironlaw.model.frozen import DEQUANTISED, NF4_BLOCK
from ironlaw.workload.blocks import FP32, Shape, norm_saved_bytes
from ironlaw.workload.operations import Operation, call, product, with_memory, without_work

DEQUANTISING_BYTES = 17  # peak per number: its unpacked code (1), the code as an index (8), its value (4), scaled (4)


EXPERT = "expert_"  # products of experts: `expert_up`
IN_FULL = ("router", "shared_gate")  # products of matrices that are never quantised
READERS = (
    (("qkv",), "attention_out"), (("ffn_gate", "ffn_up"), "ffn_down"), (("ffn_down",), "ffn_down"),
    (("shared_ffn_gate", "shared_ffn_up"), "shared_ffn_down"), (("shared_ffn_down",), "shared_ffn_down"),
    (("expert_gate", "expert_up"), "expert_down"), (("expert_down",), "expert_down"), (("router",), ""),
)  # fmt: skip
"""Products with one input, and the product whose module holds that input until it returns ("": the block)."""


def _without_inputs(shape: Shape, operations: Sequence[Operation]) -> list[Operation]:
    """Return the operations of a block, where inputs of matrices without an adapter are freed when they are read."""
    changed, adapted = list(operations), {name for name, _ in shape.adapters[0].rows}
    found = {op.name: index for index, op in enumerate(operations) if op.matmul is not None}
    for readers, holder in READERS:
        shared = set() if shape.casts else adapted.intersection(readers)  # autocast makes a copy for each
        for name in () if shared else [name for name in readers if name in found and name not in adapted]:
            owner, of_weight = next(
                (i, j) for i in range(found[name], len(changed)) for j, g in enumerate(changed[i].gradient)
                if g.kernel == "matmul_weight_gradient" and g.name == name
            )  # fmt: skip
            gradient = list(changed[owner].gradient)
            copied = gradient[of_weight].temporary_bytes if shape.casts else 0
            size = gradient[of_weight].frees_saved_bytes - copied
            if not size:
                continue
            gradient[of_weight] = with_memory(gradient[of_weight], frees_saved=-size)
            changed[owner] = replace(changed[owner], gradient=tuple(gradient))
            before = range(found[name] - 1, -1, -1)
            maker = next(i for i in before if changed[i].saved_bytes >= size and not _casts_weight(changed[i]))
            changed[maker] = with_memory(changed[maker], saved=-size, temporary=size)
            end = found.get(holder, len(changed) - 1)
            changed[end] = with_memory(changed[end], frees_temporary=size)
    return changed


def _casts_weight(op: Operation) -> bool:
    return op.kernel == "cast" and any(g.gradient_bytes for g in op.gradient)


def frozen(shape: Shape, kind: str, operations: Sequence[Operation]) -> Iterator[Operation]:
    """Yield the operations of a layer of a kind, with their backward passes, given its adapters (`shape.adapters`)."""
    adapters = shape.adapters[0]
    last: tuple[Operation, ...] = ()
    of_input, is_adapted = not (adapters.first and adapters.rows) or kind == "head", False
    for op in operations if kind in ("embedding", "head") else _without_inputs(shape, operations):
        # Narrow keys and values are made of the layer's input, after queries that may have adapters.
        needs_gradient = of_input or (is_adapted and not op.name.startswith("latent_down"))
        if kind in adapters.ends and (op.matmul is not None or op.kernel == "cast" or op.name == "embedding"):
            yield op  # trained in full
            continue
        if op.kernel == "matmul_weight_gradient":  # in the forward pass: of a chunked loss
            left = op.frees_temporary_bytes - op.temporary_bytes
            yield without_work(op, temporary_bytes=0, frees_temporary_bytes=left)
            continue
        if _casts_weight(op):
            input_gradients = tuple(g for g in op.gradient if not g.gradient_bytes)
            # Not saved where no gradient of the input is asked for.
            if adapters.casts_weights and not op.name.startswith(EXPERT):
                yield replace(op, gradient=input_gradients, saved_bytes=op.saved_bytes if needs_gradient else 0)
            else:  # its other gradients still come last in the layer's backward pass
                last = input_gradients
            continue
        rows = dict(adapters.rows).get(op.name, ()) if op.matmul is not None else ()
        rows = rows if op.summed else tuple(count // shape.division.tp for count in rows)
        gradient = [back for g in (*op.gradient, *last) for back in _backward(shape, kind, g, rows, needs_gradient)]
        last = ()
        if kind == "embedding" and kind not in adapters.ends:
            op, gradient = replace(op, saved_bytes=0 if adapters.starts_plain else op.saved_bytes), []
        if adapters.first and adapters.starts_plain and op.name == "attention_norm" and op.kind is Kind.NORM:
            statistics = norm_saved_bytes(shape, shape.tokens, shape.model.hidden)
            op = with_memory(op, saved=-statistics)
            gradient = [replace(g, frees_saved_bytes=0) for g in gradient]
        if not (needs_gradient or rows):
            gradient = [replace(g, repeat=0, flops=None) for g in gradient]
        op, dequantised = _dequantised(shape, kind, op, columns=2)
        yield from dequantised
        if not rows:
            yield replace(op, gradient=tuple(gradient))
            continue
        freed = op.frees_temporary_bytes  # when the module returns
        yield replace(op, gradient=tuple(gradient), frees_temporary_bytes=0)
        *added, summed = _adapters(shape, op, rows, needs_gradient)
        is_adapted = True
        yield from (*added, with_memory(summed, frees_temporary=freed))


def _backward(shape: Shape, kind: str, op: Operation, rows: Sequence[int], needs_gradient: bool) -> Iterator[Operation]:
    """Yield what replaces one operation of a backward pass. `needs_gradient`: whether the layer's input does."""
    block, op = shape.adapters[0], replace(op, gradient_bytes=0)
    if op.kernel == "matmul_weight_gradient":  # only its memory remains, without gradient and absent weight copy
        has_copy = block.casts_weights and needs_gradient and not op.name.startswith(EXPERT)
        absent = op.temporary_bytes if shape.casts and not has_copy else 0
        freed = op.frees_saved_bytes - absent
        yield without_work(op, temporary_bytes=0, frees_saved_bytes=freed)
    elif op.kernel == "sum_rows":  # a bias gradient
        yield replace(op, repeat=0)
    elif op.matmul is None:
        yield op
    else:
        op, dequantised = _dequantised(shape, kind, op, columns=1)
        yield from dequantised
        yield from _adapters_backward(shape, op, rows, needs_gradient)
        if rows and not needs_gradient:
            op = without_work(op, temporary_bytes=0)
        elif rows:  # the two gradients of one input are added
            op = with_memory(op, frees_temporary=op.temporary_bytes)
        yield op


def _dequantised(shape: Shape, kind: str, op: Operation, columns: int) -> tuple[Operation, list[Operation]]:
    """Return an operation and, if it is a product, what dequantises its matrix before it, or those of experts one by
    one while its result exists. `columns`: the size of the product that is the length of a row, whose last block may be
    partial."""
    if op.matmul is None or shape.adapters[0].method != "qlora" or kind == "head" or op.name in IN_FULL:
        return op, []
    elements, row = op.matmul[1] * op.matmul[2], op.matmul[columns]
    padded = elements // row * -(-row // NF4_BLOCK) * NF4_BLOCK
    size = DEQUANTISING_BYTES * min(padded, DEQUANTISED)
    size += elements * shape.matmul_bytes if elements > DEQUANTISED else 0  # the part of the matrix done so far
    alone = not op.name.startswith(EXPERT)
    work = call(f"{op.name}_dequantise", "add", elements, DEQUANTISING_BYTES * elements, scratch=size * alone)
    return with_memory(op, scratch=size * (not alone)), [replace(work, repeat=op.batch)]


def _adapters(shape: Shape, op: Operation, adapters: Sequence[int], needs_gradient: bool) -> Iterator[Operation]:
    """Yield the down and up projections, and the sum with the frozen product. `adapters`: output rows of each;
    `needs_gradient`: whether the input's is computed, without which the down projection's matrix is not saved."""
    assert op.matmul is not None
    (tokens, outputs, inputs), w, block = op.matmul, shape.matmul_bytes, shape.adapters[0]
    name, rank, plain = f"{op.name}_adapter", block.rank, outputs - sum(adapters)
    for number, rows in enumerate(adapters):
        casts = rank * (rows + inputs * needs_gradient) * w if shape.casts else 0
        yield product(name, (tokens, rank, inputs), w, saved=tokens * rank * w + casts)
        yield product(name, (tokens, rows, rank), w)
        if block.method == "dora":  # the norms of the merged rows: saved with the factors and the unscaled output
            merged = rows * inputs * FP32
            saved = _saved_by_dora(tokens, rows + plain * (number == 0), w)
            yield product(name, (rows, inputs, rank), FP32, saved=saved, scratch=merged)
    size = tokens * outputs * w  # of the frozen product, of the adapters' and of their sum
    yield call(name, "add", tokens * outputs, 3 * size, scratch=2 * size)


def _saved_by_dora(tokens: int, rows: int, w: int) -> int:
    """The unscaled output, the factor of each row and its norm; all but the norm also for rows without an adapter."""
    return tokens * rows * w + rows * w + rows * FP32


def _adapters_backward(
    shape: Shape, op: Operation, adapters: Sequence[int], needs_gradient: bool
) -> Iterator[Operation]:
    assert op.matmul is not None
    (tokens, inputs, outputs), w, block = op.matmul, shape.matmul_bytes, shape.adapters[0]
    name, rank, dora, weight = f"{op.name}_adapter", block.rank, block.method == "dora", "matmul_weight_gradient"
    plain = outputs - sum(adapters)
    for number, rows in enumerate(adapters):
        casts = rank * (rows + inputs * needs_gradient) * w if shape.casts else 0
        freed = tokens * rank * w + casts + dora * _saved_by_dora(tokens, rows + plain * (number == 0), w)
        up = rows * (rank + dora) * FP32
        yield product(name, (rows, rank, tokens), w, kernel=weight, parameters=up, frees_saved=freed)
        yield product(name, (tokens, rank, rows), w)
        yield product(name, (rank, inputs, tokens), w, kernel=weight, parameters=rank * inputs * FP32)
        if needs_gradient:
            size = tokens * inputs * w
            freed_input = size if number else 0  # later input gradients are added in place to the first
            yield product(name, (tokens, inputs, rank), w, temporary=size, frees_temporary=freed_input)
