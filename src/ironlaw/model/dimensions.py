"""The fields of a decoder's config, and the sizes derived from them."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from ironlaw.model.yarn import score_factor
from ironlaw.schema import Section


class LatentConfig(Section):
    """The `[model.latent]` table: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). Defaults are
    those of DeepSeek-V2 and its successors; widths are in elements.

    Keys and values of all heads are computed from one narrow vector per token, and queries optionally from another. A
    head's query and key have a part without positions and a rotated part; all heads share the rotated key.
    """

    query_rank: int | None = Field(
        None, gt=0, le=2**20
    )  # q_lora_rank; None: queries are projected from the residual stream (V2-Lite)
    key_value_rank: int = Field(512, gt=0, le=2**20)  # kv_lora_rank
    plain_size: int = Field(128, gt=0, le=2**14)  # qk_nope_head_dim: part of a query and key without positions
    rotary_size: int = Field(64, gt=0, le=2**14)  # qk_rope_head_dim: rotated part
    value_size: int = Field(128, gt=0, le=2**14)  # v_head_dim
    norm_eps: float = Field(1e-6, ge=0, lt=1)  # of the norms of the two narrow vectors

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.rotary_size % 2:
            raise ValueError(f"rotary positions need an even size, rotary_size is {self.rotary_size}")
        if self.value_size > self.head_size:
            raise ValueError(f"value_size = {self.value_size} is more than plain_size + rotary_size = {self.head_size}")
        return self

    @property
    def head_size(self) -> int:
        """Size of a head's query and key."""
        return self.plain_size + self.rotary_size

    @property
    def down_size(self) -> int:
        """Output width of the down projection: the narrow vector and the shared rotated key."""
        return self.key_value_rank + self.rotary_size

    def up_size(self, heads: int) -> int:
        """Return the output width of the up projection: each head's key part without positions, and its value."""
        return heads * (self.plain_size + self.value_size)


