"""Cross-entropy of the output layer in chunks of tokens, so that the logits of a whole micro-batch never exist.

One chunk's logits are made, turned into its loss and, in place, into their own gradient, and used up for the gradients
of the layer's input and weight: three products per chunk, as many FLOPs as with full logits. What waits for the
backward pass are those two gradients. (As in Liger's fused loss, arXiv 2410.10989, in plain PyTorch.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ironlaw.kernels.transpose import transposed
from ironlaw.model.autocast import autocast_dtype
from ironlaw.model.linear import onednn_product

IGNORED = -100  # as in PyTorch: a target that counts for nothing


class Vocabulary:
    """Whose logits a process has: of all words. `train/parallel/partition.py` has a part of them."""

    def loss_and_gradient(self, logits: Tensor, targets: Tensor, wanted: bool) -> tuple[Tensor, Tensor | None]:
        """Sum of the losses of the targets that count, from logits (T, V) that are used up; the gradient (T, V) of
        every row's loss, counted or not, if it is `wanted`. Both fp32."""
        logs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        del logits
        loss = F.nll_loss(logs, targets, ignore_index=IGNORED, reduction="sum")
        if not wanted:
            return loss, None
        gradient = logs.exp_()
        counted = (targets != IGNORED).unsqueeze(1)
        return loss, gradient.scatter_add_(1, targets.clamp(min=0).unsqueeze(1), -counted.to(gradient.dtype))


WHOLE_VOCABULARY = Vocabulary()


def chunked_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, chunk: int, reduction: str, onednn: bool = False,
    vocabulary: Vocabulary = WHOLE_VOCABULARY,
) -> Tensor:  # fmt: skip
    """Mean or sum over the targets that count, in fp32, from x (T, H) and weight (V, H), `chunk` tokens at a time.

    `onednn`: how fp32 products are computed. `vocabulary`: which words `weight` has rows for.
    """
    reduced = autocast_dtype(x)
    total = _Chunked.apply(x, weight, targets, chunk, reduced or weight.dtype, onednn and reduced is None, vocabulary)
    if reduction == "sum":
        return total
    return total / (targets != IGNORED).sum()


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, dtype: torch.dtype, onednn: bool,
        vocabulary: Vocabulary,
    ) -> Tensor:  # fmt: skip
        """Sum of the losses, fp32."""
        wanted = any(ctx.needs_input_grad[:2])
        with torch.autocast(x.device.type, enabled=False):
            cast = weight.detach().to(dtype)
            of_x = torch.empty(x.shape, dtype=dtype, device=x.device) if wanted else None
            # oneDNN's products of this shape come out transposed: they are added up so, and turned round once.
            turned = onednn and weight.shape[0] > weight.shape[1]
            shape = weight.shape[::-1] if turned else weight.shape
            trained = ctx.needs_input_grad[1]
            of_weight = torch.zeros(shape, dtype=torch.float32, device=x.device) if trained else None
            total = torch.zeros((), dtype=torch.float32, device=x.device)
            for first in range(0, len(x), chunk):
                rows = slice(first, first + chunk)
                total += _chunk(x[rows].to(dtype), cast, targets[rows], of_x, of_weight, rows, onednn, vocabulary)
            if turned and of_weight is not None:
                of_weight = transposed(of_weight)
        # Not as saved tensors: the backward pass must be able to let go of them, so that no copy becomes the gradient.
        ctx.gradients = of_x, of_weight
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight = ctx.gradients
        if _comes_again():
            return tuple(g if g is None else g * gradient for g in (of_x, of_weight)) + (None,) * 5
        # In place: they are used once. Their scale is known only now: the mean, accumulation, a loss scale.
        ctx.gradients = None
        return tuple(g if g is None else g.mul_(gradient) for g in (of_x, of_weight)) + (None,) * 5


def _comes_again() -> bool:
    """Whether this backward pass keeps its graph: pipelines that split it take gradients of inputs before weights'."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def _chunk(
    x: Tensor, weight: Tensor, targets: Tensor, of_x: Tensor | None, of_weight: Tensor | None, rows: slice,
    onednn: bool, vocabulary: Vocabulary,
) -> Tensor:  # fmt: skip
    """The chunk's loss; its gradients are written to `of_x[rows]` and added to `of_weight`."""
    # The logits stay an unnamed temporary, freed as soon as the loss has used them.
    loss, gradient = vocabulary.loss_and_gradient(
        onednn_product(x, weight) if onednn else x @ weight.t(), targets, of_x is not None
    )
    if of_x is None or gradient is None:
        return loss
    counted = (targets != IGNORED).unsqueeze(1)
    if not _all_count(counted):
        gradient.mul_(counted)
    gradient = gradient.to(x.dtype)
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


def _all_count(counted: Tensor) -> bool:
    """Known without waiting only on a CPU; elsewhere the product is taken in any case."""
    return counted.device.type == "cpu" and bool(counted.all())
