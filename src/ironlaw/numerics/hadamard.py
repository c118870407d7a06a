"""Random Hadamard rotation: spreads an outlier over its block before rounding, and cancels in products.

Sylvester's H_n: H_2n = [[H_n, H_n], [H_n, -H_n]]. The numbers of a block of n are multiplied by random signs, then by
H_n / sqrt(n), which is orthogonal: two operands with the same rotation along the dimension that is summed over give the
same product (arXiv 2405.16406; for the weight gradient in NVFP4 training arXiv 2509.25149).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ironlaw.errors import UserError
from ironlaw.numerics.rounding import generator_of


@cache
def rotation(size: int, seed: int, device: torch.device) -> Tensor:
    """Returns H / sqrt(size) with a random sign per row, fp32 (size, size). UserError unless a power of two."""
    if size < 1 or size & (size - 1):
        raise UserError(f"a Hadamard matrix of {size}: its size must be a power of two")
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    signs = torch.randint(0, 2, (size, 1), generator=generator_of(seed, device), device=device) * 2 - 1
    return signs * matrix / size**0.5


def rotate(x: Tensor, size: int = 16, seed: int = 0) -> Tensor:
    """Rotates each group of `size` numbers in the last dimension of `x`, which must be a multiple of `size`."""
    return (x.unflatten(-1, (-1, size)) @ rotation(size, seed, x.device).to(x.dtype)).flatten(-2)
