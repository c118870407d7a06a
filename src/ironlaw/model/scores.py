"""Attention with modified scores: soft caps (Gemma 2, arXiv 2408.00118, section 2), sinks (gpt-oss, arXiv 2508.10925),
and ALiBi's distances (arXiv 2108.12409), which can be part of a mask.

On a CPU all scores are in memory; on CUDA FlexAttention applies the same rules (`masks.flexible`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ironlaw.model.config import ModelConfig


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
