"""One optimizer step: forward and backward passes over the micro-batches, gradient clipping, update.

`Step` holds everything that affects what a step computes: precision and loss scale, accumulation, recomputation,
offloading, the average of the weights, the noise scale. The training loop decides when a step is taken. `LayoutStep`
(`train/parallel/step.py`) overrides the methods that differ for a layout of many ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from ironlaw.train.checkpoint import AdapterFiles, Checkpoint, Stateful, Store, WholeFiles
from ironlaw.train.finetune import add_adapters, base_digest
from ironlaw.train.host_optimizer import HostOptimizer
from ironlaw.train.mesh import Mesh, StepResult
from ironlaw.train.noise_scale import NoiseScale
from ironlaw.train.objective import CrossEntropy, build_objective, second_model_path
from ironlaw.train.offload import ActivationOffload, TransferStream
from ironlaw.train.optimizer import build_optimizer, learning_rate, set_learning_rate, trained_parameters
from ironlaw.train.restore import load, load_first_weights
from ironlaw.workload.sections import FROZEN


class Step:
    """An optimizer step: `loss = step.forward_backward(batch, number)`, then `step.update(loss, number)`.

    Steps are numbered from 0. `clock` times the phases. While `recording`, the step emits marks for the profile reader.
    """

    optimizer: torch.optim.Optimizer
    store: Store
    objective = CrossEntropy()
    attention: str | None = None  # the attention kernel in use, if known
    offload: ActivationOffload | None = None
    schedule: Any = None  # pipeline schedule, if any
    plugin: Any = None  # an extension used on many ranks (`train/parallel/store.py`)
    moment: Any = None  # current step and micro-batch, which seed stochastic rounding

    def __init__(
        self, config: RunConfig, decisions: Decisions, mesh: Mesh, *, onednn: bool = False, fresh: bool = True,
        say: Callable[[str], None] = lambda message: None,
    ) -> None:  # fmt: skip
        """`fresh`: no checkpoint will be loaded, so weights are initialized or read from `train.start_from`.
        `onednn`: fp32 matrix products use oneDNN."""
        self.config, self.decisions, self.mesh, self.device, self.say = config, decisions, mesh, mesh.device, say
        self.precision: str = decisions.precision
        self.share = config.train.global_batch // mesh.layout.dp  # sequences per replica
        self.about: dict[str, Any] = {}  # extra fields of a checkpoint's index: the models it depends on
        self.clock, self.recording = StepClock(cuda=self.device.type == "cuda"), False
        self.gradient_pointers: set[int] = set()  # addresses in the last profiled step
        self.small_square: tuple[int, float] | None = None  # sequences of a small batch, squared norm of its gradient
        self._norm = 0.0
        self.writers = mesh  # ranks that write a checkpoint together
        self._expert_load: ExpertLoad | None = None
        self._build(onednn, fresh)
        self.scale = precision.LossScale(self.device, self.precision, config.scaler)
        decay = config.train.average_decay
        self.average = None if decay is None else WeightAverage(self.model, decay)
        self.noise = NoiseScale()

    def _build(self, onednn: bool, fresh: bool) -> None:
        """Create the model, the optimizer and the checkpoint store."""
        config, device, plan = self.config, self.device, self.decisions
        self.model = self._first_model(read=fresh or config.finetune.adapts)
        self.micro_batch, self.micro_batches = config.micro_batch, config.accumulation
        self.model.to(device)
        use_onednn(self.model, onednn)
        use_native_attention(self.model, plan.native_attention)
        self.moment = precision.prepare(self.model.blocks, device, self.precision, config.train)
        self.model.dropout_seed = config.train.seed
        self.model.loss_chunk = plan.loss_chunk
        recompute_blocks(self.model.blocks, plan.recompute)
        stream = TransferStream(device) if config.train.offload != "none" else None
        hosted = stream if config.train.offloads_optimizer else None
        self.optimizer = build_optimizer(self.model, config.optimizer, stream=hosted)
        if stream is not None and config.train.offloads_activations:
            self.offload = ActivationOffload(self.model, device, stream, plan.offload_ahead_bytes)
            self.model.around = self.offload.around
        self.attention = attention_kernel(self.model, config, device, self.precision)
        self.objective = build_objective(config, device)
        if (second := second_model_path(config)) is not None:
            self.about["second_sha256"] = base_digest(str(second))
        self.store = AdapterFiles() if config.finetune.adapts else WholeFiles()

    def _first_model(self, read: bool) -> Transformer:
        """Return a model with initial weights, or those of `train.start_from` if `read`, and its adapters, if any."""
        config, source = self.config, self.config.train.start_from
        model = Transformer(config.model)
        if source and read:
            load_first_weights(source, model, config.model)
        if source and config.finetune.adapts:
            add_adapters(model, config.model, config.finetune, source, self.precision)
            base = {"path": source, "sha256": base_digest(source)}
            self.about = {"base": base, "finetune": config.finetune.model_dump(mode="json")}
        return model

    def compile(self) -> bool:
        """Compile the blocks if the config asks for it. Returns whether compilation succeeded."""
        wanted = self.config.train.compile
        if wanted == "off" or (wanted == "auto" and self.device.type != "cuda"):
            return False
        tokens = torch.zeros(self.micro_batch, self.config.sequence, dtype=torch.long, device=self.device)
        return compile_blocks(self.model, tokens, self.autocast, self.say, graphs=wanted == "graphs")

    def autocast(self) -> Any:
        return precision.autocast(self.device, self.precision)

    def states(self) -> dict[str, Stateful]:
        """Return the states that a checkpoint holds beside the weights."""
        states: dict[str, Stateful] = {"optimizer": self.optimizer}
        if self.scale.is_enabled():
            states["loss scale"] = self.scale
        rules = precision_recipe(self.precision)
        if self.moment is not None and rules is not None and rules.history > 0:  # scales are of earlier micro-batches
            states["largest numbers"] = self.moment
        if self.average is not None:
            states["average"] = self.average
        if self.config.train.noise_scale_every:
            states["noise scale"] = self.noise
        return states if self.plugin is None else states | {self.plugin.name: self.plugin}

    def load(self, checkpoint: Checkpoint, states: dict[str, Stateful]) -> list[str]:
        """Load weights and states from disk. Returns the names of states that the checkpoint lacks.

        PyTorch's optimizers load their settings too: those of the config, which may have changed, are put back.
        """
        settings = [{key: value for key, value in g.items() if key != "params"} for g in self.optimizer.param_groups]
        missing = self._read(checkpoint, states)
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(own)
        return missing

    def _read(self, checkpoint: Checkpoint, states: dict[str, Stateful]) -> list[str]:
        return load(checkpoint, self.model, self.config.model, states)

    def trained(self) -> dict[str, Tensor]:
        """Return the unsharded trained tensors by name, on the rank that writes them."""
        return dict(trained_parameters(self.model))

    # -- forward and backward --------------------------------------------------------------------------------

    def forward_backward(self, batch: Batch[Tensor], number: int) -> Tensor:
        """Accumulate gradients of the mean loss over all targets. Returns this rank's part of that mean as a tensor
        on the device; the mean of the parts over ranks is the loss of the batch."""
        every = self.config.train.noise_scale_every
        loss = self._gradients(batch, number, every > 0 and (number + 1) % every == 0)
        if self.recording:
            self.gradient_pointers = {p.grad.data_ptr() for p in self.model.parameters() if p.grad is not None}
        return loss

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Time a phase and mark it in the profile."""
        with self.clock.phase(phase), scope(f"{PHASE_SCOPE}{phase}", self.recording):
            yield

    def _gradients(self, batch: Batch[Tensor], number: int, estimating: bool) -> Tensor:
        # Padding and document ends are not targets; without them all micro-batches have the same number of targets.
        uneven = batch.documents is not None or self.config.data.packing == "best_fit"
        uneven = uneven or self.config.objective.needs_logits
        counted = self.objective.count(batch).clamp(min=1) if uneven else None
        samples = self._samples(number)

        def loss_of(rows: slice) -> Tensor:
            if self.offload is not None:
                self.offload.begin()
            return self._share_of_loss(batch.rows(rows), batch, counted, None if samples is None else samples[rows])

        return self._micro_batches(len(batch.inputs), number, loss_of, self._record_first_norm if estimating else None)

    def _samples(self, number: int) -> Tensor | None:
        """Return this replica's sequence numbers within the run if they seed dropout, equally on any layout."""
        if self.config.layout is None or not self.config.model.dropout:
            return None
        first = number * self.config.train.global_batch + self.mesh.index("dp") * self.share
        return torch.arange(first, first + self.share)

    def _micro_batches(
        self, sequences: int, number: int, loss_of: Callable[[slice], Tensor],
        after_first: Callable[[int, int], None] | None = None,
    ) -> Tensor:  # fmt: skip
        """Run forward and backward on all sequences. `loss_of` returns the share of a micro-batch in the mean loss."""
        losses = []
        starts = range(0, sequences, self.micro_batch)
        for index, start in enumerate(starts):
            if self.moment is not None:
                self.moment.step, self.moment.micro_batch = number, index
            rows = slice(start, min(start + self.micro_batch, sequences))
            if self.config.train.compile == "graphs":
                torch.compiler.cudagraph_mark_step_begin()  # results of the pass before may be overwritten
            with self._synchronised(index == len(starts) - 1):
                with self.phase(Phase.FORWARD), self.autocast():
                    loss = loss_of(rows)
                with self.phase(Phase.BACKWARD):
                    self._scaled(loss).backward()
                    self._after_backward()
                    losses.append(loss.detach())
                    del loss  # frees the rest of the graph, as part of the backward pass
            if index == 0 and after_first is not None:
                after_first(rows.stop - rows.start, sequences)
        with self.clock.phase(Phase.HOST):
            return torch.stack(losses).sum()

    def _synchronised(self, last: bool) -> AbstractContextManager[None]:
        """Return the context for a micro-batch. Gradients are reduced over replicas in that of the last one."""
        return nullcontext()

    def _after_backward(self) -> None:
        """Called when the gradients of a micro-batch have been computed."""

    def _scaled(self, loss: Tensor) -> Tensor:
        return self.scale.scale(loss)

    def _share_of_loss(
        self, micro: Batch[Tensor], batch: Batch[Tensor], counted: Tensor | None, samples: Tensor | None
    ) -> Tensor:
        """Return a micro-batch's share of the loss. Shares add up to the batch mean even if targets are uneven."""
        if counted is not None:
            # Losses that balance experts are means: their share of the batch is that of the micro-batch's targets.
            balance = self.objective.count(micro).float() if self.config.model.moe else None
            return self.objective.total(self.model, micro, samples, balance) / counted
        loss: Tensor = self.model(micro.inputs, micro.targets, samples)
        if len(batch.inputs) % self.micro_batch:
            return loss * (len(micro.inputs) / len(batch.inputs))
        return loss / self.micro_batches

    def _record_first_norm(self, sequences: int, of: int) -> None:
        """Record the gradient norm of the first micro-batch alone, for the noise scale."""
        norm = float(nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None]))
        self.small_square = sequences, (norm / self.scale.get_scale()) ** 2 * (of / sequences) ** 2

    # -- update ----------------------------------------------------------------------------------------------

    def update(self, loss: Tensor, number: int, stop: bool = False) -> StepResult:
        """Clip gradients by their global norm, update the weights and clear the gradients. Every rank returns the same:
        `loss` over all ranks, the norm, and whether any rank requests a `stop`."""
        recording = self.recording
        alone = self.mesh.size == 1 or self.device.type == "cpu"
        with self.phase(Phase.OPTIMIZER if alone else Phase.COMMUNICATION), scope(f"{MODULE_SCOPE}clip", recording):
            mean, norm, stop = self._reduce_and_clip(loss, stop)
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
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # in no phase of the host: it waits for those of the device
        with self.clock.phase(Phase.HOST):
            if done:  # a skipped step overflowed: its gradient norm has no meaning
                self._norm = float(norm)
                if self.small_square is not None:
                    self.noise.observe(*self.small_square, self.config.train.global_batch, self._norm**2)
            self.small_square = None
            result = StepResult(float(mean), self._norm, stop)
        if self.plugin is not None:
            with self.clock.phase(Phase.COMMUNICATION):
                self.plugin.after(number + 1)
        return result

    def _reduce_and_clip(self, loss: Tensor, stop: bool) -> tuple[Any, Any, bool]:
        """Clip the gradients. Returns the fields of `StepResult`, with tensors not yet synchronized to the host."""
        self.scale.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.train.clip)
        return loss, norm, stop

    def _step_optimizer(self) -> bool:
        """Step the optimizer. Returns False if the gradient overflowed and the update was skipped."""
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
        """Return the sum of the losses over this rank's targets, and the number of targets."""
        if self.config.train.compile == "graphs":
            torch.compiler.cudagraph_mark_step_begin()
        return self.objective.held_out(self.model, batch, self.autocast)

    # -- properties ------------------------------------------------------------------------------------------

    def persistent_bytes(self) -> int:
        """Return the bytes of tensors held between steps."""
        return sum(self.held().values())

    def held(self) -> dict[str, int]:
        """Return the bytes of tensors held between steps, by kind."""
        found = held_bytes(self.model, self.optimizer, self.average.tensors if self.average else ())
        second = self.objective.second
        return found if second is None else found | {FROZEN: tree_bytes([*second.parameters(), *second.buffers()])}

    def host_bytes(self) -> int | None:
        """Return the host memory that offloading holds, or None if nothing is offloaded."""
        if self.offload is None and not isinstance(self.optimizer, HostOptimizer):
            return None
        moved = self.offload.moved_bytes if self.offload is not None else 0
        return moved + (self.optimizer.host_bytes() if isinstance(self.optimizer, HostOptimizer) else 0)

    def setting(self) -> dict[str, Any]:
        """Return the settings that must be equal for step times of two sessions to be comparable."""
        return {"micro_batch": self.micro_batch}

    def facts(self) -> dict[str, Any]:
        """Return facts for the ledger of the run."""
        rows = self.micro_batch * self.config.sequence
        return {
            "attention": self.attention, "host_bytes": self.host_bytes(),
            "skipped_updates": self.scale.skipped_steps,
            "misaligned": misaligned_weights(self.model, rows, self.precision),
            "odd_sizes": odd_sizes(rows, self.config.model.size_of_head),
        }  # fmt: skip

    def metrics(self) -> dict[str, Any]:
        """Return the values to log at each step."""
        result: dict[str, Any] = {}
        if self.scale.is_enabled():
            result |= {"loss_scale": self.scale.get_scale(), "skipped_steps": self.scale.skipped_steps}
        if self.config.train.noise_scale_every and self.noise.sequences is not None:
            result["critical_batch"] = self.noise.sequences
        return result if self._expert_load is None else result | self._expert_load._asdict()
