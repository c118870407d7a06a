"""Which weights of a linear layer may go, and how those that stay lie in a file.

    magnitude   |w|                      the smallest of a matrix (arXiv 1506.02626)
    wanda       |w_ij| ||x_j||           the smallest of each row, x_j: the layer's j-th input (arXiv 2306.11695)

or, of 2:4, the smaller two of every four neighbours in a row: the pattern that NVIDIA's matrix units skip (Ampere and
later). What stays is held as one bit a weight, which says whether it does, and the codes of those that do. 2:4's own
form, two bits for each of two numbers in four, takes as many.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ironlaw.catalog.formats import NumberFormat
from ironlaw.errors import UserError
from ironlaw.numerics.packing import pack, unpack
from ironlaw.numerics.quantized import Quantized
from ironlaw.numerics.rounding import encode

Score = Literal["magnitude", "wanda"]


@dataclass(frozen=True)
class Pruning:
    """`share` of a matrix's weights goes, or with `of_four` so many of every four neighbours."""

    share: float
    of_four: int = 0

    def __str__(self) -> str:
        return f"{4 - self.of_four}:4" if self.of_four else f"pruned={100 * self.share:g}%"


def kept_weights(weight: Tensor, pruning: Pruning, input_norms: Tensor | None = None) -> Tensor:
    """Bool (N, K): the weights (N, K) that stay. `input_norms` (K,): ||x_j||, for Wanda's score; else by magnitude.

    UserError where 2:4 does not divide the rows.
    """
    score = weight.detach().float().abs()
    rows, columns = score.shape
    by_row = input_norms is not None
    if input_norms is not None:
        score = score * input_norms
    if pruning.of_four:
        if columns % 4:
            raise UserError(f"2:4 needs rows of a multiple of 4 weights, these have {columns}: use pruned=50%")
        groups, count = score.reshape(-1, 4), pruning.of_four
    else:
        groups = score if by_row else score.reshape(1, -1)
        count = round(pruning.share * groups.shape[1])
    gone = groups.topk(count, dim=1, largest=False, sorted=False).indices
    return torch.ones_like(groups, dtype=torch.bool).scatter_(1, gone, False).reshape(rows, columns)


@dataclass(frozen=True)
class Sparse:
    """`held`, whose codes are of the weights that stay only, one row of them; `bitmap`: which ones, 8 to a byte."""

    held: Quantized
    bitmap: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.held.shape

    @property
    def format(self) -> NumberFormat:
        return self.held.format

    @property
    def bytes(self) -> int:
        return self.held.bytes + self.bitmap.numel()

    def dequantize(self) -> Tensor:
        return self.dense().dequantize()

    def dense(self) -> Quantized:
        """With the codes of all weights, pruned ones 0."""
        held, (rows, columns) = self.held, self.held.matrix_shape
        kept = unpack(self.bitmap, 1, rows * columns).view(rows, columns).bool()
        padded, element = torch.nn.functional.pad(kept, (0, held.row_codes - kept.shape[1])), held.format.element
        codes = encode(torch.zeros(1), element).expand(padded.shape).clone()
        codes[padded] = unpack(held.codes, element.bits, int(kept.sum()))[0]
        return replace(held, codes=pack(codes, element.bits))


def sparse(held: Quantized, kept: Tensor) -> Sparse:
    """`held`, whose pruned weights are 0, without their codes. `kept`: bool (N, K)."""
    bits = held.format.element.bits
    codes = unpack(held.codes, bits, held.row_codes)[:, : kept.shape[1]]
    return Sparse(replace(held, codes=pack(codes[kept][None], bits)), pack(kept.flatten().to(torch.uint8), 1))
