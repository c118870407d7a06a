"""The operations of a block whose feed-forward network is made of experts: `model/moe.py`, call by call.

Symbols as in `transformer.py`, and: E experts, k experts per token, S = T k choices, R rows of expert work (S, or E
times the capacity), F inner width of an expert. A product of the experts is one operation: `batch` products, each of
the mean load.

Its FLOPs are exact whatever the load. Its time is that of an even one: on one device an uneven load has the same rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ironlaw.ledger import Kind, Phase
from ironlaw.model.moe_config import MoEConfig
from ironlaw.workload.backward import (
    activated_backward,
    attention_half_backward,
    branch_gradient,
    feed_forward_backward,
)
from ironlaw.workload.blocks import FP32, INDEX, Shape, elementwise, norm_saved_bytes
from ironlaw.workload.division import on_rank
from ironlaw.workload.forward import activated, attention_half, feed_forward
from ironlaw.workload.layers import (
    cast_gradient,
    joining,
    linear,
    linear_backward,
    norm,
    norm_backward,
    quantised,
    residual,
)
from ironlaw.workload.operations import Operation
from ironlaw.workload.sizes import Size, any_of, divided, is_array, larger, smaller

GROUP = "moe_block"


def moe_block(shape: Shape) -> list[Operation]:
    """Forward pass of one block with experts; `repeat` counts those blocks."""
    operations = attention_half(shape)
    operations += _norm(shape)
    operations += _route(shape) + _experts(shape)
    if _shared(shape):
        operations += _shared_experts(shape)
    operations += joining(shape, Phase.FORWARD)
    operations.append(residual(shape, shape.model.layers))
    return _of_moe_layers(shape, on_rank(shape, operations))


def moe_block_backward(shape: Shape) -> list[Operation]:
    """`moe_block` in reverse: what was saved there is freed here."""
    operations = [cast_gradient(shape)] if shape.casts else []
    operations += joining(shape, Phase.BACKWARD)
    if _shared(shape):
        operations += _shared_experts_backward(shape)
    operations += _experts_backward(shape) + _route_backward(shape)
    wide = shape if shape.conventions.fused else replace(shape, precision="fp32")
    operations += norm_backward(wide, "ffn_norm", "block", 1, reader="", residual=True)
    return _of_moe_layers(shape, on_rank(shape, operations + attention_half_backward(shape)))


def _of_moe_layers(shape: Shape, operations: list[Operation]) -> list[Operation]:
    return [replace(op, group=GROUP, repeat=shape.model.moe_layers) for op in operations]


def _shared(shape: Shape) -> bool:
    return shape.model.moe is not None and shape.model.moe.shared_experts > 0


def rows(shape: Shape) -> int:
    """Rows that all experts of a layer compute together."""
    moe = shape.model.moe
    assert moe is not None
    if shape.rows_per_token is not None:
        return shape.tokens * shape.rows_per_token
    if is_array(shape.tokens) and moe.capacity_factor is not None:  # `MoEConfig.capacity` of many layouts
        mean = shape.tokens * moe.experts_per_token / moe.experts
        return moe.experts * smaller(shape.tokens, larger(1, np.ceil(mean * moe.capacity_factor)))
    capacity = moe.capacity(shape.tokens)
    return shape.tokens * moe.experts_per_token if capacity is None else moe.experts * capacity


IMBALANCE = 1.1
"""Rows of the busiest expert parallel rank over the mean. Assumed: balancing aims at 1 (arXiv 2408.15664 measures how
far the fullest expert is off), and no published figure is per rank and micro-batch. In a run's metrics,
`expert_load_busiest_over_mean` is an upper bound of it. Published speeds of a vendor are of random choices, which are
even (`moe_router_force_load_balancing` in the scripts they come from): `default_imbalance` of the engine."""


def row_factor(moe: MoEConfig, ep: Size, imbalance: Size = 0.0) -> Size:
    """Rows that a rank computes over an even share: its capacity, or the imbalance where ranks wait for each other.

    `imbalance`: rows of the busiest rank over the mean; 0: what training is taken to have.
    """
    if moe.capacity_factor is not None:
        return moe.capacity_factor
    return np.where(np.asarray(ep) > 1, np.where(np.asarray(imbalance) > 0, imbalance, IMBALANCE), 1.0)


def rows_of_a_rank(moe: MoEConfig, ep: Size, split: Size, imbalance: Size = 0.0) -> Size:
    """Rows per token of a rank's micro-batch: fewer where experts are split over less than tp, `split` of it."""
    return moe.experts_per_token * row_factor(moe, ep, imbalance) * split


