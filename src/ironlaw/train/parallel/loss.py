"""The chunked cross-entropy of tensor parallel ranks, which have a part of the vocabulary each (arXiv 1909.08053).

Of every chunk's logits a rank computes those of its words. Two all-reduces of a few bytes per token tell all ranks the
largest logit, and the sum of exponentials and the target's own logit: then each knows the loss, and the gradient of its
logits.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ironlaw.model.loss import IGNORED, Vocabulary


class Divided(Vocabulary):
    """Words from `first` on, as many as the weight has rows; `group` has the others."""

    def __init__(self, first: int, group: dist.ProcessGroup) -> None:
        self.first, self.group = first, group

    def loss_and_gradient(self, logits: Tensor, targets: Tensor, wanted: bool) -> tuple[Tensor, Tensor | None]:
        logits = logits.float()  # (T, words here)
        most = logits.amax(-1)
        dist.all_reduce(most, dist.ReduceOp.MAX, self.group)
        logits.sub_(most.unsqueeze(1))
        word = targets - self.first
        here = (word >= 0) & (word < logits.shape[1])  # never of targets that do not count, which are negative
        place = word.clamp(0, logits.shape[1] - 1).unsqueeze(1)
        own = logits.gather(1, place).squeeze(1) * here
        exponentials = logits.exp_()
        together = torch.stack((exponentials.sum(-1), own))
        dist.all_reduce(together, group=self.group)
        total, own = together.unbind()
        loss = ((total.log() - own) * (targets != IGNORED)).sum()
        if not wanted:
            return loss, None
        gradient = exponentials.div_(total.unsqueeze(1))
        return loss, gradient.scatter_add_(1, place, -here.unsqueeze(1).to(gradient.dtype))
