"""What a step is made of: seconds of every kernel and collective of one micro-batch, for many candidates at once.

    costs = step_costs(candidates, system)

Operations come from `workload/` under the engine's conventions, seconds from the models of single operations in
`machine/efficiency`. What a run makes of them (slowdowns, overlap, launches) is the engine's too and added in
`timeline.py`, so that fitting an engine to measured runs need not evaluate the operations again. Ranks are placed tp,
cp, dp, pp from the inside out, as Megatron does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ironlaw.ledger import Phase
from ironlaw.machine.efficiency.matmul import matmul_seconds
from ironlaw.machine.efficiency.streaming import streaming_seconds
from ironlaw.plan.cluster.candidates import Array, Candidates
from ironlaw.plan.cluster.collective_costs import (
    collective,
    distinct,
    layer_collectives,
    shared_states,
    small_collectives,
)
from ironlaw.plan.cluster.memory import kept_activation_bytes
from ironlaw.plan.cluster.operation_costs import PARTS, end_costs, operation_costs
from ironlaw.plan.cluster.stages import StageLayers, owned_parameters, stage_layers
from ironlaw.plan.cluster.system import ClusterSystem
from ironlaw.workload.sizes import Size


@dataclass(frozen=True)
class StepCosts:
    """Seconds per candidate. `block`: of one block and micro-batch, by (part, phase); the mean over all blocks."""

    block: dict[tuple[str, Phase], Array]
    again: dict[tuple[str, int], Array]  # of it, what runs again under full (0) and selective (1) recomputation
    accumulate: Array  # adding a weight gradient of one block into the fp32 buffer
    tp_collective: Array  # one all-reduce, or one all-gather and one reduce-scatter
    tp_collectives: Array  # of them in a layer's forward pass: two, less where experts exchange rows instead
    cp_layer: Array  # one exchange of one layer between context parallel ranks, forward
    head_matmul: Array  # output layer, forward and backward
    head_streaming: Array  # loss
    embedding: Array
    pp_message: Array
    small_collectives: dict[str, Array]  # of a step by name, where no other constant stands for them
    dp_reduce: Array
    dp_across: Array  # of dp_reduce: over copies of the sharded state
    dp_gather: Array
    ep_layer: Array  # one exchange of rows between expert parallel ranks, there or back; mean over all layers
    fsdp_gather_layer: Array
    fsdp_scatter_layer: Array
    optimizer: Array
    host_update: Array  # of an offloaded optimizer: the processor's update, or the way back of the weights if longer
    host_gradients: Array  # their way to the host
    host_layer: Array  # one block's kept activations of one micro-batch, to the host or back
    crosses: dict[str, npt.NDArray[np.bool_]]  # whether traffic of a kind leaves the island; pp: of some pair of stages


def _update(candidates: Candidates, system: ClusterSystem, layers: StageLayers, owned: Array) -> Array:
    """Seconds of the optimizer on the stage with most parameters; `owned`: how many a rank updates.

    Whole-matrix work (Muon's iterations, GaLore's projections) is dealt out matrix by matrix over the ranks that shard
    the state, and divided by tp.
    """
    cost, hardware = system.update, system.hardware
    blocks = layers.fullest * candidates.local_block_parameters
    inside = np.minimum(1.0, blocks / np.maximum(layers.largest_parameters, 1.0))
    per_parameter = inside * cost.block_bytes + (1 - inside) * cost.end_bytes
    seconds = np.asarray(streaming_seconds(owned * per_parameter, hardware))
    if not cost.matrices:
        return seconds
    products = sum(
        times * float(np.asarray(matmul_seconds(m, n, k, 1.0, "bf16", hardware=hardware, sustained=True)))
        for m, n, k, times in cost.matrices
    )
    dealt = layers.fullest * cost.owners
    ranks = np.where(candidates.zero > 0, candidates.shard_ranks, 1.0)
    return seconds + products / cost.owners * np.ceil(dealt / ranks) / candidates.tp


def _offloaded(candidates: Candidates, system: ClusterSystem, layers: StageLayers) -> dict[str, Array]:
    """Seconds on the way to the host and on it; zero where nothing is offloaded."""
    none = np.zeros(len(candidates))
    host, engine = system.host, system.engine
    if host is None or not (candidates.offload > 0).any():
        return {"host_update": none, "host_gradients": none, "host_layer": none}
    owned, rate = owned_parameters(candidates, layers), min(host.link_bytes_per_second, host.memory_bytes_per_second)
    update = owned * system.update.block_bytes / host.memory_bytes_per_second
    back = owned * engine.element_bytes / rate
    kept, *_ = kept_activation_bytes(candidates, engine)
    return {
        "host_update": np.where(candidates.offloads_optimizer, np.maximum(update, back), 0.0),
        "host_gradients": np.where(
            candidates.offloads_optimizer, owned * engine.gradient_communication_bytes / rate, 0.0
        ),
        "host_layer": np.where(candidates.offloads_activations, kept / rate, 0.0),
    }


def step_costs(candidates: Candidates, system: ClusterSystem, layers: StageLayers | None = None) -> StepCosts:
    """Every ingredient of the step time."""
    layers = layers or stage_layers(candidates, system.engine.partition)
    # Layouts of a search share their blocks, or their state: each kind is worked out once.
    first, kind = candidates.distinct(OF_THE_BATCH)
    found = _state(candidates.take(first), system, layers.take(first))
    state: dict[str, Any] = {name: column[kind] for name, column in found.items()}
    host: dict[str, Any] = _offloaded(candidates, system, layers)
    return replace(block_costs(candidates, system), **state | host)


def block_costs(candidates: Candidates, system: ClusterSystem) -> StepCosts:
    """The same without what gradients, weights and their update take: that is zero."""
    island = float(system.fabric.island_ranks)
    found = candidates.of_blocks(
        "seconds", system.engine,
        lambda part: _block(part, system) | _ends(part, system) | layer_collectives(part, system),
    )  # fmt: skip
    blocks: dict[str, Any] = {name: column for name, column in found.items() if isinstance(name, str)}
    near, far = blocks.pop("message_inside"), blocks.pop("message_across")
    blocks |= dict.fromkeys(OF_STATE, np.zeros(len(candidates)))
    of_parts = {key: column for key, column in found.items() if not isinstance(key, str)}
    blocks["block"] = {key: column for key, column in of_parts.items() if isinstance(key[1], Phase)}
    blocks["again"] = {key: column for key, column in of_parts.items() if not isinstance(key[1], Phase)}
    stage_fills_island = candidates.tp * candidates.cp * candidates.dp >= island
    return StepCosts(
        small_collectives=small_collectives(candidates, system),
        pp_message=np.where(candidates.pp > 1, np.where(stage_fills_island, far, near), 0.0),
        crosses={
            "tp": candidates.tp > island, "cp": candidates.tp * candidates.cp > island,
            "dp": candidates.tp * candidates.cp * candidates.dp > island, "pp": candidates.accelerators > island,
            "ep": candidates.expert_tp * candidates.ep > island,
        },
        **blocks,
    )  # fmt: skip


OF_STATE = (
    "dp_reduce", "dp_across", "dp_gather", "fsdp_gather_layer", "fsdp_scatter_layer", "optimizer", "host_update",
    "host_gradients", "host_layer",
)  # fmt: skip


OF_THE_BATCH = frozenset(("micro_batch", "global_batch", "sp", "cp_kind", "recompute", "every"))
"""Columns on which no seconds of gradients, weights and their update hang."""


def _block(candidates: Candidates, system: ClusterSystem) -> dict[Any, Array]:
    """Seconds of one block by part and phase; and by part what runs again in full and under selective recomputation."""
    none, hardware = np.zeros(len(candidates)), system.hardware
    seconds = {(part, phase): none for part in PARTS for phase in (Phase.FORWARD, Phase.BACKWARD)}
    again = {(part, mode): none for part in PARTS for mode in (0, 1)}
    moved: dict[tuple[str, Phase], Size] = {}
    for cost in operation_costs(candidates, system):
        key = cost.part, cost.operation.phase
        if cost.seconds is None:
            size = cost.share * cost.operation.bytes_moved
            moved[key] = moved.get(key, 0.0) + size
        else:
            size = cost.share * cost.seconds
            seconds[key] = seconds[key] + size
        for mode, times in enumerate(cost.again):
            again[cost.part, mode] = again[cost.part, mode] + times * size
    for key, size in moved.items():
        seconds[key] = distinct(lambda b: streaming_seconds(b, hardware), size)
    for part in {part for part, _ in moved}:  # bytes become their share of the time
        for mode in (0, 1):
            again[part, mode] = seconds[part, Phase.FORWARD] * again[part, mode] / moved[part, Phase.FORWARD]
    return {**seconds, **again}


def _ends(candidates: Candidates, system: ClusterSystem) -> dict[str, Array]:
    """Seconds of the output layer, of the loss and of the embedding, of one micro-batch."""
    sums: dict[str, Any] = dict.fromkeys(("matmul", "loss", "stream"), 0.0)
    for cost in end_costs(candidates, system):
        sums[cost.part] = sums[cost.part] + (cost.operation.bytes_moved if cost.seconds is None else cost.seconds)
    return {
        "head_matmul": np.asarray(sums["matmul"]),
        "head_streaming": np.asarray(streaming_seconds(sums["loss"], system.hardware)),
        "embedding": np.asarray(streaming_seconds(sums["stream"], system.hardware)),
    }


def _state(candidates: Candidates, system: ClusterSystem, layers: StageLayers) -> dict[str, Array]:
    """Of reducing gradients, gathering weights and updating them."""
    engine, states = system.engine, shared_states(candidates, system, layers)
    gradient, wide = engine.gradient_communication_bytes, engine.sent_weight_bytes

    def sent(kind: str, size: float, *, layer: bool = False, by_all: bool = False) -> Array:
        parts = ((s.layer if layer else s.held, s.replicas if by_all else s.sharing, s.inside) for s in states)
        return np.asarray(sum(collective(kind, held * size, ranks, near, system) for held, ranks, near in parts))

    # Hybrid sharding: what a rank owns is averaged over the copies, once per step.
    copies_inside = np.maximum(1.0, float(system.fabric.island_ranks) // (candidates.tp * candidates.shard_ranks))
    shard = np.asarray(sum(s.held / s.sharing for s in states))
    across = collective("all_reduce", shard * gradient, candidates.copies, copies_inside, system)
    sharded, fsdp = candidates.zero > 0, candidates.zero >= 3
    in_pieces = engine.reduces_in_pieces(candidates.zero, candidates.pp)
    once = np.where(sharded, sent("reduce_scatter", gradient) + across, sent("all_reduce", gradient, by_all=True))
    update = _update(candidates, system, layers, owned_parameters(candidates, layers))
    return {
        "dp_reduce": np.where(in_pieces, across, once),
        "dp_across": np.where(sharded, across, 0.0),
        "dp_gather": np.where(sharded & ~fsdp, sent("all_gather", wide), 0.0),
        "fsdp_gather_layer": np.where(fsdp, sent("all_gather", wide, layer=True), 0.0),
        "fsdp_scatter_layer": np.where(in_pieces, sent("reduce_scatter", gradient, layer=True), 0.0),
        "optimizer": np.where(candidates.offloads_optimizer, 0.0, update),
    }
