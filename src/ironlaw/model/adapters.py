"""Adapters of linear layers: y = x W^T + s (x A^T) B^T with frozen W and trained A (R, K) and B (N, R) (LoRA, arXiv
2106.09685). With magnitudes m (N), row i of W + s B A is scaled to the norm m_i (DoRA, arXiv 2402.09353).

A layer may have several, each for a range of rows, because query, key and value are one matrix here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ironlaw.model.linear import Linear, become, cast_like_autocast, linear, local_part


class Adapter(nn.Module):
    """The adapter of rows `start` to `stop`. Initially A is random as in PEFT, B is 0, m are the frozen rows' norms."""

    def __init__(self, start: int, stop: int, inputs: int, rank: int, scale: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.start, self.stop, self.scale = start, stop, scale
        self.a = nn.Parameter(torch.empty(rank, inputs))
        self.b = nn.Parameter(torch.zeros(stop - start, rank))
        self.magnitude: nn.Parameter | None = None
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.whole_lengths: Callable[[Tensor], Tensor] = lambda lengths: lengths  # from norms over this rank's columns
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def added(self, x: Tensor) -> Tensor:
        """Return the adapter's output (..., stop - start) for x (..., K)."""
        return F.linear(F.linear(self.dropout(x), local_part(self.a)) * self.scale, local_part(self.b))

    @torch.no_grad()
    def merged(self, rows: Tensor) -> Tensor:
        """Return the rows (stop - start, K) of the frozen matrix with the adapter merged in."""
        rows = rows + self.scale * (self.b @ self.a)
        return rows if self.magnitude is None else rows * self.stretch(rows).unsqueeze(1)

    def stretch(self, merged: Tensor) -> Tensor:
        """Return the factor that scales each row to its magnitude. The norms have no gradient (section 4.3)."""
        assert self.magnitude is not None
        return local_part(self.magnitude) / self.whole_lengths(torch.linalg.vector_norm(merged.detach(), dim=1))


class LayerAdapters(nn.ModuleDict):
    """The adapters of one layer, in the order of their rows. A module, so that it appears in profiles."""

    def forward(self, x: Tensor, y: Tensor, layer: AdaptedLinear) -> Tensor:
        """Return the output (..., N) from x (..., K) and the frozen product y (..., N), in DoRA without the bias."""
        y = y + self._side_by_side([adapter.added(x) for adapter in self.each()], y)
        if self.stretches:
            lengths = [self._stretch(adapter, layer) for adapter in self.each()]
            y = y * self._side_by_side(lengths, y.new_ones(layer.out_features), 1).to(y.dtype)
            y = y if layer.bias is None else y + layer.bias.to(y.dtype)
        return y

    @property
    def stretches(self) -> bool:
        return any(adapter.magnitude is not None for adapter in self.each())

    def _side_by_side(self, parts: list[Tensor], like: Tensor, fill: int = 0) -> Tensor:
        """Concatenate the adapters' parts into (..., N), with `fill` in rows without an adapter."""
        together, row = [], 0
        for start, stop, part in [*((a.start, a.stop, p) for a, p in zip(self.each(), parts, strict=True)),
                                  (like.shape[-1], 0, None)]:  # fmt: skip
            if start > row:
                together.append(like.new_full((*like.shape[:-1], start - row), fill))
            together += [] if part is None else [part]
            row = stop
        return together[0] if len(together) == 1 else torch.cat(together, dim=-1)

    @staticmethod
    def _stretch(adapter: Adapter, layer: AdaptedLinear) -> Tensor:
        with torch.autocast(adapter.a.device.type, enabled=False), torch.no_grad():
            merged = (local_part(adapter.b) @ local_part(adapter.a)).mul_(adapter.scale)
            merged += layer.frozen()[adapter.start : adapter.stop]
        return adapter.stretch(merged)

    def each(self) -> Iterator[Adapter]:
        for adapter in self.values():
            assert isinstance(adapter, Adapter)
            yield adapter


class AdaptedLinear(Linear):
    """A frozen `Linear` with adapters. Subclasses override `product` and `frozen` for other storage of the matrix."""

    adapters: LayerAdapters
    adapting = True  # False: the adapters are ignored

    def frozen(self) -> Tensor:
        """Return the frozen matrix (N, K)."""
        return self.weight

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return (linear if self.onednn else F.linear)(x, self.weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = cast_like_autocast(x)  # cast once for all products
        if not (self.adapting and self.adapters):
            return self.product(x, self.bias)
        return self.adapters(x, self.product(x, None if self.adapters.stretches else self.bias), self)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """Return the matrix (N, K) with the adapters merged in."""
        whole = self.frozen().clone()
        for adapter in self.adapters.each():
            rows = slice(adapter.start, adapter.stop)
            whole[rows] = adapter.merged(whole[rows])
        return whole


def adapt(module: Linear, adapters: dict[str, Adapter], *, magnitudes: bool = False) -> None:
    """Add adapters, in the order of their rows, to a frozen layer in place. The names of its tensors do not change."""
    module = module if isinstance(module, AdaptedLinear) else become(module, AdaptedLinear)
    module.adapters = LayerAdapters(adapters)
    for adapter in adapters.values() if magnitudes else ():
        rows = module.frozen()[adapter.start : adapter.stop]
        adapter.magnitude = nn.Parameter(torch.linalg.vector_norm(rows.detach(), dim=1))


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}
