"""The layers that each pipeline stage holds, and their parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ironlaw.plan.cluster.candidates import Array, Candidates
from ironlaw.plan.cluster.layout_table import distinct_rows
from ironlaw.workload.schedule import V_SHAPED, layers_of, rank_of_last, stages_of


@dataclass(frozen=True)
class StageLayers:
    """Layers per rank of the first, the fullest middle and the last stage, all virtual chunks; one entry per job."""

    first: Array
    middle: Array
    last: Array
    fullest: Array
    head_stage: Array  # index of the stage that holds the output layer
    largest_parameters: Array  # of the stage with most parameters, on one rank before ZeRO divides them
    row: npt.NDArray[np.int64]  # index of the job's partition in `counts`
    counts: Array  # layers, as partitions x stages; zero beyond the last stage
    owned_parameters: Array  # that a rank of the fullest stage updates: under ZeRO, its share of them

    def on(self, stage: Array) -> Array:
        """Returns the layers of a stage of each job; those of the first where `stage` is negative."""
        return np.asarray(self.counts[self.row, np.maximum(stage, 0).astype(int)])


def stage_layers(candidates: Candidates, partition: str = "equal") -> StageLayers:
    """Returns the layers per stage, computed once per candidates and partition."""
    known: dict[str, StageLayers] = candidates.layers_of_stages
    if partition not in known:
        known[partition] = _stage_layers(candidates, partition)
    return known[partition]


def _stage_layers(candidates: Candidates, partition: str) -> StageLayers:
    """Returns the layers per stage, with `partition` "equal" or "cost".

    "equal" gives surplus layers to the stages between the first and the last, which hold the embedding and the output
    layer. Virtual chunks are equal except for one layer less in the first or last, or as equal as possible.
    "cost" is nanotron's rule: blocks are assigned in order, and a new stage begins after the block with which the
    running cost reaches the stage's share. The output layer costs hidden x vocabulary, a block its matrices.
    """
    c, model = candidates, candidates.model
    linear, _, head = c.forward_flops() if partition == "cost" else (0.0, 0.0, 0.0)
    keys = np.broadcast_arrays(model.layers, c.pp, c.virtual_stages, c.v_shaped, linear / model.layers, head)
    first, row = distinct_rows(keys, len(c))
    counts, head_stage = np.zeros((len(first), int(c.pp.max(initial=1)))), np.zeros(len(first))
    for way, which in enumerate(first):
        layers, pp, virtual, v_shaped = (int(key[which]) for key in keys[:4])
        if partition == "cost":
            held, head_stage[way] = _divide_by_cost(layers, pp, float(keys[4][which]), float(keys[5][which]))
        else:
            held, head_stage[way] = _divide_equally(layers, pp, virtual, bool(v_shaped))
        counts[way, : len(held)] = held
    ways, last_stage = np.arange(len(first)), c.pp[first].astype(int) - 1
    inner = counts.copy()
    inner[:, 0] = inner[ways, last_stage] = 0
    fullest, with_head = counts.max(axis=1)[row], counts[ways, head_stage.astype(int)][row]
    head_stage, block = head_stage[row], c.local_block_parameters
    embedding, head = model.embedding_parameters / c.tp, model.hidden * model.vocab / c.tp
    both = head_stage == 0
    head = np.where(both, np.where(model.tied, embedding, embedding + head), head)
    largest = np.maximum(np.maximum(fullest * block, counts[row, 0] * block + embedding), with_head * block + head)
    # Expert parallelism leaves a rank fewer experts and, by the same factor, fewer ranks to shard them over. Its share
    # is therefore that of the experts of all ranks over all sharding ranks.
    sharded = largest
    if c.has_experts:
        sharded = largest + fullest * (c.expert_parameters / c.tp - c.local_expert_parameters)
    owned = np.where(c.zero > 0, sharded / c.shard_ranks, largest)
    return StageLayers(
        counts[row, 0], inner.max(axis=1)[row], counts[ways, last_stage][row], fullest, head_stage, largest, row,
        counts, owned,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _divide_equally(layers: int, pp: int, virtual: int, v_shaped: bool) -> tuple[list[int], int]:
    """Returns the layers of each pipeline rank, as equal as possible, and the rank of the output layer."""
    chunks, schedule = layers_of(layers, pp * virtual, virtual), V_SHAPED[0] if v_shaped else "1f1b"
    held = [sum(len(chunks[stage]) for stage in stages_of(schedule, pp, virtual, rank)) for rank in range(pp)]
    return held, rank_of_last(schedule, pp)


def _divide_by_cost(layers: int, pp: int, block_cost: float, head_cost: float) -> tuple[list[int], int]:
    """Returns the layers of each stage by cost, and the stage of the output layer."""
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
