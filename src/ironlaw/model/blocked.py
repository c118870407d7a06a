"""Causal attention as batched products over blocks of queries, for CPUs whose fused kernel is slower than that.

PyTorch's fused attention of a CPU multiplies tiles too small for its products, in its backward pass most of all: on an
AMD EPYC, (4, 4, 256, 64) in bf16 takes it 2.2 times as long as this. A block of queries is multiplied with all keys up
to its end, so that of a long sequence only half of the scores is computed; the weights of each block are kept for the
backward pass. In reduced precision scores and weights are rounded to it, as by any attention that is written out; in
fp32 results differ in the order of sums only. `ironlaw measure` times both kernels, and the plan takes the faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ironlaw.model.switches import score_blocks


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """(B, A, S, D) from queries of that shape, keys and values (B, K, S, D), as
    `scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)` gives; `scale` as there."""
    return _Blocked.apply(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale)


def _flat(x: Tensor, repeat: int = 1) -> Tensor:
    """(B, A, S, D) to (B A, S, D); `repeat`: heads of queries that share one of these."""
    return (x if repeat == 1 else x.repeat_interleave(repeat, 1)).flatten(0, 1)


def _shared(gradient: Tensor, like: Tensor, repeat: int) -> Tensor:
    """Back to (B, K, S, D): the gradients of all heads that share one add up."""
    batch, heads, sequence, size = like.shape
    if repeat == 1:
        return gradient.view(like.shape)
    return gradient.view(batch, heads, repeat, sequence, size).sum(2)


def _blocks(x: Tensor) -> Iterator[tuple[slice, slice]]:
    """The queries of each block, and the keys that they may see."""
    for first, end in score_blocks(x.shape[-2], x.element_size()):
        yield slice(first, end), slice(0, end)


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        batch, heads, sequence, _ = query.shape
        repeat = heads // key.shape[1]
        flat_query, flat_key, flat_value = _flat(query * scale), _flat(key, repeat), _flat(value, repeat)
        # Laid out as the output layer reads it: (B, S, A, D).
        out = query.new_empty(batch, sequence, heads, value.shape[-1]).transpose(1, 2)
        kept = []
        for rows, seen in _blocks(query):
            scores = flat_query[:, rows] @ flat_key[:, seen].transpose(1, 2)
            width = rows.stop - rows.start
            scores[..., rows.start :] += torch.full((width, width), -torch.inf, dtype=scores.dtype).triu_(1)
            weights = torch._softmax(scores, -1, False)
            del scores
            out[:, :, rows] = (weights @ flat_value[:, seen]).unflatten(0, (batch, heads))
            kept.append(weights)
        ctx.scale = scale
        ctx.save_for_backward(query, key, value, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *kept = ctx.saved_tensors
        repeat = query.shape[1] // key.shape[1]
        flat_query, flat_key, flat_value = _flat(query * ctx.scale), _flat(key, repeat), _flat(value, repeat)
        gradient = _flat(gradient)
        of_query = torch.empty_like(flat_query)
        of_key, of_value = torch.zeros_like(flat_key), torch.zeros_like(flat_value)
        for (rows, seen), weights in zip(_blocks(query), kept, strict=True):
            own = gradient[:, rows]
            of_value[:, seen] += weights.transpose(1, 2) @ own
            of_scores = own @ flat_value[:, seen].transpose(1, 2)
            of_scores = torch._softmax_backward_data(of_scores, weights, -1, weights.dtype)
            of_query[:, rows] = of_scores @ flat_key[:, seen]
            of_key[:, seen] += of_scores.transpose(1, 2) @ flat_query[:, rows]
        of_query = of_query.mul_(ctx.scale).view(query.shape)
        return of_query, _shared(of_key, key, repeat), _shared(of_value, value, repeat), None
