"""The shape of a mixture-of-experts feed-forward network: the `[model.moe]` table of a config.

Token-choice top-k routing (arXiv 1701.06538): every token is sent to the `experts_per_token` experts that its router
scores highest, and to all shared experts (arXiv 2401.06066).
"""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from ironlaw.schema import Section


class MoEConfig(Section):
    """Which layers have experts, how many, how wide, and how their load is kept even. Defaults are Mixtral's."""

    experts: int = Field(gt=1, le=2**16)  # routed ones, in each layer that has any
    experts_per_token: int = Field(gt=0, le=2**16)  # that its router chooses for a token
    expert_ffn: int | None = Field(None, gt=0, le=2**24)  # inner width of one expert; the model's ffn unless given
    shared_experts: int = Field(0, ge=0, le=2**16)  # that every token visits (DeepSeekMoE); computed as one network
    shared_ffn: int | None = Field(
        None, gt=0, le=2**24
    )  # inner width of them together; else shared_experts x expert_ffn
    shared_gate: bool = False  # a learned sigmoid scales what the shared experts give (Qwen2-MoE)
    bias: bool = False  # of the router and of every expert's matrices (gpt-oss)
    dense_layers: int = Field(0, ge=0)  # so many first layers keep the dense network, `ffn` wide (DeepSeekMoE)
    every: int = Field(1, gt=0)  # of the rest, only each k-th layer has experts (GShard 2)
    score: Literal["softmax", "sigmoid"] = "softmax"  # of the router's logits (sigmoid: DeepSeek-V3)
    # Experts in so many equal groups, of which a token's experts come from the best few: by the best score in each
    # (softmax: arXiv 2405.04434, section 2.2.2) or the sum of the two best (sigmoid: arXiv 2412.19437).
    groups: int = Field(1, gt=0)
    groups_per_token: int | None = Field(None, gt=0)  # all of them unless given
    normalize: bool = True  # the weights of a token's experts sum to 1
    routed_scale: float = Field(1.0, gt=0)  # of the routed experts' sum (DeepSeek-V3 2.5)
    # None: dropless, every token reaches its experts. Else an expert takes at most factor x (mean load) of the choices
    # of a training micro-batch, and later tokens go without it (Switch, arXiv 2101.03961). Never in evaluation.
    capacity_factor: float | None = Field(None, gt=0)
    # How the load is kept even: an auxiliary loss (arXiv 2101.03961, equation 4), or a bias on each expert's score that
    # only the choice sees, moved after every step (arXiv 2408.15664).
    balance: Literal["loss", "bias", "none"] = "loss"
    balance_loss: float = Field(0.01, ge=0)  # its coefficient; 0.01 in Switch and OLMoE, 0.001 in Qwen
    bias_rate: float = Field(0.001, gt=0)  # what a bias moves per step (0.001 in arXiv 2408.15664)

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
        """Whether a token's experts come from some of the groups only."""
        return self.groups_per_token is not None and self.groups_per_token < self.groups

    def in_layer(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) has experts."""
        return layer >= self.dense_layers and (layer + 1) % self.every == 0

    def layers(self, of: int) -> int:
        """How many of a decoder's `of` layers have experts."""
        return max(of // self.every - self.dense_layers // self.every, 0)

    def capacity(self, tokens: int) -> int | None:
        """Rows that one expert computes at most of `tokens` tokens; None without a limit."""
        if self.capacity_factor is None:
            return None
        mean = tokens * self.experts_per_token / self.experts
        return min(tokens, max(1, math.ceil(mean * self.capacity_factor)))
