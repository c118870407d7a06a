"""Costs of a layer's collectives, for many candidates at once.

Tensor parallel ranks sum the residual stream twice per layer and pass. `workload/messages.py` describes what context
parallel ranks exchange.

Expert parallel ranks are neighbours in the dp x cp group, around the tensor parallel ranks over which an expert's
matrices are split like a dense network's. Folded experts (arXiv 2504.14960) are laid out over all dp x cp x tp ranks
of a stage, independently of the dense layers: each is split over `etp` ranks, and ep such groups are neighbours. A rank
keeps E / ep experts of each layer and computes the rows that its group sends them. Layers with and without experts are
averaged: all stages are assumed to hold the same mix.

    rows        T k etp / tp on a rank: T k where experts are split like dense layers, at etp = 1 its own tokens' alone
    dispatch    sends each token to its k experts: T k H elements per rank (divided by tp under sequence parallelism,
                then gathered over etp); combine sends them back; the backward pass repeats both
    gradients   of experts are reduced over dp cp tp / (ep etp) ranks, others over dp cp; under hybrid sharding the ep
                ranks lie within one copy of the state, so that every copy has all experts
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ironlaw.machine.efficiency.collectives import collective_seconds
from ironlaw.machine.efficiency.streaming import streaming_seconds
from ironlaw.plan.cluster.candidates import Array, Candidates
from ironlaw.plan.cluster.layout_table import code
from ironlaw.plan.cluster.stages import stage_layers
from ironlaw.plan.cluster.system import ClusterSystem
from ironlaw.plan.engines.engine import TrainingEngine
from ironlaw.workload.latent import gathered_share
from ironlaw.workload.messages import context_buffers, context_messages, expert_parts_per_token
from ironlaw.workload.moe import is_exchanged, row_factor
from ironlaw.workload.sizes import Size

FP32, INT64 = 4.0, 8.0


def collective(kind: str, size: Array, ranks: Array, inside: Array, system: ClusterSystem) -> Array:
    """Returns the seconds of one collective of `size` bytes. `inside`: ranks of the group that share an island."""
    return np.asarray(collective_seconds(kind, size, ranks, np.clip(inside, 1.0, ranks), fabric=system.fabric))


def layer_collectives(candidates: Candidates, system: ClusterSystem) -> dict[str, Array]:
    """Returns the costs of a layer's collectives, of accumulating its gradients and of a message between stages."""
    island, model = float(system.fabric.island_ranks), candidates.model
    hardware, width = system.hardware, system.engine.element_bytes
    stream_bytes = candidates.tokens * model.hidden * width
    message = stream_bytes / candidates.stream_shards
    tp_inside = np.minimum(candidates.tp, island)
    one, two = np.ones(len(candidates)), np.full(len(candidates), 2.0)
    # The fp32 buffer is read and written. The gradient is read first, unless the matmul itself accumulates.
    read = FP32 if system.engine.autocast else 0.0 if system.engine.fused_accumulation else width
    accumulated = candidates.local_block_parameters * (read + 2 * FP32)
    return {
        "accumulate": np.asarray(streaming_seconds(accumulated, hardware)),
        "tp_collective": np.where(
            candidates.sp > 0,
            collective("all_gather", stream_bytes, candidates.tp, tp_inside, system)
            + collective("reduce_scatter", stream_bytes, candidates.tp, tp_inside, system),
            collective("all_reduce", stream_bytes, candidates.tp, tp_inside, system),
        ),
        "tp_collectives": 2.0 - spared_collectives(candidates, system),
        "cp_layer": exchange_seconds(candidates, system),
        "message_inside": collective("send_recv", message, two, two, system),
        "message_across": collective("send_recv", message, two, one, system),
        "ep_layer": exchange_of_rows(candidates, system) if candidates.has_experts else np.zeros(len(candidates)),
    }


