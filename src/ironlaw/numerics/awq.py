"""AWQ (arXiv 2306.00978): input channels that carry much are scaled up before their weights are rounded.

For y = x W^T, W' = W diag(s) and x' = x / s give the same y; s decides which channels bear the rounding error of W'.
1/s is folded into what makes x: the norm before, or the rows of the layer before where nothing bends between. Of
s = a^alpha, with a the root mean square of each channel, that of least |x' (W' - Q(W'))^T|^2 is taken; alpha 0 is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ironlaw.catalog.formats import NumberFormat
from ironlaw.model.feed_forward import FeedForward
from ironlaw.model.linear import Linear
from ironlaw.model.transformer import Attention, Block
from ironlaw.numerics.quantized import rounded

STEPS = 10  # of alpha

Fold = Callable[[Tensor], None]  # divides what makes the channels by s (K,)


@torch.no_grad()
def balance(block: nn.Module, moments: Mapping[nn.Module, Tensor], format: NumberFormat) -> None:
    """Scale the layers of a block in place for `format`, and what comes before them; its function stays.

    moments: x^T x (K, K) of each layer's inputs.
    """
    assert isinstance(block, Block)
    for fold, layers in _groups(block):
        moment = moments[layers[0]]
        scale = _best_scale([layer.weight for layer in layers], moment, format)
        fold(scale)
        for layer in layers:
            layer.weight.mul_(scale)


def can_balance(block: nn.Module) -> bool:
    return isinstance(block, Block) and next(_groups(block), None) is not None


def _best_scale(weights: Sequence[Tensor], moment: Tensor, format: NumberFormat) -> Tensor:
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


def _groups(block: Block) -> Iterator[tuple[Fold, list[Linear]]]:
    """Layers that read the same channels, and how to divide these."""
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
        yield _of_rows(attention.qkv, attention.out.in_features), [attention.out]  # values are the last rows
    if dense is not None and dense.gate is not None:
        yield _of_rows(dense.up), [dense.down]  # its product with the activated gate is linear in it


def _of_rows(module: nn.Module, last: int = 0) -> Fold:
    def fold(scale: Tensor) -> None:
        for part in (module.weight, getattr(module, "bias", None)):
            if isinstance(part, Tensor):
                rows = part[-last:]
                rows.div_(scale if rows.dim() == 1 else scale[:, None])

    return fold
