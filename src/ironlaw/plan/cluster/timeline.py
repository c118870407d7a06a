"""Step time of many candidates at once: compute from operation shapes, host time, pipeline, communication.

    costs = step_costs(candidates, system)        # seconds of every ingredient, without the engine's constants
    times = assemble(costs, candidates, system.engine)
    times.step_seconds                       # one per job

For a pipeline stage s and one micro-batch (forward, backward and recomputation together):

    device   matmuls + attention + streaming kernels + tensor, context parallel collectives on the critical path
    host     launches: layers x (forward + backward); per micro-batch. The host does not run ahead of the loss
    stage    max(device, host) of its blocks + the same of embedding, output layer and loss + pipeline messages
    step     m max_s stage + sum of the other stages x the share that the schedule leaves idle (`bubble_share`)
             + exposed data parallel communication + optimizer + host per step

Under ZeRO-3, each micro-batch gathers weights and scatters gradients while it computes. Under ZeRO-2 it scatters
gradients: those kept in shards cannot wait for the last micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ironlaw.ledger import Phase
from ironlaw.plan.cluster.candidates import Array, Candidates
from ironlaw.plan.cluster.collective_costs import context_kinds, exposed
from ironlaw.plan.cluster.layout_table import code
from ironlaw.plan.cluster.stages import stage_layers
from ironlaw.plan.cluster.step_costs import StepCosts
from ironlaw.plan.engines.engine import TrainingEngine

RIVALRY = 6.0
"""Exponent of the norm that replaces max(device, host): where both are close, each sometimes waits for the other."""

UNFUSED_SOFTMAX_LAUNCHES = 0.25
"""Share of a block's launches that Megatron's scale, mask and softmax add when run separately (about 6 kernels to 25).
The fused kernel takes four rows of scores at a time: heads x sequences of a rank must be a multiple of four."""


@dataclass(frozen=True)
class Times:
    """Seconds per job and step, on the busiest stage; `step_seconds` is the sum of all others."""

    step_seconds: Array
    forward: Array  # of the blocks
    backward: Array  # of the blocks, with recomputation
    host_excess: Array  # time the device waits for launches
    bubble: Array
    tp_exposed: Array
    cp_exposed: Array
    pp_exposed: Array
    ep_exposed: Array
    fsdp_exposed: Array
    reduce_exposed: Array  # gradients over data parallel ranks, once per step
    gather_exposed: Array  # weights after the update
    optimizer: Array
    offload_exposed: Array  # time the device waits for host transfers and the host's update
    host_step: Array
    small_collectives: Array
    busiest_layers: Array  # number of layers of the busiest stage
    heads: Array  # number of runs of the output layer
    head_matmul: Array
    loss: Array
    embedding: Array


def part_factors(flash: bool, engine: TrainingEngine) -> dict[str, float]:
    """Returns the factors of a run on the seconds of each part of a block.

    Without a fused kernel, attention is two batched matmuls with the slowdown of all matmuls.
    """
    return {
        "matmul": engine.matmul_slowdown,
        "attention": engine.attention_slowdown if flash else engine.matmul_slowdown,
        "scores": engine.score_traffic,
        "stream": engine.streaming_traffic,
        "shard": engine.shard_traffic,
    }


def accumulated_share(candidates: Candidates, engine: TrainingEngine) -> Array:
    """Returns how often a block's gradients are accumulated per micro-batch: by our trainer from the second one on, and
    under ZeRO-3 into a rank's own part."""
    if engine.fused:
        return np.where(candidates.zero >= 3, 0.0, 1.0)
    part = np.where(candidates.zero >= 3, candidates.shard_ranks, 1.0)
    return (candidates.accumulation - 1) / candidates.accumulation / part


def bubble_share(schedule: Array, virtual: Array, forward: Array, inputs: Array, weights: Array) -> Array:
    """Returns a pipeline's idle time over the time that the other stages spend on one micro-batch.

    forward, inputs, weights: seconds of a stage's forward pass, of the gradients of its inputs (for which the previous
    stage waits) and of its weights (for which no stage waits). With p equal stages and times F, B, W, the idle time is
    p - 1 times

        1f1b, gpipe   (F + B + W) / v        arXiv 2104.04473, section 2.2
        zb            (F + max(0, B - W)) / v   ZB-H1, arXiv 2401.10241, table 2: W fills the rest
        zbv           max(F, B) / 2          the last rank of a V starts after p - 1 chunks
        dualpipe      (F + max(0, B - W) + max(0, B - F)) / 2   its V form, without the overlap of F and B inside a rank

    Each was checked against the order of passes in PyTorch's schedules. The paper's smaller figures for zb and zbv let
    stages start their optimizer step at different times; gradient clipping makes them wait for each other.
    """
    whole = forward + inputs + weights
    filled = forward + np.maximum(inputs - weights, 0.0)
    idle = np.where(schedule == code("schedule", "zb"), filled / virtual, whole / virtual)
    idle = np.where(schedule == code("schedule", "zbv"), np.maximum(forward, inputs) / 2, idle)
    both = (filled + np.maximum(inputs - forward, 0.0)) / 2
    return np.asarray(np.where(schedule == code("schedule", "dualpipe"), both, idle) / whole)


