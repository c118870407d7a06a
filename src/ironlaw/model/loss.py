"""Cross-entropy of the output layer in chunks of tokens, so that the logits of a whole micro-batch never exist at once.

One chunk's logits are converted to its loss and, in place, to their own gradient, from which the gradients of the
layer's input and weight are computed: three products per chunk, with the FLOPs of full logits. Only these two gradients
are saved for the backward pass. (As in Liger's fused loss, arXiv 2410.10989, in plain PyTorch.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ironlaw.kernels.transpose import transposed
from ironlaw.model.linear import autocast_dtype, onednn_product

IGNORED = -100  # a target that does not count, as in PyTorch


def loss_and_gradient(logits: Tensor, targets: Tensor, wanted: bool) -> tuple[Tensor, Tensor | None]:
    """Return the sum of the losses of the targets that count, from logits (T, V), which are consumed, and if `wanted`
    the gradient (T, V) of every row's loss, counted or not. Both are fp32."""
    logs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    del logits
    loss = F.nll_loss(logs, targets, ignore_index=IGNORED, reduction="sum")
    if not wanted:
        return loss, None
    gradient = logs.exp_()
    counted = (targets != IGNORED).unsqueeze(1)
    return loss, gradient.scatter_add_(1, targets.clamp(min=0).unsqueeze(1), -counted.to(gradient.dtype))


OfLogits = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]
"""`loss_and_gradient`, or that of a vocabulary divided over ranks (`train/parallel/partition.py`)."""


def chunked_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, chunk: int, reduction: str, onednn: bool = False,
    of_logits: OfLogits = loss_and_gradient,
) -> Tensor:  # fmt: skip
    """Return the mean or sum over the targets that count, in fp32, from x (T, H) and weight (V, H).

    `chunk`: tokens at a time. `onednn`: oneDNN computes fp32 products. `of_logits`: of one chunk.
    """
    reduced = autocast_dtype(x)
    total = _Chunked.apply(x, weight, targets, chunk, reduced or weight.dtype, onednn and reduced is None, of_logits)
    if reduction == "sum":
        return total
    return total / (targets != IGNORED).sum()


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, dtype: torch.dtype, onednn: bool,
        of_logits: OfLogits,
    ) -> Tensor:  # fmt: skip
        """Return the sum of the losses in fp32."""
        wanted = any(ctx.needs_input_grad[:2])
        with torch.autocast(x.device.type, enabled=False):
            cast = _aligned(weight.detach().to(dtype))
            of_x = torch.empty(x.shape, dtype=dtype, device=x.device) if wanted else None
            # oneDNN computes products of this shape transposed: they are summed so, and transposed back once.
            turned = onednn and weight.shape[0] > weight.shape[1]
            shape = cast.shape[::-1] if turned else cast.shape
            trained = ctx.needs_input_grad[1]
            of_weight = torch.zeros(shape, dtype=torch.float32, device=x.device) if trained else None
            total = torch.zeros((), dtype=torch.float32, device=x.device)
            for first in range(0, len(x), chunk):
                rows = slice(first, first + chunk)
                total += _chunk(
                    x[rows].to(dtype), cast, len(weight), targets[rows], of_x, of_weight, rows, onednn, of_logits
                )
            if turned and of_weight is not None:
                of_weight = transposed(of_weight)
        of_weight = None if of_weight is None else of_weight[: len(weight)]
        # Not saved tensors: the backward pass must release them, so that they become the gradients without a copy.
        ctx.gradients = of_x, of_weight
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight = ctx.gradients
        # Whether the graph is retained, as in pipelines that separate gradients of inputs and weights.
        if torch._C._autograd._get_current_graph_task_keep_graph():
            return tuple(g if g is None else g * gradient for g in (of_x, of_weight)) + (None,) * 5
        # In place, as they are used once. Their scale (mean, accumulation, loss scale) is known only now.
        ctx.gradients = None
        return tuple(g if g is None else g.mul_(gradient) for g in (of_x, of_weight)) + (None,) * 5


def _aligned(weight: Tensor) -> Tensor:
    """On CUDA add rows of zeros to a vocabulary of odd size: products of rows that are not 16 bytes apart are slow."""
    if weight.is_cuda and len(weight) % 8:
        return F.pad(weight, (0, 0, 0, -len(weight) % 64))
    return weight


def _chunk(
    x: Tensor, weight: Tensor, size: int, targets: Tensor, of_x: Tensor | None, of_weight: Tensor | None, rows: slice,
    onednn: bool, of_logits: OfLogits,
) -> Tensor:  # fmt: skip
    """Return the chunk's loss; write its gradients to `of_x[rows]` and add them to `of_weight`. `size`: rows of
    `weight` that are no padding."""
    # The logits have no name, so that they are freed as soon as the loss has used them.
    loss, gradient = of_logits(
        onednn_product(x, weight) if onednn else (x @ weight.t())[:, :size], targets, of_x is not None
    )
    if of_x is None or gradient is None:
        return loss
    gradient = _of_counted(gradient, (targets != IGNORED).unsqueeze(1), len(weight), x.dtype)
    if onednn:
        of_x[rows] = onednn_product(gradient, weight.t())
    else:
        torch.mm(gradient, weight, out=of_x[rows])
    if of_weight is None:  # frozen
        return loss
    if onednn:
        one, other = (x, gradient) if of_weight.shape != weight.shape else (gradient, x)
        of_weight += onednn_product(transposed(one), other.t())
    elif x.dtype is torch.float32:
        of_weight.addmm_(gradient.t(), x)
    else:
        of_weight += gradient.t() @ x
    return loss


def _of_counted(gradient: Tensor, counted: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return the gradient (T, width) in the type of the products: 0 where no target counts, and in the padding."""
    if gradient.is_cuda:  # in one pass, without asking the device whether all count
        whole = gradient.new_empty(len(gradient), width, dtype=dtype)
        whole[:, gradient.shape[1] :] = 0
        torch.mul(gradient, counted, out=whole[:, : gradient.shape[1]])
        return whole
    if not bool(counted.all()):
        gradient.mul_(counted)
    return gradient.to(dtype)
