"""Frozen linear layers whose matrix is held in few bits and dequantised for each product (QLoRA, arXiv 2305.14314).

Scales are held in 8 bits themselves: their mean is taken off, and 256 of the rest share an fp32 scale (the paper's
double quantisation; its 8 bits are a float, ours int8). With nf4 that is 4 + 8/64 + 32/(64 x 256) = 4.127 bits each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ironlaw.model.adapters import AdaptedLinear
from ironlaw.model.linear import Linear
from ironlaw.numerics.quantized import Quantized, quantize

SCALES_BLOCK = (1, 256)


class _Product(torch.autograd.Function):
    """Keeps nothing: the matrix is dequantised again on the way back, and no gradient needs x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FrozenLinear, bias: Tensor | None) -> Tensor:
        ctx.layer, ctx.dtype = layer, x.dtype
        return F.linear(x, layer.frozen(), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (gradient @ ctx.layer.frozen().to(gradient.dtype)).to(ctx.dtype), None, None


class FrozenLinear(AdaptedLinear):
    """`AdaptedLinear` without `weight`: codes and scales are its buffers, which no checkpoint holds."""

    codes: Tensor
    scale_codes: Tensor
    scale_scales: Tensor
    scale_mean: Tensor
    _blocks: torch.Size  # rows and columns of the scales
    _form: tuple[Quantized, Quantized]  # of codes and of scales, without their tensors

    def frozen(self) -> Tensor:
        form, scales_form = self._form
        scales = replace(scales_form, codes=self.scale_codes, scales=self.scale_scales).dequantize() + self.scale_mean
        return replace(form, codes=self.codes, scales=scales.reshape(self._blocks)).dequantize()

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor = _Product.apply(x, self, bias)
        return product


@torch.no_grad()
def hold_quantized(module: Linear, name: str = "nf4") -> FrozenLinear:
    """The module itself, with its matrix in the block format `name`, which must have fp32 scales."""
    whole = quantize(module.weight, name)
    assert whole.scales is not None
    mean = whole.scales.mean()
    scales = quantize((whole.scales - mean).flatten().unsqueeze(0), "int8", block=SCALES_BLOCK)
    module.__class__ = FrozenLinear
    assert isinstance(module, FrozenLinear)
    module.adapters = nn.ModuleDict()
    del module._parameters["weight"]
    tensors = {"codes": whole.codes, "scale_codes": scales.codes, "scale_scales": scales.scales, "scale_mean": mean}
    for part, tensor in tensors.items():
        module.register_buffer(part, tensor, persistent=False)
    module._blocks = whole.scales.shape
    nothing = torch.empty(0)
    module._form = replace(whole, codes=nothing, scales=None), replace(scales, codes=nothing, scales=None)
    return module
