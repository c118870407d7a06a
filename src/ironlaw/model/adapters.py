"""Adapters beside the matrices of linear layers: y = x W^T + s (x A^T) B^T with W frozen, A (R, K) and B (N, R) trained
(LoRA, arXiv 2106.09685). With a magnitude m (N) every row of W + s B A gets the length m (DoRA, arXiv 2402.09353).

A layer may have several, each on some of its rows: query, key and value are one matrix here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ironlaw.model.autocast import followed
from ironlaw.model.linear import Linear, linear


class Adapter(nn.Module):
    """Of rows `start` to `stop`. It starts as a zero: A is PEFT's random one, B zeros, m the lengths that are there."""

    def __init__(self, start: int, stop: int, inputs: int, rank: int, scale: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.start, self.stop, self.scale = start, stop, scale
        self.a = nn.Parameter(torch.empty(rank, inputs))
        self.b = nn.Parameter(torch.zeros(stop - start, rank))
        self.magnitude: nn.Parameter | None = None
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.whole_lengths: Callable[[Tensor], Tensor] = lambda lengths: lengths  # from those of the columns here
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def added(self, x: Tensor) -> Tensor:
        """x (..., K) to (..., stop - start)."""
        return F.linear(F.linear(self.dropout(x), local(self.a)) * self.scale, local(self.b))

    @torch.no_grad()
    def merged(self, rows: Tensor) -> Tensor:
        """These rows (stop - start, K) of the frozen matrix with the adapter in them."""
        rows = rows + self.scale * (self.b @ self.a)
        return rows if self.magnitude is None else rows * self.stretch(rows).unsqueeze(1)

    def stretch(self, merged: Tensor) -> Tensor:
        """What brings each row to its length. The gradient takes the present lengths as constants (section 4.3)."""
        assert self.magnitude is not None
        return local(self.magnitude) / self.whole_lengths(torch.linalg.vector_norm(merged.detach(), dim=1))


def local(tensor: Tensor) -> Tensor:
    """Of a distributed tensor this rank's part."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


class AdaptedLinear(Linear):
    """A frozen `Linear` with adapters. `product` and `frozen` say how its matrix is held."""

    adapters: nn.ModuleDict
    adapting = True  # False: as if there were none

    def frozen(self) -> Tensor:
        """The matrix (N, K)."""
        return self.weight

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return (linear if self.onednn else F.linear)(x, self.weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = followed(x)  # once, for all products
        adapters = list(self.each()) if self.adapting else []
        stretched = any(adapter.magnitude is not None for adapter in adapters)
        y = self.product(x, None if stretched else self.bias)
        if adapters:
            y = y + self._by_rows([adapter.added(x) for adapter in adapters], y.new_zeros)
        if stretched:
            y = y * self._by_rows([self._stretch(adapter) for adapter in adapters], y.new_ones).to(y.dtype)
            y = y if self.bias is None else y + self.bias.to(y.dtype)
        return y

    def _by_rows(self, parts: list[Tensor], fill: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
        """What each adapter has of (..., N), side by side; other rows are filled."""
        together, row = [], 0
        for adapter, part in zip(self.each(), parts, strict=True):
            if adapter.start > row:
                together.append(fill((*part.shape[:-1], adapter.start - row)))
            together.append(part)
            row = adapter.stop
        if row < self.out_features:
            together.append(fill((*parts[0].shape[:-1], self.out_features - row)))
        return together[0] if len(together) == 1 else torch.cat(together, dim=-1)

    def _stretch(self, adapter: Adapter) -> Tensor:
        with torch.autocast(adapter.a.device.type, enabled=False), torch.no_grad():
            rows = self.frozen()[adapter.start : adapter.stop].float() + adapter.scale * (
                local(adapter.b) @ local(adapter.a)
            )
        return adapter.stretch(rows)

    def each(self) -> Iterator[Adapter]:
        """In the order of their rows."""
        for adapter in self.adapters.values():
            assert isinstance(adapter, Adapter)
            yield adapter

    @torch.no_grad()
    def merged(self) -> Tensor:
        """The matrix with the adapters in it, (N, K)."""
        whole = self.frozen().clone()
        for adapter in self.each():
            rows = slice(adapter.start, adapter.stop)
            whole[rows] = adapter.merged(whole[rows])
        return whole


def adapt(module: Linear, adapters: dict[str, Adapter], *, magnitudes: bool = False) -> None:
    """Give a frozen layer its adapters, in the order of their rows. Names of what it has stay as they are."""
    if type(module) is Linear:
        module.__class__ = AdaptedLinear
    assert isinstance(module, AdaptedLinear)
    module.adapters = nn.ModuleDict(adapters)
    for adapter in adapters.values() if magnitudes else ():
        rows = module.frozen()[adapter.start : adapter.stop]
        adapter.magnitude = nn.Parameter(torch.linalg.vector_norm(rows.detach(), dim=1))


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}