@dataclass(frozen=True)
class _Layer:
    """Seconds of one block and micro-batch: of device compute, exposed communication and launches by the host."""

    forward: Array
    backward: Array
    again: Array
    weight_gradients: Array
    tp_exposed: Array
    cp_exposed: Array
    ep_exposed: Array
    fsdp_exposed: Array
    offloaded: Array
    launches: Array
    first_half: Array  # the forward pass with its exposed communication

    @property
    def device(self) -> Array:
        """Device seconds of both passes, without waiting for sharded weights and offloaded activations."""
        return self.forward + self.backward + self.again + self.tp_exposed + self.cp_exposed + self.ep_exposed


def _layer(costs: StepCosts, candidates: Candidates, engine: TrainingEngine, slow: dict[str, Array]) -> _Layer:
    full, selective = (candidates.has("recompute", word) for word in ("full", "selective"))
    factors = part_factors(candidates.flash, engine)
    forward_of, backward_of = (
        {part: costs.block[part, phase] * factor for part, factor in factors.items()}
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    forward = np.asarray(sum(forward_of.values()))
    backward = sum(backward_of.values()) + costs.accumulate * accumulated_share(candidates, engine)
    whole, partly = (sum(costs.again[part, mode] * factor for part, factor in factors.items()) for mode in (0, 1))
    again = np.where(full, whole * candidates.recomputed_share, np.where(selective, partly, 0.0))
    passes = 2 + candidates.recomputed_share
    tp_exposed = costs.tp_collectives * passes * costs.tp_collective * slow["tp"] * (1 - engine.tp_hidden)
    exchange = 2 * passes * costs.ep_layer * slow["ep"]  # rows are sent out and back
    beside = np.where(costs.crosses["ep"], engine.ep_hidden_across, engine.ep_hidden) * exchange
    ep_exposed = exchange - np.minimum(beside, forward + backward)
    kind = context_kinds(candidates, engine)
    # Megatron's selective recomputation repeats attention together with its exchange.
    repeats = engine.repeats_attention_alone and not engine.repeats_up_projections(candidates.model)
    repeated = np.where(selective & repeats, 1.0, candidates.recomputed_share)
    cp_passes = 2 + repeated + (kind != code("cp_kind", "all_to_all"))  # gradients of gathered tensors are scattered
    attention = (forward_of["attention"] + forward_of["scores"]) * (1 + repeated) + backward_of["attention"]
    cp_exposed = exposed(costs.cp_layer * cp_passes * slow["cp"], candidates, kind, attention, engine.cp_hidden)
    device = forward + backward + again + tp_exposed + cp_exposed + ep_exposed
    return _Layer(
        forward, backward, again, backward_of["matmul"] / 2 + costs.accumulate, tp_exposed, cp_exposed, ep_exposed,
        fsdp_exposed=_sharded(costs, candidates, engine, slow["dp"], device),
        # Activations move to the host during the next block's forward pass, and back during its backward pass.
        offloaded=np.maximum(costs.host_layer - forward, 0.0) + np.maximum(costs.host_layer - backward - again, 0.0),
        launches=_launches(costs, candidates, engine),
        first_half=forward + tp_exposed / passes + cp_exposed / cp_passes + ep_exposed / passes,
    )  # fmt: skip


def _sharded(costs: StepCosts, candidates: Candidates, engine: TrainingEngine, slow: Array, device: Array) -> Array:
    """Returns the transfer seconds of a layer's sharded weights and gradients that its own device time does not hide.

    ZeRO-3 gathers weights for forward and again for backward; terms are zero where nothing is sharded.
    """
    travel = (2 * costs.fsdp_gather_layer + costs.fsdp_scatter_layer) * slow
    ranks = np.where(costs.fsdp_gather_layer > 0, candidates.shard_ranks, 0.0)
    travel = travel + 3 * engine.gather_rank_seconds * ranks
    left = np.maximum(travel - engine.fsdp_hidden * device, travel * (1 - engine.fsdp_hidden))
    return np.asarray(np.maximum(left, 0.0))


def _launches(costs: StepCosts, candidates: Candidates, engine: TrainingEngine) -> Array:
    """Returns the seconds that the host takes to launch a layer's kernels and collectives."""
    host_passes = 1 + engine.host_backward_ratio + candidates.recomputed_share
    unfused = (not candidates.flash) & (candidates.micro_batch * candidates.model.heads / candidates.tp % 4 != 0)
    kernels = engine.host_layer_seconds * host_passes * np.where(unfused, 1 + UNFUSED_SOFTMAX_LAUNCHES, 1.0)
    kernels = kernels * (1 + candidates.launches * candidates.expert_share + candidates.latent_launches)
    exchanges = np.where(candidates.ep > 1, candidates.expert_share, 0.0)
    across_nodes = (candidates.pp > 1) & costs.crosses["pp"]
    collective = engine.host_collective_seconds + engine.host_rank_seconds * np.where(across_nodes, candidates.tp, 0.0)
    collective = np.where(candidates.tp > 1, collective, 0.0) + engine.host_collective_seconds * exchanges
    return np.asarray(kernels + 2 * (2 + candidates.recomputed_share) * collective)


def _stages(
    layer: _Layer, candidates: Candidates, engine: TrainingEngine, head: Array, embedding: Array, message: Array
) -> tuple[Array, ...]:
    """Returns, per micro-batch, the seconds of the slowest stage, of all others together and of the slowest stage's
    wait for its host; and the slowest stage's layers and whether it has the output layer and the embedding."""
    layers = stage_layers(candidates, engine.partition)
    # Every chunk of a rank beyond the first adds a receive and a send in each direction.
    host_messages = engine.host_collective_seconds * 4 * (candidates.virtual_stages - 1)
    host_microbatch = engine.host_microbatch_seconds + host_messages
    # Rows: the first stage, those in the middle, the last. Their layers, and which ends of the model they have.
    none, alone = np.zeros(len(candidates)), candidates.pp == 1
    count = np.stack([layers.first, layers.middle, layers.last])
    has_head = np.stack(
        [np.where(alone | candidates.v_shaped, 1.0, 0.0), none, np.where(candidates.v_shaped, 0.0, 1.0)]
    )
    has_embedding = np.stack([none + 1.0, none, np.where(alone, 1.0, 0.0)])
    blocks = count * (layer.device + layer.fsdp_exposed + layer.offloaded)
    ends = has_head * head + has_embedding * embedding
    longer = _longer(blocks, count * layer.launches) + _longer(ends, host_microbatch)
    first, middle, last = longer + message
    slowest = np.maximum(np.maximum(first, last), np.where(candidates.pp > 2, middle, 0.0))
    others = np.where(candidates.pp > 1, first + last + (candidates.pp - 2) * middle, slowest) - slowest
    row = np.where(slowest == last, 2, np.where(slowest == first, 0, 1)), np.arange(len(candidates))
    return slowest, others, (longer - blocks - ends)[row], count[row], has_head[row], has_embedding[row]


def assemble(costs: StepCosts, candidates: Candidates, engine: TrainingEngine) -> Times:
    """Returns the step time from its ingredients and the engine's constants."""
    slow = {
        kind: np.where(crosses, engine.network_slowdown, engine.island_slowdown)
        for kind, crosses in costs.crosses.items()
    }
    micro_batches, layer = candidates.accumulation, _layer(costs, candidates, engine, slow)
    head_matmul, loss = costs.head_matmul * engine.matmul_slowdown, costs.head_streaming * engine.loss_traffic
    embedding = costs.embedding * engine.streaming_traffic
    message = 2 * candidates.virtual_stages * costs.pp_message * (1 - engine.pp_hidden) * slow["pp"]
    slowest, others, host_excess, count, has_head, has_embedding = _stages(
        layer, candidates, engine, head_matmul + loss, embedding, message
    )
    second_half = layer.device - layer.first_half - layer.weight_gradients
    bubble = others * bubble_share(
        candidates.schedule, candidates.virtual_stages, layer.first_half, second_half, layer.weight_gradients
    )
    window = count * (layer.backward + layer.again)  # the last micro-batch's backward, which hides gradient reduction
    reduce, gather = costs.dp_reduce * slow["dp"], costs.dp_gather * slow["dp"]
    reduce_exposed = reduce - np.minimum(engine.dp_hidden * reduce, window)
    gather_exposed = gather - np.minimum(engine.dp_hidden * gather, count * layer.forward)
    # Gradients move to the host during the last backward pass; weights return while others are still updated.
    offload_step = np.maximum(costs.host_gradients - window, 0.0) + costs.host_update
    optimizer = costs.optimizer * engine.optimizer_traffic
    host_step = np.full(len(candidates), engine.host_step_seconds)
    m, heads = micro_batches * count, micro_batches * has_head
    small, steady = np.zeros(len(candidates)) + sum(costs.small_collectives.values()), micro_batches * slowest
    return Times(
        step_seconds=steady + small + bubble + reduce_exposed + gather_exposed + optimizer + offload_step + host_step,
        forward=m * layer.forward,
        backward=m * (layer.backward + layer.again),
        host_excess=micro_batches * host_excess,
        bubble=bubble,
        tp_exposed=m * layer.tp_exposed,
        cp_exposed=m * layer.cp_exposed,
        pp_exposed=micro_batches * message,
        ep_exposed=m * layer.ep_exposed,
        fsdp_exposed=m * layer.fsdp_exposed,
        reduce_exposed=reduce_exposed,
        gather_exposed=gather_exposed,
        optimizer=optimizer,
        offload_exposed=m * layer.offloaded + offload_step,
        host_step=host_step,
        small_collectives=small,
        busiest_layers=count,
        heads=heads,
        head_matmul=heads * head_matmul,
        loss=heads * loss,
        embedding=micro_batches * has_embedding * embedding,
    )


def _longer(device: Array, host: Array) -> Array:
    return np.asarray((device**RIVALRY + host**RIVALRY) ** (1 / RIVALRY))
