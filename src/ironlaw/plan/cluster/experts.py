"""What experts add to a job: their products, the moves of rows, their traffic and their activations.

Expert parallel ranks are taken from the dp x cp group, next to each other around the tensor parallel ranks that an
expert's matrices are split over like a dense network's. Folded (arXiv 2504.14960) experts are laid out over all
dp x cp x tp ranks of a stage apart from the dense rest: split over `etp` ranks, ep of these next to each other. A rank
keeps E / ep experts of each layer and computes the rows that its group sends them: as many as without expert
parallelism if the load is even, `IMBALANCE` times that on the rank that the others wait for. Layers with and without
experts are averaged: stages are taken to hold the same mix.

    rows        T k etp / tp on a rank: T k where an expert is split like the rest, its own tokens' at etp = 1
    dispatch    each token k times to the rank of its expert, T k H elements per rank (over tp under sequence
                parallelism, gathered again over etp); combine the same way back; backward the same again
    gradients   of experts are reduced over dp cp tp / (ep etp) ranks, the rest over dp cp; under hybrid sharding ep
                ranks are taken inside a copy of the state, so that every copy has all experts
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ironlaw.model.moe_config import MoEConfig
from ironlaw.plan.cluster.candidates import Array, Candidates
from ironlaw.plan.cluster.distinct import collective
from ironlaw.plan.cluster.system import System
from ironlaw.workload.moe import is_exchanged, row_factor

if TYPE_CHECKING:
    from ironlaw.plan.cluster.stages import StageLayers


def places_of_a_token(moe: MoEConfig, places: Array) -> Array:
    """Of so many equal parts of a layer's experts, how many a token's choices fall into: the mean over even choices.

    Where they come from some groups of experts only, the parts are those of these groups.
    """
    experts, chosen, groups = (
        np.broadcast_to(n, places.shape) for n in (moe.experts, moe.experts_per_token, moe.groups)
    )
    open_groups = groups if moe.groups_per_token is None else moe.groups_per_token
    held = np.minimum(places, groups)  # parts of whole groups
    of_groups = held * (1 - _missed(groups, groups / held, np.broadcast_to(open_groups, places.shape)))
    open_share = np.where(open_groups < groups, of_groups / held, 1.0)
    pool, among = experts * open_share, np.maximum(places * open_share, 1.0)
    return np.asarray(among * (1 - _missed(pool, pool / among, chosen)))


def _missed(pool: Array, part: Array, draws: Array) -> Array:
    """Chance that none of `draws` different ones out of `pool` is among `part` of them."""
    chance = np.ones(len(pool))
    for drawn in range(int(draws.max(initial=0))):
        left = np.maximum(pool - part - drawn, 0.0) / np.maximum(pool - drawn, 1.0)
        chance = np.where(drawn < draws, chance * left, chance)
    return chance


def rows_sent_per_token(candidates: Candidates, system: System) -> Array:
    """Times that a token travels to its experts and back over what is slowest on the way.

    Once per choice, or once per rank that holds some of its experts; where the exchange leaves the island once per
    island, inside which it is handed on (DeepEP and its like: arXiv 2412.19437, section 3.2.2).
    """
    moe = candidates.model.moe
    assert moe is not None
    factor = row_factor(moe, candidates.ep, candidates.imbalance)
    if system.engine.rows_sent == "choices":
        return moe.experts_per_token * factor
    island, ranks = float(system.fabric.island_ranks), candidates.ep * candidates.expert_tp
    places = np.where(ranks > island, np.maximum(ranks / island, 1.0), candidates.ep)
    return places_of_a_token(moe, places) * factor


@dataclass(frozen=True)
class ExpertTraffic:
    """Parameters and seconds of the experts' share of communication."""

    local: Array  # parameters of experts on the fullest rank
    layer: Array  # the same of one layer
    shard: Array  # of the first, what ZeRO leaves a rank
    all_reduce: Array
    scatter: Array
    gather: Array
    gather_layer: Array
    scatter_layer: Array


def exchange_of_rows(candidates: Candidates, system: System) -> Array:
    """Seconds of moving a micro-batch's rows to their experts, or back; the mean over all layers."""
    island, split = float(system.fabric.island_ranks), candidates.expert_tp

    # Sequence parallel ranks send their own tokens, and gather afterwards what came for all that share an expert.
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


def expert_traffic(candidates: Candidates, system: System, layers: StageLayers, gradient_bytes: float) -> ExpertTraffic:
    """Reduction and gathering of experts over the ranks that hold the same ones."""
    island = float(system.fabric.island_ranks)
    wide = system.engine.sent_weight_bytes
    layer = candidates.local_expert_parameters
    local = layer * layers.counts.max(axis=1)
    group, sharing, split = candidates.expert_replicas, candidates.expert_shard_ranks, candidates.expert_tp
    inside = np.maximum(island // (split * candidates.ep), 1.0)

    return ExpertTraffic(
        local=local,
        layer=layer,
        shard=local / sharing,
        all_reduce=collective("all_reduce", local * gradient_bytes, group, inside, system),
        scatter=collective("reduce_scatter", local * gradient_bytes, sharing, inside, system),
        gather=collective("all_gather", local * wide, sharing, inside, system),
        gather_layer=collective("all_gather", layer * wide, sharing, inside, system),
        scatter_layer=collective("reduce_scatter", layer * gradient_bytes, sharing, inside, system),
    )
