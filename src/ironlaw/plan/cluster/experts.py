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
import numpy.typing as npt

from ironlaw.plan.cluster.distinct import collective
from ironlaw.plan.cluster.jobs import Array, Jobs
from ironlaw.plan.cluster.setting import Setting

if TYPE_CHECKING:
    from ironlaw.plan.cluster.stages import StageLayers

FP32 = 4.0

IMBALANCE = 1.1
"""Rows of the busiest expert parallel rank over the mean. Assumed: balancing aims at 1 (arXiv 2408.15664 measures how
far the fullest expert is off), and no published figure is per rank and micro-batch. In a run's metrics,
`expert_load_busiest_over_mean` is an upper bound of it. Published speeds of a vendor are of random choices, which are
even (`moe_router_force_load_balancing` in the scripts they come from): `default_imbalance` of the engine."""

Product = tuple[Array, Array, Array, Array, Array]
"""Outputs, inputs, rows, products side by side, share of the layers."""


def row_factor(jobs: Jobs) -> Array:
    """Rows that a rank computes over an even share: its capacity, or the imbalance where ranks wait for each other."""
    busiest = np.where(jobs.imbalance > 0, jobs.imbalance, IMBALANCE)
    dropless = np.where(jobs.ep > 1, busiest, 1.0)
    return np.where(jobs.capacity > 0, jobs.capacity, dropless)


def rows_per_token(jobs: Jobs) -> Array:
    """Rows that a rank computes over its micro-batch's tokens T: fewer where experts are split over less than tp."""
    return np.asarray(jobs.experts_per_token * row_factor(jobs) * jobs.expert_tp / jobs.tp)


def is_exchanged(jobs: Jobs) -> npt.NDArray[np.bool_]:
    """Whether rows move on their own instead of as a dense network's tokens under tensor parallelism."""
    return np.asarray((jobs.ep > 1) | (jobs.expert_tp != jobs.tp))


def spared_collectives(jobs: Jobs) -> Array:
    """Of the two tensor parallel collectives of a layer, how many the rows' exchange replaces; mean over all layers.

    Shared experts gather their tokens like a dense network.
    """
    replaced = (jobs.sp > 0) & is_exchanged(jobs) & (jobs.shared_ffn == 0)
    return np.asarray(np.where(replaced, jobs.expert_share, 0.0))


def with_experts(jobs: Jobs, products: dict[str, Product]) -> dict[str, Product]:
    """A block's products with those of experts, up and down, beside the dense network: routed, shared, router."""
    share, tp, up = jobs.expert_share, jobs.tp, np.where(jobs.gated > 0, 2.0, 1.0)
    ones = np.ones(len(jobs))
    local = jobs.experts / jobs.ep  # experts of a rank
    rows = jobs.tokens * rows_per_token(jobs) / np.maximum(local, 1.0)
    width, shared = jobs.expert_ffn / jobs.expert_tp, np.maximum(jobs.shared_ffn, 1.0) / tp
    has_shared = np.where(jobs.shared_ffn > 0, share, 0.0)
    dense = {
        name: (outputs, inputs, r, batch, 1 - share if name.startswith("ffn") else of_layers)
        for name, (outputs, inputs, r, batch, of_layers) in products.items()
    }
    return dense | {
        "expert_up": (width * up, jobs.hidden, rows, local, share),
        "expert_down": (jobs.hidden, width, rows, local, share),
        "shared_up": (shared * up, jobs.hidden, jobs.tokens, ones, has_shared),
        "shared_down": (jobs.hidden, shared, jobs.tokens, ones, has_shared),
        "router": (jobs.experts, jobs.hidden, jobs.tokens / jobs.stream_shards, ones, share),
    }


def places_of_a_token(jobs: Jobs, places: Array) -> Array:
    """Of so many equal parts of a layer's experts, how many a token's choices fall into: the mean over even choices.

    Where they come from some groups of experts only, the parts are those of these groups.
    """
    limited = jobs.groups_per_token < jobs.expert_groups
    held = np.minimum(places, jobs.expert_groups)  # parts of whole groups
    of_groups = held * (1 - _missed(jobs.expert_groups, jobs.expert_groups / held, jobs.groups_per_token))
    open_share = np.where(limited, of_groups / held, 1.0)
    pool, among = jobs.experts * open_share, np.maximum(places * open_share, 1.0)
    return np.asarray(among * (1 - _missed(pool, pool / among, jobs.experts_per_token)))


