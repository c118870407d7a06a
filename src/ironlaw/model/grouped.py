"""Grouped products of rows with their experts' matrices, and the moves of rows to experts and back.

They are autograd functions because plain autograd is wasteful: the gradient of a slice of stacked weights has the size
of the whole stack, and that of an indexed read is a scatter-add in no fixed order. These functions only read by index,
so that results are reproducible, on CUDA too, and save no more than the backward pass needs.

Shapes: N tokens, k choices per token, R rows of work, E experts, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ironlaw.model.linear import capability, onednn_product, onednn_weight_gradient

Ends = list[int] | Tensor
"""End of the rows of each expert: a list on the host, or a tensor on the device for kernels that read it there."""


def group_ends(counts: Tensor, rows: Tensor, weight: Tensor | None) -> Ends:
    """Convert `counts` (E,) to row ends. Tensors without values (meta, fake) count as an even load. `weight`: the
    stacked matrices; None where they are not in memory as such."""
    if weight is not None and _has_grouped_kernel(rows, weight):
        return counts.cumsum(0).to(torch.int32)  # stays on the device: no synchronisation
    if counts.is_meta or isinstance(counts, FakeTensor):
        return [rows.shape[0] * (expert + 1) // counts.numel() for expert in range(counts.numel())]
    return counts.cumsum(0).tolist()


def _has_grouped_kernel(rows: Tensor, weight: Tensor) -> bool:
    """Whether PyTorch has a grouped kernel: bf16, rows in multiples of 16 bytes, from Hopper on (else it loops)."""
    return (
        rows.dtype is torch.bfloat16
        and rows.shape[1] % 8 == 0
        and weight.shape[1] % 8 == 0
        and (capability(rows.device) or (0, 0)) >= (9, 0)
    )


PART, TERMS = 64, 16
"""oneDNN generates a kernel for each new number of rows (0.8 to 1.4 ms for 512 x 2048 on two cores, where 512 rows take
3 to 4.5) and caches 1,024; an expert has another number in every step. So rows are split into a multiple of `PART` and
a rest, which have few different sizes, and the summed rows of weight gradients into a multiple of `TERMS` and a rest
for MKL. Without this, a step of 8 experts in 4 layers with uneven loads was 11% slower."""


def _product(rows: Tensor, weight: Tensor, out: Tensor, onednn: bool) -> None:
    """Write rows weight^T into `out` (r, N), for the rows (r, K) of one expert and weight (N, K)."""
    if not onednn or not len(rows):
        torch.mm(rows, weight.t(), out=out)
        return
    middle = len(rows) - len(rows) % PART
    for part in (slice(middle), slice(middle, None)):
        if len(rows[part]):
            out[part] = onednn_product(rows[part], weight)


def _weight_gradient(gradient: Tensor, rows: Tensor, out: Tensor, onednn: bool) -> None:
    """Write gradient^T rows into `out` (N, K), for gradient (r, N) and rows (r, K)."""
    if not onednn or not len(rows):
        torch.mm(gradient.t(), rows, out=out)
        return
    whole = rows.shape[0] - rows.shape[0] % TERMS
    if whole:
        out.copy_(onednn_weight_gradient(gradient[:whole], rows[:whole]))
    if whole < rows.shape[0]:
        out.addmm_(gradient[whole:].t(), rows[whole:], beta=1.0 if whole else 0.0)


class GroupedProduct(torch.autograd.Function):
    """(R, in) rows sorted by expert, (E, out, in) weights -> (R, out). Frozen weights do not keep the rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Ends, onednn: bool = False) -> Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight)
        ctx.ends, ctx.onednn = ends, onednn
        if isinstance(ends, Tensor):
            return torch._grouped_mm(rows, weight.transpose(1, 2), offs=ends)
        out = rows.new_empty(rows.shape[0], weight.shape[1])
        for span, matrix in zip(spans(ends), weight, strict=True):
            _product(rows[span], matrix, out[span], onednn)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        rows, weight = ctx.saved_tensors
        gradient, ends = gradients[0].contiguous(), ctx.ends
        if isinstance(ends, Tensor):
            of_rows = torch._grouped_mm(gradient, weight, offs=ends)
            return of_rows, None if rows is None else torch._grouped_mm(gradient.t(), rows, offs=ends), None, None
        of_rows = gradient.new_empty(gradient.shape[0], weight.shape[2])
        of_weight = None if rows is None else torch.empty_like(weight)
        for expert, span in enumerate(spans(ends)):
            _product(gradient[span], weight[expert].t(), of_rows[span], ctx.onednn)
            if of_weight is not None:
                _weight_gradient(gradient[span], rows[span], of_weight[expert], ctx.onednn)
        return of_rows, of_weight, None, None


