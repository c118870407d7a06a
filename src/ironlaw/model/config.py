"""The shape of a decoder-only transformer. One type covers the families of `docs/model.md`, dense or with experts."""

from __future__ import annotations

from typing import Any, Self

from pydantic import model_validator

from ironlaw.catalog.models import model_figures
from ironlaw.model.dimensions import Dimensions
from ironlaw.model.parameters import elements_of, of_block, of_embedding, of_experts, of_head


class ModelConfig(Dimensions):
    """Dimensions and choices of a decoder. Defaults are GPT-2's, or those of a name in `ironlaw catalog`."""

    def __hash__(self) -> int:  # some fields are unhashable; these distinguish models
        return hash((self.name, self.layers, self.hidden, self.heads, self.ffn, self.vocab))

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
        """Raise ValueError for options that latent attention, with its own sizes and rotary positions, lacks."""
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
        """Return a catalogued model with fields replaced; tables such as `moe` are merged field by field."""
        return cls(**with_overrides(model_figures(name) | {"name": name}, overrides))

    @property
    def block_parameters(self) -> int:
        """Parameters of one block with a dense feed-forward network."""
        return elements_of(of_block(self))

    @property
    def moe_block_parameters(self) -> int:
        """Parameters of one block with all of its experts; 0 without experts."""
        return elements_of(of_block(self, experts=True)) if self.moe else 0

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert; 0 without experts."""
        return elements_of(of_experts(self)) // self.moe.experts if self.moe else 0

    @property
    def embedding_parameters(self) -> int:
        """Parameters of token embedding, learned positions and their norm; an untied output layer is not included."""
        return elements_of(of_embedding(self))

    @property
    def head_parameters(self) -> int:
        """Parameters of the output layer, without the norm before it."""
        return elements_of(of_head(self)) - self.norm_parameters

    @property
    def parameters(self) -> int:
        blocks = self.dense_layers * self.block_parameters + self.moe_layers * self.moe_block_parameters
        return self.embedding_parameters + blocks + elements_of(of_head(self))

    @property
    def active_parameters(self) -> int:
        """Parameters used for one token: of the routed experts only the chosen ones."""
        idle = self.moe.experts - self.moe.experts_per_token if self.moe else 0
        return self.parameters - self.moe_layers * idle * self.expert_parameters

    def of_kind(self, windowed: bool, rotated: bool) -> ModelConfig:
        """Return the model with all layers of one kind: with or without window and rotation."""
        update: dict[str, Any] = {"full_every": None, "full_offset": 0, "full_first": 0, "unrotated_every": None}
        if not windowed:
            update |= {"sliding_window": None, "rope_theta_local": None}
        if not rotated:
            update["positions"] = "none"
        return self.model_copy(update=update)


def with_overrides(figures: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Replace fields of a model's table; its `moe` and `latent` tables are merged field by field."""
    merged = figures | overrides
    for name in ("moe", "latent"):
        if isinstance(figures.get(name), dict) and isinstance(overrides.get(name), dict):
            merged[name] = figures[name] | overrides[name]
    return merged


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - wanted))
