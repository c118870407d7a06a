"""Learning-rate schedules."""

from __future__ import annotations

import math

from ironlaw.config import RunConfig


def peak_rate(config: RunConfig) -> float:
    """`optimizer.lr` scaled with the batch: linearly (arXiv 1706.02677) or by its root (arXiv 2205.10287 for Adam)."""
    ratio = config.train.global_batch / config.schedule.reference_batch
    factors = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}
    return config.optimizer.lr * factors[config.schedule.lr_scaling]


def learning_rate(config: RunConfig, step: int) -> float:
    """Return the learning rate of `step`, counted from 0: linear warmup, then the schedule.

    Warmup starts at peak / warmup rather than 0, so that the first batch is not wasted.
    """
    peak, warmup = peak_rate(config), config.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    span = max(1, config.train.steps - warmup)
    return _after_warmup(config, peak, step - warmup, min(1.0, (step - warmup) / span))


def _after_warmup(config: RunConfig, peak: float, steps: int, progress: float) -> float:
    """Return the rate `steps` after the warmup; `progress` (0 to 1) is their fraction of all steps after it."""
    schedule = config.schedule
    floor = peak * schedule.min_lr_fraction
    match schedule.kind:
        case "cosine":
            return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
        case "linear":
            return peak + (floor - peak) * progress
        case "exponential":
            return peak * schedule.min_lr_fraction**progress
        case "inverse_sqrt":
            start = max(1, config.warmup_steps)
            return max(floor, peak * math.sqrt(start / (start + steps)))
        case "step":
            return float(max(floor, peak * schedule.step_factor ** (steps // schedule.step_every)))
        case "wsd":
            left = (1 - progress) / schedule.decay_fraction
            return floor + (peak - floor) * min(1.0, left)
        case _:
            return peak
