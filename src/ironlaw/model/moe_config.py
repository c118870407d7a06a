"""The shape of a mixture-of-experts feed-forward network: the `[model.moe]` table of a config.

Token-choice top-k routing (arXiv 1701.06538): every token is sent to the `experts_per_token` experts with the highest
router scores, and to all shared experts (arXiv 2401.06066).
"""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from ironlaw.schema import Section


class MoEConfig(Section):
    """Number, width, placement and load balancing of the experts. Defaults are Mixtral's."""

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
