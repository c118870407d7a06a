"""The ingredients of a step: seconds of every kernel and collective of one micro-batch, for many jobs at once.

    parts = step_parts(jobs, setting)

Shapes come from the layout, seconds from the models of single operations in `machine/efficiency`. What a run makes of
them (slowdowns, overlap, launches) is the engine's and added in `timeline.py`, so that fitting an engine to measured
runs need not evaluate the operations again. Ranks are placed tp, cp, dp, pp from the inside out, as Megatron does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ironlaw.machine.efficiency import attention_seconds, matmul_seconds, streaming_seconds
from ironlaw.plan.cluster import latent
from ironlaw.plan.cluster.context_parallel import exchange_seconds, kinds
from ironlaw.plan.cluster.distinct import collective, distinct
from ironlaw.plan.cluster.experts import (
    Product,
    exchange_of_rows,
    expert_traffic,
    permutation_elements,
    spared_collectives,
    with_experts,
)
from ironlaw.plan.cluster.jobs import CP_KINDS, Array, Jobs
from ironlaw.plan.cluster.memory import kept_activation_bytes
from ironlaw.plan.cluster.setting import Setting
from ironlaw.plan.cluster.stages import StageLayers, owned_parameters, stage_layers
from ironlaw.plan.engines.engine import Engine

FP32 = 4.0

FLASH2_SLOWDOWN = {"hopper": 616 / 335, "blackwell": 3.0, "blackwell_ultra": 3.0}
"""Time of FlashAttention-2 over that of a kernel written for the generation. Hopper: causal forward, head size 128,
16k tokens, 335 against FlashAttention-3's 616 TFLOP/s (arXiv 2407.08608, figure 5). Blackwell: assumed."""

NEWER_LIBRARY = {"volta": 0.75}
"""Time of a matmul in a training library over that of the kernels measured alone, where those are much older: Volta's
are of cuBLAS 9, in the year of the V100 (DeepBench, 2017). From four runs of 2020 on 1 to 8 V100s."""


@dataclass(frozen=True)
class Parts:
    """Seconds per job of single ingredients. `layer`: of one block and micro-batch; forward and backward apart."""

    layer_matmul_forward: Array
    layer_matmul_backward: Array
    layer_widening_forward: Array  # of the matmuls: what makes latent attention's queries, keys and values wide
    layer_attention_forward: Array
    layer_attention_backward: Array
    layer_scores_forward: Array  # streaming over materialised scores
    layer_streaming_forward: Array
    layer_streaming_backward: Array
    layer_shard_forward: Array  # streaming that tensor parallel divides
    layer_shard_backward: Array
    layer_accumulate: Array  # adding a weight gradient into the fp32 buffer
    tp_collective: Array  # one all-reduce, or one all-gather and one reduce-scatter
    tp_collectives: Array  # of them in a layer's forward pass: two, less where experts exchange rows instead
    cp_layer: Array  # one exchange of one layer between context parallel ranks, forward
    head_matmul: Array  # output layer, forward and backward
    head_streaming: Array  # loss
    embedding: Array
    pp_message: Array
    dp_reduce: Array
    dp_gather: Array
    ep_layer: Array  # one exchange of rows between expert parallel ranks, there or back; mean over all layers
    ep_crosses: npt.NDArray[np.bool_]
    fsdp_gather_layer: Array
    fsdp_scatter_layer: Array
    optimizer: Array
    host_update: Array  # of an offloaded optimizer: the processor's update, or the way back of the weights if longer
    host_gradients: Array  # their way to the host
    host_layer: Array  # one block's kept activations of one micro-batch, to the host or back
    tp_crosses: npt.NDArray[np.bool_]  # whether the traffic of this kind leaves the island
    cp_crosses: npt.NDArray[np.bool_]
    dp_crosses: npt.NDArray[np.bool_]
    pp_crosses: npt.NDArray[np.bool_]  # of some pair of stages


