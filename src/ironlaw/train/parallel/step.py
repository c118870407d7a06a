"""Forward and backward of one step on a rank, and what all ranks then agree on: loss and gradient norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from ironlaw.config import RunConfig
from ironlaw.data.batch import IGNORED
from ironlaw.ledger import Phase
from ironlaw.observe.clock import StepClock
from ironlaw.plan.recipe import micro_batch_of
from ironlaw.train.parallel import early, pipeline, waiting
from ironlaw.train.parallel.apply import Applied
from ironlaw.train.parallel.place import SharedPlace
from ironlaw.train.precision import LossScale
from ironlaw.workload.pipeline import V_SHAPED, rank_of_last


class DistributedStep:
    """`losses = step.forward_backward(inputs, targets, samples)`, then `loss, norm = step.agree(losses, clip)`."""

    def __init__(
        self, applied: Applied, config: RunConfig, autocast: Callable[[], Any] = nullcontext, precision: str = "fp32"
    ) -> None:
        self.applied, self.ranks, self.config, self.autocast = applied, applied.ranks, config, autocast
        layout = self.ranks.config
        self.share = config.train.global_batch // self.ranks.dp  # sequences of this replica
        self.micro_batch = micro_batch_of(config, self.share)
        self.micro_batches = self.share // self.micro_batch
        self.schedule = None
        self._clock = StepClock()
        if layout.pp > 1:
            self.schedule = self._schedule_of(self.micro_batches)
        self.noise = early.Noise(self, config) if config.train.noise_scale_every else None
        self.scale = LossScale(self.ranks.device, precision, config.scaler)
        # Ranks over which gradients are averaged.
        self.averaging = self.ranks.dp // self.ranks.sites * layout.cp
        self._norms = [0.0] * self.ranks.sites
        self.overflowed = False  # of the last step's gradient: the weights stay as they are
        self.has_loss = applied.stages - 1 in applied.plain
        if applied.compressor is not None:
            (part,) = applied.parts.values()
            tokens = torch.zeros(self.micro_batch, config.sequence, dtype=torch.long, device=self.ranks.device)
            applied.compressor.settle(part, self.local(tokens), self.local(tokens))  # type: ignore[arg-type]
        self._copies = {id(p): self._copies_of(p) for p in applied.parameters()}

    # -- forward and backward --------------------------------------------------------------------------------

    def local(self, tokens: Tensor) -> Tensor:
        """This rank's positions of sequences (B, S)."""
        place = next(iter(self.applied.plain.values())).place
        if not isinstance(place, SharedPlace) or place.cp == 1:
            return tokens
        return tokens[:, place.positions(tokens.shape[1])].contiguous()

    def samples(self, step: int) -> Tensor | None:
        """Numbers of this replica's sequences within the run, where dropout is drawn by them."""
        if not self.config.model.dropout:
            return None
        first = step * self.config.train.global_batch + self.ranks.index("dp") * self.share
        return torch.arange(first, first + self.share)

    def _schedule_of(self, micro_batches: int) -> Any:
        return pipeline.build_schedule(
            self.applied.parts, self.ranks, micro_batches, self.micro_batch, self.config.sequence,
            self.config.model.hidden, self.autocast, lambda phase: self._clock.phase(phase),
        )  # fmt: skip

    def forward_backward(
        self, inputs: Tensor, targets: Tensor, samples: Tensor | None = None, clock: StepClock | None = None,
        documents: Tensor | None = None, estimating: bool = False,
    ) -> Tensor:  # fmt: skip
        """Gradients of the mean loss over the targets of the global batch that count; returns this rank's part of it,
        of which the mean over ranks is the whole (zero without a loss).

        `clock` is told of forward and backward, which a pipeline mixes. `documents` (B, S) as `Batch` has them.
        `estimating`: the gradient of the first micro-batches is looked at by itself (`self.noise`).
        """
        clock = self._clock = clock or StepClock()
        inputs, targets = self.local(inputs), self.local(targets)
        by_row = {"samples": samples, "documents": documents}
        factor: Tensor | float = 1.0 / self.micro_batches
        more: dict[str, Any] = {}
        if documents is not None or self.config.data.packing == "best_fit":
            with clock.phase(Phase.COMMUNICATION):
                weight, by_row["balance"] = self._weights(targets)
            factor = weight * (factor * self.micro_batches)
            more["reduction"] = "sum"
        scale = self._loss_scale()
        factor = factor * scale
        rows = {name: tensor for name, tensor in by_row.items() if tensor is not None}

        def of(some: slice, schedule: Any) -> Tensor:
            here = {name: tensor[some] for name, tensor in rows.items()}
            with loss_parallel() if self.ranks.config.tp > 1 else nullcontext():
                if schedule is not None:
                    loss = self._pipelined(schedule, inputs[some], targets[some], factor, here | more)
                else:
                    loss = self._plain(inputs[some], targets[some], factor, here, more, clock)
            with clock.phase(Phase.BACKWARD if self.ranks.device.type == "cpu" else Phase.COMMUNICATION):
                self._finish_gradients()
            return loss

        if estimating and self.noise is not None:
            return self.noise.in_two(of, scale) / scale
        return of(slice(None), self.schedule) / scale

    def _loss_scale(self) -> float:
        """What this rank's loss is multiplied with. Its gradients are averaged with others', those of one process added
        up: divided by their number, they have its size, and overflow where it does."""
        return self.scale.scaler.get_scale() / self.averaging if self.scale.enabled else 1.0

    def _weights(self, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where rows have unequal numbers of targets: what a sum of losses is multiplied with, and for every row what
        a balancing loss counts beside that. The mean over ranks then is the mean over targets.
        """
        counted = (targets != IGNORED).view(self.micro_batches, -1).sum(1)
        total, ranks = counted.sum(), self.averaging
        for dimension in ("replicate", "shard"):
            if self.ranks.size_of(dimension) > 1:
                dist.all_reduce(total, group=self.ranks.group(dimension))
        if self.config.model.moe is None:
            return ranks / total, None
        group = self.ranks.groups.get("micro_batch")
        if group is not None:
            dist.all_reduce(counted, group=group)
            counted = counted / group.size()
        return ranks / total, counted.float().repeat_interleave(self.micro_batch)

    def _plain(
        self, inputs: Tensor, targets: Tensor, factor: Tensor | float, by_row: dict[str, Tensor],
        more: dict[str, Any], clock: StepClock,
    ) -> Tensor:  # fmt: skip
        (part,) = self.applied.parts.values()
        losses = []
        count = len(inputs) // self.micro_batch
        for index in range(count):
            rows = slice(index * self.micro_batch, (index + 1) * self.micro_batch)
            with self._synchronised(part, index == count - 1):
                with clock.phase(Phase.FORWARD), self.autocast():
                    here = {name: tensor[rows] for name, tensor in by_row.items()}
                    loss = part(inputs[rows], targets[rows], **here, **more)
                    loss = (loss.full_tensor() if isinstance(loss, DTensor) else loss) * factor
                with clock.phase(Phase.BACKWARD):
                    loss.backward()
                    waiting.backward_done()
            losses.append(loss.detach())
            del loss
        return torch.stack(losses).sum()

    def _synchronised(self, part: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Gradients are reduced with the last micro-batch; ZeRO 2 and 3 do not hold whole ones, and reduce each."""
        if isinstance(part, DistributedDataParallel):
            return nullcontext() if last else part.no_sync()
        if isinstance(part, FSDPModule):
            zero = self.ranks.config.zero
            part.set_requires_gradient_sync(last or zero >= 2)
            part.set_reshard_after_backward(last or zero == 3)
            part.set_is_last_backward(last)
        return nullcontext()

    def _pipelined(
        self, schedule: Any, inputs: Tensor, targets: Tensor, factor: Tensor | float, more: dict[str, Any]
    ) -> Tensor:  # fmt: skip
        losses: list[Tensor] = []
        for part in self.applied.plain.values():
            part.loss_factor = factor
        if self.has_loss:
            more |= {"targets": targets, "target": targets, "losses": losses}
        first = (inputs,) if 0 in self.applied.plain else ()
        with self._clock.phase(Phase.HOST):  # the schedule itself: passes and waits within it are counted as such
            schedule.step(*first, return_outputs=False, **more)
        if not losses:
            return torch.zeros((), device=self.ranks.device)
        return torch.stack([loss.detach() for loss in losses]).sum()

    def _finish_gradients(self) -> None:
        """What neither autograd nor FSDP adds up."""
        layout = self.ranks.config
        for parameter in self.applied.parameters():
            gradient = parameter.grad
            if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
                continue
            if gradient.placements != parameter.placements:  # partial over tp
                parameter.grad = gradient.redistribute(placements=parameter.placements)
        if self.applied.exchanged:  # averaged over the holders of the same experts; tokens of ep ranks are in it
            torch._foreach_div_([_local(p.grad) for p in self.applied.exchanged if p.grad is not None], layout.ep)
        if self.applied.partial:
            _sum_together([p.grad for p in self.applied.partial if p.grad is not None], self.ranks.group("tp"))
        if self.ranks.config.pp > 1 and self.config.model.tied:
            self._tie_gradients()

    def _tie_gradients(self) -> None:
        """The two copies of a tied weight, on the first stage and the last, take the sum of their gradients."""
        layout, first, copy = self.ranks.config, self.applied.plain.get(0), self.applied.copied_head
        ours = first.embedding.weight if first is not None and first.embedding is not None else copy
        if ours is None or ours.grad is None:
            return
        if first is not None and copy is not None:  # both ends on one rank
            assert copy.grad is not None
            ours.grad.add_(copy.grad)
            copy.grad.copy_(ours.grad)
            return
        group = self.ranks.group("pp")
        peer = dist.get_global_rank(group, rank_of_last(layout.schedule, layout.pp) if first else 0)
        mine = _local(ours.grad)
        other = torch.empty_like(mine)
        # Ready first: gloo sends when the other has said so, and what is said after a message waits behind it.
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, other, peer, group), dist.P2POp(dist.isend, mine.contiguous(), peer, group)]
        )
        for work in works:
            work.wait()
        mine.add_(other)

    # -- what all ranks agree on -----------------------------------------------------------------------------

    def agree(
        self, loss: Tensor, clip: float, stop: bool = False, more: list[float] | None = None
    ) -> tuple[float, float, bool]:
        """The loss over the global batch, the norm of the whole gradient, and whether any rank wants to stop: the same
        on every rank. Clips by the norm.

        One all-reduce of three numbers: every element of the gradient is counted on one of the ranks that hold it.
        Sites that train by themselves have a norm each, and clip by it; the first one's is returned.
        `more`, as many on every rank, is added up with them and left in `self.added`.
        """
        layout, device = self.ranks.config, self.ranks.device
        weight = 1.0 / (self.ranks.dp * layout.cp * layout.tp) if self.has_loss else 0.0
        gradients = [_local(p.grad) for p in self.applied.parameters() if p.grad is not None]
        square = self.square()
        flag = torch.tensor(float(stop), device=device, dtype=torch.float64)
        squares = torch.zeros(self.ranks.sites, device=device, dtype=torch.float64)
        squares[self.ranks.index("site")] = square
        together = torch.stack([loss.detach().double() * weight, flag, *squares])
        if more:
            together = torch.cat([together, torch.tensor(more, device=device, dtype=torch.float64)])
        dist.all_reduce(together)
        mean, flags, *rest = together.tolist()
        scale = self._loss_scale()
        norms = [math.sqrt(total) / scale for total in rest[: self.ranks.sites]]
        self.added = rest[self.ranks.sites :]
        norm = norms[self.ranks.index("site")]
        # torch.nn.utils.clip_grad_norm_ adds the same 1e-6
        shrink = (min(1.0, clip / (norm + 1e-6)) if clip < norm else 1.0) / scale
        if shrink != 1.0 and gradients:
            torch._foreach_mul_(gradients, shrink)
        if self.scale.enabled:  # from the same numbers, so that no rank skips alone
            self.overflowed = not all(map(math.isfinite, norms))
            self.scale.decided(self.overflowed)
            norms = self._norms if self.overflowed else norms  # which is no news of the gradient
            self._norms = norms
        return mean, norms[0], flags > 0

    def square(self) -> Tensor:
        """Of the gradient as it is: this rank's part of its squared norm."""
        square = torch.zeros((), device=self.ranks.device, dtype=torch.float64)
        for parameter in self.applied.parameters():
            if parameter.grad is not None and parameter is not self.applied.copied_head:
                norm = torch.linalg.vector_norm(_local(parameter.grad))
                square += norm.double() ** 2 / self._copies[id(parameter)]
        return square

    def _copies_of(self, parameter: nn.Parameter) -> int:
        """Ranks of one stage that hold the same elements."""
        parts = 1
        if isinstance(parameter, DTensor):
            sizes = parameter.device_mesh.shape
            parts = math.prod(n for n, p in zip(sizes, parameter.placements, strict=True) if not p.is_replicate())
        return self.ranks.size // self.ranks.config.pp // parts

    # -- evaluation ------------------------------------------------------------------------------------------

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        for part in self.applied.parts.values():
            part.eval()
        yield
        for part in self.applied.parts.values():
            part.train()
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # the parameters are the sharded ones again

    def evaluate(self, inputs: Tensor, targets: Tensor, documents: Tensor | None = None) -> tuple[float, int]:
        """Sum of the losses of this rank's targets that count and their number; none where another stage has the loss.

        A pipeline takes batches of the step's own size only.
        """
        inputs, targets = self.local(inputs), self.local(targets)
        more: dict[str, Any] = {"reduction": "sum"} | ({} if documents is None else {"documents": documents})
        with loss_parallel() if self.ranks.config.tp > 1 else nullcontext():
            if self.schedule is None:
                (part,) = self.applied.parts.values()
                with self.autocast():
                    loss = part(inputs, targets, **more)
            else:
                losses: list[Tensor] = []
                for plain in self.applied.plain.values():
                    plain.loss_factor = 1.0
                if self.has_loss:
                    more |= {"targets": targets, "target": targets, "losses": losses}
                first = (inputs,) if 0 in self.applied.plain else ()
                if self.ranks.config.schedule in V_SHAPED:  # PyTorch's cannot leave the backward pass out
                    with torch.enable_grad():
                        self.schedule.step(*first, return_outputs=False, **more)
                    for parameter in self.applied.parameters():
                        parameter.grad = None
                else:
                    self.schedule.eval(*first, **more)
                if not losses:
                    return 0.0, 0
                loss = torch.stack([loss.detach() for loss in losses]).sum()
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        return float(loss), int((targets != IGNORED).sum())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sum_together(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """One all-reduce for many small gradients."""
    parts = [_local(tensor) for tensor in tensors]
    if not parts:
        return
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat, group=group)
    for part, summed in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.copy_(summed.view_as(part))