def is_exchanged(ep: Size, split: Size, tp: Size) -> Any:
    """Whether rows move on their own instead of as a dense network's tokens under tensor parallelism."""
    return (ep > 1) | (split != tp)


def _small(
    name: str, phase: Phase, kernel: str, elements: int, moved: int, *, saved: int = 0, temporary: int = 0,
    frees_saved: int = 0, frees_temporary: int = 0,
) -> Operation:  # fmt: skip
    return Operation(
        name, Kind.ELEMENTWISE, phase, "block", kernel, elements=elements, bytes_moved=moved, precision="fp32",
        saved_bytes=saved, temporary_bytes=temporary, frees_saved_bytes=frees_saved,
        frees_temporary_bytes=frees_temporary,
    )  # fmt: skip


def _source_bytes(shape: Shape) -> int:
    """Of the table from rows to choices; with a capacity it has one more entry, for all dropped ones."""
    assert shape.model.moe is not None
    return (rows(shape) + (shape.model.moe.capacity_factor is not None)) * INDEX


def _mask_bytes(shape: Shape) -> int:
    """Which choices have a row and which rows a choice, a byte each; nothing when dropless."""
    moe = shape.model.moe
    assert moe is not None
    return 0 if moe.capacity_factor is None else shape.tokens * moe.experts_per_token + rows(shape) + 1


def _norm(shape: Shape) -> list[Operation]:
    """Its output is kept in fp32 whatever the precision, for the router reads it so."""
    if shape.conventions.fused:
        return norm(shape, "ffn_norm", "block", 1, reader="")
    elements = shape.tokens * shape.model.hidden
    statistics = norm_saved_bytes(shape, shape.tokens, shape.model.hidden)
    kernel = f"{shape.model.norm}_forward"
    return [
        Operation(
            "ffn_norm", Kind.NORM, Phase.FORWARD, "block", kernel, elements=elements, bytes_moved=2 * elements * FP32,
            saved_bytes=statistics + elements * FP32,
        )
    ]  # fmt: skip


def _sizes(shape: Shape) -> tuple[int, int, int]:
    """Elements of the scores, choices, and bytes that normalised weights keep beside themselves."""
    moe = shape.model.moe
    assert moe is not None
    scores, choices = shape.stream_tokens * moe.experts, shape.stream_tokens * moe.experts_per_token
    return scores, choices, (choices + shape.tokens) * FP32 if moe.normalize else 0


def _balance_saved_bytes(shape: Shape) -> int:
    """Of the balancing loss: the share of each expert; sigmoid scores also their sums (they are there already)."""
    moe = shape.model.moe
    assert moe is not None
    if moe.balance != "loss" or moe.balance_loss == 0:
        return 0
    return moe.experts * FP32 + (shape.tokens * FP32 if moe.score == "sigmoid" else 0)


