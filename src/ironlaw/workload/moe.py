"""The operations of a mixture-of-experts block, mirroring `model/moe.py` call by call.

Symbols as in `forward.py`, and: E experts, k experts per token, S = T k choices, R rows of expert work (S, or E
times the capacity), F inner width of an expert. A product of the experts is one operation: `batch` products with the
mean load each.

FLOPs are exact for any load. Time is that of an even load: on one device an uneven load has the same number of rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ironlaw.model.dimensions import MoEConfig
from ironlaw.workload.blocks import FP32, INDEX, Shape, activation, cast, elementwise, gate_product, gradient_sum
from ironlaw.workload.conventions import OURS
from ironlaw.workload.forward import activated, attention_half, branch_gradient, feed_forward, network_reader
from ironlaw.workload.layers import joining, linear, norm, product_gradients, quantising, residual, weight_cast
from ironlaw.workload.operations import Operation, call, gradient_first, gradient_last, product
from ironlaw.workload.sizes import Size, divided, is_array, is_nonzero, larger, smaller

GROUP = "moe_block"


def moe_block(shape: Shape) -> list[Operation]:
    # The norm's output is saved in fp32 under any precision, because the router reads it in fp32.
    wide = shape if shape.conventions.fused else replace(shape, precision="fp32")
    operations = attention_half(shape) + norm(wide, "ffn_norm", reader="")
    operations += _route(shape) + (_fused_experts if shape.conventions.fused else _experts)(shape)
    if _of(shape).shared_experts:
        operations += _shared_experts(shape)
    if not shape.conventions.fused:  # each tensor parallel rank has partial results of every expert
        operations[-1] = replace(operations[-1], summed=True)
    return [*operations, *joining(shape), residual(shape)]


def _of(shape: Shape) -> MoEConfig:
    assert shape.model.moe is not None
    return shape.model.moe


def rows(shape: Shape) -> int:
    """Return the rows that all experts of a layer compute in total."""
    moe = _of(shape)
    if shape.rows_per_token is not None:
        return shape.tokens * shape.rows_per_token
    if is_array(shape.tokens) and moe.capacity_factor is not None:  # `MoEConfig.capacity` of many layouts
        mean = shape.tokens * moe.experts_per_token / moe.experts
        return moe.experts * smaller(shape.tokens, larger(1, -(-mean * moe.capacity_factor // 1)))
    capacity = moe.capacity(shape.tokens)
    return shape.tokens * moe.experts_per_token if capacity is None else moe.experts * capacity


IMBALANCE = 1.1
"""Rows of the busiest expert parallel rank over the mean. Assumed: balancing aims at 1 (arXiv 2408.15664 measures the
excess of the fullest expert), and no published figure is per rank and micro-batch. In a run's metrics,
`expert_load_busiest_over_mean` is an upper bound. A vendor's published speeds are for random, hence even choices
(`moe_router_force_load_balancing` in its scripts): `default_imbalance` of the engine."""


def row_factor(moe: MoEConfig, ep: Size, imbalance: Size = 0.0) -> Size:
    """Return a rank's rows over an even share: the capacity factor, or the imbalance if expert parallel ranks wait.

    `imbalance`: rows of the busiest rank over the mean; 0: the `IMBALANCE` assumed for training.
    """
    if moe.capacity_factor is not None:
        return moe.capacity_factor
    import numpy as np

    return np.where(np.asarray(ep) > 1, np.where(np.asarray(imbalance) > 0, imbalance, IMBALANCE), 1.0)


def is_exchanged(ep: Size, split: Size, tp: Size) -> Any:
    """Whether rows are exchanged among ranks, unlike a dense network's tokens under tensor parallelism."""
    return (ep > 1) | (split != tp)


def _source_bytes(shape: Shape) -> int:
    """Return the bytes of the table from rows to choices; under a capacity it has one more entry, for dropped ones."""
    return (rows(shape) + (_of(shape).capacity_factor is not None)) * INDEX


def _mask_bytes(shape: Shape) -> int:
    """Return the bytes of the masks of used choices and of used rows, one byte each; 0 when dropless."""
    moe = _of(shape)
    return 0 if moe.capacity_factor is None else shape.tokens * moe.experts_per_token + rows(shape) + 1


def _sizes(shape: Shape) -> tuple[int, int, int]:
    """Return the elements of scores and of choices, and the bytes that normalising the weights saves."""
    moe = _of(shape)
    scores, choices = shape.stream_tokens * moe.experts, shape.stream_tokens * moe.experts_per_token
    return scores, choices, (choices + shape.tokens) * FP32 if moe.normalize else 0


