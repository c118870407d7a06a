"""Many (model, batch, layout) combinations as columns of arrays: what search and validation evaluate at once.

A job is one way to run one training step. Every column has one entry per job; lengths are in elements. What all jobs
of a call share (accelerator, fabric, engine, precision) is in a `Setting`, not here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster import latent
from ironlaw.plan.cluster.launches import expert_launches, latent_launches
from ironlaw.workload.layout import Layout

Array = npt.NDArray[np.float64]
RECOMPUTE = {"none": 0, "selective": 1, "full": 2}
SCHEDULES = {"1f1b": 0, "gpipe": 1, "zb": 2, "zbv": 3, "dualpipe": 4}
"""Order of forward and backward passes in a pipeline; `stages.py` and `bubbles.py` say what each one costs."""

OFFLOAD = {"none": 0, "optimizer": 1, "activations": 2, "both": 3}
CP_KINDS = {"ring": 1, "all_gather": 2, "all_to_all": 3}
"""How context parallel ranks see all keys (`context_parallel.py`); 0: as the engine does."""

DEFAULTS = {
    "schedule": 0.0, "shard": 0.0, "window": 0.0, "windowed": 1.0, "small": -1.0, "norms": 2.0,
    "kept_streams": 2.0, "kept_normed": 2.0, "every": 1.0, "offload": 0.0, "ep": 1.0, "etp": 0.0, "experts": 0.0,
    "experts_per_token": 0.0, "expert_ffn": 0.0, "shared_ffn": 0.0, "expert_layers": 0.0, "capacity": 0.0,
    "launches": 0.0, "cp_kind": 0.0, "imbalance": 0.0, "expert_groups": 1.0, "groups_per_token": 1.0,
    "latent_rank": 0.0, "query_rank": 0.0, "rotary_size": 0.0, "value_size": 0.0, "latent_launches": 0.0,
}  # fmt: skip
"""Columns that a row of measured runs need not have."""


@dataclass(frozen=True)
class Jobs:
    """One entry per job in every field. Booleans are 0 or 1, `recompute` is 0 none, 1 selective, 2 full."""

    # model
    layers: Array
    hidden: Array
    heads: Array
    kv_heads: Array
    head_size: Array
    ffn: Array
    gated: Array
    vocab: Array
    tied: Array
    biased: Array  # linear layers and norms have biases, positions are learned: the GPT-2 family
    rotary: Array  # positions turn queries and keys
    learned: Array  # positions are a table
    small: Array  # parameters of a block beside its matrices, biases and norms; -1: by `biased`
    norms: Array  # of a block, over the residual stream
    kept_streams: Array  # tensors of the stream that a block keeps
    kept_normed: Array  # results of norms that a block keeps
    # batch
    sequence: Array  # tokens
    global_batch: Array  # sequences per step
    micro_batch: Array  # sequences
    # layout
    dp: Array
    zero: Array
    tp: Array
    sp: Array
    pp: Array
    virtual: Array
    cp: Array
    cp_kind: Array  # a value of CP_KINDS; 0: the engine's own
    recompute: Array
    flash: Array
    schedule: Array  # a value of SCHEDULES
    shard: Array  # data parallel replicas that share one sharded copy; 0: all of them
    window: Array  # tokens that a query looks back at; 0: all
    windowed: Array  # share of the layers that have the window
    every: Array  # full recomputation of one block in so many
    offload: Array  # a value of OFFLOAD
    # mixture of experts: all 0 (ep 1) where the model is dense
    ep: Array
    etp: Array  # ranks that an expert is split over; 0: tp
    experts: Array  # in each layer that has any
    experts_per_token: Array
    expert_ffn: Array  # inner width of one expert
    shared_ffn: Array  # of the shared ones together
    expert_layers: Array  # layers with experts
    capacity: Array  # rows of an expert at most, over the mean; 0: dropless
    launches: Array  # kernels of a block with experts over those of a dense one, less 1
    imbalance: Array  # rows of the busiest expert parallel rank over the mean; 0: what training is taken to have
    expert_groups: Array  # equal parts of a layer's experts, ...
    groups_per_token: Array  # ... of which a token's experts come from so many at most

    # latent attention (`latent.py`): all 0 where keys and values are projected as usual
    latent_rank: Array
    query_rank: Array  # 0: queries straight from the residual stream
    rotary_size: Array  # of a head, the part that positions turn
    value_size: Array  # of a head's value; 0: as wide as its key
    latent_launches: Array  # kernels that such attention adds, over those of a usual block

    def __len__(self) -> int:
        return int(self.layers.size)

    def take(self, index: Any) -> Jobs:
        return Jobs(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def distinct(self, ignored: frozenset[str]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """One job of every kind that differs in more than the ignored columns, and of every job its kind.

        What does not hang on those columns need be worked out for few: `function(jobs.take(first))[kind]`.
        """
        number, size = np.zeros(len(self), dtype=np.int64), 1
        for name in (f.name for f in fields(self) if f.name not in ignored):
            column = getattr(self, name)
            least, most = (column.min(), column.max()) if len(self) else (0.0, 0.0)
            if least == most:
                continue
            if least >= 0 and most < 2**20 and (column == np.floor(column)).all():
                code, values = column.astype(np.int64), int(most) + 1
            else:
                found, code = np.unique(column, return_inverse=True)
                code, values = code.reshape(-1), len(found)
            if size * values >= 2**62:
                found, number = np.unique(number, return_inverse=True)
                number, size = number.reshape(-1), len(found)
            number, size = number * values + code, size * values
        _, first, kind = np.unique(number, return_index=True, return_inverse=True)
        return first, kind.reshape(-1)

    @property
    def accumulation(self) -> Array:
        """Micro-batches per model replica and step."""
        return self.global_batch / (self.dp * self.micro_batch)

    @property
    def accelerators(self) -> Array:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def tokens(self) -> Array:
        """Tokens of one micro-batch that a rank works on: the sequence is split over context parallel ranks."""
        return self.micro_batch * self.sequence / self.cp

    @property
    def shard_ranks(self) -> Array:
        """Ranks over which ZeRO divides what it shards: the replicas of a group, and context parallel ranks."""
        return np.where(self.shard > 0, self.shard, self.dp) * self.cp

    @property
    def copies(self) -> Array:
        """Sharded copies of the state: more than one under hybrid sharding."""
        return np.where(self.shard > 0, self.dp / np.maximum(self.shard, 1.0), 1.0)

    @property
    def query_size(self) -> Array:
        return self.heads * self.head_size

    @property
    def key_value_size(self) -> Array:
        return self.kv_heads * self.head_size

    @property
    def has_latent(self) -> bool:
        """Whether attention of any of the jobs is latent: the arithmetic of others stays as it is."""
        return bool((self.latent_rank > 0).any())

    @property
    def value_head(self) -> Array:
        return np.where(self.value_size > 0, self.value_size, self.head_size)

    @property
    def mixed_size(self) -> Array:
        """Width of what attention gives to its output layer."""
        return self.heads * self.value_head

    @property
    def values_size(self) -> Array:
        return self.kv_heads * self.value_head

    @property
    def recomputed_share(self) -> Array:
        """Share of the blocks that are recomputed in full."""
        return np.where(self.recompute == RECOMPUTE["full"], 1 / self.every, 0.0)

    @property
    def offloads_optimizer(self) -> npt.NDArray[np.bool_]:
        return np.asarray((self.offload == OFFLOAD["optimizer"]) | (self.offload == OFFLOAD["both"]))

    @property
    def offloads_activations(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.offload >= OFFLOAD["activations"])

    @property
    def attended(self) -> Array:
        """Twice the mean number of keys that a query looks at: the sequence, or less under a sliding window.

        Layers with and without one are averaged: stages are taken to hold the same mix.
        """
        span = np.where(self.window > 0, np.minimum(self.window, self.sequence), self.sequence)
        return self.windowed * span * (2 - span / self.sequence) + (1 - self.windowed) * self.sequence

    @property
    def v_shaped(self) -> npt.NDArray[np.bool_]:
        """Whether a rank holds the chunks i and 2 pp - 1 - i, so that the first one has both ends of the model."""
        return np.asarray((self.schedule == SCHEDULES["zbv"]) | (self.schedule == SCHEDULES["dualpipe"]))

    @property
    def stream_shards(self) -> Array:
        """Ranks that share the residual stream: the tensor parallel ones when sequence parallelism is on."""
        return np.where(self.sp > 0, self.tp, 1.0)

    @property
    def block_parameters(self) -> Array:
        """Parameters of one transformer block, all ranks together; with experts, the mean over all layers."""
        qkv = self.query_size + 2 * self.key_value_size
        matrices = np.where(self.gated > 0, 3.0, 2.0)
        weights = latent.projection_weights(self) + self.mixed_size * self.hidden + matrices * self.hidden * self.ffn
        if self.has_latent:
            weights = weights + np.where(self.latent_rank > 0, self.query_rank + self.latent_rank, 0.0)  # their norms
        biases = qkv + 2 * self.hidden + (matrices - 1) * self.ffn
        usual = biases * self.biased + 2 * self.hidden * (1 + self.biased)
        dense = weights + np.where(self.small >= 0, self.small, usual)
        if not self.has_experts:
            return dense
        extra = self.hidden * (self.experts + matrices * (self.shared_ffn - self.ffn))
        return dense + self.expert_share * extra + self.expert_parameters

    @property
    def has_experts(self) -> bool:
        """Whether any of the jobs is a mixture of experts: the arithmetic of dense ones stays as it is."""
        return bool((self.experts > 0).any())

    @property
    def expert_share(self) -> Array:
        """Of the layers, those with experts."""
        return self.expert_layers / self.layers

    @property
    def expert_parameters(self) -> Array:
        """Of the routed experts of a layer, all of them; the mean over all layers."""
        matrices = np.where(self.gated > 0, 3.0, 2.0)
        return self.expert_share * self.experts * matrices * self.hidden * self.expert_ffn

    @property
    def expert_tp(self) -> Array:
        """Ranks that an expert is split over."""
        return np.where(self.etp > 0, self.etp, self.tp)

    @property
    def expert_replicas(self) -> Array:
        """Ranks that hold the same part of the same experts."""
        return self.dp * self.cp * self.tp / (self.ep * self.expert_tp)

    @property
    def expert_shard_ranks(self) -> Array:
        """Of these, the ranks that ZeRO divides the experts over: all but those of other copies."""
        return self.shard_ranks * self.tp / (self.ep * self.expert_tp)

    @property
    def local_expert_parameters(self) -> Array:
        """Of the routed experts of a layer, on one rank; the mean over all layers."""
        return self.expert_parameters / (self.ep * self.expert_tp)

    @property
    def copied_parameters(self) -> Array:
        """Of a block, on one rank: what it holds more than its part where key/value heads are fewer than tp, and of
        narrow vectors, which are computed whole."""
        part = self.key_value_size / self.tp
        copied = 2 * self.hidden * (np.maximum(part, self.head_size) - part)
        return copied + latent.narrow_weights(self) * (1 - 1 / self.tp) if self.has_latent else copied

    @property
    def local_block_parameters(self) -> Array:
        """Of a block, on one rank, before ZeRO divides any."""
        split = self.block_parameters / self.tp + self.copied_parameters
        return split - self.expert_parameters / self.tp + self.local_expert_parameters if self.has_experts else split

    @property
    def visited_ffn(self) -> Array:
        """Inner width of the feed-forward networks that a token visits in a layer; the mean over all layers."""
        if not self.has_experts:
            return self.ffn
        visited = self.experts_per_token * self.expert_ffn + self.shared_ffn
        return self.ffn + self.expert_share * (visited - self.ffn)

    @property
    def embedding_parameters(self) -> Array:
        return self.hidden * (self.vocab + self.learned * self.sequence)

    @property
    def parameters(self) -> Array:
        final_norm = self.hidden * (1 + self.biased)
        head = np.where(self.tied > 0, 0.0, self.hidden * self.vocab)
        return self.layers * self.block_parameters + self.embedding_parameters + final_norm + head

    def model_flops(self) -> Array:
        """Matrix FLOPs of one step, forward and backward; masked scores of causal attention are not counted."""
        matrices = np.where(self.gated > 0, 3.0, 2.0)
        linear = latent.projection_weights(self) + self.hidden * (self.mixed_size + matrices * self.visited_ffn)
        if self.has_experts:
            linear = linear + self.hidden * self.experts * self.expert_share
        per_token = 2 * (self.layers * linear + self.hidden * self.vocab)
        attention = self.layers * self.attended * (self.query_size + self.mixed_size)
        return 3 * (per_token + attention) * self.global_batch * self.sequence

    def hardware_flops(self) -> Array:
        """The same with recomputation and, for standard attention, the masked half that is computed anyway.

        With full recomputation this is equation 3 of arXiv 2104.04473.
        """
        matrices = np.where(self.gated > 0, 3.0, 2.0)
        linear = 2 * latent.projection_weights(self) + 2 * self.hidden * (self.mixed_size + matrices * self.visited_ffn)
        if self.has_experts:
            linear = linear + 2 * self.hidden * self.experts * self.expert_share  # the router
        attention = np.where(self.flash > 0, 2 * self.attended, 4 * self.sequence)
        attention = attention * (self.query_size + self.mixed_size) / 2
        again = self.recomputed_share
        linear_passes = 3 + again
        attention_passes = 3 + np.where(self.recompute == 1, 1.0, again)
        blocks = self.layers * (linear * linear_passes + attention * attention_passes)
        return (blocks + 3 * 2 * self.hidden * self.vocab) * self.global_batch * self.sequence


def jobs_of_columns(rows: Sequence[Mapping[str, float]]) -> Jobs:
    """Jobs from one mapping of column to number each; columns of `DEFAULTS` may be absent."""
    rows = [{"rotary": 1 - row["biased"], "learned": row["biased"]} | dict(row) for row in rows]
    columns = {f.name: [row.get(f.name, DEFAULTS.get(f.name)) for row in rows] for f in fields(Jobs)}
    for name, column in columns.items():
        assert None not in column, f"no column {name}"
    return Jobs(**{name: np.array(column, dtype=float) for name, column in columns.items()})


def jobs_of(model: ModelConfig, layouts: list[Layout], *, sequence: int, global_batch: int, flash: bool = True) -> Jobs:
    """The jobs of one model under several layouts."""
    rows = [layout_columns(layout) for layout in layouts]
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    return jobs_of_table(model, columns, sequence=sequence, global_batch=global_batch, flash=flash)


def layout_columns(layout: Layout) -> dict[str, float]:
    """The columns that a layout sets."""
    return {
        "dp": float(layout.dp), "zero": float(layout.zero), "shard": float(layout.shard or 0),
        "tp": float(layout.tp), "sp": float(layout.sp), "pp": float(layout.pp),
        "virtual": float(layout.virtual_stages), "schedule": float(SCHEDULES[layout.schedule]),
        "cp": float(layout.cp), "cp_kind": float(CP_KINDS.get(layout.cp_kind or "", 0)),
        "micro_batch": float(layout.micro_batch),
        "recompute": float(RECOMPUTE.get(layout.recompute, RECOMPUTE["full"])), "every": float(layout.every),
        "offload": float(OFFLOAD[layout.offload]), "ep": float(layout.ep), "etp": float(layout.etp or 0),
    }  # fmt: skip


def jobs_of_table(
    model: ModelConfig, columns: Mapping[str, Array], *, sequence: int, global_batch: int, flash: bool = True
) -> Jobs:
    """The jobs of one model under layouts whose columns are given (those of `layout_columns`)."""
    count = len(next(iter(columns.values())))
    windowed = sum(model.window_of(layer, sequence) is not None for layer in range(model.layers))
    shared = {
        "layers": model.layers, "hidden": model.hidden, "heads": model.heads, "kv_heads": model.key_value_heads,
        "head_size": model.size_of_head, "ffn": model.ffn_size, "gated": model.gated_ffn, "vocab": model.vocab,
        "tied": model.tied, "biased": model.bias, "sequence": sequence, "global_batch": global_batch,
        "flash": flash, "window": (model.sliding_window or 0) if windowed else 0,
        "windowed": windowed / model.layers if windowed else 1, "rotary": model.positions == "rope",
        "learned": model.positions == "learned", "small": model.small_parameters, "norms": model.norms_per_block,
        "kept_streams": model.kept_streams, "kept_normed": model.kept_normed,
        **expert_columns(model), **latent_columns(model),
    }  # fmt: skip
    return Jobs(**{name: np.full(count, float(value)) for name, value in shared.items()}, **columns)


def latent_columns(model: ModelConfig) -> dict[str, float]:
    """The columns of latent attention; zeros for any other."""
    sizes = model.latent
    if sizes is None:
        return dict.fromkeys(("latent_rank", "query_rank", "rotary_size", "value_size", "latent_launches"), 0.0)
    return {
        "latent_rank": sizes.key_value_rank, "query_rank": sizes.query_rank or 0, "rotary_size": sizes.rotary_size,
        "value_size": sizes.value_size, "latent_launches": latent_launches(model),
    }  # fmt: skip


def expert_columns(model: ModelConfig) -> dict[str, float]:
    """The columns of a model's experts; zeros for a dense one."""
    moe = model.moe
    return {
        "experts": moe.experts if moe else 0, "experts_per_token": moe.experts_per_token if moe else 0,
        "expert_ffn": model.expert_ffn_size, "shared_ffn": model.shared_ffn_size, "expert_layers": model.moe_layers,
        "capacity": (moe.capacity_factor or 0) if moe else 0, "launches": expert_launches(model), "imbalance": 0,
        "expert_groups": moe.groups if moe else 1,
        "groups_per_token": (moe.groups_per_token or moe.groups) if moe else 1,
    }  # fmt: skip