def _route(shape: Shape) -> list[Operation]:
    """Scores in fp32, the choice, its weights, and the order of the choices by expert."""
    model, tokens, forward = shape.model, shape.stream_tokens, Phase.FORWARD
    assert model.moe is not None
    scores, choices, normalised = _sizes(shape)
    count, w = model.moe.experts, FP32
    router = Operation(
        "router", Kind.MATMUL, forward, "block", "matmul", matmul=(tokens, count, model.hidden),
        flops=2 * tokens * count * model.hidden, precision="fp32",
        bytes_moved=w * (tokens * model.hidden + count * model.hidden + scores), temporary_bytes=scores * w,
    )  # fmt: skip
    if shape.conventions.fused:
        return [replace(router, saved_bytes=scores * w)]
    operations = [
        router,
        _small("route", forward, "softmax", scores, 2 * scores * w, saved=scores * w),
        _small("route", forward, "topk", scores, scores * w + choices * (w + INDEX),
               saved=choices * INDEX, temporary=choices * w, frees_temporary=choices * w),
        # The weights that `combine` keeps, and what normalising them keeps; the logits die with the router's variables.
        _small("route", forward, "multiply", choices, 4 * choices * w, saved=choices * w + normalised,
               frees_temporary=scores * w),
    ]  # fmt: skip
    if any_of(balance := _balance_saved_bytes(shape)):
        operations.append(_small("route", forward, "add", scores, scores * w, saved=balance))
    # Sorting, and where each choice went: two tables of indices; a capacity adds a mask of choices and one of rows.
    tables = choices * INDEX + _source_bytes(shape) + _mask_bytes(shape)
    operations.append(
        _small("route", forward, "sort", choices, 6 * choices * INDEX, saved=tables,
               temporary=choices * INDEX, frees_temporary=choices * INDEX)
    )  # fmt: skip
    return operations


def _rows_by_expert(shape: Shape) -> tuple[Size, Size]:
    """The mean load of an expert of this rank, and how many products that makes side by side."""
    moe, count = shape.model.moe, rows(shape)
    assert moe is not None
    local = divided(moe.experts, shape.ep)
    if shape.conventions.fused or is_array(count, local):
        return divided(count, larger(local, 1)), local
    return max(1, round(count / local)), min(local, count)


def _grouped(shape: Shape, name: str, inputs: int, outputs: int, *, keep: bool) -> list[Operation]:
    """Every row with the matrix of its expert; in reduced precision the weights are cast first, and kept."""
    moe, w, count = shape.model.moe, shape.matmul_bytes, rows(shape)
    assert moe is not None
    mean, batch = _rows_by_expert(shape)
    weights, out = moe.experts * inputs * outputs, count * outputs * w
    operations = quantised(shape, name, "block", 1, Phase.FORWARD, mean, inputs, outputs, batch)
    if shape.casts:
        operations.append(
            Operation(
                f"{name}_cast", Kind.ELEMENTWISE, Phase.FORWARD, "block", "cast", elements=weights,
                bytes_moved=weights * (FP32 + w), saved_bytes=weights * w,
            )
        )  # fmt: skip
    operations.append(
        Operation(
            name, Kind.MATMUL, Phase.FORWARD, "block", "matmul", flops=2 * count * inputs * outputs,
            matmul=(mean, outputs, inputs), batch=batch,
            bytes_moved=w * (count * inputs + count * outputs) + weights * w,
            saved_bytes=out if keep else 0, temporary_bytes=0 if keep else out,
        )
    )  # fmt: skip
    if moe.bias and not shape.conventions.fused:
        operations.append(elementwise(shape, name, "add_in_place", count * outputs, 3))
    return operations


