"""Bytes of tensors that a rank holds during a step, from a walk over its program, with gathered weights and buffers.

    peak = peak_memory(step(model, batch, layout, recipe), position=0)
    peak.total, peak.where, peak.components

Held throughout: the rank's weights, the optimizer state, DDP's buckets, a pipeline's message buffers. Held for a time:
activations between forward and backward, temporaries, gradients, and the buffers of FSDP2. In the forward pass, FSDP2
gathers weights into a buffer and copies them out; the buffer lives until the next gather. In the backward pass, the
next weights are prefetched, and gradients are copied to a buffer that lives until the next reduction. Gloo copies both.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from ironlaw.ledger import Kind, Phase
from ironlaw.model.config import ModelConfig
from ironlaw.model.parameters import Parameter
from ironlaw.plan.memory_walk import Peak, Walk
from ironlaw.plan.offload import on_device, stream_bytes
from ironlaw.workload.blocks import FP32
from ironlaw.workload.collectives import matrix_elements
from ironlaw.workload.division import sharded
from ironlaw.workload.layout import Layout
from ironlaw.workload.operations import Operation
from ironlaw.workload.optimizers import update_temporary_bytes
from ironlaw.workload.program import EMBEDDING, HEAD, Layer, Program, step
from ironlaw.workload.recipe import Recipe, StepBatch
from ironlaw.workload.schedule import passes_of_rank
from ironlaw.workload.sharding import (
    EXPERTS,
    bucket_bytes,
    expert_dp,
    of_experts,
    parameter_groups,
    shard_of,
    site_layout,
)


def peak_memory(program: Program, position: int = 0) -> Peak:
    """Returns the peak memory of a rank at a pipeline position."""
    return _RankWalk(program, position).peak()


def highest_peak(
    model: ModelConfig, batch: StepBatch, layout: Layout, recipe: Recipe, enough: float = math.inf
) -> tuple[int, Peak, Program]:
    """Returns the pipeline position of the highest peak, the peak and its program; stops at a peak above `enough`."""
    highest: tuple[int, Peak, Program] | None = None
    for position in range(layout.pp):
        program = step(model, batch, layout, recipe, position)
        peak = peak_memory(program, position)
        if highest is None or peak.total > highest[1].total:
            highest = position, peak, program
        if highest[1].total > enough:
            break
    assert highest is not None
    return highest


class _Unit:
    """Parameters that FSDP gathers together, in bytes; rows are padded to a multiple of the ranks that share them."""

    def __init__(self, tensors: list[Parameter], model: ModelConfig | None, ep: int, ranks: int) -> None:
        self.sharing, parts = ranks, [(p, shard_of(p, model, ep, ranks).bytes * ranks) for p in tensors]
        self.gathered = sum(size for _, size in parts)
        self.gradients = sum(p.elements for p in tensors if p.trained) * FP32  # of trained parameters
        self.reduced = sum(size for p, size in parts if p.trained)  # the same, padded
        self.whole = sum(p.elements for p in tensors) * FP32  # gradients of all parameters


class _StageState:
    """One of the rank's pipeline stages, and what it holds at the moment."""

    def __init__(self, index: int, parameters: list[Parameter], layers: list[Layer], units: dict[str, _Unit]) -> None:
        self.index, self.parameters, self.layers, self.units = index, parameters, layers, units
        self.gathered = frozenset[str]()  # units whose whole weights exist
        self.reduced = set[str]()  # units whose reduced gradients exist
        self.ahead: dict[str, float] = {}  # bytes of prefetch buffers in the backward pass
        self.has_gradients, self.waiting = False, 0.0  # bytes kept for a split backward pass's weight gradients
        self.gradient_bytes = float(sum(p.elements for p in parameters) * FP32)

    @property
    def blocks(self) -> list[Layer]:
        return [layer for layer in self.layers if layer.name not in (EMBEDDING, HEAD)]

    def parts(self, *layers: str) -> Iterator[str]:
        """Yields the units of layers; experts follow the rest of their block."""
        return (part for layer in layers for part in (layer, layer + EXPERTS) if part in self.units)


