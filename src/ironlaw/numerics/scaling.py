"""Scaling of input channels before weights are rounded: AWQ (arXiv 2306.00978), SmoothQuant (arXiv 2211.10438).

For y = x W^T, W' = W diag(s) and x' = x / s give the same y; s distributes the rounding error of W' over the channels,
and that of x' if products round their inputs too. 1/s is folded into the previous norm, or into the rows of the
previous layer if no nonlinearity is between.

    awq          s = a^alpha, a: root mean square of a channel; alpha minimises |x' (W' - Q(W'))^T|^2, 0: no scaling
    smoothquant  s = max|x|^(1/2) / max|W|^(1/2) of a channel: inputs and weights then have the same range
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ironlaw.catalog.formats import NumberFormat
from ironlaw.model.feed_forward import FeedForward
from ironlaw.model.linear import Linear
from ironlaw.model.transformer import Attention, Block
from ironlaw.numerics.quantized import rounded

STEPS = 10  # of alpha from 0 to 1

Fold = Callable[[Tensor], None]  # divides the source of the channels by s (K,)


@dataclass
class Inputs:
    """Statistics of a layer's inputs x (tokens, K): x^T x (K, K), and the largest |x| of each channel (K,)."""

    moment: Tensor
    peak: Tensor

    def __add__(self, other: Inputs) -> Inputs:
        return Inputs(self.moment + other.moment, torch.maximum(self.peak, other.peak))


@torch.no_grad()
def balance(block: nn.Module, inputs: Mapping[nn.Module, Inputs], format: NumberFormat, method: str = "awq") -> None:
    """Scale the layers of a block and their sources in place for `format`; the block's function does not change."""
    assert isinstance(block, Block)
    for fold, layers in _groups(block):
        seen, weights = inputs[layers[0]], [layer.weight for layer in layers]
        scale = _awq_scale(weights, seen.moment, format) if method == "awq" else _smoothquant_scale(weights, seen.peak)
        fold(scale)
        for layer in layers:
            layer.weight.mul_(scale)


def can_scale_channels(block: nn.Module) -> bool:
    return isinstance(block, Block) and next(_groups(block), None) is not None


def _awq_scale(weights: Sequence[Tensor], moment: Tensor, format: NumberFormat) -> Tensor:
    size = moment.diagonal().clamp(min=0).sqrt()
    size = size.clamp(min=1e-4 * float(size.max().clamp(min=1e-30)))
    best, least = torch.ones_like(size), torch.inf
    for step in range(STEPS + 1):
        scale = size ** (step / STEPS)
        scale = scale / (scale.max() * scale.min()).sqrt()
        error = 0.0
        for weight in weights:
            off = rounded(weight.float() * scale, format, block=format.weight_block) / scale - weight
            error += float(((off @ moment) * off).sum())
        if error < least:
            best, least = scale, error
    return best


def _smoothquant_scale(weights: Sequence[Tensor], peak: Tensor) -> Tensor:
    largest = torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0)
    scale = (peak.clamp(min=1e-5) / largest.clamp(min=1e-5)).sqrt()
    return scale / (scale.max() * scale.min()).sqrt()


def _groups(block: Block) -> Iterator[tuple[Fold, list[Linear]]]:
    """Yields the layers that read the same channels, with the function that divides these channels."""
    attention = block.attention if isinstance(block.attention, Attention) else None
    dense = block.ffn if isinstance(block.ffn, FeedForward) else None
    into = [attention.qkv] if attention is not None else []
    wide = [layer for layer in (dense.up, dense.gate) if layer is not None] if dense is not None else []
    if block.parallel == 1:  # one norm for both
        into, wide = ([*into, *wide] if into and wide else []), []
    for norm, layers in ((block.attention_norm, into), (block.ffn_norm, wide)):
        if layers and norm is not None and norm.weight is not None:
            yield _of_rows(norm), layers
    if attention is not None and attention.config.heads == attention.config.key_value_heads:
        yield _of_rows(attention.qkv, attention.out.in_features), [attention.out]  # the last rows of qkv are values
    if dense is not None and dense.gate is not None:
        yield _of_rows(dense.up), [dense.down]  # the product with the activated gate is linear in up's output


def _of_rows(module: nn.Module, last: int = 0) -> Fold:
    def fold(scale: Tensor) -> None:
        for part in (module.weight, getattr(module, "bias", None)):
            if isinstance(part, Tensor):
                rows = part[-last:]
                rows.div_(scale if rows.dim() == 1 else scale[:, None])

    return fold