def _experts(shape: Shape) -> list[Operation]:
    """Dispatch, the experts' network on their rows, combine."""
    model, w = shape.model, shape.matmul_bytes
    assert model.moe is not None
    elements, width = rows(shape) * model.hidden, model.expert_ffn_size
    inner, stream, k = rows(shape) * width, shape.tokens * model.hidden, model.moe.experts_per_token
    if shape.conventions.fused:
        return _fused_experts(shape)
    operations = []
    cast = stream * w if shape.casts else 0
    if shape.casts:
        operations.append(elementwise(shape, "dispatch_cast", "cast", stream, 3, temporary=cast))
    operations.append(
        elementwise(
            shape, "dispatch", "embedding_forward", elements, 2, saved=elements * w, frees_temporary=cast
        )
    )  # fmt: skip
    if model.gated_ffn:
        operations += _grouped(shape, "expert_gate", model.hidden, width, keep=True)
    else:
        operations += _grouped(shape, "expert_up", model.hidden, width, keep=True)
    together = model.activation == "clamped_swiglu"  # gate and product are one, and keep what they are given
    if not together:
        operations.append(elementwise(shape, "activation", f"{model.activation}_forward", inner, 2, saved=inner * w))
    if model.gated_ffn:
        operations += _grouped(shape, "expert_up", model.hidden, width, keep=True)
        operations.append(elementwise(shape, "gate_product", "multiply", inner, 3, saved=inner * w))
    operations += _grouped(shape, "expert_down", width, model.hidden, keep=True)  # `combine` keeps it
    # Choice by choice: the rows of all tokens are gathered, weighted and added.
    operations.append(elementwise(shape, "combine", "fill", stream, 1, temporary=stream * w))
    operations.append(
        elementwise(
            shape, "combine", "embedding_forward", k * stream, 2, temporary=stream * w, frees_temporary=stream * w
        )
    )  # fmt: skip
    operations.append(elementwise(shape, "combine", "add_in_place", k * stream, 3))
    return operations


def _fused_experts(shape: Shape) -> list[Operation]:
    """The same where tokens are sorted to rows, and rows added up to tokens, by one kernel each."""
    model, conventions = shape.model, shape.conventions
    count, width = rows(shape), model.expert_ffn_size
    both = 2 * width if model.gated_ffn else width
    sent, back = permuted_elements(shape)
    return [
        replace(elementwise(shape, "dispatch", "embedding_forward", sent, 1),
                saved_bytes=count * model.hidden * conventions.storage.input_bytes),
        *_grouped(shape, "expert_up", model.hidden, both, keep=True),
        activated(shape, count * width),
        *_grouped(shape, "expert_down", width, model.hidden, keep=conventions.keeps_expert_outputs),
        elementwise(shape, "combine", "add", back, 1),
    ]  # fmt: skip


def permuted_elements(shape: Shape) -> tuple[Size, Size]:
    """Elements read and written by sorting a rank's tokens to rows, and by adding rows up to tokens.

    Rows that arrive by choices from other ranks are sorted by expert once more, and back, where a rank has several.
    """
    moe, count, tokens = shape.model.moe, rows(shape) * shape.model.hidden, shape.tokens * shape.model.hidden
    assert moe is not None
    again = (shape.ep > 1) & (shape.ep < moe.experts) & (shape.conventions.rows_sent == "choices")
    return 2 * count * (1 + again), 2 * count * again + count + tokens


def _shared_experts(shape: Shape) -> list[Operation]:
    """One dense network that every token visits, perhaps scaled, added to what `combine` gave."""
    model, w = shape.model, shape.matmul_bytes
    assert model.moe is not None
    if shape.conventions.fused:
        gate = linear(shape, "shared_gate", "block", 1, model.hidden, 1, keep=True, bias=False)
        return feed_forward(shape, model.shared_ffn_size, "shared_ffn") + (gate if model.moe.shared_gate else [])
    stream = shape.tokens * model.hidden
    operations = []
    if shape.casts:
        operations.append(elementwise(shape, _first_shared_cast(shape), "cast", stream, 3, saved=stream * w))
    operations += feed_forward(shape, model.shared_ffn_size, "shared_ffn")
    if model.moe.shared_gate:
        # The product keeps both of its factors: the output of the shared experts is saved, not temporary.
        operations[-1] = replace(operations[-1], saved_bytes=stream * w, temporary_bytes=0)
        gate, cast = shape.tokens * w, stream * w if shape.casts else 0
        weight = model.hidden * w if shape.casts else 0
        operations += [
            Operation(
                "shared_gate", Kind.MATMUL, Phase.FORWARD, "block", "matmul", matmul=(shape.tokens, 1, model.hidden),
                flops=2 * stream, bytes_moved=stream * w, saved_bytes=cast + weight, temporary_bytes=gate,
            ),
            elementwise(shape, "shared_sum", "silu_forward", shape.tokens, 2, saved=gate, frees_temporary=gate),
            elementwise(shape, "shared_sum", "multiply", stream, 2, temporary=stream * w),
        ]  # fmt: skip
    operations.append(
        elementwise(shape, "shared_sum", "add", stream, 3, temporary=stream * w, frees_temporary=2 * stream * w)
    )
    return operations


