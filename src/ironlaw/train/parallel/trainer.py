"""The training loop on many ranks: the same loop, with a layout's step, and files written by rank 0."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ironlaw.config import LayoutConfig, RunConfig
from ironlaw.cores import usable_threads
from ironlaw.data.batch import Batch
from ironlaw.data.loader import Loader
from ironlaw.errors import UserError
from ironlaw.ledger import Ledger, Phase
from ironlaw.machine import host
from ironlaw.model.linear import use_onednn
from ironlaw.model.moe import Load
from ironlaw.observe.clock import StepTimes
from ironlaw.observe.held import recording
from ironlaw.plan.recipe import layout_of
from ironlaw.train import checkpoint, precision
from ironlaw.train.checkpointer import Checkpointer
from ironlaw.train.journal import Journal
from ironlaw.train.jsonl import read_lines
from ironlaw.train.loop import Outcome, Trainer, _due
from ironlaw.train.optimizer import set_learning_rate
from ironlaw.train.parallel import apply as layouts
from ironlaw.train.parallel import experts
from ironlaw.train.parallel.average import SharedAverage
from ironlaw.train.parallel.early import first_part
from ironlaw.train.parallel.first import first_does
from ironlaw.train.parallel.lasting import lasting_bytes
from ironlaw.train.parallel.merged import merge, seen, typical_steps
from ironlaw.train.parallel.names import mark_fused
from ironlaw.train.parallel.outer import Outer
from ironlaw.train.parallel.ranks import Ranks
from ironlaw.train.parallel.step import DistributedStep
from ironlaw.train.parallel.store import ShardedFiles
from ironlaw.train.parallel.straggler import Straggling
from ironlaw.train.parallel.waiting import timed_hooks, watch_replica, watching
from ironlaw.train.parallel.watcher import Watcher
from ironlaw.train.parallel.whole import read_first_weights, shapes
from ironlaw.train.recovery import Recovery, Spike
from ironlaw.train.schedule import learning_rate
from ironlaw.train.state import RandomState
from ironlaw.train.transfer import Transfer


class Gatherer:
    """What `Checkpointer` needs of the ranks, over a group of its own: it works beside the training step."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank = group, dist.get_rank(group)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        return values


