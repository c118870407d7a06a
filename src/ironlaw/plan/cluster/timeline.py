"""Step time of many candidates at once: compute from operation shapes, host time, pipeline, communication.

    costs = step_costs(candidates, system)        # seconds of every ingredient, without the engine's constants
    times = Times(costs, candidates, system.engine)
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


class _Layer:
    """Seconds of one block and micro-batch: of device compute, exposed communication and launches by the host."""

    def __init__(
        self, costs: StepCosts, candidates: Candidates, engine: TrainingEngine, slow: dict[str, Array]
    ) -> None:
        full, selective = (candidates.has("recompute", word) for word in ("full", "selective"))
        factors = part_factors(candidates.flash, engine)
        forward_of, backward_of = (
            {part: costs.block[part, phase] * factor for part, factor in factors.items()}
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        )
        self.forward = forward = np.asarray(sum(forward_of.values()))
        self.backward = sum(backward_of.values()) + costs.accumulate * accumulated_share(candidates, engine)
        self.weight_gradients = backward_of["matmul"] / 2 + costs.accumulate
        whole, partly = (sum(costs.again[part, mode] * factor for part, factor in factors.items()) for mode in (0, 1))
        self.again = np.where(full, whole * candidates.recomputed_share, np.where(selective, partly, 0.0))
        passes = 2 + candidates.recomputed_share
        self.tp_exposed = costs.tp_collectives * passes * costs.tp_collective * slow["tp"] * (1 - engine.tp_hidden)
        kind = context_kinds(candidates, engine)
        # Megatron's selective recomputation repeats attention together with its exchange.
        repeats = engine.repeats_attention_alone and not engine.repeats_up_projections(candidates.model)
        repeated = np.where(selective & repeats, 1.0, candidates.recomputed_share)
        cp_passes = 2 + repeated + (kind != code("cp_kind", "all_to_all"))  # gradients of gathered ones are scattered
        attention = (forward_of["attention"] + forward_of["scores"]) * (1 + repeated) + backward_of["attention"]
        sent = costs.cp_layer * cp_passes * slow["cp"]
        self.cp_exposed = exposed(sent, candidates, kind, attention, engine.cp_hidden)
        exchange = 2 * passes * costs.ep_layer * slow["ep"]  # rows are sent out and back
        beside = np.where(costs.crosses["ep"], engine.ep_hidden_across, engine.ep_hidden) * exchange
        compute = forward + self.backward - (sent - self.cp_exposed)  # that hides no exchange of keys
        self.ep_exposed = exchange - np.minimum(beside, compute)
        # Device seconds of both passes, without waiting for sharded weights and offloaded activations.
        self.device = forward + self.backward + self.again + self.tp_exposed + self.cp_exposed + self.ep_exposed
        hidden = sent - self.cp_exposed + exchange - self.ep_exposed
        left = self.device - hidden
        self.left = 1 - hidden / (forward + self.backward)  # share of compute that hides no exchange
        self.fsdp_exposed, fsdp_hidden = _sharded(costs, candidates, engine, slow["dp"], left)
        self.free = left - fsdp_hidden  # device seconds that can hide further transfers
        # Activations move to the host during the next block's forward pass, and back during its backward pass.
        self.offloaded = np.maximum(costs.host_layer - forward, 0.0)
        self.offloaded = self.offloaded + np.maximum(costs.host_layer - self.backward - self.again, 0.0)
        self.launches = _launches(costs, candidates, engine)
        # The forward pass with its exposed communication.
        self.first_half = forward + self.tp_exposed / passes + self.cp_exposed / cp_passes + self.ep_exposed / passes


def _sharded(
    costs: StepCosts, candidates: Candidates, engine: TrainingEngine, slow: Array, device: Array
) -> tuple[Array, Array]:
    """Returns the transfer seconds of a layer's sharded weights and gradients: those exposed, and those that hide
    behind `device`, its seconds that hide no exchange of keys or of experts' rows.

    ZeRO-3 gathers weights for forward and again for backward; terms are zero where nothing is sharded.
    """
    travel = (2 * costs.fsdp_gather_layer + costs.fsdp_scatter_layer) * slow
    ranks = np.where(costs.fsdp_gather_layer > 0, candidates.shard_ranks, 0.0)
    travel = travel + 3 * engine.gather_rank_seconds * ranks
    left = np.maximum(travel - engine.fsdp_hidden * device, travel * (1 - engine.fsdp_hidden))
    return left, travel - left


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


class Times:
    """Seconds per job and step, on the busiest stage; `step_seconds` is the sum of all others."""

    def __init__(self, costs: StepCosts, candidates: Candidates, engine: TrainingEngine) -> None:
        c, layers = candidates, stage_layers(candidates, engine.partition)
        slow = {
            kind: np.where(crosses, engine.network_slowdown, engine.island_slowdown)
            for kind, crosses in costs.crosses.items()
        }
        layer, micro_batches = _Layer(costs, c, engine, slow), c.accumulation
        head_matmul, loss = costs.head_matmul * engine.matmul_slowdown, costs.head_streaming * engine.loss_traffic
        embedding = costs.embedding * engine.streaming_traffic
        message = 2 * c.virtual_stages * costs.pp_message * (1 - engine.pp_hidden) * slow["pp"]
        # Every chunk of a rank beyond the first adds a receive and a send in each direction.
        host_messages = engine.host_collective_seconds * 4 * (c.virtual_stages - 1)
        # Rows: the first stage, those in the middle, the last. Their layers, and which ends of the model they have.
        none, alone = np.zeros(len(c)), c.pp == 1
        count = np.stack([layers.first, layers.middle, layers.last])
        has_head = np.stack([np.where(alone | c.v_shaped, 1.0, 0.0), none, np.where(c.v_shaped, 0.0, 1.0)])
        has_embedding = np.stack([none + 1.0, none, np.where(alone, 1.0, 0.0)])
        blocks = count * (layer.device + layer.fsdp_exposed + layer.offloaded)
        ends = has_head * (head_matmul + loss) + has_embedding * embedding
        elapsed = _longer(blocks, count * layer.launches)
        longer = elapsed + _longer(ends, engine.host_microbatch_seconds + host_messages)
        first, middle, last = longer + message
        slowest = np.maximum(np.maximum(first, last), np.where(c.pp > 2, middle, 0.0))
        others = np.where(c.pp > 1, first + last + (c.pp - 2) * middle, slowest) - slowest
        row = np.where(slowest == last, 2, np.where(slowest == first, 0, 1)), np.arange(len(c))
        self.busiest_layers = busiest = count[row]  # number of layers of the busiest stage
        self.heads = micro_batches * has_head[row]  # number of runs of the output layer
        m = micro_batches * busiest
        self.forward = m * layer.forward  # of the blocks
        self.backward = m * (layer.backward + layer.again)  # of the blocks, with recomputation
        self.head_matmul, self.loss = self.heads * head_matmul, self.heads * loss
        self.embedding = micro_batches * has_embedding[row] * embedding
        self.host_excess = micro_batches * (longer - blocks - ends)[row]  # time the device waits for launches
        self.tp_exposed, self.cp_exposed = m * layer.tp_exposed, m * layer.cp_exposed
        self.ep_exposed, self.fsdp_exposed = m * layer.ep_exposed, m * layer.fsdp_exposed
        self.pp_exposed = micro_batches * message
        second_half = layer.device - layer.first_half - layer.weight_gradients
        shares = bubble_share(c.schedule, c.virtual_stages, layer.first_half, second_half, layer.weight_gradients)
        self.bubble = others * shares
        # The last micro-batch's backward hides gradient reduction, the first one's forward the gathering of weights,
        # also while the device waits for launches.
        hiding = (count * elapsed / np.where(count > 0, blocks, 1.0))[row]
        window, free = hiding * layer.left * (layer.backward + layer.again), hiding * layer.free
        # Gradients over data parallel ranks, once per step, and weights after the update.
        reduce, gather = costs.dp_reduce * slow["dp"], costs.dp_gather * slow["dp"]
        reduce_hidden = np.minimum(np.minimum(engine.dp_hidden * reduce, window), free)
        free = free - np.where(micro_batches > 1, 0.0, reduce_hidden)  # one micro-batch hides both
        gather_hidden = np.minimum(np.minimum(engine.dp_hidden * gather, hiding * layer.left * layer.forward), free)
        self.reduce_exposed, self.gather_exposed = reduce - reduce_hidden, gather - gather_hidden
        # Gradients move to the host during the last backward pass; weights return while others are still updated.
        offload_step = np.maximum(costs.host_gradients - window, 0.0) + costs.host_update
        self.offload_exposed = m * layer.offloaded + offload_step
        self.optimizer = costs.optimizer * engine.optimizer_traffic
        self.host_step = np.full(len(c), engine.host_step_seconds)
        self.small_collectives = np.zeros(len(c)) + sum(costs.small_collectives.values())
        steady = micro_batches * slowest + self.small_collectives + self.bubble
        once = self.reduce_exposed, self.gather_exposed, self.optimizer, offload_step, self.host_step
        self.step_seconds = sum(once, steady)


def _longer(device: Array, host: Array) -> Array:
    return np.asarray((device**RIVALRY + host**RIVALRY) ** (1 / RIVALRY))
