"""The shape of a decoder-only transformer. One type covers the families of `docs/model.md`, dense or with experts."""

from __future__ import annotations

import math
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from ironlaw.catalog.models import model_figures
from ironlaw.model.latent_config import LatentConfig
from ironlaw.model.moe_config import MoEConfig
from ironlaw.model.switches import Switches
from ironlaw.model.yarn import score_factor


class ModelConfig(Switches):
    """Dimensions and choices of a decoder. Defaults are GPT-2's; a name of `ironlaw catalog` brings its own.

    Widths are in elements, `context` and `sliding_window` in tokens.
    """

    name: str = "custom"  # a catalogued name brings that model's figures; any other is a label

    # Upper bounds are some ten times what anybody has built: a plan walks over layers and divisors.

    layers: int = Field(gt=0, le=10_000)  # decoder blocks
    hidden: int = Field(gt=0, le=2**20)  # width of the residual stream
    heads: int = Field(gt=0, le=2**14)  # query heads of an attention layer
    kv_heads: int | None = Field(None, gt=0, le=2**14)  # fewer than `heads`: grouped-query attention
    head_size: int | None = Field(None, gt=0, le=2**14)  # hidden / heads unless the model says otherwise (Qwen3)
    ffn: int | None = Field(None, gt=0, le=2**24)  # inner width of the feed-forward network; 4 x hidden unless given
    gated_ffn: bool = False  # three matrices (SwiGLU) instead of two
    # Of the feed-forward network.
    activation: Literal["gelu", "gelu_tanh", "silu", "relu", "relu2", "clamped_swiglu"] = "gelu_tanh"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"  # kind of all norms
    norm_eps: float = Field(1e-5, ge=0, lt=1)  # added to a norm's variance
    qk_norm: bool = False  # RMSNorm on each head's query and key (Qwen3)
    qk_norm_whole: bool = False  # that norm runs over all heads at once (OLMoE)
    positions: Literal["learned", "rope", "alibi", "none"] = "learned"  # how a token's place is told
    rope_theta: float = Field(10_000.0, gt=0)  # base of the rotary frequencies
    rope_scaling: dict[str, float] | None = None  # Llama 3.1's: factor, low_freq_factor, high_freq_factor, original;
    # or YaRN's (yarn.py)
    bias: bool = True  # on every linear layer of the blocks
    qkv_bias: bool | None = None  # on the query, key and value projections only (Qwen2); same as `bias` unless given
    vocab: int = Field(gt=0, le=2**28)  # tokens that there are
    context: int = Field(gt=0, le=2**30)  # longest sequence, in tokens
    tied: bool = True  # the output layer shares the embedding
    dropout: float = Field(0.0, ge=0.0, lt=1.0)  # probability, wherever the model drops
    moe: MoEConfig | None = None  # experts in place of the dense feed-forward network
    latent: LatentConfig | None = None  # keys and values from one narrow vector per token (DeepSeek-V2)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.latent is not None:
            self._check_latent()
        elif self.head_size is None and self.hidden % self.heads:
            raise ValueError(
                f"hidden = {self.hidden} is not divisible by heads = {self.heads}: "
                f"use heads = {_nearest_divisor(self.hidden, self.heads)} or give head_size"
            )
        if self.heads % self.key_value_heads:
            raise ValueError(
                f"heads = {self.heads} is not divisible by kv_heads = {self.kv_heads}: "
                f"use kv_heads = {_nearest_divisor(self.heads, self.key_value_heads)}"
            )
        if self.positions == "rope" and self.size_of_rotary % 2:
            part = "rotary_size" if self.rotary_size else "head size"
            raise ValueError(f"rotary positions need an even {part}, this one is {self.size_of_rotary}")
        for factors in (self.rope_short, self.rope_long):
            both = self.rope_short and self.rope_long and "original_context" in (self.rope_scaling or {})
            if factors and not (both and len(factors) == self.size_of_rotary // 2):
                raise ValueError(
                    f"rope_short and rope_long have {self.size_of_rotary // 2} numbers each, and need rope_scaling's "
                    "factor and original_context"
                )
        if self.size_of_rotary > self.size_of_head:
            raise ValueError(f"rotary_size = {self.rotary_size} is more than the head size {self.size_of_head}")
        if self.qk_norm_whole and not self.qk_norm:
            raise ValueError("qk_norm_whole needs qk_norm = true")
        if self.dropout and (self.norm_place != "pre" or self.parallel_norms):
            raise ValueError("dropout goes with norm_place = 'pre' and one branch after the other: use dropout = 0")
        if self.dropout and (self.composes_scores or self.positions == "alibi"):
            raise ValueError("dropout goes without attention_cap, attention_sinks and alibi: use dropout = 0")
        if self.activation == "clamped_swiglu" and not (self.moe_layers == self.layers and self.gated_ffn):
            raise ValueError('activation = "clamped_swiglu" is of gated experts, in all layers')
        if self.moe is not None:
            if self.parallel_norms or self.norm_place != "pre":
                raise ValueError("experts go with norm_place = 'pre' and without parallel_norms")
            if self.has_ffn_bias:
                raise ValueError("experts have no biases: use bias = false (qkv_bias = true keeps those of attention)")
            if not self.moe_layers:
                raise ValueError(
                    f"no layer has experts: {self.layers} layers, moe.dense_layers = {self.moe.dense_layers}, "
                    f"moe.every = {self.moe.every}"
                )
        return self

    def _check_latent(self) -> None:
        """Latent attention has sizes of its own, rotary positions, and nothing optional."""
        assert self.latent is not None
        if self.kv_heads not in (None, self.heads) or self.head_size not in (None, self.latent.head_size):
            raise ValueError("latent attention has its own sizes: leave kv_heads and head_size out")
        if self.positions != "rope" or self.norm != "rmsnorm":
            raise ValueError('latent attention goes with positions = "rope" and norm = "rmsnorm"')
        if self.parallel_norms or self.norm_place != "pre" or self.rotary_size or self.composes_scores or self.qkv_clip:
            raise ValueError("latent attention has no parallel_norms, norm_place, rotary_size, caps, clips and sinks")
        if self.bias or self.has_qkv_bias or self.has_out_bias or self.qk_norm:
            raise ValueError("latent attention has no biases and norms of its own: bias = false, qk_norm = false")

    @classmethod
    def named(cls, name: str, **overrides: Any) -> ModelConfig:
        """A catalogued model, with any field replaced; fields of `moe` one by one."""
        return cls(**with_overrides(model_figures(name) | {"name": name}, overrides))

    @property
    def key_value_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def size_of_head(self) -> int:
        """Of a query and of a key."""
        if self.latent is not None:
            return self.latent.head_size
        return self.hidden // self.heads if self.head_size is None else self.head_size

    @property
    def size_of_value(self) -> int:
        """Of a head's value, and of what it mixes."""
        return self.latent.value_size if self.latent is not None else self.size_of_head

    @property
    def size_of_rotary(self) -> int:
        """Of a head, the part that rotary positions turn."""
        return self.latent.rotary_size if self.latent is not None else self.rotary_size or self.size_of_head

    @property
    def score_scale(self) -> float | None:
        """What attention scores are multiplied by; None: one over the root of the head size."""
        if self.attention_scale is not None:
            return self.attention_scale
        factor = score_factor(self.rope_scaling) if self.latent is not None else 1.0
        return None if factor == 1.0 else factor / math.sqrt(self.size_of_head)

    @property
    def logits_are_a_product(self) -> bool:
        """And nothing more: what the chunked loss takes."""
        return not self.head_bias and self.logit_cap is None

    @property
    def ffn_size(self) -> int:
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def has_qkv_bias(self) -> bool:
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def has_out_bias(self) -> bool:
        return self.bias if self.out_bias is None else self.out_bias

    @property
    def has_ffn_bias(self) -> bool:
        return self.bias if self.ffn_bias is None else self.ffn_bias

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.size_of_head

    @property
    def key_value_size(self) -> int:
        """Width of all key heads together; of all value heads too, but for latent attention."""
        return self.key_value_heads * self.size_of_head

    @property
    def projected_size(self) -> int:
        """Width of all that linear layers give before attention."""
        if self.latent is None:
            return self.query_size + 2 * self.key_value_size
        narrow = (self.latent.query_rank or 0) + self.latent.down_size
        return self.query_size + narrow + self.latent.up_size(self.heads)

    @property
    def mixed_size(self) -> int:
        """Width of what attention gives to its output layer."""
        return self.heads * self.size_of_value

    @property
    def norm_tensors(self) -> int:
        return (1 + (self.norm == "layernorm" and self.norm_bias)) * self.norm_weight

    @property
    def norm_parameters(self) -> int:
        return self.hidden * self.norm_tensors

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """Widths of the norms of query and key."""
        if self.qk_norm_whole:
            return self.query_size, self.key_value_size
        return self.size_of_head, self.size_of_head

    @property
    def ffn_matrices(self) -> int:
        return 3 if self.gated_ffn else 2

    @property
    def attention_parameters(self) -> int:
        """Of one block's attention, and of all norms of the block."""
        norms = self.norms_per_block * self.norm_parameters
        if self.latent is not None:
            return self.latent.parameters(self.hidden, self.heads) + norms
        qkv = self.query_size + 2 * self.key_value_size
        attention = self.hidden * qkv + self.query_size * self.hidden
        attention += qkv * self.has_qkv_bias + self.hidden * self.has_out_bias
        attention += sum(self.qk_norm_sizes) * self.qk_norm + self.heads * self.attention_sinks
        return attention + norms

    @property
    def block_parameters(self) -> int:
        """Parameters of one transformer block with a dense feed-forward network."""
        mlp = self.ffn_matrices * self.hidden * self.ffn_size
        mlp += ((self.ffn_matrices - 1) * self.ffn_size + self.hidden) * self.has_ffn_bias
        return self.attention_parameters + mlp

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.moe.layers(self.layers) if self.moe else 0

    @property
    def dense_layers(self) -> int:
        return self.layers - self.moe_layers

    @property
    def expert_ffn_size(self) -> int:
        """Inner width of one expert; 0 without experts."""
        if self.moe is None:
            return 0
        return self.ffn_size if self.moe.expert_ffn is None else self.moe.expert_ffn

    @property
    def shared_ffn_size(self) -> int:
        """Inner width of all shared experts together; 0 without any."""
        if self.moe is None:
            return 0
        shared = self.moe.shared_ffn
        return self.moe.shared_experts * self.expert_ffn_size if shared is None else shared

    @property
    def expert_parameters(self) -> int:
        """Of one expert."""
        return self.ffn_matrices * self.hidden * self.expert_ffn_size + self.expert_biases

    @property
    def expert_biases(self) -> int:
        """Of one expert's matrices."""
        has = self.moe is not None and self.moe.bias
        return ((self.ffn_matrices - 1) * self.expert_ffn_size + self.hidden) * has

    @property
    def moe_block_parameters(self) -> int:
        """Parameters of one block with experts, all of them; 0 without experts."""
        return self._moe_block(self.moe.experts) if self.moe else 0

    def _moe_block(self, experts: int) -> int:
        """A block with experts of which `experts` are counted: attention, router, these, and the shared ones."""
        assert self.moe is not None
        shared = self.ffn_matrices * self.hidden * self.shared_ffn_size + self.hidden * self.moe.shared_gate
        router = self.moe.experts * (self.hidden + self.moe.bias)
        return self.attention_parameters + router + experts * self.expert_parameters + shared

    @property
    def embedding_parameters(self) -> int:
        """Token embedding, learned positions, and their norm; the output layer counts apart when it is not tied."""
        table = self.hidden * (self.vocab + (self.context if self.positions == "learned" else 0))
        return table + self.norm_parameters * self.embedding_norm

    @property
    def head_parameters(self) -> int:
        return (0 if self.tied else self.hidden * self.vocab) + self.vocab * self.head_bias

    @property
    def parameters(self) -> int:
        return self._parameters(self.moe_block_parameters)

    @property
    def active_parameters(self) -> int:
        """Those that one token meets: of the routed experts only its own."""
        return self._parameters(self._moe_block(self.moe.experts_per_token)) if self.moe else self.parameters

    def _parameters(self, moe_block: int) -> int:
        return (
            self.embedding_parameters
            + self.dense_layers * self.block_parameters
            + self.moe_layers * moe_block
            + self.norm_parameters
            + self.head_parameters
        )

    def of_kind(self, windowed: bool, rotated: bool) -> ModelConfig:
        """The model if all of its layers were of one kind."""
        update: dict[str, Any] = {"full_every": None, "full_offset": 0, "full_first": 0, "unrotated_every": None}
        if not windowed:
            update |= {"sliding_window": None, "rope_theta_local": None}
        if not rotated:
            update["positions"] = "none"
        return self.model_copy(update=update)


def with_overrides(figures: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """A model's table with fields replaced; in its `moe` and `latent` tables too, where both are tables."""
    merged = figures | overrides
    for name in ("moe", "latent"):
        if isinstance(figures.get(name), dict) and isinstance(overrides.get(name), dict):
            merged[name] = figures[name] | overrides[name]
    return merged


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - wanted))
