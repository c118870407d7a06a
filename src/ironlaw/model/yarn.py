"""The sharpening of attention by YaRN (arXiv 2309.00071), in addition to its stretched frequencies. Needs no torch.

A YaRN table has `factor`, `beta_fast`, `beta_slow`, `original_context`, and may have `mscale` and `mscale_all_dim`
(DeepSeek's; arXiv 2412.19437 trains with both at 1). Without these two, cosines and sines are multiplied by
0.1 ln(factor) + 1, so that scores get its square. With `mscale_all_dim`, whole scores are scaled, rotated or not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping


def is_yarn(scaling: Mapping[str, float]) -> bool:
    return "beta_fast" in scaling


def sharpening(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def cosine_factor(scaling: Mapping[str, float]) -> float:
    """Return the factor on cosines and sines."""
    if "attention_factor" in scaling:
        return scaling["attention_factor"]
    factor, part, whole = scaling["factor"], scaling.get("mscale", 0.0), scaling.get("mscale_all_dim", 0.0)
    if part and whole:
        return sharpening(factor, part) / sharpening(factor, whole)
    return sharpening(factor)


def score_factor(scaling: Mapping[str, float] | None) -> float:
    """Return the factor on all attention scores, in addition to 1 / sqrt(head size)."""
    if not scaling or not is_yarn(scaling) or not scaling.get("mscale_all_dim"):
        return 1.0
    return sharpening(scaling["factor"], scaling["mscale_all_dim"]) ** 2
