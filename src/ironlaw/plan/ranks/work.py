"""What one rank of a layout computes: the operations of its pipeline stage on its part of heads, widths and tokens.

    work = stage_work(config, layout, stage, precision, machine, ranks_here)
    work.forward_seconds          # of one micro-batch
    work.lines                    # of a step, by the keys of any ledger

Shapes are divided as the trainer divides them (`train/parallel/apply.py`): tp divides heads, the feed-forward width and
the vocabulary, sp what else of the residual stream it can, cp the sequence. Seconds are those of the measured machine,
slowed as ranks that share its cores slow each other (`machine/links.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ironlaw.config import RunConfig
from ironlaw.ledger import Kind, Line, Phase
from ironlaw.machine.links import RankCosts
from ironlaw.model.config import ModelConfig
from ironlaw.plan.layout import Layout
from ironlaw.plan.pipeline import layers_of
from ironlaw.plan.process.timing import MeasuredMachine
from ironlaw.plan.ranks.parts import expert_holders, of_experts, of_site, shard_of, stage_parameters
from ironlaw.workload.blocks import Division
from ironlaw.workload.kinds import is_block, layer_groups, shape_of
from ironlaw.workload.operations import Operation
from ironlaw.workload.optimizers import update_operations
from ironlaw.workload.parameters import Parameter
from ironlaw.workload.transformer import Shape, attention_score_pairs, training_operations

STREAM = ("attention_norm", "ffn_norm", "final_norm", "residual", "dropout", "residual_cast", "embedding", "positions")
"""Operations on the residual stream, which sp divides and tp alone does not."""


def local_model(model: ModelConfig, layout: Layout) -> ModelConfig:
    """The model whose whole operations are one rank's: fewer heads, narrower, parts of the words and the experts."""
    tp, update = layout.tp, dict[str, Any]()
    if tp > 1:
        update = {
            "heads": model.heads // tp, "kv_heads": max(1, model.key_value_heads // tp),
            "head_size": model.size_of_head, "ffn": model.ffn_size // tp, "vocab": math.ceil(model.vocab / tp),
        }  # fmt: skip
        if model.latent is not None:  # whose narrow vectors every rank computes whole
            update |= {"kv_heads": None, "head_size": None}
    if layout.ep > 1 and model.moe is not None:  # its share of the experts, which take the choices of ep ranks
        update["moe"] = model.moe.model_copy(update={"experts": model.moe.experts // layout.ep})
    if layout.pp > 1 and model.tied:  # the last stage has a copy
        update["tied"] = False
    return model.model_copy(update=update) if update else model


def local_shape(shape: Shape, layout: Layout) -> Shape:
    """`shape` is the whole model's; its micro-batch is the layout's."""
    here = shape.sequence // layout.cp
    division = Division(layout.tp, layout.sp, layout.cp, split_qkv=layout.tp > 1 or sharded(layout))
    return replace(
        shape, model=local_model(shape.model, layout), sequence=here, micro_batch=layout.micro_batch, division=division
    )


def sharded(layout: Layout) -> bool:
    """Whether FSDP2 holds the weights; if not, and there are replicas, DDP does."""
    replicas = layout.dp * layout.cp > 1
    return layout.zero > 0 or (replicas and layout.tp * layout.pp * layout.ep > 1)


def local_parameters(model: ModelConfig, layout: Layout, stage: int) -> list[Parameter]:
    """The tensors of a stage as this rank updates them: its shards of them, where ZeRO divides them."""
    shards = (layout.shard or layout.dp) * layout.cp if layout.zero else 1
    apart = expert_holders(layout.dp, layout.cp, layout.ep) if layout.zero and layout.ep > 1 else shards
    return [
        shard_of(p, model, layout.ep, apart if of_experts(p) else shards)
        for p in stage_parameters(model, layout, stage)
    ]


def stage_operations(shape: Shape, layout: Layout, stage: int) -> Iterator[tuple[Operation, int]]:
    """Operations of one micro-batch with how often the stage runs each. `shape` is the local one."""
    model, stages = shape.model, layout.pp * layout.virtual_stages
    groups = layer_groups(model)
    everywhere = Counter(groups)
    here = Counter(groups[layer] for layer in layers_of(model.layers, stages, layout.virtual_stages)[stage])
    ends = {"embedding": stage == 0, "head": stage == stages - 1}
    for op in training_operations(shape):
        if is_block(op.group):
            times = op.repeat * here[op.group] / everywhere[op.group]
        else:
            times = op.repeat if ends.get(op.group, True) else 0
        if times:
            yield _divided(op, shape, layout), round(times)


def _divided(op: Operation, shape: Shape, layout: Layout) -> Operation:
    if layout.sp and op.name in STREAM and op.matmul is None:
        return replace(op, elements=op.elements // layout.tp, bytes_moved=op.bytes_moved // layout.tp)
    if layout.cp > 1 and op.attention is not None:
        # Each rank has as much under the causal mask as any other, against keys of the whole sequence.
        batch, here, heads, groups, size = op.attention
        window = shape_of(shape, op.group).model.sliding_window
        pairs = attention_score_pairs(here * layout.cp, window) // layout.cp
        grown = pairs / attention_score_pairs(here, window)
        return replace(
            op, attention=(batch, here * layout.cp, heads, groups, size), elements=batch * heads * pairs // 2,
            flops=None if op.flops is None else round(op.flops * grown),
        )  # fmt: skip
    return op


@dataclass(frozen=True)
class StageWork:
    """Seconds of one stage on one rank: of a micro-batch, and of the update."""

    forward_seconds: float
    input_seconds: float  # of the backward pass, what the stage before waits for
    weight_seconds: float  # gradients of weights, which nobody waits for
    update_seconds: float
    lines: list[Line]  # of a step

    @property
    def backward_seconds(self) -> float:
        return self.input_seconds + self.weight_seconds


@dataclass(frozen=True)
class RankMachine:
    """The measured machine as one of `ranks` on it sees it."""

    machine: MeasuredMachine
    costs: RankCosts
    ranks: int  # that compute at once

    def seconds(self, op: Operation, precision: str) -> tuple[float, str]:
        timing = self.machine.time(op, precision)
        if self.ranks < 2:
            return timing.seconds, timing.bound
        kind = "compute" if op.matmul is not None or op.attention is not None else "memory"
        # A call's fixed cost is one thread's work, whoever else computes.
        fixed = min(timing.seconds, self.machine.profile.small_operation_seconds)
        grown = (timing.seconds - fixed) * self.costs.slowdown(kind, self.ranks)
        return fixed * self.turns + grown, timing.bound

    @property
    def turns(self) -> float:
        return max(1.0, self.ranks / self.costs.cores)

    def dispatch_seconds(self, phase: Phase) -> float:
        return self.machine.dispatch_seconds(phase) * self.turns

    def copy_seconds(self, size: float) -> float:
        rate = self.machine.profile.copy_bytes_per_second
        return 2 * size / rate * self.costs.slowdown("memory", self.ranks)


def stage_work(
    config: RunConfig, layout: Layout, stage: int, shape: Shape, precision: str, machine: RankMachine
) -> StageWork:
    """`shape` is the local one; times by `precision`, one that the machine was measured in."""
    micro_batches = config.train.global_batch // (layout.dp * layout.micro_batch)
    folded: dict[tuple[Phase, Kind, str], Line] = {}
    seconds = dict.fromkeys(("forward", "inputs", "weights", "update"), 0.0)

    def add(op: Operation, count: int, part: str, times: int) -> None:
        took, bound = machine.seconds(op, precision)
        seconds[part] += took * count
        key = (op.phase, op.kind, op.name)
        known = folded.get(key, Line(*key, count=0, bytes_moved=0.0, seconds=0.0, bound=bound))
        flops = known.flops if op.flops is None else (known.flops or 0) + op.flops * count * times
        folded[key] = replace(
            known, count=(known.count or 0) + count * times, flops=flops,
            bytes_moved=(known.bytes_moved or 0.0) + op.bytes_moved * count * times,
            seconds=(known.seconds or 0.0) + took * count * times,
        )  # fmt: skip

    calls = {Phase.FORWARD: 0, Phase.BACKWARD: 0}
    for op, count in stage_operations(shape, layout, stage):
        calls[op.phase] += count
        weights = op.kernel in ("matmul_weight_gradient", "sum_rows", "embedding_backward")
        add(op, count, "forward" if op.phase is Phase.FORWARD else "weights" if weights else "inputs", micro_batches)
    for phase, count in calls.items():
        took = count * machine.dispatch_seconds(phase)
        seconds["forward" if phase is Phase.FORWARD else "inputs"] += took
        folded[phase, Kind.HOST, "dispatch"] = Line(
            phase, Kind.HOST, "dispatch", count=count * micro_batches, seconds=took * micro_batches, bound="overhead"
        )
    parameters = local_parameters(config.model, of_site(layout, config.communication), stage)
    for op in update_operations(parameters, config.optimizer, accumulation=micro_batches):
        if op.repeat:
            add(op, op.repeat, "update", 1)
    for phase, part, took in _wrapping(shape.model, layout, stage, parameters, machine):
        seconds[part] += took
        key = (phase, Kind.HOST, "wrapping")
        known = folded.get(key, Line(*key, seconds=0.0, bound="overhead"))
        folded[key] = replace(known, seconds=(known.seconds or 0.0) + took * micro_batches)
    return StageWork(
        seconds["forward"], seconds["inputs"], seconds["weights"], seconds["update"], list(folded.values())
    )


def _wrapping(
    model: ModelConfig, layout: Layout, stage: int, parameters: list[Parameter], machine: RankMachine
) -> Iterator[tuple[Phase, str, float]]:
    """What FSDP, DTensor and the pipeline add to a micro-batch beside their collectives: measured on tiny layers."""
    costs, turns = machine.costs, machine.turns
    stages = layout.pp * layout.virtual_stages
    blocks = len(layers_of(model.layers, stages, layout.virtual_stages)[stage])
    if layout.tp > 1:
        linears = blocks * (4 + model.ffn_matrices) + (stage == 0) + (stage == stages - 1)
        yield Phase.FORWARD, "forward", linears * costs.dtensor_seconds / 3 * turns
        yield Phase.BACKWARD, "inputs", linears * costs.dtensor_seconds * 2 / 3 * turns
    if layout.pp > 1:
        yield Phase.FORWARD, "forward", costs.pass_seconds * turns
        yield Phase.BACKWARD, "inputs", costs.pass_seconds * turns
    if layout.zero == 3:
        units = blocks + (stage == 0) + (stage == stages - 1)
        whole = sum(p.elements for p in parameters) * 4 * (layout.shard or layout.dp) * layout.cp
        copies = machine.copy_seconds(whole)
        yield Phase.FORWARD, "forward", units * costs.unit_seconds * turns + copies
        yield Phase.BACKWARD, "inputs", 2 * units * costs.unit_seconds * turns + 2 * copies
