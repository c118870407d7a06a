"""How many layers each pipeline stage holds, and the parameters that go with them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ironlaw.plan.cluster.candidates import Array, Candidates
from ironlaw.workload.pipeline import V_SHAPED, layers_of, stages_of


@dataclass(frozen=True)
class StageLayers:
    """Per job: layers of the first, of the fullest middle and of the last stage (per rank, all virtual chunks)."""

    first: Array
    middle: Array
    last: Array
    counts: Array  # candidates x stages, zero beyond a job's last stage
    head_stage: Array  # index of the stage that holds the output layer
    largest_parameters: Array  # of the stage with most parameters, on one rank before ZeRO divides any

    def take(self, index: Any) -> StageLayers:
        return StageLayers(**{name: column[index] for name, column in vars(self).items()})


def stage_layers(candidates: Candidates, partition: str = "equal") -> StageLayers:
    """Layers per stage: "equal", or "cost" where a stage takes layers until its share of the parameters is full.

    "equal" gives what does not divide to the stages between the first and the last, which have the embedding and the
    output layer to hold; virtual chunks are equal but for one layer less in the first or last, or as equal as can be.
    "cost" is the rule of nanotron: blocks are dealt out in order, and the next stage begins after the block with
    which the running cost reaches its share; the output layer costs hidden x vocabulary, a block its matrices.
    """
    stages, model = int(candidates.pp.max(initial=1)), candidates.model
    counts = np.zeros((len(candidates), stages))
    head_stage = np.where(candidates.v_shaped, 0.0, candidates.pp - 1)
    if partition == "cost":
        head_stage = head_stage.copy()
        linear, _, head = candidates.forward_flops()
        cost = linear / model.layers
        keys = np.stack(np.broadcast_arrays(model.layers, candidates.pp, cost, head), axis=1)
        unique, back = np.unique(keys, axis=0, return_inverse=True)
        dealt = [_dealt(int(n), int(pp), block, head) for n, pp, block, head in unique]
        for i, which in enumerate(back.reshape(-1)):
            layers_dealt, head_stage[i] = dealt[which]
            counts[i, : len(layers_dealt)] = layers_dealt
    else:
        counts = _even(candidates, stages)
    rows = np.arange(len(candidates))
    last_index = (candidates.pp - 1).astype(int)
    inner = counts.copy()
    inner[:, 0] = 0
    inner[rows, last_index] = 0
    embedding, head = model.embedding_parameters / candidates.tp, model.hidden * model.vocab / candidates.tp
    per_stage = counts * candidates.local_block_parameters[:, None]
    per_stage[:, 0] += embedding
    alone = model.tied & (head_stage == 0)
    per_stage[rows, head_stage.astype(int)] += np.where(alone, 0.0, head)
    return StageLayers(
        first=counts[:, 0],
        middle=inner.max(axis=1),
        last=counts[rows, last_index],
        counts=counts,
        head_stage=head_stage,
        largest_parameters=per_stage.max(axis=1),
    )


def owned_parameters(candidates: Candidates, layers: StageLayers) -> Array:
    """Parameters that a rank of the fullest stage updates: under ZeRO its share of them.

    Experts are sharded over the ranks that hold the same ones, fewer than share the rest by as much as a rank holds
    fewer of them.
    """
    local = layers.largest_parameters
    if candidates.has_experts:
        blocks = layers.counts.max(axis=1)
        sharded = local + blocks * (candidates.expert_parameters / candidates.tp - candidates.local_expert_parameters)
        return np.where(candidates.zero > 0, sharded / candidates.shard_ranks, local)
    return np.where(candidates.zero > 0, local / candidates.shard_ranks, local)


def _even(candidates: Candidates, stages: int) -> Array:
    """Candidates x stages: layers of each stage, as equal as can be; the last stage is the first to hold one less."""
    index, pp = np.arange(stages)[None, :], candidates.pp[:, None]
    exists = index < pp
    layers = np.broadcast_to(np.asarray(candidates.model.layers, dtype=float), len(candidates))
    whole, rest = np.divmod(layers, candidates.pp)
    turn = np.where(index == pp - 1, pp - 1, np.where(index == 0, pp - 2, index - 1))  # who takes of the rest
    counts = whole[:, None] + (turn < rest[:, None])
    chunks = candidates.pp * candidates.virtual_stages
    last_less = np.where(layers % chunks == 0, 0.0, 1.0)
    first_less = np.where((layers + 1) % chunks == 0, 0.0, last_less)
    per_stage = candidates.virtual_stages * (layers + first_less + last_less) / chunks
    holds_last = np.where(candidates.v_shaped, 0, candidates.pp - 1)[:, None]
    dealt = per_stage[:, None] - first_less[:, None] * (index == 0) - last_less[:, None] * (index == holds_last)
    for i in np.flatnonzero((candidates.virtual_stages > 1) & ((layers + first_less + last_less) % chunks != 0)):
        dealt[i] = 0.0
        held = _uneven(
            int(layers[i]), int(candidates.pp[i]), int(candidates.virtual_stages[i]), bool(candidates.v_shaped[i])
        )
        dealt[i, : len(held)] = held
    return np.where(exists, np.where(candidates.virtual_stages[:, None] > 1, dealt, counts), 0.0)


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