class Silent:
    """The journal of ranks that write nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: None


class DistributedTrainer(Trainer):
    """One rank of a run. Construct on every rank, then `train()` on every rank."""

    ranks: Ranks

    def __init__(self, *arguments: Any, ranks: Ranks, watcher: Watcher, **named: Any) -> None:
        self.ranks, self.watcher = ranks, watcher
        config: RunConfig = arguments[0]
        per_stage = ranks.size // ranks.config.pp
        stages = [rank // per_stage for rank in range(ranks.size)]
        self.straggling = Straggling(stages, config.recovery.straggler_threshold)
        self._stop_agreed = False
        self._expert_load: Load | None = None
        self._watching = contextlib.ExitStack()
        self.peak_bytes: int | None = None
        super().__init__(*arguments, **named)

    def _setup(self, start: checkpoint.Checkpoint | None) -> None:
        config, ranks = self.config, self.ranks
        _check_supported(config, ranks.config, self.precision)
        host.keep_freed_memory()
        torch.set_num_threads(threads_per_rank(self.profile.threads))
        self.device = ranks.device
        self.loader = Loader(self.dataset, config.data, config.sequence)
        self.batches = self.loader.training(config.train.global_batch, config.train.seed, ranks.index("dp"), ranks.dp)
        self.to_device = Transfer(self.device, config.data.pin_memory)
        torch.manual_seed(config.train.seed)
        model = shapes(config.model)
        mark_fused(model)
        precision.prepare(model, model.blocks, self.device, self.precision)
        model.loss_chunk = self.plan.decided.loss_chunk
        wanted = config.train.compile
        wanted = "on" if wanted == "auto" and self.device.type == "cuda" else wanted
        self.compiled = wanted == "on" and self._can_compile()
        experts.form_groups(config, ranks)
        self.waits = self._watching.enter_context(watching(ranks))
        with timed_hooks(self.waits):
            drawn = start is None and not config.train.start_from
            self.applied = layouts.apply(model, config, ranks, self.plan.decided.recompute, self.compiled, drawn)
        for part in self.applied.parts.values():
            watch_replica(part, self.waits)
        self.model = self.applied.model
        # Of the layers that dividing has made, too: projections apart, a pipeline's copy of a tied head.
        use_onednn(self.model, self.profile.fp32_products == "onednn")
        group = dist.new_group(backend="gloo")
        self.store = ShardedFiles(group, config.optimizer)
        if start is None and config.train.start_from:
            read_first_weights(config.train.start_from, self.applied.plain.values(), self.model, self.store)
        self.optimizer = layouts.build(self.applied, config.optimizer)
        self.distributed = DistributedStep(self.applied, config, self._autocast, self.precision)
        self.states = {"optimizer": self.optimizer, "random": RandomState()}
        if self.distributed.scale.enabled:
            self.states["loss scale"] = self.distributed.scale
        if config.train.average_decay is not None:
            self.average = self.states["average"] = SharedAverage(self.model, config.train.average_decay)
        if self.distributed.noise is not None:
            self.states["noise scale"] = self.distributed.noise.scale
        self.outer = Outer(self.applied, config) if ranks.sites > 1 else None
        self.states |= {"outer": self.outer} if self.outer else {}
        self.states |= {"powersgd": self.applied.compressor} if self.applied.compressor else {}
        self.checkpointer = Checkpointer(
            self.run.checkpoints, config.checkpoint, config.model, store=self.store, ranks=Gatherer(group),
            say=self.say, before_write=lambda: self.journal.sync(),
        )  # fmt: skip
        if start is not None:
            checkpoint.check_model(start, config.model)
            self._start_anew(self.store.read(start.path, self.model, self.states))
            self.step, self.tokens = start.step, start.tokens
            self.checkpointer.last = start
            self.say(f"resumed from step {start.step}")
        self.recovery = Recovery(config.recovery, read_lines(self.run.events_file), ())
        self._spike_known = False
        self._digested: Any = None
        if ranks.first:
            self.journal = Journal(config, self.run, self.step, self._setting(), self.say)
        else:
            self.journal = cast(Journal, Silent())
        dist.barrier()  # the others read what rank 0's journal leaves of an earlier session
        self.recovery.start_over(self.run.metrics())

    def _can_compile(self) -> bool:
        """On every rank or on none, or they would wait for each other: a small function shows whether there is a
        compiler at all."""
        problem = None
        try:
            torch.compile(lambda x: x.cos() + 1)(torch.zeros(8, device=self.device))
        except Exception as error:  # it fails in many ways
            problem = (str(error).strip().splitlines() or [type(error).__name__])[0]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, problem)
        first = next((reason for reason in found if reason is not None), None)
        if first is not None:
            self.say(f"torch.compile failed, training without it: {first}")
        return first is None

    def train(self) -> Outcome:
        with self._watching:
            return super().train()

    def _setting(self) -> dict[str, Any]:
        layout = layout_of(self.ranks.config, self.distributed.micro_batch)
        return super()._setting() | {"layout": str(layout), "micro_batch": self.distributed.micro_batch}

    def _enough_steps_left(self) -> bool:
        return self.device.type == "cpu" and self.config.train.steps - self.step >= 3

    def _record_steps(self, batches: Iterator[Batch[Tensor]]) -> None:
        """One step whose allocations are counted. By operation nothing is recorded: that reader knows one process."""
        began = time.perf_counter()
        average = self.average.tensors if self.average is not None else ()
        lasting = lasting_bytes(self.applied, self.optimizer, self.distributed.schedule, average, self.outer)
        self.waits.settle = True
        with recording() as recorded:
            times = self._timed_step(batches, recording=True)
        self.waits.settle = False
        batch = 2 * 8 * self.distributed.share * self.config.sequence
        self.peak_bytes = lasting + batch + recorded.peak_bytes()
        self.waits.start_over()
        self._after_step(times, recorded=True)
        self.observed.wall_seconds["profiling"] = time.perf_counter() - began

    def _timed_step(self, batches: Iterator[Batch[Tensor]], recording: bool) -> StepTimes:
        config, clock = self.config, self.clock
        self.watcher.step = self.step + 1
        comparing = _due(self.step + 1, config.recovery.straggler_every)
        with clock.step() as times, self.waits.counting(clock), self.watcher.own.step():
            with clock.phase(Phase.DATA):
                batch = next(batches)
            noise = self.distributed.noise
            loss = self.distributed.forward_backward(
                batch.inputs, batch.targets, self.distributed.samples(self.step), clock, batch.documents,
                estimating=noise is not None and noise.due(self.step),
            )  # fmt: skip
            # Clipping; what is waited for in it counts as communication.
            with clock.phase(Phase.OPTIMIZER if self.device.type == "cpu" else Phase.COMMUNICATION):
                # One all-reduce: every rank knows the same loss and norm, and stops at the same step.
                stop = self._interrupted is not None
                own = self._own_seconds() if comparing else None
                self.train_loss, self._gradient_norm, stop = self.distributed.agree(loss, config.train.clip, stop, own)
            with clock.phase(Phase.OPTIMIZER):
                set_learning_rate(self.optimizer, learning_rate(config, self.step))
                if not self.distributed.overflowed:
                    self.optimizer.step()
                    if self.average is not None:
                        self.average.update()
                if noise is not None:
                    noise.observe(self._gradient_norm, self.distributed.overflowed)
                self.optimizer.zero_grad(set_to_none=True)
                if config.model.moe:
                    self._expert_load = experts.balance(self.model, self.ranks)
            if self.outer is not None:
                with clock.phase(Phase.COMMUNICATION):
                    self.outer.after(self.step + 1)
        if stop and self._interrupted is None:
            self._interrupted = "SIGTERM"  # another rank was told to stop
        self._stop_agreed = stop
        self.step += 1
        self.tokens += config.tokens_per_step
        if comparing:
            self._compare_ranks(self.distributed.added)
        return times

    def _own_seconds(self) -> list[float]:
        """Wall seconds of the steps since the last comparison, then own ones: of this rank in its place."""
        own, wall = self.watcher.own.take()
        rank, size = self.ranks.rank, self.ranks.size
        return [wall / size, *(own if index == rank else 0.0 for index in range(size))]

    def _compare_ranks(self, added: list[float]) -> None:
        """The same numbers on every rank; rank 0 writes down what they say."""
        wall, *own = added
        if not self.ranks.first:
            return
        news, over = self.straggling.observe(own, wall, self.config.recovery.straggler_every)
        for slow in news:
            host = self.watcher.host(slow.rank)
            self.say(
                f"rank {slow.rank} on {host} is slow: it works {slow.longer:.0%} longer than the others, which wait "
                f"for it {slow.share:.0%} of the time (step {self.step})"
            )
            self.journal.event("slow_rank", step=self.step, host=host, **asdict(slow))
        for rank in over:
            self.say(f"rank {rank} on {self.watcher.host(rank)} is as fast as the others again")
            self.journal.event("slow_rank_over", step=self.step, rank=rank)

    def _stopping(self) -> bool:
        return self._stop_agreed  # never on this rank's own account: the others would wait for it

    @torch.no_grad()
    def _validate(self) -> float:
        """Replicas share the batches; sums of losses and numbers of tokens are added up over all ranks."""
        config, ranks, step = self.config, self.ranks, self.distributed
        size = step.share if step.schedule is not None else step.micro_batch
        wanted = config.evaluation.batches * config.train.global_batch
        batches = list(self.loader.validation(size, -(-wanted // size)))
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        with step.evaluating(), self.outer.evaluating() if self.outer else nullcontext():
            for first in range(0, len(batches), ranks.dp):
                # Collectives need every rank: one without a batch of its own works on another's and does not count it.
                mine = first + ranks.index("dp")
                counts = mine < len(batches) and (step.schedule is None or len(batches[mine].inputs) == size)
                if step.schedule is not None and len(batches[0].inputs) < size:
                    break  # less text than one batch of the pipeline
                batch = self.to_device(batches[mine] if counts else batches[0])
                losses, tokens = step.evaluate(batch.inputs, batch.targets, batch.documents)
                if counts:
                    total += torch.tensor([losses, tokens], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total[0] / total[1]) if float(total[1]) else float("nan")

    def _step_metrics(self) -> dict[str, Any]:
        result: dict[str, Any] = {} if self._expert_load is None else self._expert_load.metrics()
        scale = self.distributed.scale
        if scale.enabled:
            result |= {"loss_scale": scale.scaler.get_scale(), "skipped_steps": scale.skipped_steps}
        if self.distributed.noise is not None and self.distributed.noise.scale.sequences is not None:
            result["critical_batch"] = self.distributed.noise.scale.sequences
        return result

    def _step_facts(self) -> dict[str, Any]:
        return {}

    def _answer(self, spike: Spike) -> checkpoint.Checkpoint | None:
        """All ranks have found the spike in the same numbers; rank 0 looks at the disk, writes down what is done about
        it and drops checkpoints."""
        known = len(self.recovery.turns)

        def decide() -> tuple[checkpoint.Checkpoint | None, list[dict[str, Any]]]:
            return super(DistributedTrainer, self)._answer(spike), self.recovery.turns[known:]

        target, turns = first_does(decide)
        if not self.ranks.first:
            for event in turns:
                self.recovery.take(event)
        return target

    def _restore(self, target: checkpoint.Checkpoint) -> None:
        """All ranks have decided alike, from the same numbers; rank 0 drops the lines, then all read what is left."""
        self.store.read(target.path, self.model, self.states)
        self.step, self.tokens = target.step, target.tokens
        self.checkpointer.last = target
        self.journal.forget_after(self.step, self.observed)
        dist.barrier()
        self.recovery.start_over(self.run.metrics())
        self._spike_known = False

    def _finish(self) -> Ledger:
        """Rank 0 puts together what all have seen."""
        ranks = self.ranks
        chosen = [typical_steps(self.observed)]
        dist.broadcast_object_list(chosen)
        mine = seen(self.observed, chosen[0], self.waits, self.peak_bytes, ranks.rank, ranks.index("pp"))
        everybodys: list[Any] = [None] * ranks.size
        dist.all_gather_object(everybodys, mine)
        if not ranks.first:
            return Ledger("run")
        ledger = super()._finish()
        merge(ledger, everybodys)
        own = self.straggling.own_seconds
        if any(own):
            ledger.facts |= {"rank_own_seconds": own, "slowest_rank": own.index(max(own))}
        return ledger

    def _probe_sometimes(self) -> None:
        if self.ranks.first:
            super()._probe_sometimes()


def _check_supported(config: RunConfig, layout: LayoutConfig, precision: str) -> None:
    """One process does these; several do not yet."""
    train = config.train
    unsupported = {
        'train.compile = "graphs"': train.compile == "graphs",
        f'train.precision = "{precision}"': precision not in ("fp32", "tf32", "bf16", "fp16"),
        f'train.offload = "{train.offload}"': train.offload != "none",
    }
    for setting, wanted in unsupported.items():
        if wanted:
            raise UserError(f"{setting} is not supported with several ranks yet: leave it out")
    communication = config.communication
    if train.average_decay is not None and communication.local_steps:
        raise UserError("train.average_decay has no one model to follow with communication.local_steps: leave one out")
    if train.noise_scale_every and (communication.local_steps or communication.gradients == "powersgd"):
        raise UserError(
            "train.noise_scale_every needs the gradients that all ranks share: leave out communication.local_steps and "
            '"powersgd"'
        )
    if train.noise_scale_every:
        first_part(config, layout)


def threads_per_rank(threads: int) -> int:
    """Ranks of one machine share its cores."""
    return min(usable_threads(), max(1, threads // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
