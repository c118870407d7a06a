"""What one rank of a layout computes: the operations of its pipeline stage on its part of heads, widths and tokens.

    work = stage_work(config, layout, stage, precision, machine, ranks_here)
    work.forward_seconds          # of one micro-batch
    work.lines                    # of a step, by the keys of any ledger

Shapes are divided as the trainer divides them (`train/parallel/apply.py`): tp divides heads, the feed-forward width and
the vocabulary, sp what else of the residual stream it can, cp the sequence. Seconds are those of the measured machine,
slowed as ranks that share its cores slow each other (`machine/links.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ironlaw.config import RunConfig
from ironlaw.ledger import Kind, Line, Phase
from ironlaw.machine.links import RankCosts
from ironlaw.model.config import ModelConfig
from ironlaw.plan.process.timing import MeasuredMachine
from ironlaw.workload.layout import Layout
from ironlaw.workload.operations import Operation
from ironlaw.workload.parameters import Parameter
from ironlaw.workload.pipeline import layers_of
from ironlaw.workload.program import Program


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
    config: RunConfig, layout: Layout, stage: int, program: Program, precision: str, machine: RankMachine
) -> StageWork:
    """Times by `precision`, one that the machine was measured in."""
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
    for op, count in program.stages[stage].operations():
        calls[op.phase] += count
        weights = op.kernel in ("matmul_weight_gradient", "sum_rows", "embedding_backward")
        add(op, count, "forward" if op.phase is Phase.FORWARD else "weights" if weights else "inputs", micro_batches)
    for phase, count in calls.items():
        took = count * machine.dispatch_seconds(phase)
        seconds["forward" if phase is Phase.FORWARD else "inputs"] += took
        folded[phase, Kind.HOST, "dispatch"] = Line(
            phase, Kind.HOST, "dispatch", count=count * micro_batches, seconds=took * micro_batches, bound="overhead"
        )
    parameters = list(program.stages[stage].shards)
    for op in program.stages[stage].update:
        if op.repeat:
            add(op, op.repeat, "update", 1)
    for phase, part, took in _wrapping(config.model, layout, stage, parameters, machine):
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
