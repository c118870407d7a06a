"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from ironlaw.config import RunConfig


def learning_rate(config: RunConfig, step: int) -> float:
    """Linear warmup from 0, then half a cosine to `min_lr_fraction` of the peak (SGDR, arXiv 1608.03983).

    `step` counts from 0; the first step already learns a little, so that no batch is wasted.
    """
    peak, schedule = config.optimizer.lr, config.schedule
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    span = max(1, config.train.steps - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / span)
    floor = peak * schedule.min_lr_fraction
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
