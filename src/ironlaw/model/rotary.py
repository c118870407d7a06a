"""Rotary positions (RoFormer, arXiv 2104.09864), plain or stretched to longer contexts.

`rope_scaling` of a model config is a table of numbers: Llama 3.1's has `low_freq_factor`, YaRN's has `beta_fast`. Both
keep high frequencies and divide low ones by `factor`; they differ in the transition between the two. With `factor`
alone all frequencies are divided by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ironlaw.model.config import ModelConfig
from ironlaw.model.yarn import cosine_factor, is_yarn


def rotary_tables(config: ModelConfig, local: bool = False, long: bool = False) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each (context, R/2) in fp32; R is the rotated part of a head.

    `local`: the tables of layers with a sliding window, if different (`rope_theta_local`). `long`: the tables for
    sequences beyond the original context (`rope_long`).
    """
    half = config.size_of_rotary // 2
    theta, scaling, scale = config.rope_theta, config.rope_scaling, 1.0
    if local and config.rope_theta_local is not None:
        theta, scaling = config.rope_theta_local, None
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    factors = config.rope_long if long else config.rope_short
    if scaling and factors:
        frequency, scale = frequency / torch.tensor(factors, dtype=torch.float64), _long_factor(scaling)
    elif scaling and is_yarn(scaling):
        frequency, scale = _yarn(frequency, config.rope_theta, scaling), cosine_factor(scaling)
    elif scaling and "low_freq_factor" in scaling:
        frequency = llama3_frequencies(frequency, scaling)
    elif scaling:  # position interpolation (arXiv 2306.15595)
        frequency = frequency / scaling["factor"]
    angle = torch.outer(torch.arange(config.context, dtype=torch.float64), frequency)
    return (angle.cos() * scale).float(), (angle.sin() * scale).float()


def _long_factor(scaling: Mapping[str, float]) -> float:
    """Return the factor on cosines and sines in LongRoPE (arXiv 2402.13753, as in released checkpoints)."""
    if "attention_factor" in scaling:
        return scaling["attention_factor"]
    factor = scaling["factor"]
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(scaling["original_context"]))


def llama3_frequencies(frequency: Tensor, scaling: Mapping[str, float]) -> Tensor:
    """Scale each frequency by its turns within the original context (arXiv 2407.21783, section 3.4)."""
    turns = scaling["original_context"] * frequency / (2 * math.pi)
    keep = (turns - scaling["low_freq_factor"]) / (scaling["high_freq_factor"] - scaling["low_freq_factor"])
    keep = keep.clamp(0, 1)
    return frequency * (keep + (1 - keep) / scaling["factor"])


def _yarn(frequency: Tensor, theta: float, scaling: Mapping[str, float]) -> Tensor:
    """Scale frequencies by their index, between those with `beta_fast` and `beta_slow` turns (arXiv 2309.00071)."""
    half = len(frequency)

    def number(turns: float) -> float:
        return half * math.log(scaling["original_context"] / (turns * 2 * math.pi)) / math.log(theta)

    # The ends are rounded to integers, as in the training of most released checkpoints.
    first, last = number(scaling["beta_fast"]), number(scaling["beta_slow"])
    if scaling.get("truncate", 1.0):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    width = last - first or 0.001
    stretched = ((torch.arange(half, dtype=torch.float64) - first) / width).clamp(0, 1)
    return frequency * (1 - stretched + stretched / scaling["factor"])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to (B, S, heads, D), first half against second half (the Hugging Face convention).

    Tables (S, R/2) narrower than D/2 rotate the first R elements only.
    """
    half = cos.shape[-1]
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    cos, sin = cos[:, None, :].to(x.dtype), sin[:, None, :].to(x.dtype)  # (S, 1, R/2)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*turned, rest) if rest.shape[-1] else turned, dim=-1)


def fused_tables(cos: Tensor, sin: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Expand tables (N, R/2) to (N, 1, D) each for `rotate_fused`: unrotated elements have cosine 1 and sine 0."""
    rest = size - 2 * cos.shape[-1]
    cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    if rest:
        cos, sin = torch.nn.functional.pad(cos, (0, rest), value=1.0), torch.nn.functional.pad(sin, (0, rest))
    return cos[:, None].to(dtype), sin[:, None].to(dtype)


def rotate_fused(x: Tensor, cos: Tensor, sin: Tensor, size: int | None = None) -> Tensor:
    """`rotate` for (N, heads, D) in three operations, by tables of `fused_tables`; `size`: the rotated elements R."""
    size = size or x.shape[-1]
    if size == x.shape[-1]:
        swapped = x.roll(size // 2, -1)
    else:
        swapped = torch.cat((x[..., size // 2 : size], x[..., : size // 2], x[..., size:]), dim=-1)
    return torch.addcmul(x * cos, swapped, sin)
