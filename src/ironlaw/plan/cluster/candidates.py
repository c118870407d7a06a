"""Many ways to run one training step, stored as columns of arrays for search and validation to evaluate at once.

    candidates_of(model, layouts, sequence=8192, global_batch=1024)
    candidates.shape(engine)            # input of the operations in `workload/`, sizes as arrays

All candidates of one call have the same model structure; sizes may differ between them. A `ClusterSystem` holds the
accelerator, fabric, engine and precision that they share. Lengths are in elements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ironlaw.ledger import Kind
from ironlaw.model.config import ModelConfig
from ironlaw.model.dimensions import LatentConfig, MoEConfig
from ironlaw.model.parameters import elements_of, of_latent_attention
from ironlaw.plan.cluster.layout_table import (
    COLUMNS,
    Array,
    Table,
    code,
    distinct_rows,
    layout_table,
)
from ironlaw.plan.engines.engine import TrainingEngine
from ironlaw.workload.blocks import Policy, Precision, Shape
from ironlaw.workload.division import is_sharded, local_shape
from ironlaw.workload.kinds import both_passes, forward_of, layer_groups
from ironlaw.workload.layout import Layout
from ironlaw.workload.moe import GROUP as MOE_GROUP
from ironlaw.workload.moe import row_factor
from ironlaw.workload.recompute import keepable
from ironlaw.workload.schedule import V_SHAPED
from ironlaw.workload.sizes import Size, divided, is_array, larger

KnownBlocks = dict[str, tuple[dict[bytes, int], dict[Any, Array]]]
"""Values of distinct blocks, by what they are: the number of each block, and columns with an entry per number."""


@dataclass(frozen=True)
class Candidates:
    """Columns with one entry per candidate; those of the layout are encoded as in `layout_table.py`."""

    model: ModelConfig  # undivided; sizes are numbers or arrays
    kinds: Mapping[str, Size]  # groups of layers (`workload/kinds.py`) and the share of each
    flash: bool  # False: attention scores are materialised
    launches: float  # kernels added by experts, as a fraction of those of a dense block without latent attention
    latent_launches: float  # kernels added by latent attention, as the same fraction
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
    virtual_stages: Array
    schedule: Array
    cp: Array
    cp_kind: Array
    ep: Array
    etp: Array
    shard: Array
    recompute: Array
    every: Array  # one block in this many is recomputed in full
    offload: Array
    imbalance: Array  # rows of the busiest expert parallel rank over the mean; 0: the value assumed for training
    narrow: int | None = None  # number of first layers with low-precision matmuls; None: all layers
    decided: tuple[Policy, ...] = ()  # per layer: what our trainer keeps, instead of its selective default
    known_blocks: KnownBlocks | None = None  # shared by the candidates of one model and system

    def __len__(self) -> int:
        return int(self.dp.size)

    def has(self, field: str, *words: str) -> npt.NDArray[np.bool_]:
        """Returns a mask of the candidates whose layout has one of these words in `field`."""
        column = getattr(self, field)
        return np.logical_or.reduce([column == code(field, word) for word in words])

    def take(self, index: Any) -> Candidates:
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        taken = {name: column[index] for name, column in columns.items() if is_array(column)}
        kinds = {kind: share[index] if is_array(share) else share for kind, share in self.kinds.items()}
        return Candidates(**(columns | taken | {"kinds": kinds, "model": _taken(self.model, index)}))

    def shape(self, engine: TrainingEngine) -> Shape:
        """Returns the shape of one micro-batch on one rank: its part of heads, widths, vocabulary and experts."""
        if not engine.fused:
            return self._ours(engine)
        model, tp = self.model, self.tp
        update: dict[str, Any] = {"heads": model.heads / tp, "ffn": model.ffn_size / tp, "vocab": model.vocab / tp}
        if model.latent is None:
            update |= {"kv_heads": larger(model.key_value_heads / tp, 1.0), "head_size": model.size_of_head}
        rows = None
        if model.moe is not None:
            widths = {"expert_ffn": model.expert_ffn_size / self.expert_tp}
            if model.moe.shared_experts:
                widths["shared_ffn"] = model.shared_ffn_size / tp
            update["moe"] = model.moe.model_copy(update=widths)
            # A rank has fewer rows per token where experts are split over fewer than tp ranks.
            own = model.moe.experts_per_token * row_factor(model.moe, self.ep, self.imbalance)
            rows = own * divided(self.expert_tp, tp)
        return Shape(
            model.model_copy(update=update), self.micro_batch, self.sequence,
            "fp32" if engine.element_bytes == 4 else "bf16", fused_rmsnorm=True, conventions=engine, cp=self.cp,
            stream_shards=self.stream_shards, ep=self.ep, rows_per_token=rows, materialised=not self.flash,
        )  # fmt: skip

    def _ours(self, engine: TrainingEngine) -> Shape:
        """Returns the shape as our trainer divides it, by the rewrite that exact plans use, here on arrays."""
        sp = bool((self.sp > 0).any())
        names = ("dp", "zero", "tp", "pp", "cp", "ep", "micro_batch")
        sizes: dict[str, Any] = {name: getattr(self, name) for name in names}
        precision: Precision = "fp32" if engine.element_bytes == 4 else "bf16"
        whole = Shape(self.model, 1, self.sequence, precision, fused_rmsnorm=True, conventions=engine)
        return local_shape(whole, Layout(**sizes, sp=sp))

    def _division(self, engine: TrainingEngine) -> Array:
        """Returns equal numbers for candidates that share a description: all, or those our trainer divides alike."""
        if engine.fused:
            return np.zeros(len(self))
        flags = [size > 1 for size in (self.tp, self.cp, self.ep)] + [self.sp > 0, self.model.tied & (self.pp > 1)]
        flags.append(is_sharded(self.zero, self.dp * self.cp, self.tp * self.pp * self.ep))
        return np.asarray(sum(flag * 2.0**i for i, flag in enumerate(flags)))

    def of_blocks(
        self, engine: TrainingEngine, what: str, function: Callable[[Candidates], Mapping[Any, Size]]
    ) -> dict[Any, Array]:
        """Evaluates `function` once per distinct block and returns its values for every candidate.

        `what` names these values in `known_blocks`.
        """
        division = self._division(engine)
        own = [getattr(self, f.name) for f in fields(self) if f.name not in OF_THE_LAYOUT]
        columns = [c for c in [*own, *self.kinds.values(), *_arrays(self.model), division] if is_array(c)]
        first, sort = distinct_rows(columns, len(self))
        index, known = ({}, {}) if self.known_blocks is None else self.known_blocks.setdefault(what, ({}, {}))
        keys = [row.tobytes() for row in np.stack([column[first] for column in columns], axis=1)]
        new = first[np.array([key not in index for key in keys], dtype=bool)]
        for key in keys:
            index.setdefault(key, len(index))
        found: dict[Any, Array] = {}
        for alike in np.unique(division[new]) if known or len(self) else [0.0]:
            there = np.flatnonzero(division[new] == alike)
            for name, values in function(self.take(new[there])).items():
                found.setdefault(name, np.zeros(len(new)))[there] = values
        known |= {name: np.concatenate([known.get(name, []), values]) for name, values in found.items()}
        rows = np.array([index[key] for key in keys], dtype=np.int64)[sort]
        return {name: values[rows] for name, values in known.items()}

    @cached_property
    def layers_of_stages(self) -> dict[str, Any]:
        """The results of `stage_layers` by partition, each computed once."""
        return {}

    @property
    def accumulation(self) -> Array:
        """Micro-batches per model replica and step."""
        return self.global_batch / (self.dp * self.micro_batch)

    @property
    def accelerators(self) -> Array:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def tokens(self) -> Array:
        """Tokens of one micro-batch on a rank: context parallel ranks split the sequence."""
        return self.micro_batch * self.sequence / self.cp

    @property
    def shard_ranks(self) -> Array:
        """Ranks over which ZeRO shards: the replicas of a group times the context parallel ranks."""
        return np.where(self.shard > 0, self.shard, self.dp) * self.cp

    @property
    def copies(self) -> Array:
        """Sharded copies of the state: more than one under hybrid sharding."""
        return np.where(self.shard > 0, self.dp / np.maximum(self.shard, 1.0), 1.0)

    @property
    def recomputed_share(self) -> Array:
        """Share of the blocks that are recomputed in full."""
        decided = self.decided.count(frozenset()) / len(self.decided) if self.decided else 0.0
        return np.where(self.has("recompute", "full"), 1 / self.every, decided)

    def policies(self, kind: str) -> dict[Policy, float]:
        """Returns the policies of our trainer's selective recomputation for a kind of block, with their shares."""
        if not self.decided:
            return {keepable(self.model, kind): 1.0}
        found = Counter(
            policy
            for policy, group in zip(self.decided, layer_groups(self.model, self.narrow), strict=True)
            if group == kind
        )
        return {policy: count / found.total() for policy, count in found.items()}

    @property
    def offloads_optimizer(self) -> npt.NDArray[np.bool_]:
        return self.has("offload", "optimizer", "both")

    @property
    def offloads_activations(self) -> npt.NDArray[np.bool_]:
        return self.has("offload", "activations", "both")

    @property
    def v_shaped(self) -> npt.NDArray[np.bool_]:
        """Whether rank i holds the chunks i and 2 pp - 1 - i, so that the first rank has both ends of the model."""
        return self.has("schedule", *V_SHAPED)

    @property
    def stream_shards(self) -> Array:
        """Ranks that divide the residual stream: the tensor parallel ones under sequence parallelism, else one."""
        return np.where(self.sp > 0, self.tp, 1.0)

    @property
    def has_experts(self) -> bool:
        return self.model.moe is not None

    @property
    def expert_share(self) -> Size:
        """Share of the layers that have experts."""
        return sum((share for kind, share in self.kinds.items() if kind.startswith(MOE_GROUP)), 0.0)

    @property
    def block_parameters(self) -> Size:
        """Parameters of one transformer block over all ranks, as the mean over all layers."""
        dense = self.model.block_parameters
        return dense + self.expert_share * (self.model.moe_block_parameters - dense) if self.has_experts else dense

    @property
    def expert_parameters(self) -> Size:
        """Parameters of all routed experts of a layer, as the mean over all layers."""
        moe = self.model.moe
        return 0.0 if moe is None else self.expert_share * moe.experts * self.model.expert_parameters

    @property
    def expert_tp(self) -> Array:
        """Ranks over which an expert is split."""
        return np.where(self.etp > 0, self.etp, self.tp)

    @property
    def expert_replicas(self) -> Array:
        """Ranks that hold the same part of the same experts."""
        return self.dp * self.cp * self.tp / (self.ep * self.expert_tp)

    @property
    def expert_shard_ranks(self) -> Array:
        """Ranks over which ZeRO divides an expert: the `expert_replicas` within one sharded copy."""
        return self.shard_ranks * self.tp / (self.ep * self.expert_tp)

    @property
    def local_expert_parameters(self) -> Array:
        """Parameters of a layer's routed experts on one rank, as the mean over all layers."""
        return np.asarray(self.expert_parameters / (self.ep * self.expert_tp))

    @property
    def copied_parameters(self) -> Array:
        """Parameters of a block that a rank holds beyond its 1/tp part: those of key/value heads where there are fewer
        than tp, and those of latent attention's narrow vectors, which every rank computes whole."""
        model = self.model
        part = model.key_value_size / self.tp
        copied = 2 * model.hidden * (np.maximum(part, model.size_of_head) - part)
        if model.latent is None:
            return np.asarray(copied)
        narrow = elements_of(p for p in of_latent_attention(model) if p.partial)
        return np.asarray(copied + narrow * (1 - 1 / self.tp))

    @property
    def local_block_parameters(self) -> Array:
        """Parameters of a block on one rank, before ZeRO divides them."""
        split = self.block_parameters / self.tp + self.copied_parameters
        return split - self.expert_parameters / self.tp + self.local_expert_parameters if self.has_experts else split

    @property
    def parameters(self) -> Array:
        model = self.model
        ends = model.embedding_parameters + model.norm_parameters + model.head_parameters
        return np.broadcast_to(model.layers * self.block_parameters + ends, (len(self),))

    def forward_flops(self) -> tuple[Size, Size, Size]:
        """Returns the matrix FLOPs of one sequence: linear layers, attention without masked scores, output layer."""
        rows = self.model.moe.experts_per_token if self.model.moe else None
        shape = Shape(
            self.model, 1, self.sequence, conventions=TrainingEngine(""), fused_rmsnorm=True, rows_per_token=rows
        )
        sums: dict[bool, Size] = {False: 0, True: 0}
        for kind, share in self.kinds.items():
            for op in forward_of(shape, kind):
                if op.flops is not None:
                    sums[op.kind is Kind.ATTENTION] += self.model.layers * share * op.flops
        return sums[False], sums[True], 2 * self.sequence * self.model.hidden * self.model.vocab

    def model_flops(self) -> Array:
        """Returns the matrix FLOPs of one step, forward and backward, without the masked scores of attention."""
        return np.asarray(3 * sum(self.forward_flops()) * self.global_batch)

    def hardware_flops(self, selective: tuple[float, float] = (0.0, 1.0)) -> Array:
        """Returns `model_flops` plus recomputation and, for standard attention, the masked scores that it computes.

        With full recomputation this is equation 3 of arXiv 2104.04473. `selective`: shares of the blocks' matmuls and
        of attention that selective recomputation repeats; Megatron's repeats attention.
        """
        linear, attention, head = self.forward_flops()
        if not self.flash:
            widths = self.model.query_size + self.model.mixed_size
            attention = 2 * self.model.layers * widths * self.sequence**2
        again = self.recomputed_share
        linear_again, attention_again = (np.where(self.has("recompute", "selective"), s, again) for s in selective)
        blocks = linear * (3 + linear_again) + attention * (3 + attention_again)
        return np.asarray((blocks + 3 * head) * self.global_batch)