class Dispatch(torch.autograd.Function):
    """(N, H) tokens -> (R, H): row r is a copy of token `source[r]` // k; `place` (N, k) are the rows of each token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, place: Tensor, kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(place, kept)
        return x.index_select(0, source // place.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        place, kept = ctx.saved_tensors
        total: Tensor | None = None
        for choice in range(place.shape[1]):
            part = gradients[0].index_select(0, place[:, choice])
            if kept is not None:
                part *= kept[:, choice, None]
            total = part if total is None else total.add_(part)
        assert total is not None
        return total, None, None, None


class Combine(torch.autograd.Function):
    """(R, H) rows, (N, k) weights -> (N, H): the weighted sum of each token's rows. Dropped choices have weight 0."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, source: Tensor, place: Tensor, kept: Tensor | None,
        filled: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(rows, weights, source, place, kept, filled)
        if kept is not None:
            weights = weights * kept
        weights = weights.to(rows.dtype)
        out = rows.new_zeros(place.shape[0], rows.shape[1])
        for choice in range(place.shape[1]):
            out.addcmul_(rows.index_select(0, place[:, choice]), weights[:, choice, None])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        rows, weights, source, place, kept, filled = ctx.saved_tensors
        gradient = gradients[0]
        of_weights = torch.empty_like(weights)
        for choice in range(place.shape[1]):
            torch.sum(gradient * rows.index_select(0, place[:, choice]), dim=1, out=of_weights[:, choice])
        if kept is not None:
            of_weights *= kept
        of_row = weights.reshape(-1).index_select(0, source)  # weight of each row's choice
        if filled is not None:
            of_row *= filled  # rows without a choice have weight 0
        of_rows = gradient.index_select(0, source // place.shape[1])
        of_rows *= of_row.to(rows.dtype)[:, None]
        return of_rows, of_weights, None, None, None, None


class RowBias(torch.autograd.Function):
    """Add the expert's bias (E, N) to each of the rows (R, N), sorted by expert, in place."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, ends: Ends) -> Tensor:
        ctx.ends = ends
        if isinstance(ends, Tensor):
            number = torch.arange(rows.shape[0], device=rows.device)
            rows += bias[torch.searchsorted(ends, number, right=True).clamp(max=bias.shape[0] - 1)]
        else:
            for span, of_expert in zip(spans(ends), bias, strict=True):
                rows[span] += of_expert
        ctx.mark_dirty(rows)
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (gradient,) = gradients
        if not ctx.needs_input_grad[1]:
            return gradient, None, None
        if isinstance(ctx.ends, Tensor):
            lengths = torch.diff(ctx.ends, prepend=ctx.ends.new_zeros(1)).long()
            of_bias = torch.segment_reduce(gradient.float(), "sum", lengths=lengths).to(gradient.dtype)
        else:
            of_bias = torch.stack([gradient[span].sum(0) for span in spans(ctx.ends)])
        return gradient, of_bias, None


def spans(ends: list[int]) -> list[slice]:
    return list(map(slice, [0, *ends[:-1]], ends))


LIMIT, SLOPE = 7.0, 1.702


class ClampedSwiGLU(torch.autograd.Function):
    """gate sigmoid(1.702 gate) (up + 1), with gate at most 7 and up within -7 and 7 (gpt-oss). Saves both inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        gate = gate.clamp(max=LIMIT)
        return gate * torch.sigmoid(SLOPE * gate) * (up.clamp(-LIMIT, LIMIT) + 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,), (gate, up) = gradients, ctx.saved_tensors
        cut, wide = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        slope = torch.sigmoid(SLOPE * cut)
        of_gate = gradient * (wide + 1) * slope * (1 + SLOPE * cut * (1 - slope)) * (gate <= LIMIT)
        return of_gate, gradient * cut * slope * (up.abs() <= LIMIT)
