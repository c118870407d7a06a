"""Dropout that does not depend on who computes it: masks are drawn by sample, whole, and then cut.

torch's generator gives a mask that depends on the shape drawn and on everything drawn before, so that no two layouts
would drop the same elements. Here every (run seed, sample, layer, site) has a generator state of its own: a rank draws
the whole mask of its samples and keeps its rows and heads. The cost is that of drawing what others also draw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ironlaw.model.config import ModelConfig

if TYPE_CHECKING:
    from ironlaw.model.place import Place

SITES = {"attention": 0, "ffn": 1, "scores": 2}
_PRIMES = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


@dataclass(frozen=True)
class Draw:
    """Draws for one micro-batch. `samples` (B,): numbers of its sequences in the run, on the host."""

    seed: int
    config: ModelConfig
    samples: Tensor
    place: Place
    sequence: int  # of the whole sequence
    layer: int = 0

    def of_layer(self, layer: int) -> Draw:
        return replace(self, layer=layer)

    def residual(self, x: Tensor, site: str) -> Tensor:
        """Dropout of a branch (B, rows, H) before it is added to the residual stream."""
        rows = self.place.stream_positions(self.sequence)
        size = (self.sequence, self.config.hidden)
        noise = torch.stack([self._keep(sample, site, size)[rows] for sample in self.samples.tolist()])
        return x * noise.to(x)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None = None
    ) -> Tensor:
        """Attention with dropout of its weights, materialised: fused kernels draw their own. `key`: whole sequence."""
        config, place = self.config, self.place
        if mask is None:
            positions = torch.arange(self.sequence, device=query.device)
            mask = positions[place.positions(self.sequence), None] >= positions[None, :]
        repeat = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(repeat, dim=1) if repeat > 1 else t for t in (key, value))
        scores = query @ key.transpose(-2, -1)
        scores = scores / math.sqrt(config.size_of_head) if scale is None else scores * scale
        weights = F.softmax(scores.masked_fill(~mask, -math.inf).float(), dim=-1)
        size = (config.heads, self.sequence, self.sequence)
        heads, rows = place.heads(config.heads), place.positions(self.sequence)
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
