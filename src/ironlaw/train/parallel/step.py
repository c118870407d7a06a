"""A training step on one of many ranks: forward, backward and update under a layout, and agreement among ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from ironlaw.data.batch import IGNORED, Batch
from ironlaw.errors import UserError
from ironlaw.ledger import Phase
from ironlaw.model.adapters import adapted_layers
from ironlaw.model.huggingface.weights import read_weights
from ironlaw.model.linear import local_part, use_onednn
from ironlaw.model.moe import ExpertLoad
from ironlaw.model.transformer import Transformer
from ironlaw.observe.measured import tree_bytes
from ironlaw.train import precision
from ironlaw.train.checkpoint import AdapterFiles, Checkpoint, Stateful, check_model, newest_of, unique_weights
from ironlaw.train.noise_scale import first_part
from ironlaw.train.optimizer import build_optimizer, described
from ironlaw.train.parallel import communication, compilation, diloco, experts, gradient_compression, pipeline
from ironlaw.train.parallel.apply import apply
from ironlaw.train.parallel.materialize import build_on_meta, copy_from
from ironlaw.train.parallel.partition import positions_of
from ironlaw.train.parallel.ranks import Ranks
from ironlaw.train.parallel.store import ShardedFiles, SharedAdapterFiles
from ironlaw.train.restore import QuantizedFiles, load_for_inference
from ironlaw.train.run_directory import RunDirectory
from ironlaw.train.step import Step
from ironlaw.workload.schedule import V_SHAPED, layers_of, rank_of_last


class LayoutStep(Step):
    mesh: Ranks

    def _build(self, onednn: bool, fresh: bool) -> None:
        config, ranks, plan = self.config, self.mesh, self.decisions
        self.micro_batch = ranks.layout.micro_batch
        self.micro_batches = self.share // self.micro_batch
        adapts = config.finetune.adapts
        model = self._adapted() if adapts else build_on_meta(config.model)
        precision.prepare(model.blocks, self.device, self.precision, config.train)
        model.loss_chunk = plan.loss_chunk
        wanted = config.train.compile
        wanted = "on" if wanted == "auto" and self.device.type == "cuda" else wanted
        why_not = compilation.reason_not_to_compile(config, ranks, plan.recompute) if wanted == "on" else None
        if why_not is not None:
            self.say(f"training without torch.compile: {why_not}")
        self._compiled = wanted == "on" and why_not is None
        compile_block = compilation.compiler(self.say) if self._compiled else None
        initialize, whole = fresh and not config.train.start_from, described(model)
        self.rank_model = apply(model, config, ranks, plan.recompute, compile_block, initialize)
        self.model = self.rank_model.model
        # Also for layers that the division has created: split projections, a pipeline's copy of a tied head.
        use_onednn(self.model, onednn)
        group = dist.new_group(backend="gloo")
        self.writers = replace(ranks, writing=group)
        if adapts:
            self.store = SharedAdapterFiles(whole, config.optimizer, self.writers)
        else:
            self.store = ShardedFiles(group, config.optimizer)
        if fresh and config.train.start_from and not adapts:
            read_first_weights(config.train.start_from, self.rank_model.transformers.values(), self.model, self.store)
        self.optimizer = build_optimizer(self.rank_model.model, config.optimizer, whole=whole)
        if ranks.layout.pp > 1:
            for part in self.rank_model.transformers.values():
                pipeline.adapt_to_schedule(part, self.autocast)
            self.schedule = self._schedule_of(self.micro_batches)
        self._schedule_of_part: Any = None  # for the parts of a step that estimates the noise scale
        # Number of ranks over which gradients are averaged.
        self.averaging = ranks.layout.dp // ranks.sites * ranks.layout.cp
        self.has_loss = ranks.layout.pp * ranks.layout.virtual_stages - 1 in self.rank_model.transformers
        self.overflowed = False  # whether the last step's gradient did, which leaves the weights unchanged
        self._copies = {id(p): self._copies_of(p) for p in self.rank_model.parameters()}
        # At most one of them: a config with both is refused.
        self.plugin = gradient_compression.plugin_for(self.rank_model, config) or diloco.plugin_for(
            self.rank_model, config
        )
        tokens = torch.zeros(self.micro_batch, config.sequence, dtype=torch.long, device=self.device)
        first_stage = next(iter(self.rank_model.stages.values()))
        if self.plugin is not None:
            self.plugin.begin(first_stage, self.local(tokens))
        if self._compiled and isinstance(first_stage, DistributedDataParallel):
            # Otherwise a resumed run's first step would be rounded unlike that step of a run that was not stopped.
            with self.autocast():
                gradient_compression.settle_buckets(first_stage, self.local(tokens))

    def _adapted(self) -> Transformer:
        """Return the whole base model with adapters, which the layout then divides."""
        model, layout = self._first_model(read=True), self.mesh.layout
        adapted = {int(name.split(".")[1]) for name, layer in adapted_layers(model).items() if layer.adapters}
        stages = layers_of(model.config.layers, layout.pp * layout.virtual_stages, layout.virtual_stages)
        if not all(adapted & set(layers) for layers in stages):
            raise UserError("finetune.targets leaves a pipeline stage without an adapter: name modules of every layer")
        return model

    def compile(self) -> bool:
        return self._compiled  # compiled before FSDP wrapped the blocks

    def trained(self) -> dict[str, Tensor]:
        assert isinstance(self.store, SharedAdapterFiles)
        return {name.removeprefix("weights/"): tensor for name, tensor in self.store.gather(self.model).items()}

    def _read(self, checkpoint: Checkpoint, states: dict[str, Stateful]) -> list[str]:
        check_model(checkpoint, self.config.model)
        return self.store.read(checkpoint.path, self.model, states)

    # -- forward and backward --------------------------------------------------------------------------------

    def local(self, tokens: Tensor) -> Tensor:
        """Return this rank's positions of token sequences (B, S)."""
        rank, cp = self.mesh.index("cp"), self.mesh.layout.cp
        return tokens if cp == 1 else tokens[:, positions_of(rank, cp, tokens.shape[1])].contiguous()

    def _schedule_of(self, micro_batches: int) -> Any:
        return pipeline.build_schedule(self.rank_model.stages, self.mesh, self.config, micro_batches, self.phase)

    def _gradients(self, batch: Batch[Tensor], number: int, estimating: bool) -> Tensor:
        inputs, targets = self.local(batch.inputs), self.local(batch.targets)
        by_row = {"samples": self._samples(number), "documents": batch.documents}
        factor: Tensor | float = 1.0 / self.micro_batches
        more: dict[str, Any] = {}
        if batch.documents is not None or self.config.data.packing == "best_fit":
            with self.clock.phase(Phase.COMMUNICATION):
                factor, by_row["balance"] = self._weights(targets)
            more["reduction"] = "sum"
        named = {name: tensor for name, tensor in by_row.items() if tensor is not None}

        def gradients_of(some: slice, schedule: Any) -> Tensor:
            """Compute the gradients of the sequences `some` of this replica."""
            x, y, here = inputs[some], targets[some], {name: tensor[some] for name, tensor in named.items()}

            def loss_of(rows: slice) -> Tensor:
                (part,) = self.rank_model.stages.values()
                loss = part(x[rows], y[rows], **{name: tensor[rows] for name, tensor in here.items()}, **more)
                return (loss.full_tensor() if isinstance(loss, DTensor) else loss) * factor

            with loss_parallel() if self.mesh.layout.tp > 1 else nullcontext():
                if schedule is not None:
                    loss = self._pipelined(schedule, x, y, factor, self._loss_scale(), here | more)
                else:
                    loss = self._micro_batches(len(x), number, loss_of)
            with self.clock.phase(Phase.BACKWARD if self.device.type == "cpu" else Phase.COMMUNICATION):
                self._finish_gradients()
            return loss

        return self._in_two_parts(gradients_of) if estimating else gradients_of(slice(None), self.schedule)

    def _in_two_parts(self, gradients_of: Callable[[slice, Any], Tensor]) -> Tensor:
        """Compute a step that estimates the noise scale in two parts, each a step of its own: forward, backward,
        reduction of gradients over the ranks.

        The small batch is the first part of every replica: one micro-batch, or in a pipeline half of them, to fill it.
        The whole gradient is the sum of both parts, so that the step is the same except for rounding. It costs one more
        reduction of the gradients, and memory for a second set of them.
        """
        count = first_part(self.config, self.mesh.layout)
        rows = count * self.micro_batch
        if self.schedule is not None and self._schedule_of_part is None:
            self._schedule_of_part = self._schedule_of(count)
        loss = gradients_of(slice(rows), self._schedule_of_part)
        square = self.square()
        dist.all_reduce(square)
        squared = float(square) * (self.micro_batches / count / self._loss_scale()) ** 2
        self.small_square = rows * self.mesh.layout.dp, squared
        kept = []
        for parameter in self.rank_model.parameters():
            if parameter.grad is not None:
                kept.append((parameter, parameter.grad.clone()))  # DDP reduces into the same storage again
                parameter.grad = None
        loss = loss + gradients_of(slice(rows, None), self._schedule_of_part)
        for parameter, gradient in kept:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return loss

    def _loss_scale(self) -> float:
        """Return the factor of this rank's loss. Gradients are averaged over ranks but summed in one process: divided
        by the number of ranks, they have the same size as there, and overflow at the same scale."""
        return self.scale.get_scale() / self.averaging if self.scale.is_enabled() else 1.0

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss * self._loss_scale() if self.scale.is_enabled() else loss

    def _weights(self, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return weights for rows with unequal numbers of targets: the factor of a sum of losses and, for experts, the
        weight of each row's balancing loss. The mean over ranks is then the mean over all targets.
        """
        counted = (targets != IGNORED).view(self.micro_batches, -1).sum(1)
        total, ranks = counted.sum(), self.averaging
        for dimension in ("replicate", "shard"):
            if self.mesh.size_of(dimension) > 1:
                dist.all_reduce(total, group=self.mesh.group(dimension))
        if self.config.model.moe is None:
            return ranks / total.clamp(min=1), None
        group = self.mesh.groups.get("micro_batch")
        if group is not None:
            dist.all_reduce(counted, group=group)
            counted = counted / group.size()
        return ranks / total.clamp(min=1), counted.float().repeat_interleave(self.micro_batch)

    def _synchronised(self, last: bool) -> AbstractContextManager[None]:
        """Reduce gradients with the last micro-batch only; ZeRO 2 and 3, which hold no whole ones, with each."""
        (part,) = self.rank_model.stages.values()
        if isinstance(part, DistributedDataParallel):
            return nullcontext() if last else part.no_sync()
        if isinstance(part, FSDPModule):
            zero = self.mesh.layout.zero
            part.set_requires_gradient_sync(last or zero >= 2)
            part.set_reshard_after_backward(last or zero == 3)
            part.set_is_last_backward(last)
        return nullcontext()

    def _after_backward(self) -> None:
        communication.backward_done()

    def _pipelined(
        self, schedule: Any, inputs: Tensor, targets: Tensor, factor: Tensor | float, scale: float,
        more: dict[str, Any], backward: bool = True,
    ) -> Tensor:  # fmt: skip
        """Return the sum of losses times `factor`, where it is known. `backward`: compute gradients, times `scale`."""
        losses: list[Tensor] = []
        for part in self.rank_model.transformers.values():
            part.loss_factor = factor * scale
        if self.has_loss:
            more |= {"targets": targets, "target": targets, "losses": losses}
        first = (inputs,) if 0 in self.rank_model.transformers else ()
        with self.clock.phase(Phase.HOST):  # the schedule's own time: passes and waits within it have their own phases
            if backward:
                schedule.step(*first, return_outputs=False, **more)
            else:
                schedule.eval(*first, **more)
        if not losses:
            return torch.zeros((), device=self.device)
        return torch.stack([loss.detach() for loss in losses]).sum() / scale

    def _finish_gradients(self) -> None:
        """Reduce gradients that neither autograd nor FSDP reduces."""
        layout = self.mesh.layout
        for parameter in self.rank_model.parameters():
            gradient = parameter.grad
            if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
                continue
            if gradient.placements != parameter.placements:  # partial over tp
                parameter.grad = gradient.redistribute(placements=parameter.placements)
        of_experts = [local_part(p.grad) for p in self.rank_model.ep_parameters if p.grad is not None]
        if of_experts:  # averaged over ranks with the same experts, but summed over tokens of ep ranks
            torch._foreach_div_(of_experts, layout.ep)
        if self.rank_model.tp_partial:
            _sum_together([p.grad for p in self.rank_model.tp_partial if p.grad is not None], self.mesh.group("tp"))
        if self.mesh.layout.pp > 1 and self.config.model.tied:
            self._tie_gradients()

    def _tie_gradients(self) -> None:
        """Set the gradients of both copies of a tied weight, on the first and the last stage, to their sum."""
        layout, first, copy = self.mesh.layout, self.rank_model.transformers.get(0), self.rank_model.tied_head_copy
        ours = first.embedding.weight if first is not None and first.embedding is not None else copy
        if ours is None or ours.grad is None:
            return
        if first is not None and copy is not None:  # both ends on one rank
            assert copy.grad is not None
            ours.grad.add_(copy.grad)
            copy.grad.copy_(ours.grad)
            return
        group = self.mesh.group("pp")
        peer = dist.get_global_rank(group, rank_of_last(layout.schedule, layout.pp) if first else 0)
        mine = local_part(ours.grad)
        other = torch.empty_like(mine)
        # Post the receive first: gloo sends when the receiver is ready, and that notice would wait behind a send.
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, other, peer, group), dist.P2POp(dist.isend, mine.contiguous(), peer, group)]
        )
        for work in works:
            work.wait()
        mine.add_(other)

    # -- agreement among ranks -------------------------------------------------------------------------------

    def _reduce_and_clip(self, loss: Tensor, stop: bool) -> tuple[float, float, bool]:
        """Clip the gradients and agree on all results in one all-reduce; elements with copies count once in the norm.

        Sites that train independently each clip by a norm of their own; the first site's is returned.
        """
        layout, sites, device = self.mesh.layout, self.mesh.sites, self.device
        weight = 1.0 / (self.mesh.layout.dp * layout.cp * layout.tp) if self.has_loss else 0.0
        squares = torch.zeros(sites, device=device, dtype=torch.float64)
        squares[self.mesh.index("site")] = self.square()
        flag = torch.tensor([float(stop)], device=device, dtype=torch.float64)
        together = torch.cat([(loss.detach().double() * weight).reshape(1), flag, squares])
        dist.all_reduce(together)
        mean, flags, *sums = together.tolist()
        scale, clip = self._loss_scale(), self.config.train.clip
        norms = [math.sqrt(total) / scale for total in sums]
        norm = norms[self.mesh.index("site")]
        # As in torch.nn.utils.clip_grad_norm_, which adds the same 1e-6.
        shrink = (min(1.0, clip / (norm + 1e-6)) if clip < norm else 1.0) / scale
        gradients = [local_part(p.grad) for p in self.rank_model.parameters() if p.grad is not None]
        if shrink != 1.0 and gradients:
            torch._foreach_mul_(gradients, shrink)
        if self.scale.is_enabled():  # all ranks decide from the same numbers, so that none skips a step alone
            self.overflowed = not all(map(math.isfinite, norms))
            self.scale.update_from_ranks(self.overflowed)
        return mean, norms[0], flags > 0

    def square(self) -> Tensor:
        """Return this rank's part of the squared norm of the current gradients."""
        square = torch.zeros((), device=self.device, dtype=torch.float64)
        for parameter in self.rank_model.parameters():
            if parameter.grad is not None and parameter is not self.rank_model.tied_head_copy:
                norm = torch.linalg.vector_norm(local_part(parameter.grad))
                square += norm.double() ** 2 / self._copies[id(parameter)]
        return square

    def _copies_of(self, parameter: nn.Parameter) -> int:
        """Return the number of ranks in a stage that hold the same elements of a parameter."""
        parts = 1
        if isinstance(parameter, DTensor):
            sizes = parameter.device_mesh.shape
            parts = math.prod(n for n, p in zip(sizes, parameter.placements, strict=True) if not p.is_replicate())
        return self.mesh.size // self.mesh.layout.pp // parts

    def _step_optimizer(self) -> bool:
        if not self.overflowed:
            self.optimizer.step()
        return not self.overflowed

    def _balance_experts(self) -> ExpertLoad | None:
        return experts.balance(self.model, self.mesh)

    # -- evaluation ------------------------------------------------------------------------------------------

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        for part in self.rank_model.stages.values():
            part.eval()
        with nullcontext() if self.plugin is None else self.plugin.evaluating():
            yield
        for part in self.rank_model.stages.values():
            part.train()
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # restore the sharded parameters

    def evaluate(self, batch: Batch[Tensor]) -> tuple[float, int]:
        """Return the sum of losses and the number of targets, or zeros if another stage has the loss."""
        inputs, targets = self.local(batch.inputs), self.local(batch.targets)
        more: dict[str, Any] = {"reduction": "sum"}
        more |= {} if batch.documents is None else {"documents": batch.documents}
        with loss_parallel() if self.mesh.layout.tp > 1 else nullcontext():
            if self.schedule is None:
                (part,) = self.rank_model.stages.values()
                with self.autocast():
                    loss = part(inputs, targets, **more)
            else:
                backward = self.mesh.layout.schedule in V_SHAPED  # PyTorch's V schedules cannot skip it
                with torch.set_grad_enabled(backward):
                    loss = self._pipelined(self.schedule, inputs, targets, 1.0, 1.0, more, backward)
                for parameter in self.rank_model.parameters() if backward else ():
                    parameter.grad = None
                if not self.has_loss:
                    return 0.0, 0
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        return float(loss), int((targets != IGNORED).sum())

    # -- properties ------------------------------------------------------------------------------------------

    def persistent_bytes(self) -> int:
        """Return the bytes held between steps: tensors, a batch, DDP's buckets, plug-ins, and receive buffers."""
        total = super().persistent_bytes() + 2 * 8 * self.share * self.config.sequence
        for part in self.rank_model.stages.values():
            if isinstance(part, DistributedDataParallel):  # gradients are views of persistent buckets
                total += sum(p.nbytes for p in part.parameters() if p.requires_grad)
        received = list(pipeline.message_buffers(self.schedule))
        extended = () if self.plugin is None else self.plugin.held()
        return total + tree_bytes(extended) + tree_bytes(received)

    def setting(self) -> dict[str, Any]:
        return super().setting() | {"layout": str(self.mesh.layout)}

    def facts(self) -> dict[str, Any]:
        return {"skipped_updates": self.scale.skipped_steps}


def read_first_weights(source: str, parts: Iterable[Transformer], joined: nn.Module, store: ShardedFiles) -> None:
    """Read `train.start_from` into this rank's tensors: a Hugging Face model, or another run with any layout.

    Every rank reads the files, but only its own rows of tensors that are stored as they are held. A run with adapters
    or compressed weights is first loaded as a whole. `joined` is a module with all `parts`; `store` reads the other
    checkpoints.
    """
    folder, parts = Path(source), list(parts)
    config = parts[0].config
    if not RunDirectory(folder).is_run:
        copy_from(parts, lambda wanted: read_weights(folder, config, wanted))
        return
    found = newest_of(folder)
    if found.index.get("store") in (AdapterFiles.name, QuantizedFiles.name):
        whole = unique_weights(load_for_inference(found, config))
        copy_from(parts, lambda wanted: ((name, whole[name]) for name in filter(wanted, whole)))
        return
    check_model(found, config)
    store.read(found.path, joined, {})


def _sum_together(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sum many small gradients over a group, in one all-reduce."""
    parts = [local_part(tensor) for tensor in tensors]
    if not parts:
        return
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat, group=group)
    for part, summed in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.copy_(summed.view_as(part))
