"""Step time of many jobs at once: compute from operation shapes, host time, pipeline, communication.

    parts = step_parts(jobs, setting)        # seconds of every ingredient, engine-independent
    times = assemble(parts, jobs, setting.engine)
    times.step_seconds                       # one per job

For a pipeline stage s and one micro-batch (forward, backward and recomputation together):

    device   matmuls + attention + streaming kernels + tensor, context parallel collectives on the critical path
    host     launches: layers x (forward + backward), plus per micro-batch
    stage    max(device, host) + pipeline messages
    step     (m - 1) max_s stage + sum_s stage / v ...   1F1B, interleaved: arXiv 2104.04473, section 2.2
             + exposed data parallel communication + optimizer + host per step

Under ZeRO-3 the gathering of weights and scattering of gradients of each micro-batch runs beside the compute.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from ironlaw.machine.efficiency import attention_seconds, collective_seconds, matmul_seconds, streaming_seconds
from ironlaw.plan.engine import Engine
from ironlaw.plan.jobs import Array, Jobs
from ironlaw.plan.setting import Setting
from ironlaw.plan.stages import StageLayers, stage_layers

HALF = 2.0  # bytes of a 16-bit element
FP32 = 4.0

RIVALRY = 6.0
"""Exponent of the norm that stands for max(device, host): where both are close, each waits for the other at times."""

FLASH2_SLOWDOWN = {"hopper": 616 / 335, "blackwell": 3.0, "blackwell_ultra": 3.0}
"""Time of FlashAttention-2 over that of a kernel written for the generation. Hopper: causal forward, head size 128,
16k tokens, 335 against FlashAttention-3's 616 TFLOP/s (arXiv 2407.08608, figure 5). Blackwell: assumed."""


@dataclass(frozen=True)
class Parts:
    """Seconds per job of single ingredients. `layer`: of one block and micro-batch; forward and backward apart."""

    layer_matmul_forward: Array
    layer_matmul_backward: Array
    layer_attention_forward: Array
    layer_attention_backward: Array
    layer_scores_forward: Array  # streaming over materialised scores
    layer_streaming_forward: Array
    layer_streaming_backward: Array
    layer_shard_forward: Array  # streaming that tensor parallel divides
    layer_shard_backward: Array
    layer_accumulate: Array  # adding a weight gradient into the fp32 buffer
    tp_collective: Array  # one all-reduce, or one all-gather and one reduce-scatter
    cp_layer: Array  # key/value exchange of one layer, forward
    head_matmul: Array  # output layer, forward and backward
    head_streaming: Array  # loss
    embedding: Array
    pp_message: Array
    dp_reduce: Array
    dp_gather: Array
    fsdp_gather_layer: Array
    fsdp_scatter_layer: Array
    optimizer: Array
    crosses: Array  # whether data parallel and pipeline traffic leaves the island
    tp_crosses: Array


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
    fsdp_exposed: Array
    dp_exposed: Array
    optimizer: Array
    host_step: Array
    busiest_layers: Array  # of the stage these times are of
    head: Array  # output layer and embedding, part of forward and backward
    recomputed: Array  # part of backward


def _unique(function, *columns: Array) -> Array:  # type: ignore[no-untyped-def]
    """`function` on the distinct rows of the columns only: layouts share most of their shapes."""
    table = np.stack(np.broadcast_arrays(*columns), axis=1)
    shapes, back = np.unique(table, axis=0, return_inverse=True)
    return np.asarray(function(*shapes.T))[back.reshape(-1)]


def _matmuls(jobs: Jobs, setting: Setting) -> tuple[Array, Array]:
    """Seconds of a block's linear layers: forward, backward."""
    tokens, hidden, tp = jobs.tokens, jobs.hidden, jobs.tp
    qkv = jobs.query_size / tp + 2 * np.maximum(jobs.key_value_size / tp, jobs.head_size)
    up = jobs.ffn * np.where(jobs.gated > 0, 2.0, 1.0) / tp
    forward, backward = np.zeros(len(jobs)), np.zeros(len(jobs))
    for outputs, inputs in ((qkv, hidden), (hidden, jobs.query_size / tp), (up, hidden), (hidden, jobs.ffn / tp)):
        for m, n, k, target in (
            (tokens, outputs, inputs, forward),
            (tokens, inputs, outputs, backward),
            (outputs, inputs, tokens, backward),
        ):
            target += _matmul(m, n, k, 1.0, setting, setting.precision)
    return forward, backward


