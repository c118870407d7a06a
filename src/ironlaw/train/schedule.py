"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from ironlaw.config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warmup from 0, then half a cosine to `min_lr_fraction` of the peak (SGDR, arXiv 1608.03983).

    `step` counts from 0; the first step already learns a little, so that no batch is wasted.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    span = max(1, config.steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    floor = config.lr * config.min_lr_fraction
    return floor + (config.lr - floor) * 0.5 * (1 + math.cos(math.pi * progress))
