"""GPTQ (arXiv 2210.17323): weights are rounded column by column; later columns compensate each column's error.

For a layer y = x W^T with x (tokens, K), rounding W (N, K) to Q costs |x (W - Q)^T|^2 = tr((W - Q) H (W - Q)^T),
H = x^T x. With U the upper Cholesky factor of the inverse of H, the error e_j = (w_j - q_j) / U_jj of column j is best
compensated by subtracting e_j U_jk from every later column k. A block's scales are computed from the updated weights
when its first column is reached. Pruned weights are rounded to 0, and their errors compensated like others (SparseGPT,
arXiv 2301.00774, for a given mask).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ironlaw.catalog.formats import NumberFormat
from ironlaw.errors import UserError
from ironlaw.numerics.quantized import Quantized, block_scales, resolved_block, scaled_up
from ironlaw.numerics.rounding import round_to

DAMPING = 0.01  # share of the mean of H's diagonal that is added to the diagonal, as in the paper
COLUMNS = 128  # columns whose errors are applied together to the columns after them: same result, fewer products


def check_gptq(format: NumberFormat) -> None:
    """Raises UserError for a format without block scales along the rows of a weight."""
    block = format.block_of(weight=True)
    if block is None or block[0] != 1:
        raise UserError(f"gptq takes formats whose scales run along rows, and {format.name}'s do not: use rtn")


def gptq(weight: Tensor, second_moment: Tensor, format: NumberFormat, kept: Tensor | None = None) -> Quantized:
    """Quantises `weight` (N, K) to a format that `check_gptq` accepts, for inputs with the second moment x^T x (K, K).

    kept: mask of the weights that are not pruned, bool (N, K); the others become 0.
    """
    check_gptq(format)
    matrix = weight.detach().float().clone()
    rows, columns = matrix.shape
    block = resolved_block(format, matrix)
    assert block is not None
    factor = _inverse_factor(second_moment, matrix)
    width = block[1]
    tensor_scale = None
    if format.tensor_scale:  # from the original weights: the updated ones are only known block by block
        tensor_scale = block_scales(matrix.unflatten(1, (1, -1)).unflatten(0, (-1, 1)), format)[2]
    padded = torch.nn.functional.pad(matrix, (0, -columns % width))
    mask = torch.nn.functional.pad(torch.ones_like(matrix) if kept is None else kept.float(), (0, -columns % width))
    values, codes = torch.zeros_like(padded), []
    for first in range(0, columns, max(COLUMNS, width)):
        last = min(first + max(COLUMNS, width), columns)
        errors = torch.zeros(rows, last - first)
        for column in range(first, last):
            if column % width == 0:
                part = (padded * mask)[:, column : column + width]
                scale, scale_codes, _ = block_scales(part[:, None, None, :], format, tensor_scale)
                step = scaled_up(scale, tensor_scale)
                codes.append(scale_codes)
            here = padded[:, column]
            values[:, column] = round_to(here / step[:, 0], format.element) * mask[:, column]
            error = (here - values[:, column] * step[:, 0]) / factor[column, column]
            padded[:, column:last] -= error[:, None] * factor[column, column:last]
            errors[:, column - first] = error
        padded[:, last:columns] -= errors @ factor[first:last, last:]
    return Quantized.of(format, weight.shape, values, torch.cat(codes, 1), tensor_scale, block)


def _inverse_factor(second_moment: Tensor, matrix: Tensor) -> Tensor:
    """Returns U, where U^T U is the inverse of the damped H; sets the weights of inputs that are always 0 to 0."""
    damped = second_moment.double().clone()
    diagonal = damped.diagonal()
    unused = diagonal == 0
    matrix[:, unused] = 0.0
    diagonal[unused] = 1.0
    diagonal += DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).float()