OF_THE_LAYOUT = frozenset(
    ("dp", "zero", "shard", "pp", "virtual_stages", "schedule", "recompute", "every", "offload", "global_batch")
)
"""Columns that affect the seconds and bytes of a block and micro-batch only by how they divide it (`_division`)."""


def candidates_of(
    model: ModelConfig, layouts: Iterable[Layout] | Table, *, sequence: int, global_batch: int, flash: bool = True,
    narrow: int | None = None,
) -> Candidates:  # fmt: skip
    """Returns one model under several layouts. `narrow`: number of its first layers with low-precision matmuls."""
    table = layouts if isinstance(layouts, np.ndarray) else layout_table(layouts)
    kinds = {group: layers / model.layers for group, layers in Counter(layer_groups(model, narrow)).items()}
    columns, batch = columns_of(table), {"sequence": sequence, "global_batch": global_batch, "imbalance": 0.0}
    columns |= {name: np.full(len(table), float(value)) for name, value in batch.items()}
    return Candidates(model, kinds, flash, *extra_launches(model), narrow=narrow, **columns)


def columns_of(table: Table) -> dict[str, Any]:
    return {name: table[name].astype(float) for name in COLUMNS}


def _arrays(model: ModelConfig) -> list[Array]:
    """Returns the sizes of a model that differ between candidates."""
    tables = [table for table in (model, model.moe, model.latent) if table is not None]
    return [value for table in tables for value in table.__dict__.values() if is_array(value)]


