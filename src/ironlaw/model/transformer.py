"""The decoder as PyTorch modules: all families share the same blocks, with different choices in ModelConfig.

Shapes in comments: B sequences, S tokens, H hidden, A heads, K key/value heads, D head size, V vocabulary.
`workload/forward.py` lists the operations of these modules one by one; change both together
(`tests/workload` compares them with PyTorch's own counter).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ironlaw.errors import UserError
from ironlaw.kernels.attention import causal_attention
from ironlaw.model.cached import LayerCache
from ironlaw.model.config import ModelConfig
from ironlaw.model.feed_forward import FeedForward
from ironlaw.model.latent import LatentAttention
from ironlaw.model.linear import Linear, autocast_dtype
from ironlaw.model.masks import (
    BlockMask,
    Mask,
    additive,
    alibi_bias,
    attend,
    block_mask,
    capped,
    dense_mask,
    flexible,
    positions_in_document,
    score_rule,
)
from ironlaw.model.moe import MixtureOfExperts, attach_balance_losses
from ironlaw.model.partition import WHOLE, ComputePartition, Draw
from ironlaw.model.rotary import fused_tables, rotary_tables, rotate


def build_norm(config: ModelConfig) -> nn.Module:
    size, eps, affine = config.hidden, config.norm_eps, config.norm_weight
    if config.norm == "layernorm":
        return nn.LayerNorm(size, eps, elementwise_affine=affine, bias=config.norm_bias)
    return nn.RMSNorm(size, eps, elementwise_affine=affine)


class Attention(nn.Module):
    partition: ComputePartition = WHOLE
    native = False  # use `kernels/attention.c` for causal attention, if measured to be faster than PyTorch's

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        # One matrix for query, key and value: one large matmul instead of three small ones.
        self.qkv = Linear(config.hidden, config.query_size + 2 * config.key_value_size, bias=config.has_qkv_bias)
        self.out = Linear(config.query_size, config.hidden, bias=config.has_out_bias)
        if config.qk_norm:
            query_size, key_size = config.qk_norm_sizes
            self.query_norm = nn.RMSNorm(query_size, eps=config.norm_eps)
            self.key_norm = nn.RMSNorm(key_size, eps=config.norm_eps)
        self.sinks = nn.Parameter(torch.empty(config.heads)) if config.attention_sinks else None

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, mask: Mask | LayerCache | None, draw: Draw | None = None
    ) -> Tensor:
        config = self.config
        if isinstance(mask, LayerCache):
            return self.cached(x, rotary, mask)
        query, key, value = self.heads(*self.project(x))
        if rotary is not None:
            query, key = rotate(query, *rotary), rotate(key, *rotary)
        heads_first = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        if isinstance(mask, BlockMask):
            mixed = flexible(*heads_first, mask, config.score_scale, score_rule(config, x.device), self.sinks)
        elif config.composes_scores:
            assert mask is not None
            mixed = attend(*heads_first, mask, config, self.sinks)
        elif self.native and mask is None:
            mixed = causal_attention(*heads_first, config.score_scale)
        else:
            dropout = config.dropout if self.training else 0.0
            mixed = self.partition.attend(*heads_first, mask, dropout, draw, config.score_scale)  # (B, A, S, D)
        return self.out(mixed.transpose(1, 2).flatten(2))  # from (B, A, S, D)

    def cached(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, cache: LayerCache) -> Tensor:
        """`forward` of new tokens (1, N, H) with a cache, in few operations, since their overhead dominates.

        `rotary`: tables of `fused_tables`, (N, 1, D) each.
        """
        config = self.config
        together = self.clipped(self.qkv(x)[0])  # (N, heads x D)
        if config.qk_norm:
            query, key, value = self.heads(*together.split(config.qkv_sizes, dim=-1))
            heads = torch.cat((query, key), dim=1)
        else:
            together = together.view(together.shape[0], -1, config.size_of_head)
            heads, value = together.split((config.heads + config.key_value_heads, config.key_value_heads), dim=1)
        return self.out(cache.attend(heads, value, rotary, self.sinks).flatten(1)[None])

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """(B, S, H) to queries, keys and values, each (B, S, heads x D)."""
        config, together = self.config, self.qkv(x)
        if not isinstance(together, Tensor):  # three separate matrices, if ranks hold parts of each
            return [self.clipped(part) for part in together]
        ranks = sum(config.qkv_sizes) // together.shape[-1]  # ranks that divide the heads
        return self.clipped(together).split([size // ranks for size in config.qkv_sizes], dim=-1)

    def clipped(self, x: Tensor) -> Tensor:
        return x if self.config.qkv_clip is None else x.clamp(-self.config.qkv_clip, self.config.qkv_clip)

    def heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Reshape (..., heads x D) each to (..., heads, D), and norm queries and keys if the model does."""
        whole, dtype = self.config.qk_norm_whole, value.dtype
        if whole:
            query, key = self.normed(query, key, dtype)
        # The number of heads follows from the shape, as a tensor parallel rank has only some of them.
        query, key, value = (part.unflatten(-1, (-1, self.config.size_of_head)) for part in (query, key, value))
        if self.config.qk_norm and not whole:
            query, key = self.normed(query, key, dtype)
        return query, key, value

    def normed(self, query: Tensor, key: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Norm in fp32 also under autocast, as the norm's weight is fp32 and mixed dtypes have no fused kernel."""
        return self.query_norm(query.float()).to(dtype), self.key_norm(key.float()).to(dtype)


def use_native_attention(model: nn.Module, wanted: bool = True) -> None:
    """Set whether Ironlaw's own kernel computes plain causal attention; masked attention keeps PyTorch's."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.native = wanted


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.layer = layer
        self.residual_scale = config.residual_scale
        before, after = config.norm_place != "post", config.norm_place != "pre"
        self.attention_norm = build_norm(config) if before else None
        self.attention = Attention(config) if config.latent is None else LatentAttention(config)
        self.attention_after = build_norm(config) if after else None
        self.parallel = config.parallel_norms
        self.ffn_norm = build_norm(config) if before and self.parallel != 1 else None
        experts = config.moe is not None and config.moe.in_layer(layer)
        self.ffn = MixtureOfExperts(config) if experts else FeedForward(config)
        self.ffn_after = build_norm(config) if after else None
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, mask: Mask | LayerCache | None, draw: Draw | None = None
    ) -> Tensor:
        draw = draw.of(self) if draw is not None else None
        read = x if self.attention_norm is None else self.attention_norm(x)
        mixed = x + self._branch(self.attention(read, rotary, mask, draw), self.attention_after, draw, "attention")
        if self.ffn_norm is not None:
            read = self.ffn_norm(x if self.parallel else mixed)
        elif not self.parallel:
            read = mixed
        return mixed + self._branch(self.ffn(read), self.ffn_after, draw, "ffn")

    def _branch(self, x: Tensor, norm: nn.Module | None, draw: Draw | None, site: str) -> Tensor:
        """Return a branch's contribution to the residual stream."""
        if norm is not None:
            x = norm(x.float())
        if self.residual_scale != 1.0:
            x = x * self.residual_scale
        return self.dropout(x) if draw is None or not self.training else draw.residual(x, site)


def initialize_tensor(name: str, tensor: Tensor, config: ModelConfig) -> None:
    """GPT-2's initialisation: normal(0, 0.02), both residual projections divided by sqrt(2 x layers), zero biases."""
    if tensor.dim() < 2 or name.endswith("bias"):  # experts have stacked biases
        (nn.init.zeros_ if name.endswith(("bias", "sinks")) else nn.init.ones_)(tensor)
        return
    residual = name.endswith((".out.weight", ".down.weight"))
    nn.init.normal_(tensor, std=0.02 / math.sqrt(2 * config.layers) if residual else 0.02)


class Transformer(nn.Module):
    """A decoder: tokens (B, S) to logits (B, S, V), or to the mean cross-entropy if targets (B, S) are given."""

    partition: ComputePartition = WHOLE
    dropout_seed = 0  # seed of dropout masks drawn by sample
    loss_chunk = 0  # tokens whose logits exist at a time; 0: all
    loss_factor: Tensor | float = 1.0  # factor on a pipeline's loss, for balancing losses in stages without a loss
    around: Callable[[int], Any] = staticmethod(lambda block: nullcontext())
    """A context for the forward pass of each block, by its number, as for offloading the tensors that it saves."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding: nn.Embedding | None = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.context, config.hidden) if config.positions == "learned" else None
        self.embedding_norm = build_norm(config) if config.embedding_norm else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.final_norm: nn.Module | None = build_norm(config)
        self.head = Linear(config.hidden, config.vocab, bias=config.head_bias)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.make_rotary_tables()
        self.initialize()

    @property
    def is_tied(self) -> bool:
        """Whether the output layer, if it is here, has the embedding's weight; a pipeline stage may lack either."""
        return self.embedding is not None and self.head is not None and self.head.weight is self.embedding.weight

    def make_rotary_tables(self, device: torch.device | None = None) -> None:
        """Register buffers of cosines and sines; windowed layers and long sequences have their own if needed."""
        if self.config.positions != "rope":
            return
        kinds = [(False, False)] + [(True, False)] * bool(self.config.rope_theta_local)
        for local, long in kinds + [(False, True)] * bool(self.config.rope_long):
            for name, table in zip(("rotary_cos", "rotary_sin"), rotary_tables(self.config, local, long), strict=True):
                self.register_buffer(name + "_local" * local + "_long" * long, table.to(device), persistent=False)

    def initialize(self) -> None:
        for name, parameter in self.named_parameters():
            initialize_tensor(name, parameter, self.config)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, samples: Tensor | None = None,
        documents: Tensor | None = None, reduction: str = "mean", balance: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return logits, or the loss if `targets` are given.

        `samples` (B,): the number of each sequence in the run, which makes dropout a function of seed and sample,
        independent of the layout; without it, dropout uses torch's generator. `documents` (B, S): document number of
        each position, which limits attention. `reduction`: mean or sum over the targets that count. `balance` (B,):
        weight of balancing losses, by default 1. In a pipeline stage without an embedding, `tokens` are hidden states
        (B, S, H); without an output layer the result is. UserError for more tokens than the model has positions."""
        partition = self.partition
        sequence = partition.sequence(tokens)
        if sequence > self.config.context and self.config.positions in ("learned", "rope"):
            raise UserError(
                f"{sequence} tokens are more than model.context = {self.config.context}, of which positions are known"
            )
        draw = None
        if samples is not None and self.config.dropout and self.training:
            draw = Draw(self.dropout_seed, self.config, samples, partition, sequence)
        x = self.embed(tokens, sequence, documents) if self.embedding is not None else tokens
        kinds = self.kinds()
        rotary = {kind: self.rotary(sequence, *kind) for kind in set(kinds)}
        windows = {windowed for windowed, _ in kinds}
        masks = {w: self.attention_mask(sequence, tokens.device, documents, draw, windowed=w) for w in windows}
        for number, (block, kind) in enumerate(zip(self.blocks, kinds, strict=True)):
            with self.around(number):
                x = block(x, rotary[kind], masks[kind[0]], draw)
        balance_weight = 1.0 if balance is None else balance.mean()
        if self.final_norm is None:
            return attach_balance_losses(x, self, balance_weight * self.loss_factor) if self.config.moe else x
        x = self.final_norm(x)
        if self.config.logit_scale != 1.0:
            x = x * self.config.logit_scale  # before the linear output layer, as there are more logits
        if targets is None:
            return self.logits(x)
        loss = self.loss(x, targets.flatten(), reduction)
        return attach_balance_losses(loss, self, balance_weight) if self.config.moe else loss

    def forward_cached(
        self, tokens: Tensor, positions: Tensor, caches: Sequence[LayerCache], rows: Tensor | None = None,
        long: Tensor | None = None, blocks: Sequence[Callable[..., Tensor]] | None = None,
    ) -> Tensor:  # fmt: skip
        """Return logits (rows, V) for new `tokens` (N,) of any number of sequences, at `positions` (N,). Earlier tokens
        are in `caches`, one per block. `rows`: the tokens that need logits, by default all. `long` (N,): whether a
        token's sequence exceeds the original context (`rope_long`). `blocks`: replacements of the blocks
        (`packed.py`)."""
        assert self.embedding is not None and self.final_norm is not None
        x = self.embed(tokens[None], 0, at=positions)  # (1, N, H): the blocks see one sequence
        kinds = self.kinds()
        rotary = {kind: self.rotary_at(positions, *kind, long) for kind in set(kinds)}
        through: Sequence[Callable[..., Tensor]] = blocks or list(self.blocks)
        for block, kind, cache in zip(through, kinds, caches, strict=True):
            x = block(x, rotary[kind], cache)
        x = self.final_norm(x[0] if rows is None else x[0].index_select(0, rows))
        return self.logits(x * self.config.logit_scale if self.config.logit_scale != 1.0 else x)

    def loss(self, x: Tensor, targets: Tensor, reduction: str) -> Tensor:
        """Return the cross-entropy of hidden states (B, S, H), in chunks of `loss_chunk` tokens if set."""
        if self.loss_chunk:
            return self.partition.chunked_loss(
                x, self.head.weight, targets, self.loss_chunk, reduction, self.head.onednn
            )
        # The logits have no name, so that they are freed as soon as the loss has used them.
        return F.cross_entropy(self.logits(x).flatten(0, 1).float(), targets, reduction=reduction)

    def logits(self, x: Tensor) -> Tensor:
        cap = self.config.logit_cap
        return self.head(x) if cap is None else capped(self.head(x), cap)

    def embed(self, tokens: Tensor, sequence: int, documents: Tensor | None = None, at: Tensor | None = None) -> Tensor:
        """Return the embedded tokens. `at` (S,): their positions, by default from 0."""
        assert self.embedding is not None
        x = self.embedding(tokens)  # (B, S, H)
        if self.config.embedding_scale != 1.0:
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype)  # rounded like the weights, as in Gemma
        if self.positions is not None and at is not None:
            x = x + self.positions(at)
        elif self.positions is not None and documents is not None:
            rows = self.partition.stream_positions(sequence)
            x = x + self.positions(positions_in_document(documents)[:, rows])  # restarting in every document
        elif self.positions is not None:
            x = x + self.partition.weight(self.positions)[self.partition.stream_positions(sequence)]
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def kinds(self) -> list[tuple[bool, bool]]:
        """Return for each block whether its attention has a window, and whether it rotates queries and keys."""
        layers = [int(name) for name, _ in self.blocks.named_children()]
        return [(self.config.is_windowed(layer), self.config.is_rotated(layer)) for layer in layers]

    def rotary(self, sequence: int, windowed: bool, rotated: bool) -> tuple[Tensor, Tensor] | None:
        if self.config.positions != "rope" or not rotated:
            return None
        scaling, rows = self.config.rope_scaling or {}, self.partition.positions(sequence)
        long = bool(self.config.rope_long) and sequence > scaling["original_context"]
        cos, sin = self._tables(windowed, long)
        return cos[rows], sin[rows]

    def _tables(self, windowed: bool, long: bool = False) -> tuple[Tensor, Tensor]:
        which = "_long" if long else "_local" if windowed and self.config.rope_theta_local else ""
        return getattr(self, f"rotary_cos{which}"), getattr(self, f"rotary_sin{which}")

    def rotary_at(
        self, positions: Tensor, windowed: bool, rotated: bool, long: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """Return the tables' rows for `positions` (N,), from the tables of long sequences where `long` (N,) is true."""
        if self.config.positions != "rope" or not rotated:
            return None
        cos, sin = (table[positions] for table in self._tables(windowed))
        if long is not None:
            far = (table[positions] for table in self._tables(windowed, long=True))
            cos, sin = (torch.where(long[:, None], *pair) for pair in zip(far, (cos, sin), strict=True))
        if self.config.latent is not None:
            return cos, sin
        return fused_tables(cos, sin, self.config.size_of_head, autocast_dtype(positions) or cos.dtype)

    def attention_mask(
        self, sequence: int, device: torch.device, documents: Tensor | None, draw: Draw | None, windowed: bool = True
    ) -> Mask | None:
        """Return the mask, None for plain causal attention. A window has one mask (this rank's rows, S), documents one
        per sequence, ALiBi one per head. `windowed`: for layers with a window."""
        window = self.config.sliding_window if windowed else None
        window = None if window is None or window >= sequence else window
        alibi = self.config.positions == "alibi"
        if window is None and documents is None and not alibi and not self.config.composes_scores:
            return None
        drops = self.training and self.config.dropout > 0  # not supported by FlexAttention
        if device.type == "cuda" and self.partition is WHOLE and not drops:
            return block_mask(sequence, device, window, documents)
        mask = dense_mask(sequence, device, window, documents)
        if self.partition is not WHOLE or draw is not None:
            return mask[..., self.partition.positions(sequence), :]
        # SDPA adds a mask to the scores. From a boolean mask, every layer would make and save its own additive copy.
        mask = additive(mask)
        rows = torch.arange(sequence, device=device)
        return mask + alibi_bias(self.config.heads, rows, sequence, mask.dtype) if alibi else mask