def block_products(jobs: Jobs, engine: Engine) -> dict[str, Product]:
    """The linear layers of a block on one rank and micro-batch, gate and up as one; experts in place of the network."""
    tokens, hidden, tp, ones = jobs.tokens, jobs.hidden, jobs.tp, np.ones(len(jobs))
    qkv = jobs.query_size / tp + 2 * np.maximum(jobs.key_value_size / tp, jobs.head_size)
    up = jobs.ffn * np.where(jobs.gated > 0, 2.0, 1.0) / tp
    products = {
        "qkv": (qkv, hidden, tokens, ones, ones),
        "attention_out": (hidden, jobs.mixed_size / tp, tokens, ones, ones),
        "ffn_up": (up, hidden, tokens, ones, ones),
        "ffn_down": (hidden, jobs.ffn / tp, tokens, ones, ones),
    }
    if jobs.has_latent:
        products["qkv"] = (qkv, hidden, tokens, ones, np.where(jobs.latent_rank > 0, 0.0, 1.0))
        products |= latent.products(jobs, engine)
    return with_experts(jobs, products) if jobs.has_experts else products


def product_seconds(jobs: Jobs, setting: Setting, product: Product, name: str = "") -> tuple[Array, Array]:
    """Seconds of one linear layer alone: forward; gradients of its input and of its weights together.

    The router chooses in 16 bits or more whatever the precision of the rest.
    """
    precision = setting.wide_precision if name == "router" else setting.precision
    outputs, inputs, rows, batch, _ = product
    shapes = ((rows, outputs, inputs), (rows, inputs, outputs), (outputs, inputs, rows))
    forward, of_input, of_weight = (_matmul(m, n, k, batch, setting, precision) for m, n, k in shapes)
    backward = of_input + of_weight
    if precision != setting.wide_precision:
        casts, hardware = setting.engine.casts, setting.hardware
        entering, weights = rows * inputs * batch, outputs * inputs * batch
        there = casts.inputs * entering + casts.weights * weights
        back = casts.gradients * rows * outputs * batch + casts.inputs_again * entering + casts.weights_again * weights
        forward = forward + np.asarray(streaming_seconds(there, hardware))
        backward = backward + np.asarray(streaming_seconds(back, hardware))
    return forward, backward


def _matmuls(jobs: Jobs, setting: Setting) -> tuple[Array, Array, Array]:
    """Seconds of a block's linear layers, the mean over all blocks: forward, backward, and forward of those alone that
    make latent attention's queries, keys and values wide."""
    forward, backward, widening = (np.zeros(len(jobs)) for _ in range(3))
    for name, product in block_products(jobs, setting.engine).items():
        there, back = product_seconds(jobs, setting, product, name)
        forward += there * product[-1]
        backward += back * product[-1]
        if name in latent.WIDENING:
            widening += there * product[-1]
    return forward, backward, widening


def _matmul(m: Array, n: Array, k: Array, batch: float | Array, setting: Setting, precision: str) -> Array:
    hardware = setting.hardware
    newer = NEWER_LIBRARY.get(hardware.efficiency.generation, 1.0)

    def seconds(m: Array, n: Array, k: Array, b: Array) -> Array:
        alone = matmul_seconds(m, n, k, b, precision, hardware=hardware, sustained=True)
        return newer * np.asarray(alone)

    return distinct(seconds, m, n, k, np.broadcast_to(np.asarray(batch, dtype=float), m.shape))