def _balance_saved_bytes(shape: Shape) -> int:
    """Return the bytes saved by the balancing loss: the share of each expert, and the sums of sigmoid scores."""
    moe = _of(shape)
    if moe.balance != "loss" or moe.balance_loss == 0:
        return 0
    return moe.experts * FP32 + (shape.tokens * FP32 if moe.score == "sigmoid" else 0)


def _route(shape: Shape) -> list[Operation]:
    """The router: fp32 scores, the choices, their weights, and the order of the choices by expert.

    The backward pass goes from weights to scores, logits and the router's matrix; its input gradient is added to that
    of the dispatch."""
    model, moe, tokens = shape.model, _of(shape), shape.stream_tokens
    scores, choices, normalised = _sizes(shape)
    sizes, full, size = (tokens, moe.experts, model.hidden), shape.stream_elements * FP32, scores * FP32
    moved = full + (moe.experts * model.hidden + scores) * FP32
    fp32 = replace(shape, precision="fp32", conventions=OURS)
    to_input, to_weight = product_gradients(fp32, "router", sizes, moved=moved, frees=full, consumes=size)
    to_weight = replace(to_weight, gradient_bytes=moe.experts * (model.hidden + moe.bias) * FP32)

    def small(name: str, kernel: str, elements: Size, moved: Size, **memory: Any) -> Operation:
        return call(name, kernel, elements, moved, precision="fp32", **memory)

    summed = small("ffn_norm", "add_in_place", shape.stream_elements, 3 * full, frees_temporary=full)
    gradients = [replace(to_input, precision="fp32"), replace(to_weight, precision="fp32")]
    router = product("router", sizes, FP32, moved=moved, precision="fp32")
    if shape.conventions.fused:
        return [replace(router, saved_bytes=size, gradient=tuple(gradients))]
    of_scores = small("route", "softmax_backward", scores, 3 * size, scratch=size)
    balance = _balance_saved_bytes(shape)
    of_choice = small("route", "fill", scores, 2 * size, temporary=size, frees_saved=balance,
                      frees_temporary=choices * FP32)  # fmt: skip
    of_weights = small("route", "multiply", choices, 4 * choices * FP32)
    operations = [
        replace(router, temporary_bytes=size, gradient=(*gradients, summed)),
        small("route", "softmax", scores, 2 * size, held=size, gradient=[of_scores]),
        small("route", "topk", scores, size + choices * (FP32 + INDEX), held=choices * INDEX,
              scratch=choices * FP32, gradient=[of_choice]),
        # Saves the weights for `combine` and for their normalisation; logits are freed with the router's variables.
        small("route", "multiply", choices, 4 * choices * FP32, saved=choices * FP32, held=normalised,
              frees_temporary=size, gradient=[of_weights]),
    ]  # fmt: skip
    if is_nonzero(balance):
        operations.append(small("route", "add", scores, size, saved=balance))
    # Sorting, and the row of each choice: two index tables; a capacity adds a mask of choices and one of rows.
    tables = choices * INDEX + _source_bytes(shape) + _mask_bytes(shape)
    scratch = choices * INDEX
    operations.append(small("route", "sort", choices, 6 * scratch, saved=tables, scratch=scratch))
    return operations


def _rows_by_expert(shape: Shape) -> tuple[Size, Size]:
    """Return the mean load of an expert of this rank, and the number of products computed as a batch."""
    moe, count = _of(shape), rows(shape)
    local = divided(moe.experts, shape.ep)
    if shape.conventions.fused or is_array(count, local):
        return divided(count, larger(local, 1)), local
    return max(1, round(count / local)), min(local, count)


def _grouped(
    shape: Shape, name: str, inputs: Size, outputs: Size, *, keep: bool, frees: Size, consumes: Size
) -> list[Operation]:
    """A grouped product: each row times its expert's matrix. In reduced precision the cast weights are saved.

    The backward pass computes gradients of rows and weights by expert; `frees` and `consumes` are as in `linear`.
    """
    moe, w, count = _of(shape), shape.matmul_bytes, rows(shape)
    (mean, batch), weights, out = _rows_by_expert(shape), moe.experts * inputs * outputs, count * outputs * w
    moved, biased = w * (count * inputs + count * outputs + weights), moe.bias and not shape.conventions.fused
    casts, casts_backward = quantising(shape, name, mean, inputs, outputs, batch)
    gradients = [*casts_backward, *product_gradients(
        shape, name, (mean, outputs, inputs), batch=batch, weights=weights, rows=count, frees=frees,
        consumes=consumes, moved=moved,
    )]  # fmt: skip
    operations = [
        *casts, *weight_cast(shape, name, weights),
        product(
            name, (mean, outputs, inputs), w, batch=batch, flops=2 * count * inputs * outputs, moved=moved,
            saved=out if keep else 0, temporary=0 if keep else out,
        ),
    ]  # fmt: skip
    if biased:
        of_bias = elementwise(shape, name, "sum_rows", count * outputs, 1, parameters=moe.experts * outputs * FP32)
        gradients.insert(1, of_bias)
        operations.append(elementwise(shape, name, "add_in_place", count * outputs, 3))
    return gradient_first(operations, *gradients)