def _shared_experts_backward(shape: Shape) -> list[Operation]:
    """Ends with one gradient of the normed input, in fp32."""
    model, w = shape.model, shape.matmul_bytes
    assert model.moe is not None
    if shape.conventions.fused:
        gate = linear_backward(shape, "shared_gate", "block", 1, model.hidden, 1, frees=0, bias=False)
        network = feed_forward_backward(shape, model.shared_ffn_size, "shared_ffn", consumes=0)
        return (gate if model.moe.shared_gate else []) + network
    stream, full = shape.tokens * model.hidden * w, shape.tokens * model.hidden * FP32
    operations, extra = [], 0
    if model.moe.shared_gate:
        gate, elements = shape.tokens * w, shape.tokens * model.hidden
        cast, weight = (stream, model.hidden * w) if shape.casts else (0, 0)
        operations += [
            elementwise(
                shape, "shared_sum", "multiply_backward", elements, 4, backward=True, temporary=2 * stream + gate,
                frees_saved=stream, frees_temporary=stream,
            ),
            elementwise(
                shape, "shared_sum", "silu_backward", shape.tokens, 3, backward=True, temporary=gate, frees_saved=gate,
                frees_temporary=gate,
            ),
            Operation(
                "shared_gate", Kind.MATMUL, Phase.BACKWARD, "block", "matmul", matmul=(shape.tokens, model.hidden, 1),
                flops=2 * elements, bytes_moved=stream, temporary_bytes=stream,
            ),
            Operation(
                "shared_gate", Kind.MATMUL, Phase.BACKWARD, "block", "matmul_weight_gradient",
                matmul=(1, model.hidden, shape.tokens), flops=2 * elements, bytes_moved=stream,
                gradient_bytes=model.hidden * FP32, frees_saved_bytes=cast + weight, frees_temporary_bytes=gate,
            ),
        ]  # fmt: skip
        extra = stream
    # Without a scale the gradient of the sum is the branch's own, which `combine` still needs.
    operations += feed_forward_backward(shape, model.shared_ffn_size, "shared_ffn", consumes=extra)
    if not shape.casts:  # the normed input belongs to the router, which frees it
        operations = [_keeping_input(op, model.gated_ffn, stream) for op in operations]
    if shape.casts:
        operations.append(
            elementwise(
                shape, _first_shared_cast(shape), "cast", shape.tokens * model.hidden, 3, backward=True, temporary=full,
                frees_temporary=stream,
            )
        )  # fmt: skip
    if model.moe.shared_gate:
        operations.append(
            elementwise(
                shape, "ffn_norm", "add_in_place", shape.tokens * model.hidden, 3, backward=True,
                frees_temporary=extra,
            )
        )  # fmt: skip
    return operations


def _first_shared_cast(shape: Shape) -> str:
    """Of the normed input, for the first linear layer of the shared experts."""
    return "shared_ffn_gate_cast" if shape.model.gated_ffn else "shared_ffn_up_cast"


def _keeping_input(op: Operation, gated: bool, input_bytes: int) -> Operation:
    """The weight gradient of the first linear layer, which in a dense block frees the network's input."""
    first = "shared_ffn_gate" if gated else "shared_ffn_up"
    if op.name == first and op.kernel == "matmul_weight_gradient":
        return replace(op, frees_saved_bytes=op.frees_saved_bytes - input_bytes)
    return op