class MoEConfig(Section):
    """The `[model.moe]` table: number, width, placement and load balancing of experts. Defaults are Mixtral's.

    Token-choice top-k routing (arXiv 1701.06538): every token is sent to the `experts_per_token` experts with the
    highest router scores, and to all shared experts (arXiv 2401.06066).
    """

    experts: int = Field(gt=1, le=2**16)  # routed experts in each layer with experts
    experts_per_token: int = Field(gt=0, le=2**16)  # routed experts chosen for each token
    expert_ffn: int | None = Field(None, gt=0, le=2**24)  # inner width of one expert; the model's ffn unless given
    shared_experts: int = Field(0, ge=0, le=2**16)  # applied to every token (DeepSeekMoE), as one network
    shared_ffn: int | None = Field(
        None, gt=0, le=2**24
    )  # inner width of all shared experts together; default: shared_experts x expert_ffn
    shared_gate: bool = False  # a learned sigmoid scales the shared experts' output (Qwen2-MoE)
    bias: bool = False  # biases in the router and in every expert's matrices (gpt-oss)
    dense_layers: int = Field(0, ge=0)  # number of first layers with a dense network of width `ffn` (DeepSeekMoE)
    every: int = Field(1, gt=0)  # of the other layers, every k-th has experts (GShard: 2)
    score: Literal["softmax", "sigmoid"] = "softmax"  # function of the router's logits (sigmoid: DeepSeek-V3)
    # Equal groups of experts; a token's experts come from the best groups only, ranked by the best score in each group
    # (softmax: arXiv 2405.04434, section 2.2.2) or the sum of its two best (sigmoid: arXiv 2412.19437).
    groups: int = Field(1, gt=0)
    groups_per_token: int | None = Field(None, gt=0)  # default: all
    normalize: bool = True  # the weights of a token's experts sum to 1
    routed_scale: float = Field(1.0, gt=0)  # factor on the routed experts' sum (DeepSeek-V3: 2.5)
    # None: dropless, no choice is dropped. Else an expert takes at most factor x (mean load) of a training
    # micro-batch's choices and drops those of later tokens (Switch, arXiv 2101.03961). Not applied in evaluation.
    capacity_factor: float | None = Field(None, gt=0)
    # Load balancing: an auxiliary loss (arXiv 2101.03961, equation 4), or a bias on each expert's score that affects
    # only the choice and is moved after every step (arXiv 2408.15664).
    balance: Literal["loss", "bias", "none"] = "loss"
    balance_loss: float = Field(0.01, ge=0)  # coefficient of the loss; 0.01 in Switch and OLMoE, 0.001 in Qwen
    bias_rate: float = Field(0.001, gt=0)  # change of a bias per step (0.001 in arXiv 2408.15664)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token = {self.experts_per_token} is more than experts = {self.experts}")
        if self.experts % self.groups:
            raise ValueError(f"experts = {self.experts} is not divisible by groups = {self.groups}")
        seen = self.groups_per_token or self.groups
        if seen > self.groups or seen * self.experts // self.groups < self.experts_per_token:
            raise ValueError(
                f"groups_per_token = {seen} of {self.groups} groups cannot give experts_per_token = "
                f"{self.experts_per_token} of {self.experts} experts"
            )
        if self.shared_ffn and not self.shared_experts:
            raise ValueError(f"shared_ffn = {self.shared_ffn} needs shared_experts = 1 or more")
        if self.bias and (self.shared_experts or self.balance == "bias"):
            raise ValueError("bias = true goes without shared_experts and with another balance than by a bias")
        if self.shared_gate and not self.shared_experts:
            raise ValueError("shared_gate needs shared_experts = 1 or more")
        return self

    @property
    def limits_groups(self) -> bool:
        """Whether a token's experts come from a subset of the groups."""
        return self.groups_per_token is not None and self.groups_per_token < self.groups

    def in_layer(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) has experts."""
        return layer >= self.dense_layers and (layer + 1) % self.every == 0

    def layers(self, of: int) -> int:
        """Return how many of a decoder's `of` layers have experts."""
        return max(of // self.every - self.dense_layers // self.every, 0)

    def capacity(self, tokens: int) -> int | None:
        """Return the largest number of rows that one expert computes for `tokens` tokens; None without a limit."""
        if self.capacity_factor is None:
            return None
        mean = tokens * self.experts_per_token / self.experts
        return min(tokens, max(1, math.ceil(mean * self.capacity_factor)))


class Switches(Section):
    """Features of decoder families beyond GPT-2 and Llama, one field each, off by default; model names are examples."""

    # Norms before each branch of a block, after it (OLMo 2), or both (Gemma 2, GLM 4).
    norm_place: Literal["pre", "post", "sandwich"] = "pre"
    # Attention and feed-forward network read the same stream, through one norm (GPT-J, Cohere) or one each (GPT-NeoX).
    parallel_norms: int = Field(0, ge=0, le=2)  # number of norms of parallel branches; 0: sequential branches
    norm_bias: bool = True  # bias of a layernorm (not in Cohere, MPT)
    norm_weight: bool = True  # false: norms without parameters (OLMo)
    embedding_norm: bool = False  # a norm after the embedding (BLOOM)
    out_bias: bool | None = None  # bias of attention's output layer; default: as `bias`
    ffn_bias: bool | None = None  # bias of the feed-forward network; default: as `bias`
    head_bias: bool = False  # bias of the model's output layer (Phi, GPT-J)
    rotary_size: int | None = Field(None, gt=0)  # rotated elements of a head (Phi); default: all
    sliding_window: int | None = Field(None, gt=0)  # tokens a query attends to, itself included; default: all
    full_every: int | None = Field(None, gt=1)  # every n-th layer has no window (Gemma 3, gpt-oss)
    full_offset: int = Field(0, ge=0)  # shifts full_every to earlier layers (GPT-Neo: every 2nd, from the first on)
    full_first: int = Field(0, ge=0)  # number of first layers without a window (Qwen2's max_window_layers)
    rope_theta_local: float | None = Field(None, gt=0)  # unscaled base in layers with a window; default: rope_theta
    # LongRoPE (Phi): divisors of each frequency in sequences up to rope_scaling's original_context.
    rope_short: tuple[float, ...] | None = None
    rope_long: tuple[float, ...] | None = None  # divisors in longer sequences
    unrotated_every: int | None = Field(None, gt=1)  # every n-th layer has no positions (SmolLM3, Command R7B)
    attention_cap: float | None = Field(None, gt=0)  # scores become cap x tanh(score / cap) (Gemma 2)
    logit_cap: float | None = Field(None, gt=0)  # logits become cap x tanh(logit / cap)
    qkv_clip: float | None = Field(None, gt=0, le=1e6)  # queries, keys and values are clipped to +-qkv_clip (DBRX, MPT)
    attention_sinks: bool = False  # a learned score per head that joins the softmax without a value (gpt-oss)
    embedding_scale: float = Field(1.0, gt=0)  # factor on the embedding's output (Gemma)
    residual_scale: float = Field(1.0, gt=0)  # factor on each branch's output (Granite)
    logit_scale: float = Field(1.0, gt=0)  # factor on the logits (Cohere)
    attention_scale: float | None = Field(None, gt=0)  # factor on the scores, replaces 1 / sqrt(head size) (Granite)

    @model_validator(mode="after")
    def _switches_agree(self) -> Self:
        if self.parallel_norms and self.norm_place != "pre":
            raise ValueError(f"parallel_norms = {self.parallel_norms} goes with norm_place = 'pre'")
        if not self.norm_weight and self.norm_place != "pre":
            raise ValueError("norm_weight = false goes with norm_place = 'pre'")
        if self.logit_scale != 1.0 and self.head_bias:
            raise ValueError("logit_scale goes without head_bias: it scales what the output layer reads")
        if self.embedding_norm and not self.norm_weight:
            raise ValueError("embedding_norm needs norms with parameters: norm_weight = true")
        if self.sliding_window is None and (self.full_every or self.full_first or self.rope_theta_local):
            raise ValueError("full_every, full_first and rope_theta_local need a sliding_window")
        if self.full_offset >= (self.full_every or 1) and self.full_offset:
            raise ValueError("full_offset is less than full_every, which it goes with")
        if self.full_every and self.full_first:
            raise ValueError("full_every and full_first are two ways to place windows: leave one out")
        return self

    def is_windowed(self, layer: int) -> bool:
        if self.sliding_window is None or layer < self.full_first:
            return False
        return self.full_every is None or (layer + 1 + self.full_offset) % self.full_every != 0

    def window_of(self, layer: int, sequence: int) -> int | None:
        """Return the window of a layer if it is shorter than the sequence, else None."""
        return self.sliding_window if self.is_windowed(layer) and (self.sliding_window or 0) < sequence else None

    def is_rotated(self, layer: int) -> bool:
        return self.unrotated_every is None or (layer + 1) % self.unrotated_every != 0

    @property
    def composes_scores(self) -> bool:
        """Whether scores are modified between attention's two products, unsupported by PyTorch's fused kernels."""
        return self.attention_cap is not None or self.attention_sinks

    @property
    def switched(self) -> list[str]:
        """Names of this class's fields with non-default values, except `sliding_window`."""
        fields = {name: field.default for name, field in Switches.model_fields.items() if name != "sliding_window"}
        return [name for name, default in fields.items() if getattr(self, name) != default]


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