def _matmul(m: Array, n: Array, k: Array, batch: float | Array, setting: Setting, precision: str) -> Array:
    hardware = setting.hardware
    cast = precision not in ("bf16", "fp16", "fp32", "tf32")

    def seconds(m: Array, n: Array, k: Array, b: Array) -> Array:
        return np.asarray(matmul_seconds(m, n, k, b, precision, hardware=hardware, include_cast=cast, sustained=True))

    return _unique(seconds, m, n, k, np.broadcast_to(np.asarray(batch, dtype=float), m.shape))


def _attention(jobs: Jobs, setting: Setting) -> tuple[Array, Array, Array]:
    """Seconds of one layer's attention: forward, backward, and the traffic of materialised scores."""
    hardware, precision = setting.hardware, setting.wide_precision
    local_heads = jobs.heads / jobs.tp
    local_kv = np.maximum(jobs.kv_heads / jobs.tp, 1.0)

    def flash(direction: str) -> Array:
        def seconds(b: Array, s: Array, h: Array, kv: Array, d: Array) -> Array:
            return np.asarray(
                attention_seconds(
                    b, s, h, kv, d, True, precision, hardware=hardware, direction=direction, sustained=True
                )
            )

        return _unique(seconds, jobs.micro_batch, jobs.sequence, local_heads, local_kv, jobs.head_size) / jobs.cp

    # Materialised scores: every (query, key) pair is computed, masked or not.
    batch = jobs.micro_batch * local_heads
    rows = jobs.sequence / jobs.cp
    standard = _matmul(rows, jobs.sequence, jobs.head_size, batch, setting, precision)
    standard = standard + _matmul(rows, jobs.head_size, jobs.sequence, batch, setting, precision)
    pairs = batch * rows * jobs.sequence
    # scale + mask + softmax read and write 16-bit scores; dropout reads, writes and keeps a one-byte mask
    traffic = streaming_seconds(pairs * (2 * HALF + 2 * HALF + 1), hardware)
    use_flash = jobs.flash > 0
    old = FLASH2_SLOWDOWN.get(hardware.efficiency.generation, 1.0) if setting.engine.attention_kernel == "flash2" else 1.0
    forward = np.where(use_flash, flash("forward") * old, standard)
    backward = np.where(use_flash, flash("backward") * old, 2 * standard)
    return forward, backward, np.where(use_flash, 0.0, traffic)


def _streaming(jobs: Jobs, setting: Setting) -> tuple[Array, Array, Array, Array]:
    """Element-wise kernels of one block at their least traffic: on the residual stream, then on what tp divides.

    Each forward, then backward.
    """
    stream = jobs.tokens * jobs.hidden / jobs.stream_shards
    sharded = jobs.tokens / jobs.tp
    # Rotary kernels, or copies of queries, keys and values into the layout that batched matmuls want.
    heads = 2 * (jobs.query_size + np.where(jobs.biased > 0, 2.0, 1.0) * jobs.key_value_size)
    activation = jobs.ffn * np.where(jobs.gated > 0, 3.0, 2.0)
    moved = (
        # Two norms (read, write) and two residual additions (read two, write one).
        stream * (2 * 2 + 2 * 3),
        stream * (2 * 3 + 2 * 2),
        sharded * (heads + activation),
        sharded * (heads + activation * 5 / 3),
    )
    hardware = setting.hardware
    first, second, third, fourth = (_unique(lambda b: streaming_seconds(b, hardware), HALF * m) for m in moved)
    return first, second, third, fourth


def _collective(kind: str, size: Array, ranks: Array, inside: Array, setting: Setting) -> Array:
    """One collective; `inside`: ranks of the group that share an island."""
    fabric = setting.fabric

    def seconds(s: Array, n: Array, g: Array) -> Array:
        return np.asarray(collective_seconds(kind, s, n, g, fabric=fabric))

    return _unique(seconds, size, ranks, np.clip(inside, 1.0, ranks))


