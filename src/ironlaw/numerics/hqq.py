"""HQQ (Badri and Shaji 2023, "Half-Quadratic Quantization"): scales from the weights alone, without data.

Minimises sum |W - s q|^p, p = 0.7, which is less sensitive to outliers than squares. Half-quadratic splitting iterates

    q = round(W / s),   e = shrink(W - s q),   s = <q, W - e> / <q, q>,   beta = 1.01 beta

with shrink(x) = sign(x) max(0, |x| - |x|^(p - 1) / beta), the error allowed for outliers. The authors adjust the zero
point and keep s; our formats have no zero point, so s is adjusted. W is divided by its block's largest magnitude.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ironlaw.catalog.formats import NumberFormat, number_format
from ironlaw.errors import UserError
from ironlaw.numerics.quantized import Quantized, in_blocks, joined, quantize
from ironlaw.numerics.rounding import encode, round_to

POWER, BETA, GROWTH, STEPS = 0.7, 10.0, 1.01, 20  # as chosen by the authors


def check_hqq(format: NumberFormat) -> None:
    """Raises UserError for a format whose scales cannot be chosen freely."""
    if format.block is None or format.rule == "floor" or format.tensor_scale:
        raise UserError(f"hqq moves scales, and {format.name} has none of its own to move: use rtn, or --to int4")


def hqq(weight: Tensor, format: NumberFormat) -> Quantized:
    """Quantises `weight` (..., K) to a format that `check_hqq` accepts."""
    check_hqq(format)
    nearest = quantize(weight, format.name, block=format.weight_block)
    assert nearest.block is not None
    whole, scale = in_blocks(weight.detach().float().reshape(nearest.matrix_shape), nearest.block), nearest.scale()
    size = whole.abs().amax((1, 3), keepdim=True).clamp(min=1e-30)
    blocks, scale, beta = whole / size, scale[:, None, :, None] / size, BETA
    best, least = scale, torch.full_like(scale, torch.inf)
    for _ in range(STEPS):
        codes = round_to(blocks / scale, format.element)
        error = blocks - scale * codes
        cost = error.abs().pow(POWER).sum((1, 3), keepdim=True)
        best, least = torch.where(cost < least, scale, best), torch.minimum(cost, least)
        allowed = error.sign() * (error.abs() - error.abs().clamp(min=1e-8).pow(POWER - 1) / beta).clamp(min=0)
        moved = (codes * (blocks - allowed)).sum((1, 3), keepdim=True) / codes.square().sum((1, 3), keepdim=True)
        scale, beta = torch.where(moved.isfinite() & (moved != 0), moved, scale), beta * GROWTH
    found = round_to((best * size)[:, 0, :, 0], number_format(format.scale))
    found = torch.where(found == 0, nearest.scale(), found)
    values = round_to(joined(whole / found[:, None, :, None]), format.element)
    return Quantized.of(format, weight.shape, values, encode(found, number_format(format.scale)), None, nearest.block)
