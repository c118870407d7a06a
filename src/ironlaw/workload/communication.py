"""What a user may choose of how replicas tell each other their gradients. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ironlaw.schema import Section


class CommunicationConfig(Section):
    """What replicas tell each other, where links are slower than that (train/parallel/savers.py, outer.py)."""

    # How gradients travel. bf16 halves them, in sums too; powersgd (arXiv 1905.13727) sends two thin matrices for each
    # matrix that shrinks at least twofold by it, and keeps what it left out for the next step.
    gradients: Literal["fp32", "bf16", "powersgd"] = "fp32"
    rank: int = Field(4, gt=0)  # columns of powersgd's matrices
    start_step: int = Field(100, ge=2)  # powersgd from here on: early gradients are not of low rank
    # Steps between averages of the weights (DiLoCo, arXiv 2311.08105: 500); 0: gradients are averaged every step.
    local_steps: int = Field(0, ge=0)
    sites: int | None = Field(None, gt=1)  # groups of neighbouring ranks that do so; every replica alone unless given
    outer_lr: float = Field(0.7, gt=0)  # of the step from the old average to the new one: Nesterov's SGD
    outer_momentum: float = Field(0.9, ge=0, lt=1)  # of that step
