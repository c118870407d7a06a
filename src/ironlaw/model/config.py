"""The shape of a decoder-only transformer. One type covers the GPT-2 and the Llama families."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ironlaw.catalog.models import model_figures


class ModelConfig(BaseModel):
    """Dimensions and choices of a decoder. Defaults are GPT-2's; `named("llama3-8b")` fills in a catalogued one.

    Lengths are in elements: `hidden` per token, `context` and `sliding_window` in tokens.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    name: str = "custom"
    layers: int = Field(gt=0)
    hidden: int = Field(gt=0)
    heads: int = Field(gt=0)
    kv_heads: int | None = Field(None, gt=0)  # fewer than `heads`: grouped-query attention
    head_size: int | None = Field(None, gt=0)  # hidden / heads unless the model says otherwise (Qwen3)
    ffn: int | None = Field(None, gt=0)  # inner width of the feed-forward network; 4 x hidden unless given
    gated_ffn: bool = False  # three matrices (SwiGLU) instead of two
    activation: Literal["gelu", "gelu_tanh", "silu"] = "gelu_tanh"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: float = 1e-5
    qk_norm: bool = False  # RMSNorm on each head's query and key (Qwen3)
    positions: Literal["learned", "rope"] = "learned"
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, float] | None = None  # Llama 3.1's: factor, low_freq_factor, high_freq_factor, original
    bias: bool = True  # on every linear layer of the blocks
    qkv_bias: bool | None = None  # on the query, key and value projections only (Qwen2); same as `bias` unless given
    vocab: int = Field(gt=0)
    context: int = Field(gt=0)
    tied: bool = True  # the output layer shares the embedding
    sliding_window: int | None = Field(None, gt=0)
    dropout: float = Field(0.0, ge=0.0, lt=1.0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.head_size is None and self.hidden % self.heads:
            raise ValueError(
                f"hidden = {self.hidden} is not divisible by heads = {self.heads}: "
                f"use heads = {_nearest_divisor(self.hidden, self.heads)} or give head_size"
            )
        if self.heads % self.key_value_heads:
            raise ValueError(
                f"heads = {self.heads} is not divisible by kv_heads = {self.kv_heads}: "
                f"use kv_heads = {_nearest_divisor(self.heads, self.key_value_heads)}"
            )
        if self.positions == "rope" and self.size_of_head % 2:
            raise ValueError(f"rotary positions need an even head size, this one is {self.size_of_head}")
        return self

    @classmethod
    def named(cls, name: str, **overrides: Any) -> ModelConfig:
        """A catalogued model, with any field replaced."""
        return cls(**(model_figures(name) | {"name": name} | overrides))

    @property
    def key_value_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def size_of_head(self) -> int:
        return self.head_size or self.hidden // self.heads

    @property
    def ffn_size(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def has_qkv_bias(self) -> bool:
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.size_of_head

    @property
    def key_value_size(self) -> int:
        """Width of all key heads (or all value heads) together."""
        return self.key_value_heads * self.size_of_head

    @property
    def norm_parameters(self) -> int:
        return self.hidden * (2 if self.norm == "layernorm" else 1)

    @property
    def block_parameters(self) -> int:
        """Parameters of one transformer block."""
        qkv = self.query_size + 2 * self.key_value_size
        attention = self.hidden * qkv + self.query_size * self.hidden
        attention += qkv * self.has_qkv_bias + self.hidden * self.bias
        attention += 2 * self.size_of_head * self.qk_norm
        matrices = 3 if self.gated_ffn else 2
        mlp = matrices * self.hidden * self.ffn_size
        mlp += ((matrices - 1) * self.ffn_size + self.hidden) * self.bias
        return attention + mlp + 2 * self.norm_parameters

    @property
    def embedding_parameters(self) -> int:
        """Token embedding and learned positions; the output layer counts separately when it is not tied."""
        return self.hidden * (self.vocab + (self.context if self.positions == "learned" else 0))

    @property
    def head_parameters(self) -> int:
        return 0 if self.tied else self.hidden * self.vocab

    @property
    def parameters(self) -> int:
        return (
            self.embedding_parameters
            + self.layers * self.block_parameters
            + self.norm_parameters
            + self.head_parameters
        )

    @property
    def parameter_tensors(self) -> int:
        """How many tensors hold the parameters: what an optimizer walks over."""
        norm = 2 if self.norm == "layernorm" else 1
        linears = 5 if self.gated_ffn else 4
        biases = self.has_qkv_bias + (linears - 1) * self.bias
        block = 2 * norm + linears + biases + 2 * self.qk_norm
        ends = 1 + (self.positions == "learned") + norm + (not self.tied)
        return self.layers * block + ends


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - wanted))
