"""Frozen layers with a quantised matrix that is dequantised for each product (QLoRA, arXiv 2305.14314): linear layers,
and the stacked matrices of experts, one expert at a time.

Scales are quantised to 8 bits: their mean is subtracted, and 256 of the differences share an fp32 scale (the paper's
double quantisation, with int8 instead of its 8-bit float). nf4 takes 4 + 8/64 + 32/(64 x 256) = 4.127 bits per weight.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ironlaw.errors import UserError
from ironlaw.model.adapters import AdaptedLinear, LayerAdapters
from ironlaw.model.frozen import DEQUANTISED, SCALES_BLOCK
from ironlaw.model.grouped import Ends, group_ends, spans
from ironlaw.model.linear import Linear, become
from ironlaw.model.moe import ExpertLinear
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


class FrozenMatrix(nn.Module):
    """Part of a layer in the place of `weight`: codes and scales are buffers, which are not saved in checkpoints."""

    codes: Tensor  # (rows, bytes of a row)
    scale_codes: Tensor  # (rows, blocks of a row)
    group_scales: Tensor  # one for 256 scales, in the order of the whole matrix
    scale_mean: Tensor  # over all scales of the whole matrix
    group_rows: Tensor | None  # indices of the local rows in the whole matrix; None: all
    _first_block = 0
    _row_blocks: int  # blocks of a whole row
    _form: tuple[Quantized, Quantized]  # codes and scales, without their tensors

    def frozen(self, dtype: torch.dtype = torch.float32, first: int = 0, last: int | None = None) -> Tensor:
        """Returns rows `first` to `last` of the matrix, by default all, dequantised in chunks: intermediate tensors
        take several times their bytes."""
        rows, columns = self._form[0].shape
        last = rows if last is None else last
        step = max(1, DEQUANTISED // columns)
        pieces = (self._rows(slice(row, min(row + step, last))).to(dtype) for row in range(first, last, step))
        if last - first <= step:
            return next(pieces)
        found = torch.empty(last - first, columns, dtype=dtype, device=self.codes.device)
        for row, piece in zip(range(0, last - first, step), pieces, strict=True):
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


class FrozenLinear(FrozenMatrix, AdaptedLinear):
    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor = FrozenProduct.apply(x, self, bias)
        return product


class FrozenGroupedProduct(torch.autograd.Function):
    """(R, in) rows sorted by expert -> (R, out). It saves no tensor, and dequantises the experts that have rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, layer: FrozenExperts, ends: list[int]) -> Tensor:
        ctx.layer, ctx.ends = layer, ends
        out = rows.new_empty(rows.shape[0], layer.outputs)
        for expert, span in enumerate(spans(ends)):
            if span.stop > span.start:
                torch.mm(rows[span], layer.matrix(expert, rows.dtype).t(), out=out[span])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = gradient.new_empty(gradient.shape[0], ctx.layer.inputs)
        for expert, span in enumerate(spans(ctx.ends)):
            if span.stop > span.start:
                torch.mm(gradient[span], ctx.layer.matrix(expert, gradient.dtype), out=found[span])
        return found, None, None


class FrozenExperts(FrozenMatrix, ExpertLinear):
    """`ExpertLinear` whose matrices, one below the other, are quantised."""

    outputs: int

    @property
    def inputs(self) -> int:
        return self._form[0].shape[1]

    def matrix(self, expert: int, dtype: torch.dtype) -> Tensor:
        return self.frozen(dtype, expert * self.outputs, (expert + 1) * self.outputs)

    def ends(self, counts: Tensor, rows: Tensor) -> Ends:
        return group_ends(counts, rows, None)

    def product(self, rows: Tensor, ends: Any) -> Tensor:
        if rows.dim() == 3:
            experts, each, _ = rows.shape
            own = [each * (expert + 1) for expert in range(experts)]
            return self.product(rows.flatten(0, 1), own).view(experts, each, -1)
        found: Tensor = FrozenGroupedProduct.apply(rows, self, ends)
        return found


@torch.no_grad()
def quantize_frozen(module: Linear | ExpertLinear) -> None:
    """Quantises the module's matrices in place to nf4."""
    whole = quantize(module.weight.flatten(0, -2), "nf4")
    assert whole.scales is not None
    mean = whole.scales.mean()
    scales = quantize((whole.scales - mean).flatten().unsqueeze(0), "int8", block=(1, SCALES_BLOCK))
    assert scales.scales is not None
    frozen: FrozenMatrix
    if isinstance(module, ExpertLinear):
        outputs = module.weight.shape[1]
        frozen = become(module, FrozenExperts)
        frozen.outputs = outputs
    else:
        frozen = become(module, FrozenLinear)
        frozen.adapters = LayerAdapters()
    del frozen._parameters["weight"]
    codes = scales.codes.flatten()[: whole.scales.numel()].view(whole.scales.shape).clone()
    tensors = {
        "codes": whole.codes, "scale_codes": codes, "group_scales": scales.scales.flatten(), "scale_mean": mean
    }  # fmt: skip
    for part, tensor in tensors.items():
        frozen.register_buffer(part, tensor, persistent=False)
    frozen.register_buffer("group_rows", None, persistent=False)
    frozen._row_blocks = whole.scales.shape[1]
    nothing = torch.empty(0)
    frozen._form = replace(whole, codes=nothing, scales=None), replace(scales, codes=nothing, scales=None)
