"""The shape of multi-head latent attention: the `[model.latent]` table of a config (DeepSeek-V2, arXiv 2405.04434).

Keys and values of all heads are computed from one narrow vector per token, and queries optionally from another. A
head's query and key have a part without positions and a rotated part; all heads share the rotated key.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from ironlaw.schema import Section


class LatentConfig(Section):
    """Widths in elements. Defaults are those of DeepSeek-V2 and its successors."""

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
