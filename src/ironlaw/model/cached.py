"""Attention over keys and values cached in pages: the extension for serving of the modules used in training.

Modules accept a `LayerCache` in place of a mask, and differ nowhere else. `serve/` assigns pages to sequences.

Shapes: N tokens of a step, P sequences of a group with S new tokens each (N is the sum of P x S over the groups), T
tokens that the pages of a group's longest sequence hold, A heads, K key/value heads, D key size, W value size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ironlaw.kernels.library import INT4, address
from ironlaw.kernels.native import CLayer, CStep, Native
from ironlaw.model.config import ModelConfig
from ironlaw.model.masks import alibi_slopes, capped
from ironlaw.model.rotary import rotate_fused

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0, INT4: 7.0}  # largest number of formats with scales


@dataclass
class Group:
    """Sequences of one step with the same number of new tokens, in consecutive rows."""

    rows: slice  # among the step's N tokens
    sequences: int  # P
    queries: int  # S
    positions: Tensor  # (P, S): positions of the new tokens in their sequences
    blocks: Tensor | None  # for `Pages.read`; None: new sequences, each attending to its own rows only
    masks: dict[bool, Tensor | None] = field(default_factory=dict)  # whether the layer has a window -> mask

    def mask(self, config: ModelConfig, windowed: bool, size: int, dtype: torch.dtype) -> Tensor | None:
        """Return the mask (P, 1 or A, S, T) added to scores, made once per step; None: causal over the group's rows."""
        if windowed not in self.masks:
            self.masks[windowed] = self._mask(config, config.sliding_window if windowed else None, size, dtype)
        return self.masks[windowed]

    def _mask(self, config: ModelConfig, window: int | None, size: int, dtype: torch.dtype) -> Tensor | None:
        alibi = config.positions == "alibi"
        if self.blocks is None:
            size = self.queries
            if not alibi and not config.composes_scores and (window is None or window >= size):
                return None
        distance = self.positions[:, :, None] - torch.arange(size, device=self.positions.device)  # (P, S, T)
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -math.inf)
        if not alibi:
            return mask.unsqueeze(1)
        return mask.unsqueeze(1) - (alibi_slopes(config.heads, mask.device)[:, None, None] * distance[:, None]).to(
            dtype
        )


