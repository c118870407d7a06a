"""The layers that each pipeline stage holds, and their parameters."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ironlaw.plan.cluster.candidates import Array, Candidates
from ironlaw.plan.cluster.layout_table import distinct_rows
from ironlaw.workload.schedule import V_SHAPED, layers_of, rank_of_last, stages_of


class StageLayers:
    """Layers per rank of the pipeline stages, all virtual chunks together, and their parameters; one entry per job.

    The partition "equal" gives surplus layers to the stages between the first and the last, which hold the embedding
    and the output layer. Virtual chunks are equal except for one layer less in the first or last, or as equal as
    possible. "cost" is nanotron's rule: blocks are assigned in order, and a new stage begins after the block with which
    the running cost reaches the stage's share. The output layer costs hidden x vocabulary, a block its matrices.
    """

    def __init__(self, candidates: Candidates, partition: str) -> None:
        c, model = candidates, candidates.model
        linear, _, head = c.forward_flops() if partition == "cost" else (0.0, 0.0, 0.0)
        keys = np.broadcast_arrays(model.layers, c.pp, c.virtual_stages, c.v_shaped, linear / model.layers, head)
        distinct, row = distinct_rows(keys, len(c))
        counts, head_stage = np.zeros((len(distinct), int(c.pp.max(initial=1)))), np.zeros(len(distinct))
        for way, which in enumerate(distinct):
            layers, pp, virtual, v_shaped = (int(key[which]) for key in keys[:4])
            if partition == "cost":
                held, head_stage[way] = _divide_by_cost(layers, pp, float(keys[4][which]), float(keys[5][which]))
            else:
                held, head_stage[way] = _divide_equally(layers, pp, virtual, bool(v_shaped))
            counts[way, : len(held)] = held
        ways, last_stage = np.arange(len(distinct)), c.pp[distinct].astype(int) - 1
        inner = counts.copy()
        inner[:, 0] = inner[ways, last_stage] = 0
        self.row, self.counts = row, counts  # layers, as partitions x stages, zero beyond the last; a job's partition
        self.first, self.middle, self.last = counts[row, 0], inner.max(axis=1)[row], counts[ways, last_stage][row]
        self.fullest, with_head = counts.max(axis=1)[row], counts[ways, head_stage.astype(int)][row]
        self.head_stage, block = head_stage[row], c.local_block_parameters
        embedding, head = model.embedding_parameters / c.tp, model.hidden * model.vocab / c.tp
        both = np.where(model.tied, embedding, embedding + head)
        head = np.where(self.head_stage == 0, both, head)
        ends = np.maximum(self.fullest * block, self.first * block + embedding)
        # Of the stage with most parameters, on one rank before ZeRO divides them.
        self.largest_parameters = largest = np.maximum(ends, with_head * block + head)
        # Expert parallelism leaves a rank fewer experts and, by the same factor, fewer ranks to shard them over. Its
        # share is therefore that of the experts of all ranks over all sharding ranks.
        sharded = largest
        if c.has_experts:
            sharded = largest + self.fullest * (c.expert_parameters / c.tp - c.local_expert_parameters)
        # That a rank of the fullest stage updates: under ZeRO, its share of them.
        self.owned_parameters = np.where(c.zero > 0, sharded / c.shard_ranks, largest)

    def on(self, stage: Array) -> Array:
        """Returns the layers of a stage of each job; those of the first where `stage` is negative."""
        return np.asarray(self.counts[self.row, np.maximum(stage, 0).astype(int)])


def stage_layers(candidates: Candidates, partition: str = "equal") -> StageLayers:
    """Returns the layers per stage, computed once per candidates and partition."""
    known: dict[str, StageLayers] = candidates.layers_of_stages
    if partition not in known:
        known[partition] = StageLayers(candidates, partition)
    return known[partition]


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
