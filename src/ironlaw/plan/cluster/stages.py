"""How many layers each pipeline stage holds, and the parameters that go with them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ironlaw.plan.cluster.jobs import Array, Jobs
from ironlaw.plan.cluster.latent import projection_weights
from ironlaw.workload.pipeline import V_SHAPED, layers_of, stages_of


@dataclass(frozen=True)
class StageLayers:
    """Per job: layers of the first, of the fullest middle and of the last stage (per rank, all virtual chunks)."""

    first: Array
    middle: Array
    last: Array
    counts: Array  # jobs x stages, zero beyond a job's last stage
    head_stage: Array  # index of the stage that holds the output layer
    largest_parameters: Array  # of the stage with most parameters, on one rank before ZeRO divides any

    def take(self, index: Any) -> StageLayers:
        return StageLayers(**{name: column[index] for name, column in vars(self).items()})


def stage_layers(jobs: Jobs, partition: str = "equal") -> StageLayers:
    """Layers per stage: "equal", or "cost" where a stage takes layers until its share of the parameters is full.

    "equal" gives what does not divide to the stages between the first and the last, which have the embedding and the
    output layer to hold; virtual chunks are equal but for one layer less in the first or last, or as equal as can be.
    "cost" is the rule of nanotron: blocks are dealt out in order, and the next stage begins after the block with
    which the running cost reaches its share; the output layer costs hidden x vocabulary, a block its matrices.
    """
    stages = int(jobs.pp.max(initial=1))
    counts = np.zeros((len(jobs), stages))
    head_stage = np.where(jobs.v_shaped, 0.0, jobs.pp - 1)
    if partition == "cost":
        head_stage = head_stage.copy()
        cost = projection_weights(jobs) + jobs.hidden * jobs.mixed_size
        cost = cost + np.where(jobs.gated > 0, 3.0, 2.0) * jobs.hidden * jobs.visited_ffn
        keys = np.stack([jobs.layers, jobs.pp, cost, jobs.hidden * jobs.vocab], axis=1)
        unique, back = np.unique(keys, axis=0, return_inverse=True)
        dealt = [_dealt(int(n), int(pp), block, head) for n, pp, block, head in unique]
        for i, which in enumerate(back.reshape(-1)):
            layers_dealt, head_stage[i] = dealt[which]
            counts[i, : len(layers_dealt)] = layers_dealt
    else:
        counts = _even(jobs, stages)
    rows = np.arange(len(jobs))
    last_index = (jobs.pp - 1).astype(int)
    inner = counts.copy()
    inner[:, 0] = 0
    inner[rows, last_index] = 0
    embedding, head = jobs.embedding_parameters / jobs.tp, jobs.hidden * jobs.vocab / jobs.tp
    per_stage = counts * jobs.local_block_parameters[:, None]
    per_stage[:, 0] += embedding
    alone = (jobs.tied > 0) & (head_stage == 0)
    per_stage[rows, head_stage.astype(int)] += np.where(alone, 0.0, head)
    return StageLayers(
        first=counts[:, 0],
        middle=inner.max(axis=1),
        last=counts[rows, last_index],
        counts=counts,
        head_stage=head_stage,
        largest_parameters=per_stage.max(axis=1),
    )


def owned_parameters(jobs: Jobs, layers: StageLayers) -> Array:
    """Parameters that a rank of the fullest stage updates: under ZeRO its share of them.

    Experts are sharded over the ranks that hold the same ones, fewer than share the rest by as much as a rank holds
    fewer of them.
    """
    local = layers.largest_parameters
    if jobs.has_experts:
        blocks = layers.counts.max(axis=1)
        sharded = local + blocks * (jobs.expert_parameters / jobs.tp - jobs.local_expert_parameters)
        return np.where(jobs.zero > 0, sharded / jobs.shard_ranks, local)
    return np.where(jobs.zero > 0, local / jobs.shard_ranks, local)


def _even(jobs: Jobs, stages: int) -> Array:
    """Jobs x stages: layers of each stage, as equal as they can be; the last stage is the first to hold one less."""
    index, pp = np.arange(stages)[None, :], jobs.pp[:, None]
    exists = index < pp
    whole, rest = np.divmod(jobs.layers, jobs.pp)
    turn = np.where(index == pp - 1, pp - 1, np.where(index == 0, pp - 2, index - 1))  # who takes of the rest
    counts = whole[:, None] + (turn < rest[:, None])
    chunks = jobs.pp * jobs.virtual
    last_less = np.where(jobs.layers % chunks == 0, 0.0, 1.0)
    first_less = np.where((jobs.layers + 1) % chunks == 0, 0.0, last_less)
    per_stage = jobs.virtual * (jobs.layers + first_less + last_less) / chunks
    holds_last = np.where(jobs.v_shaped, 0, jobs.pp - 1)[:, None]
    dealt = per_stage[:, None] - first_less[:, None] * (index == 0) - last_less[:, None] * (index == holds_last)
    for i in np.flatnonzero((jobs.virtual > 1) & ((jobs.layers + first_less + last_less) % chunks != 0)):
        dealt[i] = 0.0
        held = _uneven(int(jobs.layers[i]), int(jobs.pp[i]), int(jobs.virtual[i]), bool(jobs.v_shaped[i]))
        dealt[i, : len(held)] = held
    return np.where(exists, np.where(jobs.virtual[:, None] > 1, dealt, counts), 0.0)


@lru_cache(maxsize=1024)
def _uneven(layers: int, pp: int, virtual: int, v_shaped: bool) -> tuple[int, ...]:
    """Layers of each rank whose virtual stages cannot be made equal."""
    held = [len(chunk) for chunk in layers_of(layers, pp * virtual, virtual)]
    schedule = V_SHAPED[0] if v_shaped else "1f1b"
    return tuple(sum(held[stage] for stage in stages_of(schedule, pp, virtual, rank)) for rank in range(pp))


def _dealt(layers: int, pp: int, block_cost: float, head_cost: float) -> tuple[list[int], int]:
    """Layers of each stage, and the stage of the output layer."""
    costs = [0.0] + [block_cost] * layers + [0.0, head_cost]  # embedding, blocks, final norm, output layer
    total = sum(costs)
    counts, stage, running = [0] * pp, 0, 0.0
    head_stage = 0
    for index, cost in enumerate(costs):
        running += cost
        if 1 <= index <= layers:
            counts[stage] += 1
        if index == len(costs) - 1:
            head_stage = stage
        if stage < pp - 1 and running >= total * (stage + 1) / pp:
            stage += 1
    return counts, head_stage
