"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). In training, keys and values of all heads
are computed from the narrow vector, followed by ordinary attention.

Shapes as in `transformer.py`, and: N the part of a head's query and key without positions, R the rotated part, D both,
W the value's size. `workload/latent.py` lists the operations of this module.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ironlaw.model.cached import Group, LayerCache
from ironlaw.model.config import ModelConfig
from ironlaw.model.linear import Linear
from ironlaw.model.masks import BlockMask, Mask, flexible
from ironlaw.model.partition import WHOLE, ComputePartition, Draw
from ironlaw.model.rotary import rotate


class LatentAttention(nn.Module):
    partition: ComputePartition = WHOLE

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        latent = config.latent
        assert latent is not None
        self.config, self.latent = config, latent
        if latent.query_rank:
            self.query_down = Linear(config.hidden, latent.query_rank, bias=False)
            self.query_norm = nn.RMSNorm(latent.query_rank, eps=latent.norm_eps)
        self.query_up = Linear(latent.query_rank or config.hidden, config.query_size, bias=False)
        self.latent_down = Linear(config.hidden, latent.down_size, bias=False)
        self.latent_norm = nn.RMSNorm(latent.key_value_rank, eps=latent.norm_eps)
        self.latent_up = Linear(latent.key_value_rank, latent.up_size(config.heads), bias=False)
        self.out = Linear(config.mixed_size, config.hidden, bias=False)

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of the products before attention in order; the wide ones under their name in recomputation policies."""
        return (*(("query_down",) if self.latent.query_rank else ()), "qkv", "latent_down", "qkv")

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, mask: Mask | LayerCache | None, draw: Draw | None = None
    ) -> Tensor:
        assert rotary is not None
        if isinstance(mask, LayerCache):
            return self.cached(x, rotary, mask)
        latent, dropout = self.latent, self.config.dropout if self.training else 0.0
        query = self.query(x, rotary)
        key, value = self.expanded(*self.narrow(x, rotary))
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)  # (B, A, S, D or W)
        if isinstance(mask, BlockMask):
            mixed = flexible(query, key, value, mask, self.config.score_scale)
        else:
            if self.pads(x, dropout):
                value = F.pad(value, (0, latent.head_size - latent.value_size))
            mixed = self.partition.attend(query, key, value, mask, dropout, draw, self.config.score_scale)
            mixed = mixed[..., : latent.value_size]  # (B, A, S, W)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def cached(self, x: Tensor, rotary: tuple[Tensor, Tensor], cache: LayerCache) -> Tensor:
        """`forward` of new tokens (1, N, H) with a cache, which stores each token's narrow vector and rotated key."""
        narrow, turned = self.narrow(x, rotary)
        kept = torch.cat((narrow.to(turned.dtype), turned[:, :, 0]), dim=-1).transpose(0, 1)  # (N, 1, rank + R)
        cache.keep(kept)
        query, mixed = self.query(x, rotary)[0], []
        if cache.step_tokens.decode is not None:
            of_key, of_value = self.absorbing(query.dtype)
            mixed.append(torch.einsum("nar,avr->nav", cache.attend_decode(self.absorbed(query, of_key)), of_value))
        for group in cache.step_tokens.groups:
            if group.blocks is None:
                keys = kept[group.rows].unflatten(0, (group.sequences, -1)).transpose(1, 2)
            else:
                (keys,) = cache.pages.read(group.blocks, group.sequences, query.dtype)
            mixed.append(self.mixed(query[group.rows], keys, group, cache))
        return self.out(torch.cat(mixed).flatten(1).unsqueeze(0))

    def mixed(self, query: Tensor, kept: Tensor, group: Group, cache: LayerCache) -> Tensor:
        """Return (P x S, A, W) from queries (P x S, A, D) and the cached `kept` (P, 1, T, rank + R) of a group.

        Few queries are projected to the narrow space, where all heads share one key (the absorbed form of section
        2.1.2). For many, it takes less work to compute keys and values of all heads, as in training.
        """
        latent, rank = self.latent, self.latent.key_value_rank
        narrow, turned = kept.split((rank, latent.rotary_size), dim=-1)
        absorbed = 2 * rank + latent.rotary_size  # multiplications per head, query and key
        made = latent.head_size + latent.value_size + rank * (latent.plain_size + latent.value_size) / group.queries
        if absorbed > made:
            keys, values = self.expanded(narrow[:, 0], turned.transpose(1, 2))
            return cache.mix(group, query, keys.transpose(1, 2), values.transpose(1, 2))
        of_key, of_value = self.absorbing(query.dtype)
        mixed = cache.mix(group, self.absorbed(query, of_key), kept, narrow)
        return torch.einsum("nar,avr->nav", mixed, of_value)

    def absorbing(self, dtype: torch.dtype) -> Sequence[Tensor]:
        """Return the projections of queries to the narrow space (A, N, rank) and of values from it (A, W, rank)."""
        weight = self.latent_up.weight.to(dtype).unflatten(0, (-1, self.latent.plain_size + self.latent.value_size))
        return weight.split((self.latent.plain_size, self.latent.value_size), dim=1)

    def absorbed(self, query: Tensor, of_key: Tensor) -> Tensor:
        """Project queries (N, A, D) to the narrow space, (N, A, rank + R)."""
        plain, rotated = query.split((self.latent.plain_size, self.latent.rotary_size), dim=-1)
        return torch.cat((torch.einsum("nap,apr->nar", plain, of_key), rotated), dim=-1)

    def pads(self, x: Tensor, dropout: float) -> bool:
        """Whether values are zero-padded to the width of keys: for the CPU's fused attention, and for ranks that gather
        keys and values as one tensor."""
        if self.latent.value_size == self.latent.head_size:
            return False
        return (x.device.type == "cpu" and not dropout) or self.partition is not WHOLE

    def query(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """(B, S, H) to (B, S, A, D)."""
        if self.latent.query_rank:
            # In fp32 also under autocast, as in `Attention.normed`.
            x = self.query_norm(self.query_down(x).float())
        query = self.query_up(x).unflatten(-1, (-1, self.latent.head_size))
        plain, turned = query.split((self.latent.plain_size, self.latent.rotary_size), dim=-1)
        return torch.cat((plain, rotate(turned, *rotary)), dim=-1)

    def narrow(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(B, S, H) to normed narrow vectors (B, S, rank) and rotated keys (B, S, 1, R), shared by all heads."""
        narrow, turned = self.latent_down(x).split((self.latent.key_value_rank, self.latent.rotary_size), dim=-1)
        turned = rotate(turned.unsqueeze(2), *rotary)
        return self.latent_norm(narrow.float()), turned

    def expanded(self, narrow: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        """Convert the outputs of `narrow` to keys (B, S, A, D) and values (B, S, A, W)."""
        latent, together = self.latent, self.latent_up(narrow)
        together = together.unflatten(-1, (-1, latent.plain_size + latent.value_size))  # this rank's heads
        plain, value = together.split((latent.plain_size, latent.value_size), dim=-1)
        return torch.cat((plain, turned.expand(-1, -1, plain.shape[2], -1)), dim=-1), value
