"""Bytes of tensors one rank holds over a step: its stage walked pass by pass, gathered weights and buffers included.

    peak = rank_peak(config, layout, position, shape)       # `shape`: the rank's own (`rank_work.local_shape`)
    peak.total, peak.where, peak.components

What lasts: the rank's weights, its optimizer's state, DDP's buckets, a pipeline's buffers for messages. What comes and
goes: activations between forward and backward, temporaries, gradients, and what FSDP2 gathers and reduces: a buffer of
the whole unit beside the weights copied out of it, kept until the next unit's is there; backward, the next unit is
gathered ahead, and gradients are copied into a buffer that lives until the next one's reduction. Gloo copies both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ironlaw.config import RunConfig
from ironlaw.ledger import Kind
from ironlaw.plan.process.memory import rotary_table_bytes
from ironlaw.workload.backward import embedding_backward, head_backward
from ironlaw.workload.blocks import Policy
from ironlaw.workload.collectives import matrix_elements
from ironlaw.workload.division import sharded
from ironlaw.workload.forward import embedding, head
from ironlaw.workload.kinds import backward_of, forward_of, layer_groups
from ironlaw.workload.layout import Layout
from ironlaw.workload.operations import Operation
from ironlaw.workload.optimizers import state_bytes, update_temporary_bytes
from ironlaw.workload.parameters import Parameter
from ironlaw.workload.pipeline import layers_of, stages_of
from ironlaw.workload.recompute import again, dropped, weight_copies
from ironlaw.workload.schedule import Pass, passes
from ironlaw.workload.sharding import (
    EXPERTS,
    bucket_bytes,
    expert_holders,
    of_experts,
    of_site,
    shard_of,
    stage_parameters,
    units_of,
)
from ironlaw.workload.transformer import FP32, INDEX, Shape

COMPONENTS = (
    "weights", "gradients", "optimizer", "activations", "temporaries", "gathered", "reducing", "messages", "savers",
    "batch",
)  # fmt: skip


@dataclass(frozen=True)
class RankPeak:
    """The highest moment of a rank's step, in bytes by component."""

    where: str
    components: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.components.values())


@dataclass
class Walk:
    """What is held now, and the highest moment so far."""

    now: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COMPONENTS, 0.0))
    peak: RankPeak = RankPeak("start", {})

    def add(self, component: str, size: float, where: str) -> None:
        self.now[component] += size
        if size > 0:
            self.look(where)

    def look(self, where: str) -> None:
        if sum(self.now.values()) > self.peak.total:
            self.peak = RankPeak(where, dict(self.now))

    def run(self, operations: Iterable[Operation], gradients: str, factor: float = 1.0) -> None:
        """`gradients`: the component that holds new ones; "" where they are added to what is there, and freed."""
        now = self.now
        for op in operations:
            now["activations"] += op.saved_bytes * factor
            now["temporaries"] += op.temporary_bytes * factor
            now[gradients or "temporaries"] += op.gradient_bytes
            self.look(f"{op.name}, {op.phase}")
            if not gradients:
                now["temporaries"] -= op.gradient_bytes
            now["activations"] -= op.frees_saved_bytes * factor
            now["temporaries"] -= op.frees_temporary_bytes * factor


def rank_peak(config: RunConfig, layout: Layout, position: int, shape: Shape, gloo: bool = True) -> RankPeak:
    """The peak of a rank at a pipeline position. `gloo`: collectives make copies, as they do on CPUs."""
    return _Rank(config, layout, position, shape, gloo).peak()


