"""Attention masks: causal, within documents, within a sliding window.

On a CPU the mask is a tensor for `scaled_dot_product_attention` (FlexAttention has no backward pass there). On CUDA it
is a block mask for FlexAttention, which skips masked blocks instead of computing them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ironlaw.model.autocast import autocast_dtype

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
