"""One optimizer step on one device: forward and backward over the micro-batches, clip, update.

Everything that changes what a step computes is held here: precision and loss scale, accumulation, recomputation,
offloading, the average of the weights, the noise scale. The loop around it decides when.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ironlaw.config import RunConfig
from ironlaw.data.batch import IGNORED, Batch
from ironlaw.ledger import Ledger, Phase
from ironlaw.machine.profile import Profile
from ironlaw.model.linear import use_onednn
from ironlaw.model.moe import update_routing
from ironlaw.model.transformer import Transformer, block_attention
from ironlaw.observe.clock import StepClock
from ironlaw.observe.profile import operation_scope, phase_scope
from ironlaw.train import precision
from ironlaw.train.average import WeightAverage
from ironlaw.train.host_optimizer import HostOptimizer
from ironlaw.train.lane import lane_to_host
from ironlaw.train.noise_scale import NoiseScale
from ironlaw.train.offload import ActivationOffload
from ironlaw.train.optimizer import build_optimizer, set_learning_rate
from ironlaw.train.recompute import recompute_blocks
from ironlaw.train.schedule import learning_rate
from ironlaw.train.start import load_first_weights
from ironlaw.train.state import Stateful


class Step:
    """`loss = step.forward_backward(batch, number)`, then `norm = step.update(number)`; steps are numbered from 0."""

    def __init__(
        self, config: RunConfig, plan: Ledger, profile: Profile, device: torch.device, *, fresh: bool = True
    ) -> None:
        """`fresh`: no checkpoint follows, so that `train.start_from` says where the weights come from."""
        self.config, self.device = config, device
        self.precision: str = plan.decided.precision
        self.model = Transformer(config.model)
        if fresh and config.train.start_from:
            load_first_weights(config.train.start_from, self.model, config.model)
        self.model.to(device)
        use_onednn(self.model, profile.fp32_products == "onednn")
        block_attention(self.model, plan.decided.blocked_attention)
        precision.prepare(self.model, self.model.blocks, device, self.precision)
        self.model.dropout_seed = config.train.seed
        self.model.loss_chunk = plan.decided.loss_chunk
        recompute_blocks(self.model.blocks, plan.decided.recompute)
        lane = lane_to_host(device) if config.train.offload != "none" else None
        self.optimizer = build_optimizer(
            self.model, config.optimizer, lane=lane if config.train.offloads_optimizer else None
        )
        self.scale = precision.LossScale(device, self.precision, config.scaler)
        decay = config.train.average_decay
        self.average = None if decay is None else WeightAverage(self.model, decay)
        self.noise = NoiseScale()
        self.offload: ActivationOffload | None = None
        if lane is not None and config.train.offloads_activations:
            self.offload = ActivationOffload(self.model, device, lane, plan.decided.offload_ahead_bytes)
            self.model.around = self.offload.around
        self.gradient_pointers: set[int] = set()  # of the last recorded step
        self._norm = 0.0
        self._expert_load: Any = None
        self._small_square: float | None = None

    def states(self) -> dict[str, Stateful]:
        """What must be as it was when a run goes on, beside the weights."""
        states: dict[str, Stateful] = {"optimizer": self.optimizer}
        if self.scale.enabled:
            states["loss scale"] = self.scale
        if self.average is not None:
            states["average"] = self.average
        if self.config.train.noise_scale_every:
            states["noise scale"] = self.noise
        return states

    def host_bytes(self) -> int | None:
        """What offloading holds in the host's memory, None where nothing is offloaded."""
        if self.offload is None and not isinstance(self.optimizer, HostOptimizer):
            return None
        moved = self.offload.moved_bytes if self.offload is not None else 0
        return moved + (self.optimizer.host_bytes() if isinstance(self.optimizer, HostOptimizer) else 0)

    def forward_backward(self, batch: Batch[Tensor], number: int, clock: StepClock, recording: bool = False) -> Tensor:
        """Gradients of the mean loss over all targets that count; returns that mean, still on the device.

        `recording`: push the marks that the profiler's reader looks for.
        """
        size = self.config.micro_batch
        parts = [slice(first, first + size) for first in range(0, len(batch.inputs), size)]
        # Padding and the ends of documents are no targets; without them every micro-batch has as many as any other.
        uneven = batch.documents is not None or self.config.data.packing == "best_fit"
        counted = (batch.targets != IGNORED).sum() if uneven else None
        losses = []
        for index, rows in enumerate(parts):
            micro = batch.rows(rows)
            with (
                clock.phase(Phase.FORWARD),
                phase_scope(recording, Phase.FORWARD),
                precision.autocast(self.device, self.precision),
            ):
                if self.offload is not None:
                    self.offload.begin()
                loss = self._share_of_loss(micro, batch, counted, self._samples(number, rows))
            with clock.phase(Phase.BACKWARD), phase_scope(recording, Phase.BACKWARD):
                self.scale.scale(loss).backward()
                losses.append(loss.detach())
                del loss  # frees what is left of the graph, which is the backward pass's to pay
            if index == 0 and self._estimates_noise(number):
                self._small_square = self._squared_norm() * (len(batch.inputs) / len(micro.inputs)) ** 2
        if recording:
            self.gradient_pointers = {p.grad.data_ptr() for p in self.model.parameters() if p.grad is not None}
        with clock.phase(Phase.HOST):
            return torch.stack(losses).sum()

    def _samples(self, number: int, rows: slice) -> Tensor | None:
        """Numbers of these sequences within the run, where dropout is drawn by them, as on any other layout."""
        if self.config.layout is None or not self.config.model.dropout:
            return None
        first = number * self.config.train.global_batch
        return torch.arange(first + rows.start, min(first + rows.stop, first + self.config.train.global_batch))

    def _share_of_loss(
        self, micro: Batch[Tensor], batch: Batch[Tensor], counted: Tensor | None, samples: Tensor | None
    ) -> Tensor:
        """Shares add up to the mean over the whole batch, however unevenly its targets are spread."""
        if counted is not None and self.config.model.moe:  # balance losses belong to a mean
            loss = self.model(micro.inputs, micro.targets, samples, micro.documents)
            return loss * (micro.targets != IGNORED).sum() / counted
        if counted is not None:
            loss = self.model(micro.inputs, micro.targets, samples, micro.documents, reduction="sum")
            return loss / counted
        loss = self.model(micro.inputs, micro.targets, samples)
        if len(batch.inputs) % self.config.micro_batch:
            return loss * (len(micro.inputs) / len(batch.inputs))
        return loss / self.config.accumulation

    def update(self, number: int, recording: bool = False) -> float:
        """Clip by global norm, update, clear gradients. Returns the norm before clipping."""
        set_learning_rate(self.optimizer, learning_rate(self.config, number))
        with operation_scope(recording, "clip"):
            self.scale.unscale(self.optimizer)
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.train.clip)
        with operation_scope(recording, self.config.optimizer.name):
            done = self.scale.step(self.optimizer)
        if done and self.average is not None:
            with operation_scope(recording, "average"):
                self.average.update()
        if self.config.model.moe:
            self._expert_load = update_routing(self.model)
        self.optimizer.zero_grad(set_to_none=True)
        if done:  # a skipped step overflowed, which is no news of the gradient
            self._norm = float(norm)
        else:
            self._small_square = None
        self._observe_noise()
        return self._norm

    # -- gradient noise --------------------------------------------------------------------------------------

    def _estimates_noise(self, number: int) -> bool:
        every = self.config.train.noise_scale_every
        return every > 0 and (number + 1) % every == 0

    def _squared_norm(self) -> float:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        scale = self.scale.scaler.get_scale() if self.scale.enabled else 1.0
        return (float(nn.utils.get_total_norm(gradients)) / scale) ** 2

    def _observe_noise(self) -> None:
        if self._small_square is not None:
            config = self.config
            self.noise.observe(config.micro_batch, self._small_square, config.train.global_batch, self._norm**2)
            self._small_square = None

    def metrics(self) -> dict[str, Any]:
        """What of this is worth a line per step."""
        result: dict[str, Any] = {}
        if self.scale.enabled:
            result |= {"loss_scale": self.scale.scaler.get_scale(), "skipped_steps": self.scale.skipped_steps}
        if self.config.train.noise_scale_every and self.noise.sequences is not None:
            result["critical_batch"] = self.noise.sequences
        if self._expert_load is not None:
            result |= self._expert_load.metrics()
        return result
