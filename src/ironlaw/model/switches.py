"""What sets families of decoders apart beyond GPT-2 and Llama, one switch each. All are off unless asked for."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ironlaw.schema import Section


class Switches(Section):
    """The less common fields of `ModelConfig`, which adds the dimensions; model names are examples."""

    # Norms stand before each branch of a block, after it (OLMo 2), or both (Gemma 2, GLM 4).
    norm_place: Literal["pre", "post", "sandwich"] = "pre"
    # Attention and feed-forward network read the same stream, through one norm (GPT-J, Cohere) or one each (GPT-NeoX).
    parallel_norms: int = Field(0, ge=0, le=2)  # 0: one branch after the other
    norm_bias: bool = True  # of a layernorm (not in Cohere, MPT)
    norm_weight: bool = True  # norms without parameters otherwise (OLMo)
    embedding_norm: bool = False  # BLOOM
    out_bias: bool | None = None  # of attention's output layer; same as `bias` unless given
    ffn_bias: bool | None = None  # of the feed-forward network; same as `bias` unless given
    head_bias: bool = False  # of the output layer of the model (Phi, GPT-J)
    rotary_size: int | None = Field(None, gt=0)  # of a head's elements, how many positions turn; all unless given (Phi)
    sliding_window: int | None = Field(None, gt=0)  # tokens that a query looks at, itself included; all unless given
    full_every: int | None = Field(None, gt=1)  # every n-th layer has no window (Gemma 3, gpt-oss)
    full_offset: int = Field(0, ge=0)  # so many layers earlier (GPT-Neo: every 2nd, from the first on)
    full_first: int = Field(0, ge=0)  # so many first layers have no window (Qwen2's max_window_layers)
    rope_theta_local: float | None = Field(None, gt=0)  # of layers with a window, unscaled; rope_theta unless given
    # LongRoPE (Phi): what each frequency is divided by, in sequences up to rope_scaling's original_context.
    rope_short: tuple[float, ...] | None = None
    rope_long: tuple[float, ...] | None = None  # the same in longer sequences
    unrotated_every: int | None = Field(None, gt=1)  # every n-th layer has no positions (SmolLM3, Command R7B)
    attention_cap: float | None = Field(None, gt=0)  # scores become cap x tanh(score / cap) (Gemma 2)
    logit_cap: float | None = Field(None, gt=0)  # logits likewise
    qkv_clip: float | None = Field(None, gt=0)  # queries, keys and values stay within it (DBRX, MPT)
    attention_sinks: bool = False  # a learned score per head that takes its share and gives nothing (gpt-oss)
    embedding_scale: float = Field(1.0, gt=0)  # factor on what the embedding gives (Gemma)
    residual_scale: float = Field(1.0, gt=0)  # factor on what a branch adds (Granite)
    logit_scale: float = Field(1.0, gt=0)  # factor on the logits (Cohere)
    attention_scale: float | None = Field(None, gt=0)  # factor on the scores in place of 1 / sqrt(head size) (Granite)

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
        """Tokens that a query of that layer looks at where that is fewer than there are."""
        return self.sliding_window if self.is_windowed(layer) and (self.sliding_window or 0) < sequence else None

    def is_rotated(self, layer: int) -> bool:
        return self.unrotated_every is None or (layer + 1) % self.unrotated_every != 0

    @property
    def composes_scores(self) -> bool:
        """Whether scores change between the two products of attention, which PyTorch's fused kernels do not do."""
        return self.attention_cap is not None or self.attention_sinks

    @property
    def switched(self) -> list[str]:
        """Fields of this class that are not at their defaults, but for a window in all layers."""
        fields = {name: field.default for name, field in Switches.model_fields.items() if name != "sliding_window"}
        return [name for name, default in fields.items() if getattr(self, name) != default]
