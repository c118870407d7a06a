"""Which part of every sequence and of the heads a process computes: all of it, unless a layout says otherwise.

The modules ask their `Place` where a whole and a shared computation differ, and nowhere else. The shared ones are in
`train/parallel`, which alone knows of ranks.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ironlaw.model.dropout import Draw
from ironlaw.model.loss import chunked_cross_entropy

Rows = slice | Tensor
"""Positions within a sequence, usable as an index: all of the first ones, or a (rows,) tensor."""


class Place:
    """The whole: every position of the sequence, every head."""

    def sequence(self, tokens: Tensor) -> int:
        """Length of the whole sequence of which `tokens` (B, S) or hidden states (B, S, H) are this process's part."""
        return tokens.shape[1]

    def positions(self, sequence: int) -> Rows:
        """Positions of the tokens that this process attends from."""
        return slice(sequence)

    def stream_positions(self, sequence: int) -> Rows:
        """Positions of the residual stream that this process holds: fewer under sequence parallelism."""
        return slice(sequence)

    def heads(self, heads: int) -> slice:
        """Heads computed here."""
        return slice(heads)

    def weight(self, module: nn.Embedding) -> Tensor:
        """A table as a plain tensor."""
        return module.weight

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, draw: Draw | None,
        scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        """(B, A, S, D) from queries of that shape, keys and values (B, K, S, D); values may be narrower.

        `scale` of the scores: one over the root of D unless given.
        """
        if draw is not None and dropout:
            return draw.attention(query, key, value, mask, scale)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None,
            enable_gqa=key.shape[1] != query.shape[1], scale=scale,
        )  # fmt: skip

    def chunked_loss(
        self, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, reduction: str, onednn: bool
    ) -> Tensor:
        """Cross-entropy of hidden states (B, S, H), `chunk` tokens at a time (`loss.py`); targets (B S,)."""
        return chunked_cross_entropy(x.flatten(0, 1), weight, targets, chunk, reduction, onednn)


WHOLE = Place()
