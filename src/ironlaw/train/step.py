"""One optimizer step: forward and backward over the micro-batches, clip, update.

Everything that changes what a step computes is held here: precision and loss scale, accumulation, recomputation,
offloading, the average of the weights, the noise scale. The loop around it decides when. What a layout of many ranks
changes is in the methods that `LayoutStep` has of its own (`train/parallel/step.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ironlaw.catalog.formats import precision_recipe
from ironlaw.config import RunConfig
from ironlaw.data.batch import Batch
from ironlaw.ledger import Decisions, Phase
from ironlaw.model.linear import use_onednn
from ironlaw.model.moe import ExpertLoad, update_routing
from ironlaw.model.transformer import Transformer, use_native_attention
from ironlaw.observe.clock import StepClock
from ironlaw.observe.measured import held_bytes, tree_bytes
from ironlaw.observe.profile import PHASE_SCOPE, scope
from ironlaw.observe.spans import MODULE_SCOPE
from ironlaw.observe.trials import misaligned_weights, odd_sizes
from ironlaw.train import precision
from ironlaw.train.average import WeightAverage
from ironlaw.train.blocks import attention_kernel, compile_blocks, recompute_blocks
from ironlaw.train.checkpoint import AdapterFiles, Checkpoint, Store, WholeFiles
from ironlaw.train.finetune import about_base, add_adapters
from ironlaw.train.host_optimizer import HostOptimizer
from ironlaw.train.mesh import Agreed, Mesh
from ironlaw.train.noise_scale import NoiseScale
from ironlaw.train.objective import CrossEntropy, objective_of
from ironlaw.train.offload import ActivationOffload
from ironlaw.train.optimizer import build_optimizer, set_learning_rate, trained_parameters
from ironlaw.train.restore import load, load_first_weights
from ironlaw.train.schedule import learning_rate
from ironlaw.train.state import Stateful
from ironlaw.train.transfer import TransferStream
from ironlaw.workload.sections import FROZEN


class Step:
    """`loss = step.forward_backward(batch, number)`, then `step.update(loss, number)`; steps are numbered from 0.

    `clock` is told of the passes; `recording`: marks are pushed that the profiler's reader looks for.
    """

    optimizer: torch.optim.Optimizer
    store: Store
    objective = CrossEntropy()
    attention: str | None = None  # the kernel that computes it, where that is known
    offload: ActivationOffload | None = None
    schedule: Any = None  # of a pipeline
    plugins: Sequence[Any] = ()  # what a job of many ranks adds (`train/parallel/plugin.py`)
    delayed = False  # scales of numbers in few bits are made of micro-batches before
    moment: Any = None  # where rounding is drawn by step and micro-batch

    def __init__(
        self, config: RunConfig, decisions: Decisions, mesh: Mesh, *, onednn: bool = False, fresh: bool = True,
        say: Callable[[str], None] = lambda message: None,
    ) -> None:  # fmt: skip
        """`fresh`: no checkpoint follows, so that first weights are drawn or read from `train.start_from`. `onednn`:
        that library multiplies fp32."""
        self.config, self.decisions, self.mesh, self.device, self.say = config, decisions, mesh, mesh.device, say
        self.precision: str = decisions.precision
        self.share = config.train.global_batch // mesh.dp  # sequences of this replica
        self.about: dict[str, Any] = {}  # for the index of checkpoints: of adapters, their base
        self.clock, self.recording = StepClock(), False
        self.gradient_pointers: set[int] = set()  # of the last recorded step
        self.small_square: tuple[int, float] | None = None  # sequences, squared norm of their gradient
        self._norm = 0.0
        self.writers = mesh  # who write a checkpoint together
        self._expert_load: ExpertLoad | None = None
        self._build(onednn, fresh)
        self.scale = precision.LossScale(self.device, self.precision, config.scaler)
        decay = config.train.average_decay
        self.average = None if decay is None else WeightAverage(self.model, decay, by_name=mesh.size > 1)
        self.noise = NoiseScale()

    def _build(self, onednn: bool, fresh: bool) -> None:
        """Model, optimizer, and how checkpoints lie on the disk."""
        config, device, plan = self.config, self.device, self.decisions
        self.model = self._first_model(read=fresh or config.finetune.adapts)
        self.micro_batch, self.micro_batches = config.micro_batch, config.accumulation
        rules = precision_recipe(self.precision)
        self.delayed = rules is not None and rules.history > 0
        self.model.to(device)
        use_onednn(self.model, onednn)
        use_native_attention(self.model, plan.native_attention)
        self.moment = precision.prepare(self.model, self.model.blocks, device, self.precision, config.train)
        self.model.dropout_seed = config.train.seed
        self.model.loss_chunk = plan.loss_chunk
        recompute_blocks(self.model.blocks, plan.recompute)
        stream = TransferStream(device) if config.train.offload != "none" else None
        self.optimizer = build_optimizer(
            self.model, config.optimizer, stream=stream if config.train.offloads_optimizer else None
        )
        if stream is not None and config.train.offloads_activations:
            self.offload = ActivationOffload(self.model, device, stream, plan.offload_ahead_bytes)
            self.model.around = self.offload.around
        self.attention = attention_kernel(self.model, config, device, self.precision)
        self.objective = objective_of(config, device)
        self.store = AdapterFiles() if config.finetune.adapts else WholeFiles()

    def _first_model(self, read: bool) -> Transformer:
        """Drawn, or with `read` the weights of `train.start_from`; with its adapters."""
        config, source = self.config, self.config.train.start_from
        model = Transformer(config.model)
        if source and read:
            load_first_weights(source, model, config.model)
        if source and config.finetune.adapts:
            add_adapters(model, config.model, config.finetune, source, self.precision)
            self.about = about_base(config.finetune, source)
        return model

    def compile(self) -> bool:
        """Where the config asks for it and it works here."""
        wanted = self.config.train.compile
        if wanted == "off" or (wanted == "auto" and self.device.type != "cuda"):
            return False
        tokens = torch.zeros(self.micro_batch, self.config.sequence, dtype=torch.long, device=self.device)
        return compile_blocks(self.model, tokens, self.autocast, self.say, graphs=wanted == "graphs")

    def autocast(self) -> Any:
        return precision.autocast(self.device, self.precision)

    def states(self) -> dict[str, Stateful]:
        """What must be as it was when a run goes on, beside the weights."""
        states: dict[str, Stateful] = {"optimizer": self.optimizer}
        if self.scale.is_enabled():
            states["loss scale"] = self.scale
        if self.moment is not None and self.delayed:
            states["largest numbers"] = self.moment
        if self.average is not None:
            states["average"] = self.average
        if self.config.train.noise_scale_every:
            states["noise scale"] = self.noise
        return states | {plugin.name: plugin for plugin in self.plugins}

    def load(self, checkpoint: Checkpoint, states: dict[str, Stateful]) -> list[str]:
        """Weights and states from the disk; the names of those that are not there."""
        return load(checkpoint, self.model, self.config.model, states)

    def trained(self) -> dict[str, Tensor]:
        """Whole tensors that are trained, by name, for the rank that writes them."""
        return dict(trained_parameters(self.model))

    # -- forward and backward --------------------------------------------------------------------------------

    def forward_backward(self, batch: Batch[Tensor], number: int) -> Tensor:
        """Gradients of the mean loss over all targets that count. Returns this rank's part of that mean, still on the
        device: the mean over ranks is the whole."""
        every = self.config.train.noise_scale_every
        loss = self._gradients(batch, number, every > 0 and (number + 1) % every == 0)
        if self.recording:
            self.gradient_pointers = {p.grad.data_ptr() for p in self.model.parameters() if p.grad is not None}
        return loss

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """For the clock, and for the reader of a profile."""
        with self.clock.phase(phase), scope(f"{PHASE_SCOPE}{phase}", self.recording):
            yield

    def _gradients(self, batch: Batch[Tensor], number: int, estimating: bool) -> Tensor:
        # Padding and the ends of documents are no targets; without them every micro-batch has as many as any other.
        uneven = batch.documents is not None or self.config.data.packing == "best_fit"
        uneven = uneven or self.config.objective.needs_logits
        counted = self.objective.count(batch).clamp(min=1) if uneven else None
        samples = self._samples(number)

        def loss_of(rows: slice) -> Tensor:
            if self.offload is not None:
                self.offload.begin()
            return self._share_of_loss(batch.rows(rows), batch, counted, None if samples is None else samples[rows])

        return self._micro_batches(len(batch.inputs), number, loss_of, self._look_at_first if estimating else None)

    def _samples(self, number: int) -> Tensor | None:
        """Numbers of this replica's sequences within the run, where dropout is drawn by them, as on any layout."""
        if self.config.layout is None or not self.config.model.dropout:
            return None
        first = number * self.config.train.global_batch + self.mesh.index("dp") * self.share
        return torch.arange(first, first + self.share)

    def _micro_batches(
        self, sequences: int, number: int, loss_of: Callable[[slice], Tensor],
        after_first: Callable[[int, int], None] | None = None,
    ) -> Tensor:  # fmt: skip
        """Forward and backward of so many sequences; `loss_of` some of them what they add to the mean."""
        losses = []
        starts = range(0, sequences, self.micro_batch)
        for index, start in enumerate(starts):
            if self.moment is not None:
                self.moment.step, self.moment.micro_batch = number, index
            rows = slice(start, min(start + self.micro_batch, sequences))
            with self._synchronised(index == len(starts) - 1):
                with self.phase(Phase.FORWARD), self.autocast():
                    loss = loss_of(rows)
                with self.phase(Phase.BACKWARD):
                    self._scaled(loss).backward()
                    self._after_backward()
                    losses.append(loss.detach())
                    del loss  # frees what is left of the graph, which is the backward pass's to pay
            if index == 0 and after_first is not None:
                after_first(rows.stop - rows.start, sequences)
        with self.clock.phase(Phase.HOST):
            return torch.stack(losses).sum()

    def _synchronised(self, last: bool) -> AbstractContextManager[None]:
        """Around each micro-batch: gradients are reduced over replicas with the last one."""
        return nullcontext()

    def _after_backward(self) -> None:
        """When a micro-batch's gradients are there."""

    def _scaled(self, loss: Tensor) -> Tensor:
        return self.scale.scale(loss)

    def _share_of_loss(
        self, micro: Batch[Tensor], batch: Batch[Tensor], counted: Tensor | None, samples: Tensor | None
    ) -> Tensor:
        """Shares add up to the mean over the whole batch, however unevenly its targets are spread."""
        if counted is not None and self.config.model.moe:  # balance losses belong to a mean
            return self.objective(self.model, micro, samples) * self.objective.count(micro) / counted
        if counted is not None:
            return self.objective(self.model, micro, samples, "sum") / counted
        loss = self.objective(self.model, micro, samples)
        if len(batch.inputs) % self.micro_batch:
            return loss * (len(micro.inputs) / len(batch.inputs))
        return loss / self.micro_batches

    def _look_at_first(self, sequences: int, of: int) -> None:
        """The gradient of the first micro-batch by itself, for the noise scale."""
        norm = float(nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None]))
        self.small_square = sequences, (norm / self.scale.get_scale()) ** 2 * (of / sequences) ** 2

    # -- update ----------------------------------------------------------------------------------------------

    def update(self, loss: Tensor, number: int, stop: bool = False, numbers: Sequence[float] = ()) -> Agreed:
        """Clip by global norm, update, clear gradients. Every rank gets the same: `loss` over all ranks, the norm,
        whether any of them is to `stop`, the sums of their `numbers`."""
        recording = self.recording
        alone = self.mesh.size == 1 or self.device.type == "cpu"
        with self.phase(Phase.OPTIMIZER if alone else Phase.COMMUNICATION), scope(f"{MODULE_SCOPE}clip", recording):
            mean, norm, stop, added = self._agree(loss, stop, numbers)
        with self.phase(Phase.OPTIMIZER):
            set_learning_rate(self.optimizer, learning_rate(self.config, number))
            with scope(MODULE_SCOPE + self.config.optimizer.name, recording):
                done = self._step_optimizer()
            if done and self.average is not None:
                with scope(f"{MODULE_SCOPE}average", recording):
                    self.average.update()
            if self.config.model.moe:
                self._expert_load = self._balance_experts()
            self.optimizer.zero_grad(set_to_none=True)
            if done:  # a skipped step overflowed, which is no news of the gradient
                self._norm = float(norm)
                if self.small_square is not None:
                    self.noise.observe(*self.small_square, self.config.train.global_batch, self._norm**2)
            self.small_square = None
        with self.clock.phase(Phase.HOST):
            agreed = Agreed(float(mean), self._norm, stop, added)  # on CUDA the host waits here for the device
        for plugin in self.plugins:
            with self.clock.phase(Phase.COMMUNICATION):
                plugin.after(number + 1)
        return agreed

    def _agree(self, loss: Tensor, stop: bool, numbers: Sequence[float]) -> tuple[Any, Any, bool, list[float]]:
        """As `Agreed`, but for tensors that nobody has waited for. Clips the gradients."""
        self.scale.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.train.clip)
        return loss, norm, stop, list(numbers)

    def _step_optimizer(self) -> bool:
        """False for a gradient that overflowed, which changes nothing."""
        return self.scale.step(self.optimizer)

    def _balance_experts(self) -> ExpertLoad | None:
        return update_routing(self.model)

    # -- evaluation ------------------------------------------------------------------------------------------

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        self.model.eval()
        yield
        self.model.train()

    def evaluate(self, batch: Batch[Tensor]) -> tuple[float, int]:
        """Sum of the losses of what counts in this rank's part, and its number."""
        return self.objective.held_out(self.model, batch, self.autocast)

    # -- what is known of it ---------------------------------------------------------------------------------

    def persistent_bytes(self) -> int:
        """Of tensors that are held between steps."""
        return sum(self.held().values())

    def held(self) -> dict[str, int]:
        """Of them, by what they are."""
        found = held_bytes(self.model, self.optimizer, self.average.tensors if self.average else ())
        second = self.objective.second
        return found if second is None else found | {FROZEN: tree_bytes([*second.parameters(), *second.buffers()])}

    def host_bytes(self) -> int | None:
        """What offloading holds in the host's memory, None where nothing is offloaded."""
        if self.offload is None and not isinstance(self.optimizer, HostOptimizer):
            return None
        moved = self.offload.moved_bytes if self.offload is not None else 0
        return moved + (self.optimizer.host_bytes() if isinstance(self.optimizer, HostOptimizer) else 0)

    def setting(self) -> dict[str, Any]:
        """What must be alike for the step times of two sessions to be comparable."""
        return {"micro_batch": self.micro_batch}

    def facts(self) -> dict[str, Any]:
        """For the ledger of the run."""
        rows = self.micro_batch * self.config.sequence
        return {
            "attention": self.attention, "host_bytes": self.host_bytes(),
            "skipped_updates": self.scale.skipped_steps,
            "misaligned": misaligned_weights(self.model, rows, self.precision),
            "odd_sizes": odd_sizes(rows, self.config.model.size_of_head),
        }  # fmt: skip

    def metrics(self) -> dict[str, Any]:
        """What of this is worth a line per step."""
        result: dict[str, Any] = {}
        if self.scale.is_enabled():
            result |= {"loss_scale": self.scale.get_scale(), "skipped_steps": self.scale.skipped_steps}
        if self.config.train.noise_scale_every and self.noise.sequences is not None:
            result["critical_batch"] = self.noise.sequences
        return result if self._expert_load is None else result | self._expert_load.metrics()