def _taken(model: ModelConfig, index: Any) -> ModelConfig:
    """Returns the model with the sizes of the candidates at `index`."""
    if not _arrays(model):
        return model

    def taken(table: Any) -> dict[str, Any]:
        return {name: value[index] for name, value in table.__dict__.items() if is_array(value)}

    update = taken(model)
    for name in ("moe", "latent"):
        table = getattr(model, name)
        if table is not None:
            update[name] = table.model_copy(update=taken(table))
    return model.model_copy(update=update)


@lru_cache(maxsize=16)
def extra_launches(model: ModelConfig) -> tuple[float, float]:
    """Returns the kernels that experts and latent attention each add, as fractions of those of a block with neither."""
    if model.moe is None and model.latent is None:
        return 0.0, 0.0
    shape = Shape(model, micro_batch=1, sequence=min(64, model.context), fused_rmsnorm=True)
    dense = usual = _calls(shape, "block")
    if model.latent is not None:
        plain = replace(shape, model=model.model_copy(update={"latent": None, "head_size": model.size_of_head}))
        usual = _calls(plain, "block")
    experts = _calls(shape, MOE_GROUP) if model.moe is not None else dense
    return (experts - dense) / usual, dense / usual - 1


def _calls(shape: Shape, kind: str) -> int:
    return sum(map(len, both_passes(shape, kind)))