def _experts(shape: Shape) -> list[Operation]:
    """Dispatch, the experts' networks, and combine."""
    model, moe, w = shape.model, _of(shape), shape.matmul_bytes
    count, width = rows(shape), model.expert_ffn_size
    stream, inner, wide = shape.elements, count * width, count * model.hidden * w
    fused = model.activation == "clamped_swiglu"  # activation and gate product are one, and save their inputs
    operations = _dispatch(shape)
    first = "expert_gate" if model.gated_ffn else "expert_up"
    network = _grouped(shape, first, model.hidden, width, keep=True, frees=wide, consumes=inner * w)
    if not fused:
        network.append(activation(shape, inner))
    if model.gated_ffn:
        network = gradient_last(network, gradient_sum(shape, "dispatch", count * model.hidden, wide))
        network += _grouped(shape, "expert_up", model.hidden, width, keep=True, frees=0, consumes=inner * w)
        network.append(gate_product(shape, inner, scratch=5 * inner * w if fused else 0))  # its factors, one by one
    # `combine` saves the experts' outputs.
    network += _grouped(shape, "expert_down", width, model.hidden, keep=True, frees=inner * w, consumes=wide)
    operations += network + _combine(shape)
    if moe.shared_experts:
        operations = gradient_last(operations, gradient_sum(shape, "ffn_norm", stream, stream * FP32))
    return operations


def _dispatch(shape: Shape) -> list[Operation]:
    """Gather tokens into rows; the backward pass sums rows into tokens, choice by choice."""
    model, w, count = shape.model, shape.matmul_bytes, rows(shape)
    k, stream, wide = _of(shape).experts_per_token, shape.elements, count * model.hidden * w
    copy = stream * w if shape.casts else 0
    operations = [cast(shape, "dispatch_cast", stream, temporary=copy)] if shape.casts else []
    gathered = elementwise(
        shape, "dispatch", "embedding_forward", k * stream, 2, temporary=2 * stream * w,
        frees_saved=shape.tokens * k * INDEX + _mask_bytes(shape),
    )  # fmt: skip
    added = gradient_sum(shape, "dispatch", k * stream, stream * w + wide)
    operations.append(
        elementwise(
            shape, "dispatch", "embedding_forward", count * model.hidden, 2, saved=wide, frees_temporary=copy,
            gradient=[gathered, added],
        )
    )  # fmt: skip
    return operations


def _combine(shape: Shape) -> list[Operation]:
    """Gather, weight and sum the rows of all tokens, choice by choice."""
    model, w, count, k = shape.model, shape.matmul_bytes, rows(shape), _of(shape).experts_per_token
    stream, wide, choices = shape.elements, count * model.hidden * w, shape.tokens * k
    of_rows = count * (INDEX + FP32)  # the token of each row, and its weight
    gradient = [
        elementwise(shape, "combine", "embedding_forward", k * stream, 2, scratch=2 * stream * w),
        elementwise(shape, "combine", "multiply", k * stream, 3, temporary=choices * FP32),
        elementwise(
            shape, "combine", "embedding_forward", count * model.hidden, 4, temporary=wide + of_rows,
            frees_saved=wide + _source_bytes(shape) + choices * FP32, frees_temporary=branch_gradient(shape) + of_rows,
        ),
    ]  # fmt: skip
    size = stream * w
    return [
        elementwise(shape, "combine", "fill", stream, 1, temporary=size),
        elementwise(shape, "combine", "embedding_forward", k * stream, 2, scratch=size),
        elementwise(shape, "combine", "add_in_place", k * stream, 3, gradient=gradient),
    ]


