"""The lines of a cluster plan's ledger: every operation of the step by name, with the keys of a run.

Each line is the operation's own cost times how often the busiest stage runs it; no line is a difference of others.
Element-wise kernels of a part are timed together and share that time by the bytes they move. FLOPs are those of all
accelerators together: of the whole model, before a layout divides it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ironlaw.ledger import Key, Kind, Line, Phase, merged
from ironlaw.model.config import ModelConfig
from ironlaw.model.parameters import model_parameters
from ironlaw.plan.cluster.candidates import Array, Candidates
from ironlaw.plan.cluster.collective_costs import context_kinds
from ironlaw.plan.cluster.layout_table import code
from ironlaw.plan.cluster.step_costs import OperationCost, StepCosts, end_costs, operation_costs
from ironlaw.plan.cluster.system import ClusterSystem
from ironlaw.plan.cluster.timeline import Times, accumulated_share, part_factors
from ironlaw.plan.engines.engine import TrainingEngine
from ironlaw.workload.blocks import Shape
from ironlaw.workload.operations import Operation
from ironlaw.workload.optimizers import OptimizerConfig, update_operations
from ironlaw.workload.program import training_operations
from ironlaw.workload.recompute import RECOMPUTED_SUFFIX
from ironlaw.workload.sizes import Size

BOUND = {"matmul": "compute", "attention": "compute"}
"""What bounds the time of a part; memory bounds all other parts."""


def step_lines(candidates: Candidates, system: ClusterSystem, costs: StepCosts, times: Times) -> list[Line]:
    """Returns the lines of the first candidate's step, without the time that its allocator loses."""
    flops = step_flops(candidates, system.engine)
    return [replace(line, flops=flops.get(line.key)) for line in merged(_step_lines(candidates, system, costs, times))]


def _step_lines(candidates: Candidates, system: ClusterSystem, costs: StepCosts, times: Times) -> Iterator[Line]:
    def line(phase: Phase, kind: Kind, name: str, seconds: Size, bound: str | None, count: Size = 0) -> Line:
        return Line(phase, kind, name, round(_at(count)) or None, seconds=_at(seconds), bound=bound)

    repeats = times.busiest_layers * candidates.accumulation
    for cost, seconds in block_seconds(candidates, system, costs):
        op, bound = cost.operation, BOUND.get(cost.part, "memory")
        count = round(_at(repeats * cost.share))
        yield line(op.phase, op.kind, op.name, repeats * seconds, bound, count)
        again = _repetitions(cost, candidates)
        if again:
            name = op.name + RECOMPUTED_SUFFIX
            yield line(Phase.BACKWARD, op.kind, name, repeats * again * seconds, bound, count * again)
    share = accumulated_share(candidates, system.engine)
    if share:
        accumulated = repeats * share * costs.accumulate
        yield line(Phase.BACKWARD, Kind.ELEMENTWISE, "accumulate", accumulated, "memory", repeats)
    for op, seconds, bound in _ends(candidates, system, times):
        yield line(op.phase, op.kind, op.name, seconds, bound, candidates.accumulation)
    forward_share = 1 / (1 + system.engine.host_backward_ratio)
    for phase, part in ((Phase.FORWARD, forward_share), (Phase.BACKWARD, 1 - forward_share)):
        yield line(phase, Kind.HOST, "dispatch", part * times.host_excess, "overhead")
    for name, seconds in exposed_collectives(candidates, system, costs, times):
        yield line(Phase.COMMUNICATION, Kind.COLLECTIVE, name, seconds, "network")
    if times.offload_exposed > 0:
        yield line(Phase.OPTIMIZER, Kind.OPTIMIZER, "host_offload", times.offload_exposed, "memory")
    for name, part in update_shares(candidates.model, system.update.name):
        yield line(Phase.OPTIMIZER, Kind.OPTIMIZER, name, part * times.optimizer, "memory", 1)
    yield line(Phase.HOST, Kind.HOST, "step", times.host_step, "overhead", 1)
    yield line(Phase.IDLE, Kind.OTHER, "pipeline_bubble", times.bubble, None)


def block_seconds(
    candidates: Candidates, system: ClusterSystem, costs: StepCosts
) -> Iterator[tuple[OperationCost, Size]]:
    """Yields every operation of a block with its seconds per micro-batch in a run, as the mean over all blocks."""
    factors = part_factors(candidates.flash, system.engine)
    found = list(operation_costs(candidates, system))
    for cost, seconds in _timed(found, costs.block, lambda cost: (cost.part, cost.operation.phase)):
        if seconds:
            yield cost, seconds * factors[cost.part]


def _timed(
    found: list[OperationCost], together: Mapping[Any, Array], key: Callable[[OperationCost], Any]
) -> Iterator[tuple[OperationCost, Size]]:
    """Yields each operation with its seconds; operations timed `together` share that time by the bytes they move."""
    moved: dict[Any, Size] = {}
    for cost in found:
        if cost.seconds is None:
            moved[key(cost)] = moved.get(key(cost), 0.0) + cost.share * cost.operation.bytes_moved
    for cost in found:
        if cost.seconds is not None:
            yield cost, cost.share * cost.seconds
        else:
            yield cost, together[key(cost)] * (cost.share * cost.operation.bytes_moved) / moved[key(cost)]