def _grouped_backward(
    shape: Shape, name: str, inputs: int, outputs: int, *, frees: int, consumes: int
) -> list[Operation]:
    """Gradients of rows and of weights, expert by expert; the weights' start in the precision of the products."""
    moe, w, count = shape.model.moe, shape.matmul_bytes, rows(shape)
    assert moe is not None
    weights, flops = moe.experts * inputs * outputs, 2 * count * inputs * outputs
    mean, batch = _rows_by_expert(shape)
    copy, gradient = (weights * w, weights * FP32) if shape.casts else (0, weights * FP32)
    moved = w * (count * inputs + count * outputs + weights)
    operations = [
        *quantised(shape, name, "block", 1, Phase.BACKWARD, mean, inputs, outputs, batch),
        Operation(
            name, Kind.MATMUL, Phase.BACKWARD, "block", "matmul", flops=flops, matmul=(mean, inputs, outputs),
            batch=batch, bytes_moved=moved, temporary_bytes=count * inputs * w,
        ),
        Operation(
            name, Kind.MATMUL, Phase.BACKWARD, "block", "matmul_weight_gradient", flops=flops,
            matmul=(outputs, inputs, mean), batch=batch, bytes_moved=moved, temporary_bytes=copy,
            gradient_bytes=0 if shape.casts else gradient, frees_saved_bytes=frees + copy,
            frees_temporary_bytes=consumes,
        ),
    ]  # fmt: skip
    if moe.bias and not shape.conventions.fused:
        gradients = moe.experts * outputs * FP32
        summed = elementwise(shape, name, "sum_rows", count * outputs, 1, backward=True)
        operations.insert(1, replace(summed, gradient_bytes=gradients))
    if shape.casts:
        operations.append(
            Operation(
                f"{name}_cast", Kind.ELEMENTWISE, Phase.BACKWARD, "block", "cast", elements=weights,
                bytes_moved=copy + gradient, gradient_bytes=gradient, frees_temporary_bytes=copy,
            )
        )  # fmt: skip
    return operations


def _fused_experts_backward(shape: Shape) -> list[Operation]:
    """`_fused_experts` in reverse."""
    model, count, width = shape.model, rows(shape), shape.model.expert_ffn_size
    both = 2 * width if model.gated_ffn else width
    sent, back = permuted_elements(shape)
    return [
        elementwise(shape, "combine", "embedding_forward", back, 1, backward=True),
        *_grouped_backward(shape, "expert_down", width, model.hidden, frees=0, consumes=0),
        activated_backward(shape, count * width),
        *_grouped_backward(shape, "expert_up", model.hidden, both, frees=0, consumes=0),
        elementwise(shape, "dispatch", "add", sent, 1, backward=True),
    ]


