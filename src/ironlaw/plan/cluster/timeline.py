"""Step time of many jobs at once: compute from operation shapes, host time, pipeline, communication.

    parts = step_parts(jobs, setting)        # seconds of every ingredient, engine-independent
    times = assemble(parts, jobs, setting.engine)
    times.step_seconds                       # one per job

For a pipeline stage s and one micro-batch (forward, backward and recomputation together):

    device   matmuls + attention + streaming kernels + tensor, context parallel collectives on the critical path
    host     launches: layers x (forward + backward); per micro-batch. It does not run ahead of the loss
    stage    max(device, host) of its blocks + the same of embedding, output layer and loss + pipeline messages
    step     m max_s stage + sum of the other stages x what the schedule leaves idle of them (`bubble_share`)
             + exposed data parallel communication + optimizer + host per step

Under ZeRO-3 the gathering of weights and scattering of gradients of each micro-batch runs beside the compute, under
ZeRO-2 the scattering: gradients kept in shards cannot wait for the last micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ironlaw.plan.cluster.context_parallel import cp_exchanges, exposed, kinds
from ironlaw.plan.cluster.ingredients import Parts
from ironlaw.plan.cluster.jobs import SCHEDULES, Array, Jobs
from ironlaw.plan.cluster.stages import StageLayers, stage_layers
from ironlaw.plan.engines.engine import Engine

RIVALRY = 6.0
"""Exponent of the norm that stands for max(device, host): where both are close, each waits for the other at times."""

UNFUSED_SOFTMAX_LAUNCHES = 0.25
"""Of a block's launches, what Megatron's scale, mask and softmax add when they run apart (about 6 kernels to 25). Its
fused kernel takes four rows of scores at a time, and steps aside where heads x sequences of a rank do not divide so."""


@dataclass(frozen=True)
class Times:
    """Seconds per job and step, on the busiest stage; up to `host_step` they add up to `step_seconds`."""

    step_seconds: Array
    forward: Array
    backward: Array
    host_excess: Array  # launches that the device waits for
    bubble: Array
    tp_exposed: Array
    cp_exposed: Array
    pp_exposed: Array
    ep_exposed: Array
    fsdp_exposed: Array
    dp_exposed: Array
    optimizer: Array
    offload_exposed: Array  # waiting for transfers to and from the host, and for its update
    host_step: Array
    busiest_layers: Array  # of the stage these times are of
    head: Array  # output layer and embedding, part of forward and backward
    recomputed: Array  # part of backward


def attention_slowdown_of(jobs: Jobs, engine: Engine) -> Array:
    """Without a fused kernel attention is two batched matmuls, as fast or slow as any other."""
    return np.where(jobs.flash > 0, engine.attention_slowdown, engine.matmul_slowdown)


def bubble_share(schedule: Array, virtual: Array, forward: Array, inputs: Array, weights: Array) -> Array:
    """Idle time of a pipeline over the time that the other stages spend on one micro-batch.

    forward, inputs, weights: seconds of a stage's forward pass, of the gradients of its inputs (which the stage before
    waits for) and of its weights (which nobody waits for). With p equal stages and times F, B, W the idle time is
    p - 1 times

        1f1b, gpipe   (F + B + W) / v        arXiv 2104.04473, section 2.2
        zb            (F + max(0, B - W)) / v   ZB-H1, arXiv 2401.10241, table 2: W fills the rest
        zbv           max(F, B) / 2          the last rank of a V starts after p - 1 chunks
        dualpipe      (F + max(0, B - W) + max(0, B - F)) / 2   its V form, without the overlap of F and B inside a rank

    Each checked against the order of passes that PyTorch's schedules produce. The paper's smaller figures for zb and
    zbv let stages start their optimizer step at different times; gradient clipping makes them wait for each other.
    """
    whole = forward + inputs + weights
    filled = forward + np.maximum(inputs - weights, 0.0)
    idle = np.where(schedule == SCHEDULES["zb"], filled / virtual, whole / virtual)
    idle = np.where(schedule == SCHEDULES["zbv"], np.maximum(forward, inputs) / 2, idle)
    both = (filled + np.maximum(inputs - forward, 0.0)) / 2
    return np.asarray(np.where(schedule == SCHEDULES["dualpipe"], both, idle) / whole)


def assemble(parts: Parts, jobs: Jobs, engine: Engine, layers: StageLayers | None = None) -> Times:
    """Step time from its ingredients and the engine's constants."""
    layers = layers or stage_layers(jobs, engine.partition)
    full, selective = jobs.recompute == 2, jobs.recompute == 1
    slow_tp, slow_cp, slow_ep, slow_dp, slow_pp = (
        np.where(crosses, engine.network_slowdown, engine.island_slowdown)
        for crosses in (parts.tp_crosses, parts.cp_crosses, parts.ep_crosses, parts.dp_crosses, parts.pp_crosses)
    )
    micro_batches = jobs.accumulation

    streaming_forward = parts.layer_streaming_forward * engine.streaming_traffic
    streaming_forward = streaming_forward + parts.layer_shard_forward * engine.shard_traffic
    attention_slowdown = attention_slowdown_of(jobs, engine)
    core = parts.layer_attention_forward * attention_slowdown + parts.layer_scores_forward * engine.score_traffic
    forward = parts.layer_matmul_forward * engine.matmul_slowdown + core + streaming_forward
    backward = (
        parts.layer_matmul_backward * engine.matmul_slowdown
        + parts.layer_attention_backward * attention_slowdown
        + 2 * parts.layer_scores_forward * engine.score_traffic
        + parts.layer_streaming_backward * engine.streaming_traffic
        + parts.layer_shard_backward * engine.shard_traffic
        + parts.layer_accumulate * np.where(jobs.zero >= 3, 0.0, 1.0)
    )
    share = engine.selective_matmul_share
    # Megatron repeats the attention core; torchtitan every other matmul and what is element-wise, seldom attention.
    others = share * parts.layer_matmul_forward * engine.matmul_slowdown + engine.selective_attention_share * core
    widens = (parts.layer_widening_forward > 0) & engine.selective_widens
    again_alone = np.where(widens, parts.layer_widening_forward * engine.matmul_slowdown, core)
    partly = np.where(share > 0, others + streaming_forward, again_alone)
    again = np.where(full, forward * jobs.recomputed_share, np.where(selective, partly, 0.0))
    passes = 2 + jobs.recomputed_share
    tp_layer = parts.tp_collectives * passes * parts.tp_collective * slow_tp
    tp_exposed = tp_layer * (1 - engine.tp_hidden)
    exchange = 2 * passes * parts.ep_layer * slow_ep  # rows go out and come back
    beside = np.where(parts.ep_crosses, engine.ep_hidden_across, engine.ep_hidden) * exchange
    ep_exposed = exchange - np.minimum(beside, forward + backward)
    kind = kinds(jobs, engine)
    # Megatron's selective recomputation repeats attention with its exchange.
    repeated = np.where(selective & (share == 0) & ~widens, 1.0, jobs.recomputed_share)
    cp_passes = cp_exchanges(kind, 2 + repeated)
    attention = core * (1 + repeated) + parts.layer_attention_backward * attention_slowdown
    cp_exposed = exposed(parts.cp_layer * cp_passes * slow_cp, jobs, kind, attention, engine.cp_hidden)
    host_passes = 1 + engine.host_backward_ratio + jobs.recomputed_share
    unfused = (jobs.flash == 0) & (jobs.micro_batch * jobs.heads / jobs.tp % 4 != 0)
    host_layer = engine.host_layer_seconds * host_passes * np.where(unfused, 1 + UNFUSED_SOFTMAX_LAUNCHES, 1.0)
    host_layer = host_layer * (1 + jobs.launches * jobs.expert_share + jobs.latent_launches)
    exchanges = np.where(jobs.ep > 1, jobs.expert_share, 0.0)
    across_nodes = (jobs.pp > 1) & parts.pp_crosses
    host_collective = engine.host_collective_seconds + engine.host_rank_seconds * np.where(across_nodes, jobs.tp, 0.0)
    host_collective = np.where(jobs.tp > 1, host_collective, 0.0) + engine.host_collective_seconds * exchanges
    host_layer = host_layer + 2 * passes * host_collective
    # Every chunk of a rank beyond the first receives and sends once forward and once backward more.
    host_messages = engine.host_collective_seconds * 4 * (jobs.virtual - 1)
    host_microbatch = engine.host_microbatch_seconds + host_messages

    head = parts.head_matmul * engine.matmul_slowdown + parts.head_streaming * engine.loss_traffic
    embedding = parts.embedding * engine.streaming_traffic
    device_layer = forward + backward + again + tp_exposed + cp_exposed + ep_exposed
    message = 2 * jobs.virtual * parts.pp_message * (1 - engine.pp_hidden) * slow_pp

    # Weights of ZeRO-3 are gathered for forward and again for backward; parts are zero where nothing is sharded.
    fsdp_layer = (2 * parts.fsdp_gather_layer + parts.fsdp_scatter_layer) * slow_dp
    fsdp_exposed = np.maximum(fsdp_layer - engine.fsdp_hidden * device_layer, fsdp_layer * (1 - engine.fsdp_hidden))
    fsdp_exposed = np.maximum(fsdp_exposed, 0.0)

    # Activations go to the host behind the forward pass of the next block, and come back behind its backward pass.
    offload_layer = np.maximum(parts.host_layer - forward, 0.0) + np.maximum(parts.host_layer - backward - again, 0.0)

    def stage(count: Array, extra: Array) -> tuple[Array, Array]:
        blocks = count * (device_layer + fsdp_exposed + offload_layer)
        longer = _longer(blocks, count * host_layer) + _longer(extra, host_microbatch)
        return longer + message, longer - blocks - extra

    both_ends = (jobs.pp == 1) | jobs.v_shaped
    first_extra = embedding + np.where(both_ends, head, 0.0)
    last_extra = np.where(jobs.v_shaped, 0.0, head) + np.where(jobs.pp == 1, embedding, 0.0)
    first, _ = stage(layers.first, first_extra)
    middle, _ = stage(layers.middle, np.zeros(len(jobs)))
    last, _ = stage(layers.last, last_extra)
    slowest = np.maximum(np.maximum(first, last), np.where(jobs.pp > 2, middle, 0.0))
    others = np.where(jobs.pp > 1, first + last + (jobs.pp - 2) * middle, slowest) - slowest
    weight_gradients = parts.layer_matmul_backward * engine.matmul_slowdown / 2 + parts.layer_accumulate
    first_half = forward + tp_exposed / passes + cp_exposed / cp_passes + ep_exposed / passes
    second_half = device_layer - first_half - weight_gradients
    bubble = others * bubble_share(jobs.schedule, jobs.virtual, first_half, second_half, weight_gradients)

    count = np.where(slowest == last, layers.last, np.where(slowest == first, layers.first, layers.middle))
    extra = np.where(slowest == last, last_extra, np.where(slowest == first, first_extra, 0.0))
    _, host_excess = stage(count, extra)
    steady = micro_batches * slowest
    window = count * (backward + again)  # the last micro-batch's backward, behind which gradients can travel
    reduce = parts.dp_reduce * slow_dp
    gather = parts.dp_gather * slow_dp
    dp_exposed = reduce - np.minimum(engine.dp_hidden * reduce, window)
    dp_exposed = dp_exposed + gather - np.minimum(engine.dp_hidden * gather, count * forward)
    # Gradients leave during the last backward pass; weights come back while the rest is still updated.
    offload_step = np.maximum(parts.host_gradients - window, 0.0) + parts.host_update
    optimizer = parts.optimizer * engine.optimizer_traffic
    host_step = np.full(len(jobs), engine.host_step_seconds)
    m = micro_batches * count
    return Times(
        step_seconds=steady + bubble + dp_exposed + optimizer + offload_step + host_step,
        forward=m * forward + micro_batches * extra / 3,
        backward=m * (backward + again) + micro_batches * extra * 2 / 3,
        host_excess=micro_batches * host_excess,
        bubble=bubble,
        tp_exposed=m * tp_exposed,
        cp_exposed=m * cp_exposed,
        pp_exposed=micro_batches * message,
        ep_exposed=m * ep_exposed,
        fsdp_exposed=m * fsdp_exposed,
        dp_exposed=dp_exposed,
        optimizer=optimizer,
        offload_exposed=micro_batches * count * offload_layer + offload_step,
        host_step=host_step,
        busiest_layers=count,
        head=micro_batches * extra,
        recomputed=m * again,
    )


def _longer(device: Array, host: Array) -> Array:
    return np.asarray((device**RIVALRY + host**RIVALRY) ** (1 / RIVALRY))
