"""The part of every sequence and of the heads that a process computes: everything, unless a layout divides them.

Modules use their `ComputePartition` only where whole and divided computations differ. Partitions that divide are in
`train/parallel`, the only place where ranks appear.

Dropout is independent of the layout: whole masks are drawn by sample, then cut. With one sequential generator, a mask
would depend on the drawn shape and on all earlier draws, and so on the layout. Here every (run seed, sample, layer,
site) has its own generator state: a rank draws the whole masks of its samples and keeps its own rows and heads, at the
cost of drawing elements that other ranks draw too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ironlaw.model.config import ModelConfig
from ironlaw.model.loss import chunked_cross_entropy

SITES = {"attention": 0, "ffn": 1, "scores": 2}
_PRIMES = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
Rows = slice | Tensor
"""Positions within a sequence, usable as an index: a slice from the start, or a (rows,) tensor."""


@dataclass(frozen=True)
class Draw:
    """Dropout masks of one micro-batch. `samples` (B,): numbers of its sequences in the run, on the host."""

    seed: int
    config: ModelConfig
    samples: Tensor
    partition: ComputePartition
    sequence: int  # of the whole sequence
    layer: int = 0

    @torch.compiler.disable  # or the layers would not share their compiled code
    def of(self, block: Any) -> Draw:
        """Return the masks of a block's `layer`."""
        return replace(self, layer=block.layer)

    def residual(self, x: Tensor, site: str) -> Tensor:
        """Dropout of a branch (B, rows, H) before it is added to the residual stream."""
        rows = self.partition.stream_positions(self.sequence)
        size = (self.sequence, self.config.hidden)
        return x * self._noise(site, size, rows).to(x)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None = None
    ) -> Tensor:
        """Attention with dropout, materialised as fused kernels draw their own masks; `key` has the whole sequence."""
        config, partition = self.config, self.partition
        if mask is None:
            positions = torch.arange(self.sequence, device=query.device)
            mask = positions[partition.positions(self.sequence), None] >= positions[None, :]
        repeat = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(repeat, dim=1) if repeat > 1 else t for t in (key, value))
        scores = query @ key.transpose(-2, -1)
        scores = scores / math.sqrt(config.size_of_head) if scale is None else scores * scale
        weights = F.softmax(scores.masked_fill(~mask, -math.inf).float(), dim=-1)
        size = (config.heads, self.sequence, self.sequence)
        heads, rows = partition.heads(config.heads), partition.positions(self.sequence)
        return (weights * self._noise("scores", size, heads, rows).to(weights)).to(value.dtype) @ value

    @torch.compiler.disable
    def _noise(self, site: str, size: tuple[int, ...], *part: Rows) -> Tensor:
        return torch.stack([self._keep(sample, site, size)[part] for sample in self.samples.tolist()])

    def _keep(self, sample: int, site: str, size: tuple[int, ...]) -> Tensor:
        """Return 0 with the dropout probability p, else 1 / (1 - p), which keeps the mean; on the host, fp32."""
        key = self.seed
        for number, prime in zip((sample, self.layer, SITES[site]), _PRIMES, strict=True):
            key = ((key ^ (number + 1)) * prime) % 2**64
            key ^= key >> 31
        generator = torch.Generator().manual_seed(key % 2**63)
        kept = 1.0 - self.config.dropout
        return torch.empty(size).bernoulli_(kept, generator=generator).div_(kept)


class ComputePartition:
    """The partition of a single process: every position of the sequence, every head."""

    def sequence(self, tokens: Tensor) -> int:
        """Return the length of the whole sequence, given this process's `tokens` (B, S) or hidden states (B, S, H)."""
        return tokens.shape[1]

    def positions(self, sequence: int) -> Rows:
        """Return the positions of this process's queries."""
        return slice(sequence)

    def stream_positions(self, sequence: int) -> Rows:
        """Return the positions of the residual stream on this process: fewer under sequence parallelism."""
        return slice(sequence)

    def heads(self, heads: int) -> slice:
        """Return the heads computed by this process."""
        return slice(heads)

    def weight(self, module: nn.Embedding) -> Tensor:
        """Return an embedding table as a plain tensor."""
        return module.weight

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, draw: Draw | None,
        scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Return (B, A, S, D) from queries of that shape, keys and values (B, K, S, D); values may be narrower.

        `scale`: factor on the scores, by default 1 / sqrt(D).
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
        """Return the cross-entropy of hidden states (B, S, H), `chunk` tokens at a time (`loss.py`); targets (B S,)."""
        return chunked_cross_entropy(x.flatten(0, 1), weight, targets, chunk, reduction, onednn)


WHOLE = ComputePartition()
