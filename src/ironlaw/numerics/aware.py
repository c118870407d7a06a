"""Compression-aware training: weights are rounded, pruned or both in every product, and kept in full for the update.

    y = x Q(W)^T,   dx = g Q(W),   dW = g^T x

The gradient ignores the rounding (the straight-through estimator, arXiv 1308.3432). It is 0 for pruned weights, which
were the smallest at the start of training and stay 0. `ironlaw compress --to` the same format by rtn afterwards gives
exactly the weights of the last products.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ironlaw.catalog.formats import CompressionTarget, read_target
from ironlaw.model.linear import Linear, RoundedLinear, become
from ironlaw.numerics.pruning import kept_weights
from ironlaw.numerics.quantized import rounded


class _Product(torch.autograd.Function):
    """A product with the narrowed weight. It saves x and the full weight, which backward rounds again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: AwareLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return F.linear(x, layer.narrow(weight).to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), layer, of_x, of_weight = ctx.saved_tensors, ctx.layer, None, None
        if ctx.needs_input_grad[0]:
            of_x = gradient @ layer.narrow(weight).to(gradient.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = (gradient.flatten(0, -2).t() @ x.flatten(0, -2)).to(weight.dtype)
            of_weight = of_weight if layer.kept is None else of_weight * layer.kept
        return of_x, of_weight, None


class AwareLinear(RoundedLinear):
    function = _Product
    target: CompressionTarget
    kept: Tensor | None = None  # mask of the unpruned weights, determined in the first forward pass

    def narrow(self, weight: Tensor) -> Tensor:
        format = self.target.format
        return rounded(weight.detach().float(), format, block=format.weight_block)

    def forward(self, x: Tensor) -> Tensor:
        if self.target.pruning is not None and self.kept is None:
            self.kept = kept_weights(self.weight, self.target.pruning)
            with torch.no_grad():
                self.weight.mul_(self.kept)
        return super().forward(x)


def hold_as(blocks: nn.Module, text: str) -> None:
    """Make the linear layers of `blocks` multiply with weights in the form of `--to text`."""
    target = read_target(text)
    for module in blocks.modules():
        if isinstance(module, Linear):
            become(module, AwareLinear).target = target
