"""Attention masks (causal, within documents, within a sliding window) and modified scores: soft caps (Gemma 2, arXiv
2408.00118, section 2), sinks (gpt-oss, arXiv 2508.10925), and ALiBi's distances (arXiv 2108.12409), part of a mask.

On a CPU the mask is a tensor for `scaled_dot_product_attention` (FlexAttention has no backward pass there), and the
modified scores are in memory. On CUDA the mask is a block mask for FlexAttention, which skips masked blocks instead of
computing them, and scores are modified by a rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ironlaw.model.config import ModelConfig
from ironlaw.model.linear import autocast_dtype

Mask = Tensor | BlockMask


def dense_mask(sequence: int, device: torch.device, window: int | None, documents: Tensor | None) -> Tensor:
    """Return a mask that is True where a query (row) attends to a key (column): (S, S), with documents (B, 1, S, S)."""
    position = torch.arange(sequence, device=device)
    distance = position[:, None] - position[None, :]
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if documents is None:
        return visible
    return (visible & (documents[:, :, None] == documents[:, None, :])).unsqueeze(1)


def additive(mask: Tensor) -> Tensor:
    """Return a mask with 0 where visible and minus infinity elsewhere, in the precision of attention."""
    dtype = autocast_dtype(mask) or torch.float32
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def positions_in_document(documents: Tensor) -> Tensor:
    """Return each position relative to the start of its document, (B, S)."""
    position = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.zeros_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return position - torch.cummax(torch.where(starts, position, 0), dim=1).values


def block_mask(sequence: int, device: torch.device, window: int | None, documents: Tensor | None) -> BlockMask:
    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key
        if window is not None:
            seen = seen & (query - key < window)
        if documents is not None:
            seen = seen & (documents[batch, query] == documents[batch, key])
        return seen

    rows = None if documents is None else documents.shape[0]
    return create_block_mask(visible, rows, None, sequence, sequence, device=str(device))


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention)


def flexible(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None = None,
    rule: Callable[..., Tensor] | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """FlexAttention. On a CPU it is not compiled and materialises every score, which is meant for tests.

    `rule` modifies a score; `sinks` (A,) are extra scores that take part in the softmax and have no value.
    """
    attend = _compiled() if query.device.type == "cuda" else flex_attention
    options: dict[str, Any] = {"block_mask": mask, "enable_gqa": key.shape[1] != query.shape[1], "scale": scale}
    if rule is not None:
        options["score_mod"] = rule
    if sinks is None:
        return attend(query, key, value, **options)
    mixed, log_sum = attend(query, key, value, return_lse=True, **options)
    return mixed * torch.sigmoid(log_sum - sinks[:, None]).unsqueeze(-1).to(mixed.dtype)


def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """Return the slopes (heads,), fp32: the series for the largest power of two, then every other slope of the next."""
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (head + 1) / whole) for head in range(whole)]
    slopes += [2 ** (-4 * (head + 1) / whole) for head in range(0, 2 * (heads - whole), 2)]
    return torch.tensor(slopes, device=device)


def alibi_bias(heads: int, rows: Tensor, sequence: int, dtype: torch.dtype) -> Tensor:
    """Return the bias (1, heads, rows, S), which decreases with distance; `rows` are the positions of the queries."""
    distance = rows[:, None] - torch.arange(sequence, device=rows.device)[None, :]
    return (-alibi_slopes(heads, rows.device)[None, :, None, None] * distance).to(dtype)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, config: ModelConfig, sinks: Tensor | None
) -> Tensor:
    """Return (B, A, S, D) from queries of that shape, keys and values (B, K, S, D); `mask` is added to the scores."""
    repeat = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeat, 1) if repeat > 1 else t.contiguous() for t in (key, value))
    scale = config.score_scale or 1 / math.sqrt(config.size_of_head)
    scores = (query * scale).contiguous() @ key.transpose(-2, -1)
    if config.attention_cap is not None:
        scores = capped(scores, config.attention_cap)
    scores = scores + mask
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    return (weights if sinks is None else weights[..., :-1]).to(value.dtype) @ value


def capped(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap


def score_rule(config: ModelConfig, device: torch.device) -> Callable[..., Tensor] | None:
    """Return the rule that modifies one score in FlexAttention, or None if scores are not modified."""
    cap = config.attention_cap
    slopes = alibi_slopes(config.heads, device) if config.positions == "alibi" else None
    if cap is None and slopes is None:
        return None

    def rule(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        score = score if cap is None else capped(score, cap)
        return score if slopes is None else score - slopes[head] * (query - key)

    return rule
