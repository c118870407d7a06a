"""Which part of every sequence and of the heads a process computes: all of it, unless a layout says otherwise.

The modules ask their `ComputePartition` where a whole and a shared computation differ, and nowhere else. The shared
ones are in `train/parallel`, which alone knows of ranks.

Dropout does not depend on who computes it: masks are drawn by sample, whole, and then cut. torch's generator gives a
mask that depends on the shape drawn and on everything drawn before: no two layouts would drop the same elements. Here
every (run seed, sample, layer, site) has a generator state of its own: a rank draws the whole mask of its samples and
keeps its rows and heads. The cost is that of drawing what others also draw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ironlaw.model.config import ModelConfig
from ironlaw.model.loss import chunked_cross_entropy

SITES = {"attention": 0, "ffn": 1, "scores": 2}
_PRIMES = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
Rows = slice | Tensor
"""Positions within a sequence, usable as an index: all of the first ones, or a (rows,) tensor."""


@dataclass(frozen=True)
class Draw:
    """Draws for one micro-batch. `samples` (B,): numbers of its sequences in the run, on the host."""

    seed: int
    config: ModelConfig
    samples: Tensor
    partition: ComputePartition
    sequence: int  # of the whole sequence
    layer: int = 0

    def residual(self, x: Tensor, site: str) -> Tensor:
        """Dropout of a branch (B, rows, H) before it is added to the residual stream."""
        rows = self.partition.stream_positions(self.sequence)
        size = (self.sequence, self.config.hidden)
        noise = torch.stack([self._keep(sample, site, size)[rows] for sample in self.samples.tolist()])
        return x * noise.to(x)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None = None
    ) -> Tensor:
        """Attention with dropout of its weights, materialised: fused kernels draw their own. `key`: whole sequence."""
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
        noise = torch.stack([self._keep(s, "scores", size)[heads][:, rows] for s in self.samples.tolist()])
        return (weights * noise.to(weights)).to(value.dtype) @ value

    def _keep(self, sample: int, site: str, size: tuple[int, ...]) -> Tensor:
        """Zeros with the probability of dropout, else its inverse, so that the mean stays; on the host, fp32."""
        key = self.seed
        for number, prime in zip((sample, self.layer, SITES[site]), _PRIMES, strict=True):
            key = ((key ^ (number + 1)) * prime) % 2**64
            key ^= key >> 31
        generator = torch.Generator().manual_seed(key % 2**63)
        kept = 1.0 - self.config.dropout
        return torch.empty(size).bernoulli_(kept, generator=generator).div_(kept)


class ComputePartition:
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


WHOLE = ComputePartition()