def _attention(jobs: Jobs, setting: Setting) -> tuple[Array, Array, Array]:
    """Seconds of one layer's attention: forward, backward, and the traffic of materialised scores."""
    hardware, precision = setting.hardware, setting.wide_precision
    local_heads = jobs.heads / jobs.tp
    local_kv = np.maximum(jobs.kv_heads / jobs.tp, 1.0)

    # Jobs of one model share its window; a window as long as the sequence hides nothing.
    window = np.where(jobs.window > 0, jobs.window, jobs.sequence)

    # All-to-all leaves fewer heads and the whole sequence. The calls of a ring alternate between two streams, so that
    # one fills what the other leaves idle (`cp_stream` of Transformer Engine): no loss for their smaller size.
    kind = np.where(jobs.cp > 1, kinds(jobs, setting.engine), 0.0)
    swapped = kind == CP_KINDS["all_to_all"]
    heads, calls = np.where(swapped, jobs.cp, 1.0), np.where(swapped, 1.0, 1 / jobs.cp)

    # FlashAttention-2 wants values as wide as keys: trainers add zeros.
    value = jobs.head_size if setting.engine.attention_kernel == "flash2" else jobs.value_head

    def flash(direction: str) -> Array:
        def seconds(b: Array, s: Array, h: Array, kv: Array, d: Array, w: Array, v: Array) -> Array:
            return np.asarray(
                attention_seconds(
                    b, s, h, kv, d, True, precision, hardware=hardware, direction=direction, window=w, sustained=True,
                    value_size=v,
                )
            )  # fmt: skip

        kv = np.maximum(local_kv / heads, 1.0)
        columns = (jobs.micro_batch, jobs.sequence, local_heads / heads, kv, jobs.head_size)
        found = distinct(seconds, *columns, window, value)
        if (jobs.windowed < 1).any():  # the mean of layers with a window and those without
            found = jobs.windowed * found + (1 - jobs.windowed) * distinct(seconds, *columns, jobs.sequence, value)
        return found * calls

    # Materialised scores: every (query, key) pair is computed, masked or not.
    batch = jobs.micro_batch * local_heads
    rows = jobs.sequence / jobs.cp
    standard = _matmul(rows, jobs.sequence, jobs.head_size, batch, setting, precision)
    standard = standard + _matmul(rows, jobs.value_head, jobs.sequence, batch, setting, precision)
    pairs = batch * rows * jobs.sequence
    # scale + mask + softmax read and write 16-bit scores; dropout reads, writes and keeps a one-byte mask
    traffic = streaming_seconds(pairs * (4 * setting.engine.element_bytes + 1), hardware)
    use_flash = jobs.flash > 0
    old = (
        FLASH2_SLOWDOWN.get(hardware.efficiency.generation, 1.0) if setting.engine.attention_kernel == "flash2" else 1.0
    )
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
    heads = 2 * (jobs.query_size + np.where(jobs.rotary > 0, 1.0, 2.0) * jobs.key_value_size)
    activation = jobs.visited_ffn * np.where(jobs.gated > 0, 3.0, 2.0)
    permuted = permutation_elements(jobs, setting.engine.rows_sent) if jobs.has_experts else 0.0
    if jobs.has_latent:  # read and written, and in the backward pass one more
        permuted = permuted + 2.5 * latent.norm_elements(jobs, setting.engine)
    moved = (
        # Norms (read, write) and two residual additions (read two, write one).
        stream * (2 * jobs.norms + 2 * 3) + permuted,
        stream * (3 * jobs.norms + 2 * 2) + permuted,
        sharded * (heads + activation),
        sharded * (heads + activation * 5 / 3),
    )
    hardware, width = setting.hardware, setting.engine.element_bytes
    first, second, third, fourth = (distinct(lambda b: streaming_seconds(b, hardware), width * m) for m in moved)
    return first, second, third, fourth


def _update(jobs: Jobs, setting: Setting, layers: StageLayers, owned: Array) -> Array:
    """Seconds of the optimizer on the stage with most parameters; `owned`: how many a rank updates.

    Whole-matrix work (Muon's iterations, GaLore's projections) is dealt out matrix by matrix over the ranks that shard
    the state, and divided by tp.
    """
    cost, hardware = setting.update, setting.hardware
    blocks = layers.counts.max(axis=1) * jobs.local_block_parameters
    inside = np.minimum(1.0, blocks / np.maximum(layers.largest_parameters, 1.0))
    per_parameter = inside * cost.block_bytes + (1 - inside) * cost.end_bytes
    seconds = np.asarray(streaming_seconds(owned * per_parameter, hardware))
    if not cost.matrices:
        return seconds
    products = sum(
        times * float(np.asarray(matmul_seconds(m, n, k, 1.0, "bf16", hardware=hardware, sustained=True)))
        for m, n, k, times in cost.matrices
    )
    dealt = layers.counts.max(axis=1) * cost.owners
    ranks = np.where(jobs.zero > 0, jobs.shard_ranks, 1.0)
    return seconds + products / cost.owners * np.ceil(dealt / ranks) / jobs.tp


def _offloaded(jobs: Jobs, setting: Setting, layers: StageLayers) -> dict[str, Array]:
    """Seconds on the way to the host and on it; zero where nothing is offloaded."""
    none = np.zeros(len(jobs))
    host, engine = setting.host, setting.engine
    if host is None or not (jobs.offload > 0).any():
        return {"host_update": none, "host_gradients": none, "host_layer": none}
    owned, rate = owned_parameters(jobs, layers), min(host.link_bytes_per_second, host.memory_bytes_per_second)
    update = owned * setting.update.block_bytes / host.memory_bytes_per_second
    back = owned * engine.element_bytes / rate
    kept, _ = kept_activation_bytes(jobs, engine)
    return {
        "host_update": np.where(jobs.offloads_optimizer, np.maximum(update, back), 0.0),
        "host_gradients": np.where(jobs.offloads_optimizer, owned * engine.gradient_communication_bytes / rate, 0.0),
        "host_layer": np.where(jobs.offloads_activations, kept / rate, 0.0),
    }