# -- measured or assumed runs, each with its own model and layout ---------------------------------------------------


MODEL_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_size", "ffn", "vocab", "context")
MOE_SIZES = ("experts", "experts_per_token", "expert_ffn", "shared_ffn", "groups", "groups_per_token")
LATENT_SIZES = ("key_value_rank", "query_rank", "rotary_size", "plain_size", "value_size")
"""Fields of a model that may differ between the jobs of one `Candidates`."""


@dataclass(frozen=True)
class TrainingJob:
    """One training step: its model, batch and layout."""

    model: ModelConfig
    layout: Layout
    sequence: float  # tokens
    global_batch: float  # sequences per step
    flash: bool = True  # False: attention scores are materialised
    imbalance: float = 0.0  # rows of the busiest expert parallel rank over the mean; 0: the value assumed for training
    every: float | None = None  # one block in this many is recomputed in full; None: as in the layout


def candidates_of_jobs(jobs: Sequence[TrainingJob]) -> Candidates:
    """Returns candidates of several models with one `structure`, each with its own layout."""
    first = structure(jobs[0])
    assert len({structure(job) for job in jobs}) == 1
    columns: dict[str, Any] = columns_of(layout_table(job.layout for job in jobs))
    strides = [job.layout.recompute.stride if job.every is None else job.every for job in jobs]
    columns["every"] = np.array(strides, dtype=float)
    for name in ("sequence", "global_batch", "imbalance"):
        columns[name] = np.array([getattr(job, name) for job in jobs], dtype=float)
    model, kinds = _stacked([job.model for job in jobs], MODEL_SIZES), dict[str, Size](block=1.0)
    if model.moe is not None:
        share = np.array([job.model.moe_layers / job.model.layers for job in jobs])
        kinds = {"block": 1 - share, MOE_GROUP: share}
        moe = _stacked([job.model.moe for job in jobs], MOE_SIZES)
        moe = moe.model_copy(update={"dense_layers": 0, "every": 1})  # `kinds` holds the share of layers with experts
        model = model.model_copy(update={"moe": moe})
    if model.latent is not None:
        model = model.model_copy(update={"latent": _stacked([job.model.latent for job in jobs], LATENT_SIZES)})
    return Candidates(model, kinds, jobs[0].flash, *extra_launches(plain_model(first[1:])), **columns)


