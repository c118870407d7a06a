"""Frozen linear layers with a quantised matrix that is dequantised for each product (QLoRA, arXiv 2305.14314).

Scales are quantised to 8 bits: their mean is subtracted, and 256 of the differences share an fp32 scale (the paper's
double quantisation, with int8 instead of its 8-bit float). nf4 takes 4 + 8/64 + 32/(64 x 256) = 4.127 bits per weight.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ironlaw.errors import UserError
from ironlaw.model.adapters import AdaptedLinear, LayerAdapters
from ironlaw.model.frozen import DEQUANTISED, SCALES_BLOCK
from ironlaw.model.linear import Linear, become
from ironlaw.numerics.quantized import Quantized, quantize
from ironlaw.numerics.rounding import decode


class FrozenProduct(torch.autograd.Function):
    """A product that saves no tensor: backward dequantises the matrix again, and no gradient needs x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FrozenLinear, bias: Tensor | None) -> Tensor:
        ctx.layer, ctx.dtype = layer, x.dtype
        return F.linear(x, layer.frozen(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (gradient @ ctx.layer.frozen(gradient.dtype)).to(ctx.dtype), None, None


class FrozenLinear(AdaptedLinear):
    """`AdaptedLinear` without `weight`: codes and scales are buffers, which are not saved in checkpoints."""

    codes: Tensor  # (rows, bytes of a row)
    scale_codes: Tensor  # (rows, blocks of a row)
    group_scales: Tensor  # one for 256 scales, in the order of the whole matrix
    scale_mean: Tensor  # over all scales of the whole matrix
    group_rows: Tensor | None  # indices of the local rows in the whole matrix; None: all
    _first_block = 0
    _row_blocks: int  # blocks of a whole row
    _form: tuple[Quantized, Quantized]  # codes and scales, without their tensors

    def frozen(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the matrix, dequantised in chunks of rows: intermediate tensors take several times its bytes."""
        rows, columns = self._form[0].shape
        step = max(1, DEQUANTISED // columns)
        pieces = (self._rows(slice(row, row + step)).to(dtype) for row in range(0, rows, step))
        if rows <= step:
            return next(pieces)
        found = torch.empty(rows, columns, dtype=dtype, device=self.codes.device)
        for row, piece in zip(range(0, rows, step), pieces, strict=True):
            found[row : row + step] = piece
        return found

    def _rows(self, chosen: slice) -> Tensor:
        (form, scales_form), scale_codes = self._form, self.scale_codes[chosen]
        (rows, blocks), device = scale_codes.shape, self.codes.device
        whole_rows = torch.arange(len(self.scale_codes), device=device) if self.group_rows is None else self.group_rows
        here = torch.arange(self._first_block, self._first_block + blocks, device=device)
        group = (whole_rows[chosen, None] * self._row_blocks + here) // SCALES_BLOCK
        scales = decode(scale_codes, scales_form.format.element) * self.group_scales[group] + self.scale_mean
        shape = torch.Size((rows, form.shape[1]))
        return replace(form, shape=shape, codes=self.codes[chosen], scales=scales).dequantize()

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor = FrozenProduct.apply(x, self, bias)
        return product

    def shard(self, rows: Tensor | None, columns: slice) -> None:
        """Keep only these rows (None: all) and columns of the whole matrix. Raises UserError for part of a block."""
        form, scales_form = self._form
        assert form.block is not None
        block, bits = form.block[1], form.format.element.bits
        if columns.start % block or (columns.stop % block and columns.stop != form.shape[1]):
            raise UserError(
                f"layout.tp leaves a rank {columns.stop - columns.start} columns of a matrix whose {form.format.name} "
                f"blocks have {block}: use a tp that leaves a multiple of {block}, or zero = 3"
            )
        chosen = torch.arange(form.shape[0]) if rows is None else rows
        self._first_block = columns.start // block
        self.codes = self.codes[chosen, columns.start * bits // 8 : -(-columns.stop // block) * block * bits // 8]
        self.scale_codes = self.scale_codes[chosen, self._first_block : -(-columns.stop // block)]
        self.group_rows = chosen
        self._form = replace(form, shape=torch.Size((len(chosen), columns.stop - columns.start))), scales_form


@torch.no_grad()
def quantize_frozen(module: Linear) -> FrozenLinear:
    """Quantises the module's matrix in place to nf4."""
    whole = quantize(module.weight, "nf4")
    assert whole.scales is not None
    mean = whole.scales.mean()
    scales = quantize((whole.scales - mean).flatten().unsqueeze(0), "int8", block=(1, SCALES_BLOCK))
    assert scales.scales is not None
    module = become(module, FrozenLinear)
    module.adapters = LayerAdapters()
    del module._parameters["weight"]
    codes = scales.codes.flatten()[: whole.scales.numel()].view(whole.scales.shape).clone()
    tensors = {
        "codes": whole.codes, "scale_codes": codes, "group_scales": scales.scales.flatten(), "scale_mean": mean
    }  # fmt: skip
    for part, tensor in tensors.items():
        module.register_buffer(part, tensor, persistent=False)
    module.register_buffer("group_rows", None, persistent=False)
    module._row_blocks = whole.scales.shape[1]
    nothing = torch.empty(0)
    module._form = replace(whole, codes=nothing, scales=None), replace(scales, codes=nothing, scales=None)
    return module