def step_parts(jobs: Jobs, setting: Setting, layers: StageLayers | None = None) -> Parts:
    """Every ingredient of the step time."""
    layers = layers or stage_layers(jobs, setting.engine.partition)
    # Layouts of a search share their blocks, or their state: each kind is worked out once.
    first, kind = jobs.distinct(OF_THE_BATCH)
    found = _state(jobs.take(first), setting, layers.take(first))
    state: dict[str, Any] = {name: column[kind] for name, column in found.items()}
    host: dict[str, Any] = _offloaded(jobs, setting, layers)
    return replace(block_parts(jobs, setting), **state | host)


def block_parts(jobs: Jobs, setting: Setting) -> Parts:
    """The same without what gradients, weights and their update take: that is zero."""
    island = float(setting.fabric.island_ranks)
    first, kind = jobs.distinct(OF_THE_LAYOUT)
    blocks: dict[str, Any] = {name: column[kind] for name, column in _blocks(jobs.take(first), setting).items()}
    near, far = blocks.pop("message_inside"), blocks.pop("message_across")
    stage_fills_island = jobs.tp * jobs.cp * jobs.dp >= island
    none = np.zeros(len(jobs))
    return Parts(
        pp_message=np.where(jobs.pp > 1, np.where(stage_fills_island, far, near), 0.0),
        tp_crosses=jobs.tp > island,
        cp_crosses=jobs.tp * jobs.cp > island,
        dp_crosses=jobs.tp * jobs.cp * jobs.dp > island,
        pp_crosses=jobs.accelerators > island,
        ep_crosses=jobs.expert_tp * jobs.ep > island,
        **blocks,
        **dict.fromkeys(OF_STATE, none),
    )


OF_STATE = (
    "dp_reduce", "dp_gather", "fsdp_gather_layer", "fsdp_scatter_layer", "optimizer", "host_update", "host_gradients",
    "host_layer",
)  # fmt: skip


OF_THE_LAYOUT = frozenset(
    ("dp", "zero", "shard", "pp", "virtual", "schedule", "recompute", "every", "offload", "global_batch")
)
"""Columns on which no seconds of a block and micro-batch hang."""

OF_THE_BATCH = frozenset(("micro_batch", "global_batch", "sp", "cp_kind", "flash", "window", "recompute", "every"))
"""Columns on which no seconds of gradients, weights and their update hang."""


def _blocks(jobs: Jobs, setting: Setting) -> dict[str, Array]:
    """Of one block and one micro-batch, of the output layer, and of a message between stages in and across islands."""
    island = float(setting.fabric.island_ranks)
    matmul_forward, matmul_backward, widening = _matmuls(jobs, setting)
    attention_forward, attention_backward, scores = _attention(jobs, setting)
    streaming_forward, streaming_backward, shard_forward, shard_backward = _streaming(jobs, setting)
    hardware, width = setting.hardware, setting.engine.element_bytes
    vocab = jobs.vocab / jobs.tp
    head = sum(
        _matmul(m, n, k, 1.0, setting, setting.wide_precision)
        for m, n, k in (
            (jobs.tokens, vocab, jobs.hidden),
            (jobs.tokens, jobs.hidden, vocab),
            (vocab, jobs.hidden, jobs.tokens),
        )
    )
    # loss: 16-bit logits to fp32, log-sum-exp, gradient back to 16 bits
    loss = np.asarray(streaming_seconds(jobs.tokens * vocab * (width * 2 + FP32 * 4), hardware))
    embedding = np.asarray(streaming_seconds(jobs.tokens * jobs.hidden * width * 6 / jobs.stream_shards, hardware))
    stream_bytes = jobs.tokens * jobs.hidden * width
    message = stream_bytes / jobs.stream_shards
    tp_inside = np.minimum(jobs.tp, island)
    one, two = np.ones(len(jobs)), np.full(len(jobs), 2.0)
    # The fp32 buffer is read and written; the gradient read before, unless the product adds it.
    read = 0.0 if setting.engine.fused_accumulation else width
    accumulated = jobs.local_block_parameters * (read + 2 * FP32)
    return {
        "layer_matmul_forward": matmul_forward,
        "layer_matmul_backward": matmul_backward,
        "layer_widening_forward": widening,
        "layer_attention_forward": attention_forward,
        "layer_attention_backward": attention_backward,
        "layer_scores_forward": scores,
        "layer_streaming_forward": streaming_forward,
        "layer_streaming_backward": streaming_backward,
        "layer_shard_forward": shard_forward,
        "layer_shard_backward": shard_backward,
        "layer_accumulate": np.asarray(streaming_seconds(accumulated, hardware)),
        "tp_collective": np.where(
            jobs.sp > 0,
            collective("all_gather", stream_bytes, jobs.tp, tp_inside, setting)
            + collective("reduce_scatter", stream_bytes, jobs.tp, tp_inside, setting),
            collective("all_reduce", stream_bytes, jobs.tp, tp_inside, setting),
        ),
        "tp_collectives": 2.0 - spared_collectives(jobs) - latent.spared_collectives(jobs, setting.engine),
        "cp_layer": exchange_seconds(jobs, setting, kinds(jobs, setting.engine)),
        "head_matmul": np.asarray(head),
        "head_streaming": loss,
        "embedding": embedding,
        "message_inside": collective("send_recv", message, two, two, setting),
        "message_across": collective("send_recv", message, two, one, setting),
        "ep_layer": exchange_of_rows(jobs, setting) if jobs.has_experts else np.zeros(len(jobs)),
    }