class _RankWalk:
    def __init__(self, program: Program, position: int) -> None:
        self.program, self.recipe, self.position = program, program.recipe, position
        self.micro_batches = program.micro_batches
        self.layout = layout = site_layout(program.layout, program.recipe.communication)
        self.last = program.last_stage
        listed = program.sent is None  # else gathered weights and buckets are among the program's tensors
        self.fsdp = listed and sharded(layout)
        self.ddp = listed and not self.fsdp and layout.dp * layout.cp > 1
        self.expert_dp = expert_dp(layout.dp, layout.cp, layout.ep) if layout.zero else 1
        self.stream = float(program.message_bytes) if layout.pp > 1 else 0.0  # bytes of one message between stages
        self.alike: dict[Hashable, _Unit] = {}
        self.stages = {index: self._stage(index) for index in program.stages_at(position)}
        self.first = next(iter(self.stages.values()))
        self.walk = Walk()
        self.waiting_buffer = 0.0  # bytes of the last reduction's buffer
        self.last_gather = 0.0  # bytes of the last forward gather's buffer
        # PyTorch's schedules with several chunks or a split backward pass wait for their sends only at the end.
        self.sends_late = layout.pp > 1 and not (layout.virtual_stages == 1 and layout.schedule in ("1f1b", "gpipe"))
        # Once as many are in flight as ever will be, beside gradients, further micro-batches cannot raise the peak.
        steady = layout.pp == 1 or (layout.schedule == "1f1b" and not self.sends_late)
        self.walked = min(self.micro_batches, layout.pp - position + 2) if steady else self.micro_batches
        self.after: dict[Hashable, frozenset[str]] = {}  # units that a pass leaves gathered
        self.inputs_only: dict[int, tuple[Operation, ...]] = {}
        self.passes = {"F": self._forward, "B": self._backward, "I": self._inputs, "W": self._weights}

    # -- sizes -------------------------------------------------------------------------------------------------

    def _stage(self, index: int) -> _StageState:
        stage, model = self.program.stages[index], self.program.model
        parameters = list(stage.parameters)
        groups = parameter_groups(model, parameters, self.layout.ep, bool(self.recipe.loss_chunk))
        units = {name: self._unit(tensors) for name, tensors in groups.items()}
        return _StageState(index, parameters, self._resident(stage.layers), units)

    def _unit(self, tensors: list[Parameter]) -> _Unit:
        """Returns the sizes of a unit; units with equal tensors share one result."""
        key = tuple((p.shape, p.width, p.trained) for p in tensors)
        if key not in self.alike:
            ranks = self.expert_dp if self.layout.ep > 1 and of_experts(tensors[0]) else self.layout.sharing
            self.alike[key] = _Unit(tensors, self.program.model, self.layout.ep, ranks)
        return self.alike[key]

    # -- the step ----------------------------------------------------------------------------------------------

    def peak(self) -> Peak:
        walk, recipe = self.walk, self.recipe
        mine = [p for index in self.stages for p in self.program.stages[index].shards]
        for tensor in self.program.tensors[self.position]:
            walk.now[tensor.component] = tensor.bytes
        first = (op for layer in self.first.layers for op in layer.forward) if 0 in self.stages else ()
        if walk.now["gradients"] + sum(op.gradient_bytes for op in first) > 0:
            self.first.has_gradients = 0 in self.stages  # a user's training loop may keep gradients from step to step
        if self.ddp:
            walk.now["gradients"] = self.first.gradient_bytes
        self._communication_state(mine)
        walk.look("start")
        if self.layout.pp > 1:
            self._pipelined()
        else:
            for m in range(self.walked):
                last = m == self.walked - 1
                if last and self.program.remainder:
                    self.first.layers = self._resident(self.program.remainder)
                self._forward(self.first)
                self._backward(self.first, last=last)
        self._finish()
        update = max(
            (op.temporary_bytes for index in self.stages for op in self.program.stages[index].update), default=0
        )
        if mine and not recipe.offloads_optimizer:
            update = update_temporary_bytes(mine, recipe.optimizer, cuda=recipe.cuda)
        walk.add("temporaries", update, f"update, {Phase.OPTIMIZER}")
        if recipe.communication.local_steps:
            walk.now["temporaries"] -= update
            walk.now["gradients"] = self.first.gradient_bytes if self.ddp else 0.0
            self._meeting(mine)
        return walk.peak

    # -- memory of compression, local updates and offloading -----------------------------------------------------------

    def _resident(self, layers: Sequence[Layer]) -> list[Layer]:
        """Returns the layers as they occupy device memory, without offloaded activations."""
        if not self.recipe.offloads_activations:
            return list(layers)
        return on_device(layers, stream_bytes(self.program))

    def _communication_state(self, mine: list[Parameter]) -> None:
        """Adds the common weights and momentum of local updates, or PowerSGD's error and matrices."""
        communication, walk = self.recipe.communication, self.walk
        if communication.local_steps:
            walk.now["communication"] = 2 * sum(p.elements for p in mine) * FP32
        if self.ddp and communication.gradients == "powersgd":
            matrices = sum(matrix_elements(p.shape, communication.rank) for p in self.first.parameters)
            walk.now["communication"] = self.first.gradient_bytes + matrices * FP32

    def _meeting(self, mine: list[Parameter]) -> None:
        """Walks the sites' synchronisation: differences to common weights, reduced in chunks; the outer gradient."""
        narrow = 0.5 if self.recipe.communication.gradients == "bf16" else 1.0
        sizes = [p.elements * FP32 for p in mine]
        while sizes:
            chunk = 0.0
            while sizes and chunk < MEETING_ELEMENTS * FP32:
                chunk += sizes.pop(0)
            self.walk.passing("communication", 2 * chunk + (chunk * narrow if narrow < 1 else 0), "sites meet")
            self.walk.add("communication", 2 * chunk, "sites meet")
            self.walk.now["communication"] -= chunk

    def _buckets(self, ready: float, reduced: int) -> int:
        """Adds the copies made by DDP's hook for the buckets that are full when `ready` bytes of gradients exist.
        Returns the number of buckets reduced so far."""
        communication = self.recipe.communication
        # bf16: a cast copy. PowerSGD: a copy of the gradient, and its approximation error.
        copies = {"bf16": 0.5, "powersgd": 2.0}.get(communication.gradients, 0.0)
        buckets = bucket_bytes(self.first.parameters)
        while reduced < len(buckets) and sum(buckets[: reduced + 1]) <= ready:
            self.walk.passing("communication", copies * buckets[reduced], f"bucket {reduced} reduced")
            reduced += 1
        return reduced

    def _pipelined(self) -> None:
        layout = self.layout
        for index in self.stages:  # a buffer for each micro-batch's input, and for the gradient of its output
            # Also for a neighbour on the same rank: its tensors replace the buffers.
            others = [s for s in (index - 1, index + 1) if 0 <= s <= self.last]
            self.walk.now["messages"] += len(others) * self.micro_batches * self.stream
        self.walk.look("messages")
        buffers = self.walk.now["messages"]
        for p in passes_of_rank(layout.schedule, layout.pp, layout.virtual_stages, self.walked, self.position):
            self._pass("B" if p.stage == 0 and p.kind == "W" else p.kind, self.stages[p.stage])
        self.walk.now["messages"] = buffers
        for stage in self.stages.values() if self.fsdp else ():  # after the last pass
            for name in reversed(stage.units):
                self._release(stage, name)
                self._reduce(stage, name)
            self._free_buffer()

    def _pass(self, kind: str, stage: _StageState) -> None:
        """Walks one pipeline pass; its effect is the same whenever the same units are gathered and gradients exist."""
        if kind == "I" and stage.index == 0:
            return  # tokens have no gradient to send: PyTorch leaves all work to the weight pass
        key = kind, stage.index, stage.gathered, stage.has_gradients
        self.walk.repeat(key, lambda: self.passes[kind](stage))
        stage.gathered = self.after.setdefault(key, stage.gathered)  # as after the first such pass
        stage.has_gradients |= kind in "BW"

    def _forward(self, stage: _StageState) -> None:
        walk = self.walk
        self._gather(stage, "root")
        for layer in stage.layers:
            self._gather(stage, layer.name)
            walk.run(layer.forward)
            if self.layout.zero == 3:
                self._release(stage, *stage.parts(layer.name))
        # Autocast caches its casts of weights until the pass is over; without recomputation, autograd keeps them.
        walk.now["activations"] -= sum(layer.cast_weight_bytes for layer in stage.layers)
        walk.add("gathered", -self.last_gather, "")
        self.last_gather = 0.0

    def _backward(self, stage: _StageState, last: bool = False) -> None:
        walk, piped = self.walk, self.layout.pp > 1
        adding = stage.has_gradients and not (self.fsdp and self.layout.zero >= 2 and not piped)
        # DDP copies gradients into its buckets in the last micro-batch; until then they are separate tensors.
        keeps = not (adding or (self.ddp and self.micro_batches == 1))
        order = stage.layers[::-1]
        if stage.index != self.last:
            walk.add("temporaries", self.stream, "gradient of the output")
        ready, reduced = 0.0, 0
        for index, layer in enumerate(order):
            backward = layer.backward
            if layer.name == HEAD and HEAD in stage.units:  # the root unit computes the loss: it comes first
                self._regather(stage, "root", [HEAD])
                walk.run([op for op in backward if op.kind is Kind.LOSS], keeps)
                backward = tuple(op for op in backward if op.kind is not Kind.LOSS)
            self._regather(stage, layer.name, [following.name for following in order[index + 1 :][:1]])
            walk.run(layer.recomputed, keeps)
            walk.run(backward, keeps)
            if self.ddp and last:
                ready += stage.units[layer.name].whole if layer.name in stage.units else 0.0
                reduced = self._buckets(ready if index + 1 < len(order) else stage.gradient_bytes, reduced)
            if layer.name != EMBEDDING:
                self._after_backward(stage, layer.name, last)
        if stage.index != 0:
            walk.now["temporaries"] -= self.stream
            walk.now["activations"] += self.stream  # the input is a message buffer, which is not freed
            self._sent(stage.index - 1)
        if stage.index != self.last:
            walk.now["activations"] -= self.stream  # the output
            self._sent(stage.index + 1)
        stage.has_gradients = True
        if self.fsdp and not piped:
            self._after_backward(stage, "root", last)
            self._after_backward(stage, EMBEDDING, last)  # tokens have no gradient whose hook would trigger this
            if last:  # otherwise the buffer of the last reduction stays until the next reduction
                self._free_buffer()

    def _sent(self, to: int) -> None:
        if self.sends_late and to not in self.stages:
            self.walk.add("messages", self.stream, "messages")

    def _inputs(self, stage: _StageState) -> None:
        """Walks a backward pass of input gradients only: saved tensors and gradients of wide outputs stay."""
        shape, walk = self.program.shape, self.walk
        assert shape is not None
        before, model = walk.now["activations"], shape.model
        # Left saved by the forward pass, without an input that is a message buffer.
        saved = sum(op.saved_bytes - op.frees_saved_bytes for layer in stage.layers for op in layer.forward)
        wide = shape.tokens * (model.projected_size + model.ffn_size * (2 if model.gated_ffn else 1)) * FP32
        ends = shape.tokens * model.vocab * FP32 + self.stream
        start = walk.now["temporaries"]
        if stage.index != self.last:
            walk.add("temporaries", self.stream, "gradient of the output")
        for layer in reversed(stage.blocks):
            self._gather(stage, layer.name)
        output = [layer for layer in stage.layers if layer.name == HEAD]
        for layer in [*output, *stage.blocks]:
            walk.add("activations", ends if layer.name == HEAD else wide, "gradients of inputs")
            walk.run(self._of_inputs(layer))
        walk.now["temporaries"] = start
        stage.waiting = walk.now["activations"] - before + saved
        if stage.index != 0:
            self._sent(stage.index - 1)
        if stage.index != self.last:
            self._sent(stage.index + 1)

    def _of_inputs(self, layer: Layer) -> tuple[Operation, ...]:
        found = self.inputs_only.get(id(layer.backward))
        if found is None:
            both = (*layer.recomputed, *layer.backward)
            found = tuple(replace(op, frees_saved_bytes=0, gradient_bytes=0) for op in both)
            self.inputs_only[id(layer.backward)] = found
        return found

    def _weights(self, stage: _StageState) -> None:
        """Walks a backward pass of weight gradients: the tensors kept for it are freed."""
        if not stage.has_gradients:
            self.walk.add("gradients", stage.gradient_bytes, "gradients of weights")
        self.walk.now["activations"] -= stage.waiting

    # -- FSDP --------------------------------------------------------------------------------------------------

    def _gather(self, stage: _StageState, layer: str) -> None:
        for name in reversed([*stage.parts(layer)]) if self.fsdp else ():
            unit = stage.units[name]
            if name in stage.gathered:
                continue
            stage.gathered |= {name}
            if unit.sharing > 1:
                self.walk.add("gathered", unit.gathered, f"gathering {name}")
                self._copied(unit.gathered, f"gathering {name}", unit)
                self.walk.now["gathered"] -= self.last_gather
                self.last_gather = unit.gathered
            self.walk.add("gathered", unit.gathered, f"weights of {name}")

    def _release(self, stage: _StageState, *units: str) -> None:
        for name in stage.gathered.intersection(units):
            self.walk.now["gathered"] -= stage.units[name].gathered
        stage.gathered -= set(units)

    def _regather(self, stage: _StageState, layer: str, following: list[str]) -> None:
        """In the backward pass, copy the layer's weights out of the prefetched buffer and prefetch the next layer's."""
        if not self.fsdp or self.layout.zero != 3:
            return
        walk = self.walk
        for name in stage.parts(layer, *following):
            unit = stage.units[name]
            if name in stage.gathered:
                continue
            if name not in stage.ahead:
                stage.ahead[name] = unit.gathered
                walk.add("gathered", unit.gathered, f"gathering {name}")
                self._copied(unit.gathered, f"gathering {name}", unit)
            if name.removesuffix(EXPERTS) == layer:
                walk.add("gathered", unit.gathered, f"weights of {name}")
                walk.now["gathered"] -= stage.ahead.pop(name)
                stage.gathered |= {name}

    def _after_backward(self, stage: _StageState, layer: str, last: bool) -> None:
        if not self.fsdp or self.layout.pp > 1:
            return
        for name in reversed([*stage.parts(layer)]):
            if last or self.layout.zero == 3:
                self._release(stage, name)
            if last or self.layout.zero >= 2:
                self._reduce(stage, name)

    def _reduce(self, stage: _StageState, name: str) -> None:
        walk, unit = self.walk, stage.units[name]
        if not unit.reduced:
            return
        sent = unit.reduced * (0.5 if self.recipe.communication.gradients == "bf16" else 1.0)
        self._free_buffer()
        walk.add("reducing", sent, f"gradients of {name} copied")
        self.waiting_buffer = sent
        walk.now["gradients"] -= unit.gradients
        walk.add("gradients", unit.reduced / unit.sharing, f"reducing {name}")
        self._copied(sent, f"reducing {name}", unit)
        if name in stage.reduced:
            walk.now["gradients"] -= unit.reduced / unit.sharing
        stage.reduced.add(name)

    def _copied(self, size: float, where: str, unit: _Unit) -> None:
        """Adds Gloo's own copy of the buffer that it gathers or reduce-scatters."""
        if unit.sharing > 1 and self.recipe.gloo:
            self.walk.passing("temporaries", size, where)

    def _free_buffer(self) -> None:
        """Frees the buffer of the last reduction."""
        self.walk.now["reducing"] -= self.waiting_buffer
        self.waiting_buffer = 0.0

    def _finish(self) -> None:
        """Adds the exchange of a tied weight's gradient between the ends of a pipeline."""
        tied = self.program.model is not None and self.program.model.tied
        if self.layout.pp > 1 and tied and self.recipe.adapters is None and {0, self.last} & set(self.stages):
            table = next(p for s in self.stages.values() for p in s.parameters if p.name in (EMBEDDING, HEAD))
            size = math.ceil(table.shape[0] / self.layout.sharing) * table.shape[1] * FP32
            self.walk.passing("temporaries", size, "gradient of the tied weight")


MEETING_ELEMENTS = 8 * 2**20  # elements reduced at a time in `train/parallel/diloco.py`