def _missed(pool: Array, part: Array, draws: Array) -> Array:
    """Chance that none of `draws` different ones out of `pool` is among `part` of them."""
    chance = np.ones(len(pool))
    for drawn in range(int(draws.max(initial=0))):
        left = np.maximum(pool - part - drawn, 0.0) / np.maximum(pool - drawn, 1.0)
        chance = np.where(drawn < draws, chance * left, chance)
    return chance


def rows_sent_per_token(jobs: Jobs, setting: Setting) -> Array:
    """Times that a token travels to its experts and back over what is slowest on the way.

    Once per choice, or once per rank that holds some of its experts; where the exchange leaves the island once per
    island, inside which it is handed on (DeepEP and its like: arXiv 2412.19437, section 3.2.2).
    """
    if setting.engine.rows_sent == "choices":
        return jobs.experts_per_token * row_factor(jobs)
    island, ranks = float(setting.fabric.island_ranks), jobs.ep * jobs.expert_tp
    places = np.where(ranks > island, np.maximum(ranks / island, 1.0), jobs.ep)
    return places_of_a_token(jobs, places) * row_factor(jobs)


def permutation_elements(jobs: Jobs, rows_sent: str) -> Array:
    """Elements read and written by sorting rows to experts and back, in one direction.

    Tokens are copied to rows and rows added up to tokens; rows that arrive by choices from other ranks are sorted by
    expert once more, and back, where a rank has several.
    """
    rows = rows_per_token(jobs)
    sorted_again = (jobs.ep > 1) & (jobs.ep < jobs.experts) & (rows_sent == "choices")
    return np.asarray(
        jobs.expert_share * jobs.hidden * jobs.tokens * (3 * rows + 1 + np.where(sorted_again, 4 * rows, 0))
    )


def expert_activation_bytes(jobs: Jobs, inner: Array, input_bytes: float, output_bytes: float) -> Array:
    """What experts keep for the backward pass beyond a dense network of the model's `ffn`, per rank and mean layer.

    `inner`: bytes that such a network keeps per element of its inner width. Rows are kept as they went in, at
    `input_bytes` per element, and as they came out, at `output_bytes`.
    """
    rows = rows_per_token(jobs)
    split = rows * jobs.expert_ffn / jobs.expert_tp + (jobs.shared_ffn - jobs.ffn) / jobs.tp
    scores = FP32 * jobs.experts / jobs.stream_shards
    kept = split * inner + rows * jobs.hidden * (input_bytes + output_bytes) + scores
    return np.asarray(jobs.expert_share * jobs.tokens * kept)


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


def exchange_of_rows(jobs: Jobs, setting: Setting) -> Array:
    """Seconds of moving a micro-batch's rows to their experts, or back; the mean over all layers."""
    island, split = float(setting.fabric.island_ranks), jobs.expert_tp

    # Sequence parallel ranks send their own tokens, and gather afterwards what came for all that share an expert.
    rows = jobs.tokens * rows_sent_per_token(jobs, setting) * jobs.hidden * setting.engine.element_bytes
    sent = rows / jobs.stream_shards
    exchange = np.where(jobs.ep > 1, collective("all_to_all", sent, jobs.ep, island // split, setting), 0.0)
    gathered = collective("all_gather", sent * split, split, np.full(len(jobs), island), setting)
    exchange = exchange + np.where((jobs.sp > 0) & is_exchanged(jobs), gathered, 0.0)
    return np.asarray(jobs.expert_share * exchange)


def expert_traffic(jobs: Jobs, setting: Setting, layers: StageLayers, gradient_bytes: float) -> ExpertTraffic:
    """Reduction and gathering of experts over the ranks that hold the same ones."""
    island = float(setting.fabric.island_ranks)
    wide = setting.engine.held.gather_bytes
    layer = jobs.local_expert_parameters
    local = layer * layers.counts.max(axis=1)
    group, sharing, split = jobs.expert_replicas, jobs.expert_shard_ranks, jobs.expert_tp
    inside = np.maximum(island // (split * jobs.ep), 1.0)

    return ExpertTraffic(
        local=local,
        layer=layer,
        shard=local / sharing,
        all_reduce=collective("all_reduce", local * gradient_bytes, group, inside, setting),
        scatter=collective("reduce_scatter", local * gradient_bytes, sharing, inside, setting),
        gather=collective("all_gather", local * wide, sharing, inside, setting),
        gather_layer=collective("all_gather", layer * wide, sharing, inside, setting),
        scatter_layer=collective("reduce_scatter", layer * gradient_bytes, sharing, inside, setting),
    )