def _fused_experts(shape: Shape) -> list[Operation]:
    """Experts whose dispatch (sorting tokens into rows) and combine (summing rows into tokens) are one kernel each."""
    model, conventions = shape.model, shape.conventions
    count, width = rows(shape), model.expert_ffn_size
    gate_and_up = 2 * width if model.gated_ffn else width
    sent, back = permuted_elements(shape)
    kept = count * model.hidden * conventions.storage.input_bytes
    sorted_back = elementwise(shape, "dispatch", "add", sent, 1)
    spread = elementwise(shape, "combine", "embedding_forward", back, 1)
    return [
        elementwise(shape, "dispatch", "embedding_forward", sent, 1, saved=kept, gradient=[sorted_back]),
        *_grouped(shape, "expert_up", model.hidden, gate_and_up, keep=True, frees=0, consumes=0),
        activated(shape, count * width),
        *_grouped(
            shape, "expert_down", width, model.hidden, keep=conventions.keeps_expert_outputs, frees=0, consumes=0
        ),
        elementwise(shape, "combine", "add", back, 1, gradient=[spread]),
    ]  # fmt: skip


def routed(operations: list[Operation]) -> list[Operation]:
    """Return a block's operations on rows, from the one that gives experts their rows to their last product."""
    names = [op.name for op in operations]
    return operations[names.index("dispatch") : names.index("combine")]


def permuted_elements(shape: Shape) -> tuple[Size, Size]:
    """Return the elements read and written to sort a rank's tokens into rows, and to sum rows into tokens.

    If a rank has several experts, rows received per choice are sorted by expert once more, and back.
    """
    moe, count, tokens = _of(shape), rows(shape) * shape.model.hidden, shape.elements
    sorts_twice = (shape.ep > 1) & (shape.ep < moe.experts) & (shape.conventions.rows_sent == "choices")
    return 2 * count * (1 + sorts_twice), 2 * count * sorts_twice + count + tokens


def _shared_experts(shape: Shape) -> list[Operation]:
    """A dense network for every token, with an optional gate, added to the result of `combine`.

    The backward pass ends with one fp32 gradient of the normed input. In fp32 the router frees that input.
    """
    model, gated, w = shape.model, _of(shape).shared_gate, shape.matmul_bytes
    if shape.conventions.fused:
        gate = linear(shape, "shared_gate", model.hidden, 1, keep=True, bias=False) if gated else []
        return feed_forward(shape, model.shared_ffn_size, "shared_ffn") + gate
    elements, size = shape.elements, shape.elements * w
    name = f"shared_{network_reader(shape)}_cast"
    operations = [cast(shape, name, elements, saved=size)] if shape.casts else []
    # Without a gate the gradient of the sum is that of the branch, which `combine` still needs.
    operations += feed_forward(
        shape, model.shared_ffn_size, "shared_ffn", consumes=size if gated else 0, owns_input=shape.casts, summed=False
    )
    if gated:
        # The product with the gate saves both factors: the shared experts' output is saved, not temporary.
        operations[-1] = replace(operations[-1], saved_bytes=size, temporary_bytes=0)
        summed = gradient_sum(shape, "ffn_norm", elements, size)
        operations = gradient_last(operations, summed) + _shared_gate(shape, size)
    joined = elementwise(shape, "shared_sum", "add", elements, 3, temporary=size, frees_temporary=2 * size)
    return [*operations, joined]


def _shared_gate(shape: Shape, size: Size) -> list[Operation]:
    """The gate of the shared experts: one factor per token on their result, of `size` bytes."""
    hidden, w, elements = shape.model.hidden, shape.matmul_bytes, shape.elements
    # Casts of the input, which a frozen weight does not save, and of the weight.
    gate, saved = shape.tokens * w, size * (not shape.adapters) + hidden * w if shape.casts else 0
    sizes = (shape.tokens, 1, hidden)
    to_input, to_weight = product_gradients(shape, "shared_gate", sizes, moved=size, consumes=gate)
    to_weight = replace(to_weight, temporary_bytes=0, gradient_bytes=hidden * FP32, frees_saved_bytes=saved)
    of_product = elementwise(shape, "shared_sum", "multiply_backward", elements, 4, temporary=2 * size + gate,
                             frees_saved=size, frees_temporary=size)  # fmt: skip
    of_sigmoid = elementwise(shape, "shared_sum", "silu_backward", shape.tokens, 3, scratch=gate)
    return [
        product("shared_gate", sizes, w, moved=size, saved=saved, temporary=gate, gradient=[to_input, to_weight]),
        elementwise(shape, "shared_sum", "silu_forward", shape.tokens, 2, held=gate, frees_temporary=gate,
                    gradient=[of_sigmoid]),
        elementwise(shape, "shared_sum", "multiply", elements, 2, temporary=size, gradient=[of_product]),
    ]  # fmt: skip