def _experts_backward(shape: Shape) -> list[Operation]:
    if shape.conventions.fused:
        return _fused_experts_backward(shape)
    model, w = shape.model, shape.matmul_bytes
    assert model.moe is not None
    width, stream, k = model.expert_ffn_size, shape.tokens * model.hidden, model.moe.experts_per_token
    inner, wide = rows(shape) * width, rows(shape) * model.hidden * w
    choices = shape.tokens * k
    of_rows = rows(shape) * (INDEX + FP32)  # the token of each row, and its weight
    operations = [
        elementwise(
            shape, "combine", "embedding_forward", k * stream, 2, backward=True, temporary=2 * stream * w,
            frees_temporary=2 * stream * w,
        ),
        elementwise(shape, "combine", "multiply", k * stream, 3, backward=True, temporary=choices * FP32),
        elementwise(
            shape, "combine", "embedding_forward", rows(shape) * model.hidden, 4, backward=True,
            temporary=wide + of_rows, frees_saved=wide + _source_bytes(shape) + choices * FP32,
            frees_temporary=branch_gradient(shape) + of_rows,
        ),
    ]  # fmt: skip
    operations += _grouped_backward(shape, "expert_down", width, model.hidden, frees=inner * w, consumes=wide)
    passing = 5 * inner * w if model.activation == "clamped_swiglu" else 0  # its factors, one by one
    if model.gated_ffn:
        operations.append(
            elementwise(
                shape, "gate_product", "multiply_backward", inner, 6, backward=True,
                temporary=2 * inner * w + passing, frees_saved=2 * inner * w, frees_temporary=inner * w + passing,
            )
        )  # fmt: skip
        operations += _grouped_backward(shape, "expert_up", model.hidden, width, frees=0, consumes=inner * w)
    if model.activation != "clamped_swiglu":
        operations.append(
            elementwise(
                shape, "activation", f"{model.activation}_backward", inner, 3, backward=True,
                temporary=inner * w, frees_saved=inner * w, frees_temporary=inner * w,
            )
        )  # fmt: skip
    first = "expert_gate" if model.gated_ffn else "expert_up"
    operations += _grouped_backward(shape, first, model.hidden, width, frees=wide, consumes=inner * w)
    if model.gated_ffn:
        operations.append(
            elementwise(
                shape, "dispatch", "add_in_place", rows(shape) * model.hidden, 3, backward=True, frees_temporary=wide
            )
        )  # fmt: skip
    operations += [
        elementwise(
            shape, "dispatch", "embedding_forward", k * stream, 2, backward=True, temporary=2 * stream * w,
            frees_saved=choices * INDEX + _mask_bytes(shape),
        ),
        elementwise(
            shape, "dispatch", "add_in_place", k * stream, 3, backward=True, frees_temporary=stream * w + wide
        ),
    ]  # fmt: skip
    if shape.casts:
        operations.append(
            elementwise(
                shape, "dispatch_cast", "cast", stream, 3, backward=True, temporary=stream * FP32,
                frees_temporary=stream * w,
            )
        )  # fmt: skip
    if _shared(shape):
        operations.append(
            elementwise(shape, "ffn_norm", "add_in_place", stream, 3, backward=True, frees_temporary=stream * FP32)
        )
    return operations


def _route_backward(shape: Shape) -> list[Operation]:
    """Weights to scores to logits to the router's matrix; its input gradient joins that of the dispatch."""
    model, tokens, backward = shape.model, shape.stream_tokens, Phase.BACKWARD
    assert model.moe is not None
    scores, choices, normalised = _sizes(shape)
    count, full = model.moe.experts, tokens * model.hidden * FP32
    flops = 2 * tokens * count * model.hidden
    moved = FP32 * (tokens * model.hidden + count * model.hidden + scores)
    operations = [
        _small("route", backward, "multiply", choices, 4 * choices * FP32, frees_saved=normalised),
        _small("route", backward, "fill", scores, 2 * scores * FP32, temporary=scores * FP32,
               frees_saved=choices * INDEX + _balance_saved_bytes(shape), frees_temporary=choices * FP32),
        _small("route", backward, "softmax_backward", scores, 3 * scores * FP32, temporary=scores * FP32,
               frees_saved=scores * FP32, frees_temporary=scores * FP32),
        Operation(
            "router", Kind.MATMUL, backward, "block", "matmul", matmul=(tokens, model.hidden, count), flops=flops,
            bytes_moved=moved, precision="fp32", temporary_bytes=full,
        ),
        Operation(
            "router", Kind.MATMUL, backward, "block", "matmul_weight_gradient", matmul=(count, model.hidden, tokens),
            flops=flops, bytes_moved=moved, precision="fp32",
            gradient_bytes=count * (model.hidden + model.moe.bias) * FP32,
            frees_saved_bytes=full, frees_temporary_bytes=scores * FP32,
        ),
        _small("ffn_norm", backward, "add_in_place", tokens * model.hidden, 3 * full, frees_temporary=full),
    ]  # fmt: skip
    if shape.conventions.fused:
        return [op for op in operations if op.kind is Kind.MATMUL]
    return operations