def _stacked(tables: Sequence[Any], sizes: Sequence[str]) -> Any:
    """Returns the first table with arrays of sizes, one entry per table; all tables leave the same sizes unset."""
    given = [name for name in sizes if getattr(tables[0], name) is not None]
    arrays = {name: np.array([getattr(table, name) for table in tables], dtype=float) for name in given}
    return tables[0].model_copy(update=arrays)


def structure(job: TrainingJob) -> tuple[bool, ...]:
    """Returns what the jobs of one `Candidates` have in common: flash, then the argument of `plain_model`."""
    model, moe, latent = job.model, job.model.moe, job.model.latent
    experts = moe is not None, moe is not None and moe.shared_experts > 0
    queries = latent is not None and latent.query_rank is not None
    return job.flash, model.gated_ffn, model.tied, *experts, latent is not None, queries


@lru_cache(maxsize=64)
def plain_model(structure: tuple[bool, ...]) -> ModelConfig:
    """Returns a model with this structure and placeholder sizes."""
    gated, tied, experts, shared, narrow, narrow_queries = structure
    biased = not (gated or narrow or experts)
    return ModelConfig(
        layers=1, hidden=64, heads=2, vocab=64, context=64, gated_ffn=gated, tied=tied, bias=biased,
        activation="silu" if gated else "gelu", norm="layernorm" if biased else "rmsnorm",
        positions="learned" if biased else "rope",
        moe=MoEConfig(experts=2, experts_per_token=1, shared_experts=int(shared)) if experts else None,
        latent=LatentConfig(query_rank=32 if narrow_queries else None) if narrow else None,
    )  # fmt: skip