def _repetitions(cost: OperationCost, candidates: Candidates) -> Size:
    """Returns how often recomputation repeats an operation, per run of it in the forward pass."""
    full, selective = cost.again
    if candidates.has("recompute", "full")[0]:
        return candidates.recomputed_share * full
    return selective if candidates.has("recompute", "selective")[0] else 0.0


def _ends(candidates: Candidates, system: ClusterSystem, times: Times) -> Iterator[tuple[Operation, Size, str]]:
    """Yields the operations of embedding and output layer, with seconds per step and bound, on the busiest stage."""
    together = {"loss": times.loss, "stream": times.embedding}
    for cost, seconds in _timed(list(end_costs(candidates, system)), together, lambda cost: cost.part):
        if cost.seconds is not None:
            seconds = times.heads * seconds * system.engine.matmul_slowdown
        yield cost.operation, seconds, BOUND.get(cost.part, "memory")  # zero if the busiest stage lacks this end


def exposed_collectives(
    candidates: Candidates, system: ClusterSystem, costs: StepCosts, times: Times
) -> Iterator[tuple[str, Size]]:
    """Returns the exposed seconds of each collective, named by mesh dimension and kind as in a run."""
    copies = costs.dp_across / costs.dp_reduce if costs.dp_reduce else np.zeros(1)
    gather, scatter = 2 * costs.fsdp_gather_layer, costs.fsdp_scatter_layer
    of_state = times.fsdp_exposed / ((gather + scatter) or 1.0)
    divides, scatters, sharded = candidates.tp > 1, candidates.sp > 0, candidates.zero > 0
    pieces = candidates.zero >= 2 and candidates.shard_ranks > 1
    found = [  # equally many all-gathers and reduce-scatters, of the same buffer
        (divides and scatters, "tp all_gather", times.tp_exposed / 2),
        (divides and scatters, "tp reduce_scatter", times.tp_exposed / 2),
        (divides and not scatters, "tp all_reduce", times.tp_exposed),
        *((seconds, name, seconds) for name, seconds in costs.small_collectives.items()),
        *((True, *line) for line in _of_context(candidates, system, times.cp_exposed)),
        (times.ep_exposed, "ep all_to_all", times.ep_exposed),
        (candidates.pp > 1, "pp send", times.pp_exposed),
        (pieces and gather, "shard all_gather", of_state * gather),
        (pieces and scatter, "shard reduce_scatter", of_state * scatter),
        (costs.dp_reduce and copies < 1, "shard reduce_scatter" if sharded else "replicate all_reduce",
         times.reduce_exposed * (1 - copies)),
        (copies, "replicate all_reduce", times.reduce_exposed * copies),
        (costs.dp_gather, "shard all_gather", times.gather_exposed),
    ]  # fmt: skip
    return ((name, seconds) for wanted, name, seconds in found if wanted)


def _of_context(candidates: Candidates, system: ClusterSystem, seconds: Array) -> Iterator[tuple[str, Size]]:
    """Yields exposed context parallel collectives: gathers in every pass and one scatter, or sends of a ring."""
    kind = context_kinds(candidates, system.engine)
    if candidates.cp == 1:
        return
    if kind == code("cp_kind", "ring"):
        yield "cp send", seconds
    elif kind == code("cp_kind", "all_to_all"):
        yield "cp all_to_all", seconds
    else:
        gathers = 2 + candidates.recomputed_share
        yield "cp all_gather", seconds * gathers / (gathers + 1)
        yield "cp reduce_scatter", seconds / (gathers + 1)


def update_shares(model: ModelConfig, optimizer: str) -> list[tuple[str, float]]:
    """Returns the operations of an optimizer update by name, each with its share of the bytes moved."""
    parameters = model_parameters(model.model_copy(update={"layers": 1, "moe": None}))
    operations = update_operations(parameters, OptimizerConfig.model_validate({"name": optimizer}), cuda=True)
    moved: dict[str, float] = {}
    for op in operations:
        moved[op.name] = moved.get(op.name, 0.0) + op.bytes_moved * op.repeat
    return [(name, size / sum(moved.values())) for name, size in moved.items() if size]


def step_flops(candidates: Candidates, engine: TrainingEngine) -> dict[Key, int]:
    """Returns the FLOPs of a step by line: those of the model in any layout, without recomputation."""
    model, sequence = candidates.model, round(_at(candidates.sequence))
    moe = model.moe
    if moe is not None:  # every choice counts, whether or not the expert has room for it
        model = model.model_copy(update={"moe": moe.model_copy(update={"capacity_factor": None})})
    found: dict[Key, int] = {}
    for op in training_operations(Shape(model, 1, sequence, fused_rmsnorm=True, conventions=engine)):
        if op.flops is not None:
            key = op.phase, op.kind, op.name
            found[key] = found.get(key, 0) + op.flops * op.repeat * round(_at(candidates.global_batch))
    return found


def _at(column: Size) -> float:
    """Returns the first candidate's value."""
    return float(np.asarray(column).reshape(-1)[0])