def small_collectives(candidates: Candidates, system: ClusterSystem) -> dict[str, Array]:
    """Returns the seconds per step of our trainer's small collectives, all exposed. Constants cover those of others.

    Divided logits: maximum, sum of exponentials and target logit of each token, per micro-batch. All ranks: loss,
    stop request, gradient norm. Experts: their loads over replicas, and their counts over the ranks of one sequence.
    """
    if system.engine.fused:
        return {}
    c, model = candidates, candidates.model

    def reduced(size: Size, ranks: Array, inner: Size = 1.0) -> Array:
        inside = np.clip(float(system.fabric.island_ranks) // inner, 1.0, ranks)
        return collective("all_reduce", np.broadcast_to(np.asarray(size, dtype=float), len(c)), ranks, inside, system)

    found = {
        "tp all_reduce": 3 * c.accumulation * reduced(c.tokens * FP32, c.tp),
        "world all_reduce": reduced(3 * INT64, c.accelerators),
    }
    if model.moe is not None:
        layers = c.expert_share * model.layers
        loads = layers / c.pp * (model.moe.experts + 1) * INT64
        replicas = np.where(c.zero > 0, c.shard_ranks, c.dp * c.cp)
        dimension = "shard all_reduce" if (c.zero > 0).all() else "replicate all_reduce"
        found[dimension] = reduced(loads, replicas, c.tp)
        found["micro_batch all_reduce"] = (
            c.accumulation * layers / c.pp * reduced(model.moe.experts * INT64, c.cp, c.tp)
        )
        found["pp all_reduce"] = reduced(4 * INT64, c.pp, c.tp * c.cp * c.dp)
    return found


def spared_collectives(candidates: Candidates, system: ClusterSystem) -> Array:
    """Returns how many of a layer's two tensor parallel collectives sequence parallelism saves, as the mean over all
    layers: one where the exchange of rows replaces it, a part where narrow vectors are gathered, not the stream."""
    moe, spared = candidates.model.moe, np.zeros(len(candidates))
    if moe is not None and not moe.shared_experts:  # shared experts gather their tokens like a dense network
        exchanged = is_exchanged(candidates.ep, candidates.expert_tp, candidates.tp)
        spared = np.where(exchanged, candidates.expert_share, 0.0)
    if candidates.model.latent is not None and system.engine.narrows_own_tokens:
        spared = spared + 0.5 * (1 - gathered_share(candidates.model))
    return np.where(candidates.sp > 0, spared, 0.0)


DESCRIPTIONS = {
    "ring": "keys and values pass all ranks beside attention (ring, arXiv 2310.01889)",
    "all_gather": "keys and values are gathered before attention (all-gather, arXiv 2407.21783)",
    "all_to_all": "ranks exchange parts of the sequence for parts of the heads (all-to-all, arXiv 2309.14509)",
}


def default_kind(engine: TrainingEngine, windowed: bool) -> str:
    """Returns the engine's first kind of context parallel attention, for `windowed` one that sees a sliding window."""
    usable = [kind for kind in engine.cp_kinds if kind != "ring" or not windowed]
    return usable[0] if usable else "all_gather"


def context_kinds(candidates: Candidates, engine: TrainingEngine) -> Array:
    """Returns the code of every candidate's `cp_kind`, the engine's default where the layout leaves it unset."""
    plain, windowed = (code("cp_kind", default_kind(engine, w)) for w in (False, True))
    return np.where(
        candidates.cp_kind > 0, candidates.cp_kind, windowed if candidates.model.sliding_window is not None else plain
    )


def exchange_seconds(candidates: Candidates, system: ClusterSystem) -> Array:
    """Returns the seconds of one forward exchange of a layer and micro-batch; 0 without context parallelism."""
    c, found = candidates, np.zeros(len(candidates))
    if not (c.cp > 1).any():
        return found
    kind, padded = context_kinds(c, system.engine), not system.engine.fused
    inside = np.clip(float(system.fabric.island_ranks) // c.tp, 1.0, c.cp)
    messages = context_messages(c.model, c.tokens, c.tp, c.cp, system.engine.element_bytes, padded)
    for name, sent in messages.items():
        ring = name == "ring"  # a ring runs at the pace of its slowest link
        ranks = np.full(len(c), 2.0) if ring else c.cp
        near = np.where(inside >= c.cp, 2.0, 1.0) if ring else inside
        seconds = sum(m.calls * collective(m.kind, m.bytes, ranks, near, system) for m in sent)
        found = np.where(kind == code("cp_kind", name), seconds, found)
    return np.where(c.cp > 1, found, 0.0)


def exposed(seconds: Array, candidates: Candidates, kind: Array, attention: Array, hidden: float) -> Array:
    """Returns the seconds of a layer's exchanges that attention does not hide. `attention`: seconds of its passes."""
    beside = hidden * np.minimum(seconds, attention * (candidates.cp - 1) / candidates.cp)
    return np.where(kind == code("cp_kind", "ring"), seconds - beside, seconds)


def buffer_bytes(candidates: Candidates, engine: TrainingEngine) -> Array:
    """Returns the bytes of keys, values and their gradients in transfer at their peak, in a layer's backward pass."""
    c, elements = candidates, np.zeros(len(candidates))
    if (c.cp > 1).any():
        kind = context_kinds(c, engine)
        for name, size in context_buffers(c.model, c.tokens, c.tp, c.cp).items():
            elements = np.where((c.cp > 1) & (kind == code("cp_kind", name)), size, elements)
    return elements * engine.element_bytes


def rows_sent_per_token(candidates: Candidates, system: ClusterSystem) -> Array:
    """Returns how often a token crosses the slowest link on the way to its experts, and as often on the way back.

    It is sent once per choice, or once per rank that holds some of its experts. If the exchange leaves the island, the
    latter sends it once per island and forwards it inside (as DeepEP does: arXiv 2412.19437, section 3.2.2).
    """
    moe = candidates.model.moe
    assert moe is not None
    factor = row_factor(moe, candidates.ep, candidates.imbalance)
    if system.engine.rows_sent == "choices":
        return moe.experts_per_token * factor
    island, ranks = float(system.fabric.island_ranks), candidates.ep * candidates.expert_tp
    places = np.where(ranks > island, np.maximum(ranks / island, 1.0), candidates.ep)
    return expert_parts_per_token(moe, places) * factor


@dataclass(frozen=True)
class SharedState:
    """Parameters replicated over the same ranks, counted on one of them before ZeRO divides them."""

    held: Array  # on the fullest stage
    layer: Array  # of one layer, the unit that ZeRO-3 gathers
    replicas: Array  # ranks that average their gradients
    sharing: Array  # the replicas of one sharded copy, over which ZeRO divides them
    inside: Array  # neighbouring replicas that share an island


def shared_states(candidates: Candidates, system: ClusterSystem) -> list[SharedState]:
    """Returns a rank's parameters: the dense ones, then the experts', with fewer replicas by the factor ep."""
    c, model, island = candidates, candidates.model, float(system.fabric.island_ranks)
    layers = stage_layers(c, system.engine.partition)
    ends = (model.embedding_parameters + model.head_parameters) / c.tp  # spread out over the layers
    held, layer = layers.largest_parameters, c.local_block_parameters + ends / model.layers
    # Gradients are averaged over context parallel ranks too.
    dense = SharedState(held, layer, c.dp * c.cp, c.shard_ranks, np.maximum(1.0, island // c.tp))
    if not c.has_experts:
        return [dense]
    of_layer = c.local_expert_parameters
    experts = SharedState(
        of_layer * layers.fullest, of_layer, c.expert_replicas, c.expert_shard_ranks,
        np.maximum(island // (c.expert_tp * c.ep), 1.0),
    )  # fmt: skip
    return [replace(dense, held=held - experts.held, layer=layer - of_layer), experts]


def exchange_of_rows(candidates: Candidates, system: ClusterSystem) -> Array:
    """Returns the seconds to send a micro-batch's rows to their experts, or back, as the mean over all layers."""
    island, split = float(system.fabric.island_ranks), candidates.expert_tp

    # Sequence parallel ranks send their own tokens, then gather the rows received by all ranks that share an expert.
    rows = (
        candidates.tokens
        * rows_sent_per_token(candidates, system)
        * candidates.model.hidden
        * system.engine.element_bytes
    )
    sent = rows / candidates.stream_shards
    exchange = np.where(candidates.ep > 1, collective("all_to_all", sent, candidates.ep, island // split, system), 0.0)
    gathered = collective("all_gather", sent * split, split, np.full(len(candidates), island), system)
    exchange = exchange + np.where(
        (candidates.sp > 0) & is_exchanged(candidates.ep, split, candidates.tp), gathered, 0.0
    )
    return np.asarray(candidates.expert_share * exchange)