def step_parts(jobs: Jobs, setting: Setting, layers: StageLayers | None = None) -> Parts:
    """Every ingredient of the step time. Rank order, innermost first: tp, cp, dp, pp (as Megatron places ranks)."""
    layers = layers or stage_layers(jobs, setting.engine.partition)
    island = float(setting.fabric.island_ranks)
    matmul_forward, matmul_backward = _matmuls(jobs, setting)
    attention_forward, attention_backward, scores = _attention(jobs, setting)
    streaming_forward, streaming_backward, shard_forward, shard_backward = _streaming(jobs, setting)
    hardware = setting.hardware

    vocab = jobs.vocab / jobs.tp
    head = sum(
        _matmul(m, n, k, 1.0, setting, setting.wide_precision)
        for m, n, k in ((jobs.tokens, vocab, jobs.hidden), (jobs.tokens, jobs.hidden, vocab), (vocab, jobs.hidden, jobs.tokens))
    )  # fmt: skip
    # loss: 16-bit logits to fp32, log-sum-exp, gradient back to 16 bits
    loss = np.asarray(streaming_seconds(jobs.tokens * vocab * (HALF * 2 + FP32 * 4), hardware))
    embedding = np.asarray(streaming_seconds(jobs.tokens * jobs.hidden * HALF * 6 / jobs.stream_shards, hardware))

    block = jobs.block_parameters / jobs.tp
    ends = (jobs.embedding_parameters + np.where(jobs.tied > 0, 0, jobs.hidden * jobs.vocab)) / jobs.tp
    local = layers.largest_parameters
    stream_bytes = jobs.tokens * jobs.hidden * HALF
    tp_inside = np.minimum(jobs.tp, island)
    dp_inside = np.maximum(1.0, island // (jobs.tp * jobs.cp))
    # Gradients are averaged over context parallel ranks too.
    replicas = jobs.dp * jobs.cp
    replicas_inside = np.maximum(1.0, island // jobs.tp)
    kv_bytes = 2 * jobs.tokens * np.maximum(jobs.key_value_size / jobs.tp, jobs.head_size) * HALF
    message = stream_bytes / jobs.stream_shards
    crosses = jobs.tp * jobs.cp * jobs.dp >= island
    two = np.full(len(jobs), 2.0)

    gradient = setting.engine.gradient_communication_bytes
    all_reduce = _collective("all_reduce", local * gradient, replicas, replicas_inside, setting)
    scatter = _collective("reduce_scatter", local * gradient, replicas, replicas_inside, setting)
    gather = _collective("all_gather", local * HALF, replicas, replicas_inside, setting)
    owned = np.where(jobs.zero > 0, local / replicas, local)
    fsdp = jobs.zero >= 3
    return Parts(
        layer_matmul_forward=matmul_forward,
        layer_matmul_backward=matmul_backward,
        layer_attention_forward=attention_forward,
        layer_attention_backward=attention_backward,
        layer_scores_forward=scores,
        layer_streaming_forward=streaming_forward,
        layer_streaming_backward=streaming_backward,
        layer_shard_forward=shard_forward,
        layer_shard_backward=shard_backward,
        layer_accumulate=np.asarray(streaming_seconds(block * (HALF + 2 * FP32), hardware)),
        tp_collective=np.where(
            jobs.sp > 0,
            _collective("all_gather", stream_bytes, jobs.tp, tp_inside, setting)
            + _collective("reduce_scatter", stream_bytes, jobs.tp, tp_inside, setting),
            _collective("all_reduce", stream_bytes, jobs.tp, tp_inside, setting),
        ),
        cp_layer=_collective("all_gather", kv_bytes * jobs.cp, jobs.cp, np.maximum(1.0, island // jobs.tp), setting),
        head_matmul=np.asarray(head),
        head_streaming=loss,
        embedding=embedding,
        pp_message=np.where(
            jobs.pp > 1, _collective("send_recv", message, two, np.where(crosses, 1.0, 2.0), setting), 0.0
        ),
        dp_reduce=np.where(fsdp, 0.0, np.where(jobs.zero > 0, scatter, all_reduce)),
        dp_gather=np.where((jobs.zero > 0) & ~fsdp, gather, 0.0),
        fsdp_gather_layer=np.where(
            fsdp, _collective("all_gather", (block + ends / jobs.layers) * HALF, replicas, dp_inside, setting), 0.0
        ),
        fsdp_scatter_layer=np.where(
            fsdp, _collective("reduce_scatter", (block + ends / jobs.layers) * gradient, replicas, dp_inside, setting), 0.0
        ),
        crosses=jobs.accelerators > island,
        tp_crosses=jobs.tp > island,
        optimizer=np.asarray(streaming_seconds(owned * (FP32 * 7 + HALF + FP32), hardware)),
    )  # fmt: skip


def assemble(parts: Parts, jobs: Jobs, engine: Engine, layers: StageLayers | None = None) -> Times:
    """Step time from its ingredients and the engine's constants."""
    layers = layers or stage_layers(jobs, engine.partition)
    full, selective = jobs.recompute == 2, jobs.recompute == 1
    slow = np.where(parts.crosses, engine.network_slowdown, engine.island_slowdown)
    micro_batches = jobs.accumulation

    streaming_forward = parts.layer_streaming_forward * engine.streaming_traffic
    streaming_forward = streaming_forward + parts.layer_shard_forward * engine.shard_traffic
    core = parts.layer_attention_forward * engine.attention_slowdown + parts.layer_scores_forward * engine.score_traffic
    forward = parts.layer_matmul_forward * engine.matmul_slowdown + core + streaming_forward
    backward = (
        parts.layer_matmul_backward * engine.matmul_slowdown
        + parts.layer_attention_backward * engine.attention_slowdown
        + 2 * parts.layer_scores_forward * engine.score_traffic
        + parts.layer_streaming_backward * engine.streaming_traffic
        + parts.layer_shard_backward * engine.shard_traffic
        + parts.layer_accumulate * np.where(jobs.zero >= 3, 0.0, 1.0)
    )
    share = engine.selective_matmul_share
    # Megatron repeats the attention core; torchtitan every other matmul and what is element-wise, not attention.
    partly = np.where(share > 0, share * parts.layer_matmul_forward * engine.matmul_slowdown + streaming_forward, core)
    again = np.where(full, forward, np.where(selective, partly, 0.0))
    passes = np.where(full, 3.0, 2.0)
    tp_layer = 2 * passes * parts.tp_collective * np.where(parts.tp_crosses, engine.network_slowdown, engine.island_slowdown)
    tp_exposed = tp_layer * (1 - engine.tp_hidden)
    cp_exposed = parts.cp_layer * (passes + 1) * (1 - engine.cp_hidden) * slow
    host_passes = 1 + engine.host_backward_ratio + np.where(full, 1.0, 0.0)
    host_layer = engine.host_layer_seconds * host_passes
    host_layer = host_layer + engine.host_collective_seconds * np.where(jobs.tp > 1, 2 * passes, 0.0)

    head = parts.head_matmul * engine.matmul_slowdown + parts.head_streaming * engine.streaming_traffic
    embedding = parts.embedding * engine.streaming_traffic
    device_layer = forward + backward + again + tp_exposed + cp_exposed
    message = 2 * jobs.virtual * parts.pp_message * (1 - engine.pp_hidden) * slow

    # Weights of ZeRO-3 are gathered for forward and again for backward.
    fsdp_layer = (2 * parts.fsdp_gather_layer + parts.fsdp_scatter_layer) * slow
    fsdp_exposed = np.maximum(fsdp_layer - engine.fsdp_hidden * device_layer, fsdp_layer * (1 - engine.fsdp_hidden))
    fsdp_exposed = np.maximum(fsdp_exposed, 0.0)

    def stage(count: Array, extra: Array) -> tuple[Array, Array]:
        device = count * (device_layer + fsdp_exposed) + extra
        host = count * host_layer + engine.host_microbatch_seconds
        longer = (device**RIVALRY + host**RIVALRY) ** (1 / RIVALRY)
        return longer + message, longer - device

    first, _ = stage(layers.first, embedding + np.where(jobs.pp == 1, head, 0.0))
    middle, _ = stage(layers.middle, np.zeros(len(jobs)))
    last, _ = stage(layers.last, np.where(jobs.pp == 1, embedding, 0.0) + head)
    slowest = np.maximum(np.maximum(first, last), np.where(jobs.pp > 2, middle, 0.0))
    others = np.where(jobs.pp > 1, first + last + (jobs.pp - 2) * middle, slowest) - slowest
    bubble = others / jobs.virtual

    count = np.where(slowest == last, layers.last, np.where(slowest == first, layers.first, layers.middle))
    extra = np.where(slowest == last, head, np.where(slowest == first, embedding, 0.0))
    extra = extra + np.where(jobs.pp == 1, embedding, 0.0)
    _, host_excess = stage(count, extra)
    steady = micro_batches * slowest
    window = count * (backward + again)  # the last micro-batch's backward, behind which gradients can travel
    reduce = parts.dp_reduce * slow
    gather = parts.dp_gather * slow
    dp_exposed = reduce - np.minimum(engine.dp_hidden * reduce, window)
    dp_exposed = dp_exposed + gather - np.minimum(engine.dp_hidden * gather, count * forward)
    optimizer = parts.optimizer * engine.optimizer_traffic
    host_step = np.full(len(jobs), engine.host_step_seconds)
    m = micro_batches * count
    return Times(
        step_seconds=steady + bubble + dp_exposed + optimizer + host_step,
        forward=m * forward + micro_batches * extra / 3,
        backward=m * (backward + again) + micro_batches * extra * 2 / 3,
        host_excess=micro_batches * host_excess,
        bubble=bubble,
        tp_exposed=m * tp_exposed,
        cp_exposed=m * cp_exposed,
        pp_exposed=micro_batches * message,
        fsdp_exposed=m * fsdp_exposed,
        dp_exposed=dp_exposed,
        optimizer=optimizer,
        host_step=host_step,
        busiest_layers=count,
        head=micro_batches * extra,
        recomputed=m * again,
    )


def take(parts: Parts, index: np.ndarray) -> Parts:
    """The ingredients of some of the jobs."""
    return Parts(**{f.name: getattr(parts, f.name)[index] for f in fields(parts)})
