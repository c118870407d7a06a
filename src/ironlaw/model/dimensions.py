"""The fields of a decoder's config, and the sizes derived from them."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from ironlaw.model.latent_config import LatentConfig
from ironlaw.model.moe_config import MoEConfig
from ironlaw.model.switches import Switches
from ironlaw.model.yarn import score_factor


class Dimensions(Switches):
    """The dimensions of a decoder. Widths are in elements, `context` and `sliding_window` in tokens."""

    name: str = "custom"  # a catalogued name sets that model's dimensions; any other is a label

    # Upper bounds, some ten times the largest models built, limit the time of a plan, which loops over layers.

    layers: int = Field(gt=0, le=10_000)  # decoder blocks
    hidden: int = Field(gt=0, le=2**20)  # width of the residual stream
    heads: int = Field(gt=0, le=2**14)  # query heads of an attention layer
    kv_heads: int | None = Field(None, gt=0, le=2**14)  # fewer than `heads`: grouped-query attention
    head_size: int | None = Field(None, gt=0, le=2**14)  # default: hidden / heads
    ffn: int | None = Field(None, gt=0, le=2**24)  # inner width of the feed-forward network; default: 4 x hidden
    gated_ffn: bool = False  # three matrices (SwiGLU) instead of two
    # Activation of the feed-forward network.
    activation: Literal["gelu", "gelu_tanh", "silu", "relu", "relu2", "clamped_swiglu"] = "gelu_tanh"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"  # kind of all norms
    norm_eps: float = Field(1e-5, ge=0, lt=1)  # added to a norm's variance
    qk_norm: bool = False  # RMSNorm on each head's query and key (Qwen3)
    qk_norm_whole: bool = False  # qk_norm normalises all heads at once (OLMoE)
    positions: Literal["learned", "rope", "alibi", "none"] = "learned"  # position encoding
    rope_theta: float = Field(10_000.0, gt=0)  # base of the rotary frequencies
    rope_scaling: dict[str, float] | None = None  # Llama 3.1's: factor, low_freq_factor, high_freq_factor, original;
    # or YaRN's (yarn.py)
    bias: bool = True  # on every linear layer of the blocks
    qkv_bias: bool | None = None  # on the query, key and value projections (Qwen2); default: as `bias`
    vocab: int = Field(gt=0, le=2**28)  # size of the vocabulary
    context: int = Field(gt=0, le=2**30)  # longest sequence, in tokens
    tied: bool = True  # the output layer shares the embedding
    dropout: float = Field(0.0, ge=0.0, lt=1.0)  # probability, the same everywhere
    moe: MoEConfig | None = None  # experts in place of the dense feed-forward network
    latent: LatentConfig | None = None  # keys and values from one narrow vector per token (DeepSeek-V2)

    @property
    def key_value_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def size_of_head(self) -> int:
        """Size of a head's query and key."""
        if self.latent is not None:
            return self.latent.head_size
        return self.hidden // self.heads if self.head_size is None else self.head_size

    @property
    def size_of_value(self) -> int:
        """Size of a head's value and of its output."""
        return self.latent.value_size if self.latent is not None else self.size_of_head

    @property
    def size_of_rotary(self) -> int:
        """Number of a head's elements that rotary positions rotate."""
        return self.latent.rotary_size if self.latent is not None else self.rotary_size or self.size_of_head

    @property
    def score_scale(self) -> float | None:
        """Factor on attention scores; None: 1 / sqrt(head size)."""
        if self.attention_scale is not None:
            return self.attention_scale
        factor = score_factor(self.rope_scaling) if self.latent is not None else 1.0
        return None if factor == 1.0 else factor / math.sqrt(self.size_of_head)

    @property
    def logits_are_a_product(self) -> bool:
        """Whether logits are a plain matrix product, as the chunked loss requires."""
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
        """Width of all key heads together and, except in latent attention, of all value heads."""
        return self.key_value_heads * self.size_of_head

    @property
    def cached_size(self) -> int:
        """Elements of a token in the cache of one layer: keys and values, or latent attention's narrow vector."""
        return 2 * self.key_value_size if self.latent is None else self.latent.down_size

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Rows of query, key and value in the qkv matrix."""
        return self.query_size, self.key_value_size, self.key_value_size

    @property
    def projected_size(self) -> int:
        """Total output width of the linear layers before attention."""
        if self.latent is None:
            return self.query_size + 2 * self.key_value_size
        narrow = (self.latent.query_rank or 0) + self.latent.down_size
        return self.query_size + narrow + self.latent.up_size(self.heads)

    @property
    def mixed_size(self) -> int:
        """Width of attention's output before the output layer."""
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
    def moe_layers(self) -> int:
        """Number of layers with experts."""
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