class Pages:
    """The pages of one layer's keys and values, for all sequences: (pages, K, page, size).

    Stored in fp32, bf16, fp8, int8 or int4. A head's tokens in a page are contiguous, so that the result of one indexed
    read can be multiplied without a copy. 8- and 4-bit formats have one scale per token and head, which maps the
    largest element to the largest number of the format.
    """

    def __init__(
        self, pages: int, page: int, heads: int, sizes: Sequence[int], store: torch.dtype, device: torch.device
    ) -> None:
        self.page, self.heads, self.sizes, self.store = page, heads, tuple(sizes), store
        self.is_scaled = store in LARGEST
        # Moved as bytes, since indexed reads and writes do not support 8-bit floats.
        raw = torch.uint8 if self.is_scaled else store
        widths = [-(-size // 2) if store is INT4 else size for size in sizes]
        self.parts = [torch.zeros(pages * heads * page, width, dtype=raw, device=device) for width in widths]
        self.scales = [torch.ones(len(part), 1, device=device) for part in self.parts] if self.is_scaled else []

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in (*self.parts, *self.scales))

    def rows(self, pages: Tensor, places: Tensor) -> Tensor:
        """Return the rows (N x K,) of `parts` for tokens at `places` (N,) of `pages` (N,)."""
        heads = torch.arange(self.heads, device=pages.device)
        return ((pages[:, None] * self.heads + heads) * self.page + places[:, None]).flatten()

    def blocks(self, pages: Tensor) -> Tensor:
        """Convert `pages` (P, pages per sequence) to the indices (P x K x pages per sequence,) for `read`."""
        heads = torch.arange(self.heads, device=pages.device)
        return (pages[:, None, :] * self.heads + heads[:, None]).flatten()

    def write(self, rows: Tensor, *values: Tensor) -> None:
        """Write `values`, one tensor (N, K, size) per part, to `rows` (N x K,)."""
        for number, (part, value) in enumerate(zip(self.parts, values, strict=True)):
            value = value.flatten(0, 1)
            if self.is_scaled:
                value, scale = quantized(value, self.store)
                self.scales[number].index_copy_(0, rows, scale)
                value = _pack_int4(value) if self.store is INT4 else value.view(torch.uint8)
            part.index_copy_(0, rows, value.to(part.dtype))

    def read(self, blocks: Tensor, sequences: int, dtype: torch.dtype) -> list[Tensor]:
        """Return a tensor (P, K, T, size) for each part."""
        found = []
        for number, (part, size) in enumerate(zip(self.parts, self.sizes, strict=True)):
            rows = part.view(-1, self.page * part.shape[1]).index_select(0, blocks)
            if self.is_scaled:
                scale = self.scales[number].view(-1, self.page).index_select(0, blocks)
                is_int4 = self.store is INT4
                codes = _unpack_int4(rows.view(-1, part.shape[1]))[:, :size] if is_int4 else rows.view(self.store)
                rows = (codes.reshape(-1, size).float() * scale.view(-1, 1)).to(dtype)
            elif rows.dtype is not dtype:
                rows = rows.to(dtype)
            found.append(rows.view(sequences, self.heads, -1, size))
        return found


def quantized(value: Tensor, store: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise (N, D) to 8-bit elements, or to numbers from -7 to 7 in int8, with scales (N, 1)."""
    scale = value.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / LARGEST[store]
    value = value.float() / scale
    return (value.to(store) if store is torch.float8_e4m3fn else value.round().to(torch.int8)), scale


def _pack_int4(value: Tensor) -> Tensor:
    """Pack numbers (N, D) from -8 to 7 into (N, D / 2) bytes, the first of two in the low bits."""
    raised = F.pad(value + 8, (0, value.shape[-1] % 2)).view(torch.uint8)
    return raised[:, ::2] | raised[:, 1::2] << 4


def _unpack_int4(pairs: Tensor) -> Tensor:
    """Unpack the result of `_pack_int4` to int8."""
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2).view(torch.int8) - 8


@dataclass
class DecodeTokens:
    """The step's first `count` tokens, of sequences with few new ones, which compiled code attends to in place."""

    count: int
    table: Tensor  # (P, pages of the longest sequence), int32
    sequence: Tensor  # (count,), int32: row of the table
    positions: Tensor  # (count,), int32
    scratch: Tensor | None = None  # scratch memory of compiled blocks

    def __post_init__(self) -> None:
        table = address(self.table, torch.int32, *self.table.shape)
        others = [address(each, torch.int32, self.count) for each in (self.sequence, self.positions)]
        self.step = CStep(table, *others, self.count, self.table.shape[1], torch.get_num_threads())


@dataclass(frozen=True)
class StepTokens:
    """One step's tokens: the first ones in `decode`, if any, the others in groups."""

    rows: Tensor | None  # (N x K,): rows of `Pages` for the new tokens; None: all tokens are in `decode`
    decode: DecodeTokens | None
    groups: Sequence[Group] = ()


class LayerCache:
    """One layer's pages, passed to a block in place of training's mask."""

    step_tokens: StepTokens

    def __init__(self, config: ModelConfig, pages: Pages, windowed: bool, native: Native | None = None,
                 sinks: Tensor | None = None) -> None:  # fmt: skip
        self.config, self.pages, self.windowed, self.native = config, pages, windowed, native
        self.scale = config.score_scale or 1 / math.sqrt(config.size_of_head)
        if native is not None:
            shapes, device, heads = native.shapes, pages.parts[0].device, config.heads
            own = (pages.page, pages.heads, pages.sizes[0], pages.sizes[-1], pages.store)
            if own != (shapes.page, shapes.shared, shapes.key, shapes.value_stride, native.store):
                raise ValueError(f"pages of {own} are not those that code is compiled for: {shapes}, {native.store}")
            slopes = alibi_slopes(heads, device).contiguous() if config.positions == "alibi" else None
            self.sinks, self.slopes = None if sinks is None else sinks.detach().float().contiguous(), slopes
            window = config.sliding_window if windowed else None
            scales: list[int | None] = [scale.data_ptr() for scale in pages.scales] or [None]
            self.layer = CLayer(
                pages.parts[0].data_ptr(), pages.parts[-1].data_ptr(), scales[0], scales[-1],
                *(address(each, torch.float32, heads) for each in (slopes, self.sinks)),
                self.scale, config.attention_cap or 0.0, window or 0,
            )  # fmt: skip

    def attend(
        self, heads: Tensor, value: Tensor, rotary: tuple[Tensor, Tensor] | None, sinks: Tensor | None
    ) -> Tensor:
        """Return (N, A, W) from new queries and keys, `heads` (N, A + K, D), and values (N, K, W), and cache both.

        `rotary`: tables of `fused_tables`, (N, 1, D) each, for queries and keys; `heads` may be overwritten.
        """
        config, step = self.config, self.step_tokens
        query, key = heads.split((config.heads, config.key_value_heads), dim=1)
        if step.rows is None:
            assert self.native is not None
            if rotary is not None:
                self.native.rotate(heads, *rotary, config.size_of_rotary)
            self.keep(key, value)
            return self.attend_decode(query)
        if rotary is not None:
            heads = rotate_fused(heads, *rotary, config.size_of_rotary)
            query, key = heads.split((config.heads, config.key_value_heads), 1)
        self.keep(key, value)
        mixed = [self.attend_decode(query)] if step.decode is not None else []
        for group in step.groups:
            if group.blocks is None:
                keys, values = (t[group.rows].unflatten(0, (group.sequences, -1)).transpose(1, 2) for t in (key, value))
            else:
                keys, values = self.pages.read(group.blocks, group.sequences, query.dtype)
            mixed.append(self.mix(group, query[group.rows], keys, values, sinks))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def keep(self, *parts: Tensor) -> None:
        """Write the new tokens' parts, (N, K, size) each, to their pages."""
        if self.step_tokens.rows is not None:
            self.pages.write(self.step_tokens.rows, *parts)
        else:
            assert self.native is not None and self.step_tokens.decode is not None
            self.native.keep(self.layer, self.step_tokens.decode.step, *parts)

    def attend_decode(self, query: Tensor) -> Tensor:
        """Return the attention output (count, A, W) of the first tokens, given all queries (N, A, D)."""
        assert self.native is not None and self.step_tokens.decode is not None
        return self.native.attend(self.layer, self.step_tokens.decode.step, query[: self.step_tokens.decode.count])

    def mix(self, group: Group, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Return (P x S, A, W) from a group's queries (P x S, A, D), keys (P, K, T, D) and values (P, K, T, W)."""
        config = self.config
        mask = group.mask(config, self.windowed, keys.shape[2], query.dtype)
        query = query.unflatten(0, (group.sequences, group.queries)).transpose(1, 2)  # (P, A, S, D)
        # For single queries, the CPU's fused attention computes many tiny products: plain ones took 0.05 to 0.9 of it.
        # CUDA's fused kernels take no mask for heads that share keys, and PyTorch's other way repeats the keys.
        plain = config.composes_scores or keys.shape[-1] != values.shape[-1]
        if plain or group.queries == 1 or (query.is_cuda and mask is not None):
            mixed = composed(query, keys, values, mask, config, sinks)
        else:
            mixed = F.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, is_causal=mask is None, scale=config.score_scale,
                enable_gqa=keys.shape[1] != query.shape[1],
            )  # fmt: skip
        return mixed.transpose(1, 2).flatten(0, 1)


def composed(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, config: ModelConfig, sinks: Tensor | None
) -> Tensor:
    """Return (P, A, S, W) as in `masks.attend`, with one product for all heads that share keys."""
    count, heads, queries, _ = query.shape
    shared = keys.shape[1]
    scale = config.score_scale or 1 / math.sqrt(config.size_of_head)
    # Products of the heads that share keys: (P x K, A / K x S, D).
    together = query.reshape(count * shared, -1, query.shape[-1])
    products = torch.bmm(together, keys.reshape(count * shared, -1, keys.shape[-1]).transpose(1, 2))
    scores = products.mul_(scale).view(count, heads, queries, -1)
    if config.attention_cap is not None:
        scores = capped(scores, config.attention_cap)
    if mask is None:
        mask = torch.full(scores.shape[-2:], -math.inf, dtype=scores.dtype, device=scores.device).triu_(1)
    scores = scores + mask if config.attention_cap is not None else scores.add_(mask)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype)[:, None, None].expand(count, -1, queries, 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    weights = weights if sinks is None else weights[..., :-1]
    mixed = torch.bmm(
        weights.reshape(count * shared, -1, weights.shape[-1]), values.reshape(count * shared, -1, values.shape[-1])
    )
    return mixed.view(count, heads, queries, -1)
