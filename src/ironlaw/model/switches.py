"""Features of decoder families beyond GPT-2 and Llama, one switch each, all off by default."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ironlaw.schema import Section


class Switches(Section):
    """The less common fields of `ModelConfig`, which adds the dimensions; model names are examples."""

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
    def _one_block(self) -> Self:
        if self.parallel_norms and self.norm_place != "pre":
            raise ValueError(f"parallel_norms = {self.parallel_norms} goes with norm_place = 'pre'")
        if not self.norm_weight and self.norm_place != "pre":
            raise ValueError("norm_weight = false goes with norm_place = 'pre'")
        if self.logit_scale != 1.0 and self.head_bias:
            raise ValueError("logit_scale goes without head_bias: it scales what the output layer reads")
        if self.embedding_norm and not self.norm_weight:
            raise ValueError("embedding_norm needs norms with parameters: norm_weight = true")
        return self

    @model_validator(mode="after")
    def _some_layers(self) -> Self:
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