def _state(jobs: Jobs, setting: Setting, layers: StageLayers) -> dict[str, Array]:
    """Of reducing gradients, gathering weights and updating them."""
    island = float(setting.fabric.island_ranks)
    ends = (jobs.embedding_parameters + np.where(jobs.tied > 0, 0, jobs.hidden * jobs.vocab)) / jobs.tp
    # What ZeRO-3 gathers at a time, embedding and output layer spread out.
    unit = jobs.local_block_parameters + ends / jobs.layers
    local = layers.largest_parameters
    # Gradients are averaged over context parallel ranks too.
    replicas = jobs.dp * jobs.cp
    replicas_inside = np.maximum(1.0, island // jobs.tp)
    gradient = setting.engine.gradient_communication_bytes
    sharing = jobs.shard_ranks
    all_reduce = collective("all_reduce", local * gradient, replicas, replicas_inside, setting)
    scatter = collective("reduce_scatter", local * gradient, sharing, replicas_inside, setting)
    wide = setting.engine.held.gather_bytes
    gather = collective("all_gather", local * wide, sharing, replicas_inside, setting)
    unit_dense, apart = unit, None
    if jobs.has_experts:
        # Experts are reduced and gathered over the ranks that hold the same ones: fewer, by the factor ep.
        apart = expert_traffic(jobs, setting, layers, gradient)
        all_reduce, scatter, gather = (
            collective(kind, (local - apart.local) * size, group, replicas_inside, setting) + more
            for kind, size, group, more in (
                ("all_reduce", gradient, replicas, apart.all_reduce),
                ("reduce_scatter", gradient, sharing, apart.scatter),
                ("all_gather", wide, sharing, apart.gather),
            )
        )
        unit_dense = unit - apart.layer
    fsdp = jobs.zero >= 3
    # Hybrid sharding: what a rank owns is averaged over the copies, once per step.
    copies_inside = np.maximum(1.0, island // (jobs.tp * sharing))
    shard = local / sharing if apart is None else (local - apart.local) / sharing + apart.shard
    across = collective("all_reduce", shard * gradient, jobs.copies, copies_inside, setting)
    whole = setting.engine.pipeline_keeps & (jobs.pp > 1)
    in_pieces = (jobs.zero >= 2) & ~whole
    update = _update(jobs, setting, layers, owned_parameters(jobs, layers))
    return {
        "dp_reduce": np.where(in_pieces, across, np.where(jobs.zero > 0, scatter + across, all_reduce)),
        "dp_gather": np.where((jobs.zero > 0) & ~fsdp, gather, 0.0),
        "fsdp_gather_layer": np.where(
            fsdp,
            collective("all_gather", unit_dense * wide, sharing, replicas_inside, setting)
            + (apart.gather_layer if apart else 0.0),
            0.0,
        ),
        "fsdp_scatter_layer": np.where(
            in_pieces,
            collective("reduce_scatter", unit_dense * gradient, sharing, replicas_inside, setting)
            + (apart.scatter_layer if apart else 0.0),
            0.0,
        ),
        "optimizer": np.where(jobs.offloads_optimizer, 0.0, update),
    }
