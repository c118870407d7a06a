"""Pruning of a linear layer: the weights with the smallest scores are removed.

    magnitude   |w|                      the smallest of a matrix (arXiv 1506.02626)
    wanda       |w_ij| ||x_j||           the smallest of each row, x_j: the layer's j-th input (arXiv 2306.11695)

or, for 2:4, the smaller two of every four neighbours in a row: the pattern that NVIDIA's matrix units skip (Ampere and
later). A pruned matrix is held as a bitmap of the kept weights and their codes (`Quantized.pruned`). The native form of
2:4, two bits for each of two numbers in four, takes as many bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ironlaw.catalog.formats import Pruning
from ironlaw.errors import UserError


def pruning_mask(weight: Tensor, pruning: Pruning, input_norms: Tensor | None = None) -> Tensor:
    """Returns a bool mask (N, K) of the weights to keep. `input_norms` (K,): ||x_j||, for Wanda's score.

    Raises UserError for 2:4 if the row length is not a multiple of 4.
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