class _Rank:
    def __init__(self, config: RunConfig, layout: Layout, position: int, shape: Shape, gloo: bool) -> None:
        self.gloo = gloo
        self.micro_batches = config.train.global_batch // (layout.dp * layout.micro_batch)
        layout = of_site(layout, config.communication)
        self.config, self.layout, self.position, self.shape = config, layout, position, shape
        self.stages = stages_of(layout.schedule, layout.pp, layout.virtual_stages, position)
        self.last = layout.pp * layout.virtual_stages - 1
        self.parameters = {s: stage_parameters(config.model, layout, s) for s in self.stages}
        self.fsdp = sharded(layout)
        self.ddp = not self.fsdp and layout.dp * layout.cp > 1
        self.ranks = (layout.shard or layout.dp) * layout.cp if layout.zero else 1
        chunked = bool(shape.loss_chunk)
        self.holders = expert_holders(layout.dp, layout.cp, layout.ep) if layout.zero else 1
        self.units = {s: units_of(config.model, self.parameters[s], layout.ep, chunked) for s in self.stages}
        self.walk = Walk()
        self.gathered: set[tuple[int, str]] = set()
        self.reduced: set[tuple[int, str]] = set()
        self.has_gradients: set[int] = set()
        self.waiting_buffer = 0.0  # of the last reduction
        self.last_gather = 0.0  # buffer of the last gather, forward
        # PyTorch's schedules of several chunks, or with split passes, wait for what they have sent at the end only.
        self.sends_late = layout.pp > 1 and not (layout.virtual_stages == 1 and layout.schedule in ("1f1b", "gpipe"))
        # Once every pass has come by after every other, further micro-batches hold nothing new.
        steady = layout.pp == 1 or (layout.schedule == "1f1b" and not self.sends_late)
        self.walked = min(self.micro_batches, 2 * layout.pp + 1) if steady else self.micro_batches
        self.unfinished = 0.0
        self.waiting: dict[tuple[int, int], float] = {}  # of a split pass: what its gradients of weights need
        self.ahead: dict[tuple[int, str], float] = {}  # buffers gathered ahead, backward

    # -- sizes -------------------------------------------------------------------------------------------------

    def sharing(self, parameter: Parameter) -> int:
        """Ranks that FSDP shards a tensor over."""
        return self.holders if self.layout.ep > 1 and of_experts(parameter) else self.ranks

    def padded(self, tensors: list[Parameter]) -> float:
        """Bytes of a unit as FSDP gathers it, rows padded to a multiple of the ranks."""
        return float(sum(p.elements * self.sharing(p) for p in map(self.shard_of, tensors)) * FP32)

    def shard_of(self, parameter: Parameter) -> Parameter:
        """This rank's part."""
        return shard_of(parameter, self.config.model, self.layout.ep, self.sharing(parameter))

    def whole(self, stage: int) -> float:
        return float(sum(p.elements for p in self.parameters[stage]) * FP32)

    def shards(self) -> list[Parameter]:
        """What this rank updates."""
        return [self.shard_of(p) for stage in self.stages for p in self.parameters[stage]]

    @property
    def stream(self) -> float:
        """One residual stream as stages hand it on."""
        tokens = self.layout.micro_batch * self.config.sequence // self.layout.cp
        return tokens * self.config.model.hidden * FP32 / (self.layout.tp if self.layout.sp else 1)

    # -- the step ----------------------------------------------------------------------------------------------

    def peak(self) -> RankPeak:
        config, walk = self.config, self.walk
        mine = self.shards()
        walk.now["weights"] = sum(p.elements for p in mine) * FP32
        model = config.model
        walk.now["weights"] += rotary_table_bytes(model)
        walk.now["optimizer"] = state_bytes(mine, config.optimizer)
        if config.train.average_decay is not None:
            walk.now["average"] = walk.now["weights"]
        walk.now["batch"] = self.micro_batches * self.layout.micro_batch * config.sequence * 2 * INDEX
        if self.ddp:
            walk.now["gradients"] = self.whole(self.stages[0])
        self._savers()
        walk.look("start")
        if self.layout.pp > 1:
            self._pipelined()
        else:
            for m in range(self.walked):
                self._forward(0, m)
                self._backward(0, m, last=m == self.walked - 1, piped=False)
        self._finish()
        update = update_temporary_bytes(mine, config.optimizer)
        walk.add("temporaries", update, "update, optimizer")
        if config.communication.local_steps:
            walk.now["temporaries"] -= update
            walk.now["gradients"] = self.whole(self.stages[0]) if self.ddp else 0.0
            self._meeting()
        return walk.peak

    # -- what savers of communication hold -----------------------------------------------------------------------

    def _savers(self) -> None:
        """Common weights and their momentum; what PowerSGD left out of the last step, and its matrices."""
        communication, walk = self.config.communication, self.walk
        if communication.local_steps:
            walk.now["savers"] = 2 * sum(p.elements for p in self.shards()) * FP32
        if self.ddp and communication.gradients == "powersgd":
            matrices = sum(matrix_elements(p.shape, communication.rank) for p in self.parameters[0])
            walk.now["savers"] = self.whole(0) + matrices * FP32

    def _meeting(self) -> None:
        """Differences to the common weights, put together and reduced some at a time, and the outer gradient."""
        narrow = 0.5 if self.config.communication.gradients == "bf16" else 1.0
        sizes, held = [p.elements * FP32 for p in self.shards()], 0.0
        while sizes:
            chunk = 0.0
            while sizes and chunk < MEETING_ELEMENTS * FP32:
                chunk += sizes.pop(0)
            self.walk.add("savers", 2 * chunk + (chunk * narrow if narrow < 1 else 0), "sites meet")
            self.walk.now["savers"] -= 2 * chunk + (chunk * narrow if narrow < 1 else 0)
            held += chunk
            self.walk.add("savers", 2 * chunk, "sites meet")
            self.walk.now["savers"] -= chunk

    def _buckets(self, ready: float, reduced: int) -> int:
        """DDP's hook for the buckets that are full once gradients of so many bytes are ready: copies it makes. Returns
        how many buckets have been reduced."""
        communication = self.config.communication
        # Cast to bf16; or the gradient as it was, and what is left out of it.
        copies = {"bf16": 0.5, "powersgd": 2.0}.get(communication.gradients, 0.0)
        buckets = bucket_bytes(self.parameters[0])
        while reduced < len(buckets) and sum(buckets[: reduced + 1]) <= ready:
            self.walk.add("savers", copies * buckets[reduced], f"bucket {reduced} reduced")
            self.walk.now["savers"] -= copies * buckets[reduced]
            reduced += 1
        return reduced

    def _pipelined(self) -> None:
        order = self._order()
        for stage in self.stages:  # a buffer for each micro-batch's input, and for the gradient of its output
            # Also for a neighbour on the same rank, whose tensors take the buffers' place.
            others = [s for s in (stage - 1, stage + 1) if 0 <= s <= self.last]
            self.walk.now["messages"] += len(others) * self.micro_batches * self.stream
        self.walk.look("messages")
        for p in order:
            if p.kind == "F":
                self._forward(p.stage, p.micro_batch)
            elif p.stage == 0 and p.kind == "I":
                pass  # nobody waits for gradients of tokens: PyTorch leaves all of it to the second pass
            elif p.kind == "B" or p.stage == 0:
                self._backward(p.stage, p.micro_batch, last=False, piped=True)
            elif p.kind == "I":
                self._inputs(p.stage, p.micro_batch)
            else:
                self._weights(p.stage, p.micro_batch)
        self.walk.now["messages"] -= self.unfinished
        for stage in self.stages if self.fsdp else ():
            self._reduce_all(stage)

    def _order(self) -> list[Pass]:
        layout = self.layout
        return passes(layout.schedule, layout.pp, layout.virtual_stages, self.walked)[self.position]

    def _blocks(self, stage: int) -> list[str]:
        return [unit for _, _, unit in self._layers(stage)]

    def _layers(self, stage: int) -> list[tuple[str, Policy, str]]:
        """Of each layer its kind, what it keeps when it is run again, and its name."""
        model, chosen = self.config.model, self.shape.recompute
        layers = layers_of(model.layers, self.last + 1, self.layout.virtual_stages)[stage]
        kinds = layer_groups(model)
        return [(kinds[layer], chosen[layer] if chosen else None, f"blocks.{layer}") for layer in layers]

    def _block_backward(self, kind: str, policy: Policy) -> list[Operation]:
        shape = self.shape
        operations = backward_of(shape, kind)
        return operations if policy is None else again(shape, policy, kind) + operations

    def _forward(self, stage: int, micro_batch: int) -> None:
        shape, walk = self.shape, self.walk
        self._gather(stage, "root")
        if stage == 0:
            self._gather(stage, "embedding.weight")
            walk.run(embedding(shape), "gradients")
            self._release(stage, "embedding.weight")
        layers = self._layers(stage)
        for kind, policy, unit in layers:
            self._gather(stage, unit)
            walk.run(forward_of(shape, kind), "gradients")
            if policy is not None:
                walk.run([dropped(shape, policy, kind)], "gradients")
            self._release(stage, unit)
        if stage == self.last:
            self._gather(stage, "head.weight")
            walk.run(head(shape), "gradients")
            self._release(stage, "head.weight")
        # Autocast remembers its copies of weights until the pass is over; where nothing runs again they are kept.
        walk.now["activations"] -= sum(weight_copies(shape, kind) for kind, policy, _ in layers if policy is not None)
        walk.add("gathered", -self.last_gather, "")
        self.last_gather = 0.0

    def _backward(self, stage: int, micro_batch: int, last: bool, piped: bool) -> None:
        shape, walk = self.shape, self.walk
        adding = stage in self.has_gradients and not (self.fsdp and self.layout.zero >= 2 and not piped)
        # DDP copies gradients into its buckets with the last micro-batch; until then they are tensors of their own.
        kept = "" if adding or (self.ddp and self.micro_batches == 1) else "gradients"
        blocks = self._blocks(stage)[::-1]
        order = (["head.weight"] if stage == self.last else []) + blocks
        order += ["embedding.weight"] if stage == 0 else []
        work = {unit: self._block_backward(kind, policy) for kind, policy, unit in self._layers(stage)}
        work |= {"head.weight": head_backward(shape), "embedding.weight": embedding_backward(shape)}
        if stage != self.last:
            walk.add("temporaries", self.stream, "gradient of the output")
        ready, reduced = 0.0, 0
        for index, unit in enumerate(order):
            if unit in self.units[stage] and unit == "head.weight":  # the loss is the root's, before the output layer
                self._regather(stage, "root", [unit])
                ahead = [op for op in work[unit] if op.kind is Kind.LOSS]
                walk.run(ahead, kept)
                work[unit] = work[unit][len(ahead) :]
            self._regather(stage, unit, order[index + 1 :][:1])
            walk.run(work[unit], kept)
            if self.ddp and last:
                ready += sum(p.elements for p in self.units[stage].get(unit, ())) * FP32
                reduced = self._buckets(ready if index + 1 < len(order) else self.whole(stage), reduced)
            if unit != "embedding.weight":
                self._after_backward(stage, unit, last, piped)
        if stage != 0:
            walk.now["temporaries"] -= self.stream
            walk.now["activations"] += self.stream  # the input is a buffer for messages
            self._sent(stage, stage - 1)
        if stage != self.last:
            walk.now["activations"] -= self.stream  # the output
            self._sent(stage, stage + 1)
        self.has_gradients.add(stage)
        if self.fsdp and not piped:
            self._after_backward(stage, "root", last, piped)
            self._after_backward(stage, "embedding.weight", last, piped)  # tokens have no gradient that would tell
            if last:  # else the buffer of the last reduction stays until the next one
                walk.now["reducing"] -= self.waiting_buffer
                self.waiting_buffer = 0.0

    def _sent(self, stage: int, to: int) -> None:
        if self.sends_late and to not in self.stages:
            self.unfinished += self.stream
            self.walk.add("messages", self.stream, "messages")

    def _inputs(self, stage: int, micro_batch: int) -> None:
        """Gradients of inputs alone: nothing that was saved is freed, and gradients of wide layers' outputs stay."""
        shape, walk, model = self.shape, self.walk, self.shape.model
        before = walk.now["activations"]
        saved = self._saved(stage)
        wide = model.projected_size + model.ffn_size * (2 if model.gated_ffn else 1)
        order: list[tuple[list[Operation], float]] = []
        if stage == self.last:
            order.append((head_backward(shape), shape.tokens * model.vocab * FP32 + self.stream))
        order += [
            (self._block_backward(kind, policy), shape.tokens * wide * FP32) for kind, policy, _ in self._layers(stage)
        ]
        start = walk.now["temporaries"]
        if stage != self.last:
            walk.add("temporaries", self.stream, "gradient of the output")
        for unit in reversed(self._blocks(stage)):
            self._gather(stage, unit)
        for operations, kept in order:
            walk.add("activations", kept, "gradients of inputs")
            walk.run([replace(op, frees_saved_bytes=0, gradient_bytes=0) for op in operations], "gradients")
        walk.now["temporaries"] = start
        self.waiting[stage, micro_batch] = walk.now["activations"] - before + saved
        if stage != 0:
            self._sent(stage, stage - 1)
        if stage != self.last:
            self._sent(stage, stage + 1)

    def _weights(self, stage: int, micro_batch: int) -> None:
        """Gradients of weights: what waited for them goes."""
        if stage not in self.has_gradients:
            self.walk.add("gradients", self.whole(stage), "gradients of weights")
            self.has_gradients.add(stage)
        self.walk.now["activations"] -= self.waiting.pop((stage, micro_batch))

    def _saved(self, stage: int) -> float:
        """What a forward pass leaves, its input left out where that is a buffer for messages."""
        shape = self.shape
        operations = []
        for kind, policy, _ in self._layers(stage):
            operations += forward_of(shape, kind) + ([] if policy is None else [dropped(shape, policy, kind)])
        operations += embedding(shape) if stage == 0 else []
        operations += head(shape) if stage == self.last else []
        return sum(op.saved_bytes - op.frees_saved_bytes for op in operations)

    # -- what FSDP does ----------------------------------------------------------------------------------------

    def _gather(self, stage: int, unit: str) -> None:
        if unit + EXPERTS in self.units[stage]:
            self._gather(stage, unit + EXPERTS)
        tensors = self.units[stage].get(unit)
        if not self.fsdp or tensors is None or (stage, unit) in self.gathered:
            return
        self.gathered.add((stage, unit))
        size = self.padded(tensors)
        if self.sharing(tensors[0]) > 1:
            self.walk.add("gathered", size, f"gathering {unit}")
            self._copied(size, f"gathering {unit}", tensors)
            self.walk.now["gathered"] -= self.last_gather
            self.last_gather = size
        self.walk.add("gathered", size, f"weights of {unit}")

    def _release(self, stage: int, unit: str) -> None:
        if unit + EXPERTS in self.units[stage]:
            self._release(stage, unit + EXPERTS)
        if self.layout.zero == 3 and (stage, unit) in self.gathered:
            self.gathered.remove((stage, unit))
            self.walk.now["gathered"] -= self.padded(self.units[stage][unit])

    def _regather(self, stage: int, unit: str, following: list[str]) -> None:
        """Backward: the unit's weights out of the buffer that was gathered ahead, and the next one's buffer."""
        if not self.fsdp or self.layout.zero != 3:
            return
        walk = self.walk
        for which in [part for one in (unit, *following) for part in (one, one + EXPERTS)]:
            tensors = self.units[stage].get(which)
            if tensors is None or (stage, which) in self.gathered:
                continue
            size = self.padded(tensors)
            if (stage, which) not in self.ahead:
                self.ahead[stage, which] = size
                walk.add("gathered", size, f"gathering {which}")
                self._copied(size, f"gathering {which}", tensors)
            if which.removesuffix(EXPERTS) == unit:
                walk.add("gathered", size, f"weights of {which}")
                walk.now["gathered"] -= self.ahead.pop((stage, which))
                self.gathered.add((stage, which))

    def _after_backward(self, stage: int, unit: str, last: bool, piped: bool) -> None:
        if unit + EXPERTS in self.units[stage]:
            self._after_backward(stage, unit + EXPERTS, last, piped)
        tensors = self.units[stage].get(unit)
        if not self.fsdp or tensors is None or piped:
            return
        zero = self.layout.zero
        if (last or zero == 3) and (stage, unit) in self.gathered:
            self.gathered.remove((stage, unit))
            self.walk.now["gathered"] -= self.padded(tensors)
        if last or zero >= 2:
            self._reduce(stage, unit, tensors)

    def _reduce(self, stage: int, unit: str, tensors: list[Parameter]) -> None:
        walk, size = self.walk, self.padded(tensors)
        narrow = size * (0.5 if self.config.communication.gradients == "bf16" else 1.0)
        walk.now["reducing"] -= self.waiting_buffer
        walk.add("reducing", narrow, f"gradients of {unit} copied")
        self.waiting_buffer = narrow
        walk.now["gradients"] -= sum(p.elements for p in tensors) * FP32
        first = (stage, unit) not in self.reduced
        walk.add("gradients", size / self.sharing(tensors[0]), f"reducing {unit}")
        self._copied(narrow, f"reducing {unit}", tensors)
        if not first:
            walk.now["gradients"] -= size / self.sharing(tensors[0])
        self.reduced.add((stage, unit))

    def _copied(self, size: float, where: str, tensors: list[Parameter]) -> None:
        """Gloo's own copy of what it gathers, or reduces and scatters."""
        if self.sharing(tensors[0]) > 1 and self.gloo:
            self.walk.add("temporaries", size, where)
            self.walk.now["temporaries"] -= size

    def _reduce_all(self, stage: int) -> None:
        """A pipeline's gradients, when its passes are through."""
        for unit in reversed(list(self.units[stage])):
            if (stage, unit) in self.gathered:
                self.gathered.remove((stage, unit))
                self.walk.now["gathered"] -= self.padded(self.units[stage][unit])
            self._reduce(stage, unit, self.units[stage][unit])
        self.walk.now["reducing"] -= self.waiting_buffer
        self.waiting_buffer = 0.0

    def _finish(self) -> None:
        """Gradients of a tied weight are exchanged between the ends of a pipeline."""
        if self.layout.pp > 1 and self.config.model.tied and {0, self.last} & set(self.stages):
            table = next(p for s in self.stages for p in self.parameters[s] if p.name in ENDS)
            size = math.ceil(table.shape[0] / self.ranks) * table.shape[1] * FP32
            self.walk.add("temporaries", size, "gradient of the tied weight")
            self.walk.now["temporaries"] -= size


MEETING_ELEMENTS = 8 * 2**20  # as `train/parallel/outer.py` reduces at a time
ENDS = ("embedding.weight", "head.weight")
