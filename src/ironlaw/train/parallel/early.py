"""The gradient noise scale on many ranks (`train/noise_scale.py`): a step's first sequences looked at by themselves.

A step that estimates is computed in two parts, each as a step of its own: forward, backward, gradients reduced over the
ranks. The small batch is the first part of every replica: one micro-batch, or in a pipeline half of them, which fill
it. The gradient of the whole is the sum of both, so that the step is the same but for rounding; it takes one reduction
of the gradients more, and memory for another set of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from ironlaw.config import LayoutConfig, RunConfig
from ironlaw.errors import UserError
from ironlaw.plan.recipe import micro_batch_of
from ironlaw.train.noise_scale import NoiseScale

if TYPE_CHECKING:
    from ironlaw.train.parallel.step import DistributedStep


def first_part(config: RunConfig, layout: LayoutConfig) -> int:
    """Micro-batches of a replica's first part. UserError where there are too few to make two parts."""
    assert layout.dp is not None
    share = config.train.global_batch // layout.dp
    micro_batches = share // micro_batch_of(config, share)
    if layout.pp == 1 and micro_batches > 1:
        return 1
    if layout.pp > 1 and micro_batches % (2 * layout.pp) == 0:
        return micro_batches // 2
    needed = "two" if layout.pp == 1 else f"a multiple of {2 * layout.pp}"
    raise UserError(
        f"train.noise_scale_every compares a part of a step with the whole, and needs {needed} micro-batches per "
        f"replica, not {micro_batches}: lower train.micro_batch, or leave it out"
    )


class Noise:
    """`in_two` during a step that estimates, `observe` after it."""

    def __init__(self, step: DistributedStep, config: RunConfig) -> None:
        self.step, self.config, self.scale = step, config, NoiseScale()
        self.every = config.train.noise_scale_every
        self.count = first_part(config, step.ranks.config)
        self.small_square: float | None = None
        self._schedule: Any = None  # of a pipeline: for each part

    def due(self, number: int) -> bool:
        return (number + 1) % self.every == 0

    def in_two(self, of: Callable[[slice, Any], Tensor], loss_scale: float) -> Tensor:
        """`of(rows, schedule)` computes gradients and the loss of some of this replica's sequences."""
        step, rows = self.step, self.count * self.step.micro_batch
        if step.schedule is not None and self._schedule is None:
            self._schedule = step._schedule_of(self.count)
        loss = of(slice(rows), self._schedule)
        square = step.square()
        dist.all_reduce(square)
        self.small_square = float(square) * (step.micro_batches / self.count / loss_scale) ** 2
        kept = []
        for parameter in step.applied.parameters():
            if parameter.grad is not None:
                kept.append((parameter, parameter.grad.clone()))  # DDP reduces into the same storage again
                parameter.grad = None
        loss = loss + of(slice(rows, None), self._schedule)
        for parameter, gradient in kept:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return loss

    def observe(self, norm: float, overflowed: bool) -> None:
        """`norm` of the whole gradient, before it was clipped."""
        if self.small_square is not None and not overflowed:
            small = self.count * self.step.micro_batch * self.step.ranks.dp
            self.scale.observe(small, self.small_square, self.config.train.global_batch, norm**2)
        self.small_square = None
