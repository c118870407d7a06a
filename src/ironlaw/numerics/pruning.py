"""Which weights of a linear layer may go.

    magnitude   |w|                      the smallest of a matrix (arXiv 1506.02626)
    wanda       |w_ij| ||x_j||           the smallest of each row, x_j: the layer's j-th input (arXiv 2306.11695)

or, of 2:4, the smaller two of every four neighbours in a row: the pattern that NVIDIA's matrix units skip (Ampere and
later). What stays is held as one bit a weight, which says whether it does, and the codes of those that do
(`Quantized.pruned`). 2:4's own form, two bits for each of two numbers in four, takes as many.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ironlaw.catalog.formats import Pruning
from ironlaw.errors import UserError


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
