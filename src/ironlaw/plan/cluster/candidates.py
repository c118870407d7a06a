"""Many ways to run one training step as columns of arrays: what search and validation evaluate at once.

    candidates_of(model, layouts, sequence=8192, global_batch=1024)
    candidates.shape(engine)            # what `workload/` describes the operations of, sizes as arrays

All candidates of one call have the same structure of model; sizes may differ from one to the next. What they share
besides (accelerator, fabric, engine, precision) is in a `System`. Lengths are in elements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ironlaw.ledger import Kind
from ironlaw.model.config import ModelConfig
from ironlaw.model.latent_config import LatentConfig
from ironlaw.model.moe_config import MoEConfig
from ironlaw.plan.cluster.launches import extra_launches
from ironlaw.plan.engines.engine import Engine
from ironlaw.workload.blocks import Precision, Shape
from ironlaw.workload.division import local_shape
from ironlaw.workload.kinds import forward_of, layer_groups
from ironlaw.workload.layout import Layout
from ironlaw.workload.moe import GROUP as MOE_GROUP
from ironlaw.workload.moe import rows_of_a_rank
from ironlaw.workload.sizes import Size, divided, is_array, larger

Array = npt.NDArray[np.float64]
RECOMPUTE = {"none": 0, "selective": 1, "full": 2}
SCHEDULES = {"1f1b": 0, "gpipe": 1, "zb": 2, "zbv": 3, "dualpipe": 4}
"""Order of forward and backward passes in a pipeline; `stages.py` and `bubbles.py` say what each one costs."""

OFFLOAD = {"none": 0, "optimizer": 1, "activations": 2, "both": 3}
CP_KINDS = {"ring": 1, "all_gather": 2, "all_to_all": 3}
"""How context parallel ranks see all keys (`context_parallel.py`); 0: as the engine does."""

FLAGS = ("gated", "tied", "biased", "flash", "shared_ffn", "experts", "latent_rank", "query_rank")
"""Columns of a measured run whose being zero or not makes another structure of model."""

LAYOUT_DEFAULTS = {
    "schedule": 0.0, "shard": 0.0, "every": 1.0, "offload": 0.0, "ep": 1.0, "etp": 0.0, "cp_kind": 0.0,
    "imbalance": 0.0,
}  # fmt: skip
"""Columns of a layout that a measured run need not have."""


@dataclass(frozen=True)
class Candidates:
    """One entry per candidate in every array. Booleans are 0 or 1, `recompute` is 0 none, 1 selective, 2 full."""

    model: ModelConfig  # whole; sizes are numbers, or arrays
    kinds: Mapping[str, Size]  # groups of layers (`workload/kinds.py`) and the share of each
    flash: bool  # else attention's scores are materialised
    launches: float  # kernels of a block with experts over those of a dense one, less 1
    latent_launches: float  # kernels that latent attention adds, over those of a usual block
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
    schedule: Array  # a value of SCHEDULES
    shard: Array  # data parallel replicas that share one sharded copy; 0: all of them
    every: Array  # full recomputation of one block in so many
    offload: Array  # a value of OFFLOAD
    ep: Array
    etp: Array  # ranks that an expert is split over; 0: tp
    imbalance: Array  # rows of the busiest expert parallel rank over the mean; 0: what training is taken to have

    def __len__(self) -> int:
        return int(self.dp.size)

    def take(self, index: Any) -> Candidates:
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        taken = {name: column[index] for name, column in columns.items() if is_array(column)}
        kinds = {kind: share[index] if is_array(share) else share for kind, share in self.kinds.items()}
        return Candidates(**(columns | taken | {"kinds": kinds, "model": _taken(self.model, index)}))

    def distinct(self, ignored: frozenset[str]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """One candidate of every sort that differs in more than the ignored columns, and of every one its sort.

        What does not hang on those columns need be worked out for few: `function(candidates.take(first))[sort]`.
        """
        number, size = np.zeros(len(self), dtype=np.int64), 1
        own = [getattr(self, f.name) for f in fields(self) if f.name not in ignored]
        for column in [c for c in [*own, *self.kinds.values(), *_arrays(self.model)] if is_array(c)]:
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
        _, first, sort = np.unique(number, return_index=True, return_inverse=True)
        return first, sort.reshape(-1)

    def shape(self, engine: Engine) -> Shape:
        """One micro-batch as one rank of each candidate has it: its part of heads, widths, words and experts."""
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
            rows = rows_of_a_rank(model.moe, self.ep, divided(self.expert_tp, tp), self.imbalance)
        return Shape(
            model.model_copy(update=update), self.micro_batch, self.sequence,
            "fp32" if engine.element_bytes == 4 else "bf16", fused_rmsnorm=True, conventions=engine, cp=self.cp,
            stream_shards=self.stream_shards, ep=self.ep, rows_per_token=rows, materialised=not self.flash,
        )  # fmt: skip

    def _ours(self, engine: Engine) -> Shape:
        """The same as our trainer divides it: the rewrite that an exact plan is made with, of arrays."""
        sp = bool((self.sp > 0).any())
        names = ("dp", "zero", "tp", "pp", "cp", "ep", "micro_batch")
        sizes: dict[str, Any] = {name: getattr(self, name) for name in names}
        precision: Precision = "fp32" if engine.element_bytes == 4 else "bf16"
        whole = Shape(self.model, 1, self.sequence, precision, fused_rmsnorm=True, conventions=engine)
        return local_shape(whole, Layout(**sizes, sp=sp))

    def divided_alike(self, engine: Engine) -> list[npt.NDArray[np.int64]]:
        """Candidates that can be described together: all of them, or for our trainer those that divide the same."""
        if engine.fused:
            return [np.arange(len(self))]
        flags = [size > 1 for size in (self.tp, self.cp, self.ep, self.pp, self.dp)] + [self.sp > 0, self.zero > 0]
        number = sum(flag * 2**i for i, flag in enumerate(flags))
        return [np.flatnonzero(number == value) for value in np.unique(number)]

    def apart(self, engine: Engine, function: Callable[[Candidates], dict[Any, Array]]) -> dict[Any, Array]:
        """What a function of `shape` gives by name, worked out for candidates that can be described together."""
        found: dict[Any, Array] = {}
        for index in self.divided_alike(engine):
            for name, column in function(self.take(index)).items():
                found.setdefault(name, np.zeros(len(self)))[index] = column
        return found

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
    def v_shaped(self) -> npt.NDArray[np.bool_]:
        """Whether a rank holds the chunks i and 2 pp - 1 - i, so that the first one has both ends of the model."""
        return np.asarray((self.schedule == SCHEDULES["zbv"]) | (self.schedule == SCHEDULES["dualpipe"]))

    @property
    def stream_shards(self) -> Array:
        """Ranks that share the residual stream: the tensor parallel ones when sequence parallelism is on."""
        return np.where(self.sp > 0, self.tp, 1.0)

    @property
    def has_experts(self) -> bool:
        return self.model.moe is not None

    @property
    def expert_share(self) -> Size:
        """Of the layers, those with experts."""
        return sum((share for kind, share in self.kinds.items() if kind.startswith(MOE_GROUP)), 0.0)

    @property
    def block_parameters(self) -> Size:
        """Parameters of one transformer block, all ranks together; the mean over all layers."""
        dense = self.model.block_parameters
        return dense + self.expert_share * (self.model.moe_block_parameters - dense) if self.has_experts else dense

    @property
    def expert_parameters(self) -> Size:
        """Of the routed experts of a layer, all of them; the mean over all layers."""
        moe = self.model.moe
        return 0.0 if moe is None else self.expert_share * moe.experts * self.model.expert_parameters

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
        return np.asarray(self.expert_parameters / (self.ep * self.expert_tp))

    @property
    def copied_parameters(self) -> Array:
        """Of a block, on one rank: what it holds more than its part where key/value heads are fewer than tp, and of
        narrow vectors, which are computed whole."""
        model = self.model
        part = model.key_value_size / self.tp
        copied = 2 * model.hidden * (np.maximum(part, model.size_of_head) - part)
        if model.latent is None:
            return np.asarray(copied)
        return np.asarray(copied + model.latent.narrow_parameters(model.hidden) * (1 - 1 / self.tp))

    @property
    def local_block_parameters(self) -> Array:
        """Of a block, on one rank, before ZeRO divides any."""
        split = self.block_parameters / self.tp + self.copied_parameters
        return split - self.expert_parameters / self.tp + self.local_expert_parameters if self.has_experts else split

    @property
    def parameters(self) -> Array:
        model = self.model
        ends = model.embedding_parameters + model.norm_parameters + model.head_parameters
        return np.broadcast_to(model.layers * self.block_parameters + ends, (len(self),))

    def forward_flops(self) -> tuple[Size, Size, Size]:
        """Matrix FLOPs of one sequence, all layers: linear ones, attention without masked scores, the output layer."""
        rows = self.model.moe.experts_per_token if self.model.moe else None
        shape = Shape(self.model, 1, self.sequence, conventions=Engine(""), fused_rmsnorm=True, rows_per_token=rows)
        sums: dict[bool, Size] = {False: 0, True: 0}
        for kind, share in self.kinds.items():
            for op in forward_of(shape, kind):
                if op.flops is not None:
                    sums[op.kind is Kind.ATTENTION] += self.model.layers * share * op.flops
        return sums[False], sums[True], 2 * self.sequence * self.model.hidden * self.model.vocab

    def model_flops(self) -> Array:
        """Matrix FLOPs of one step, forward and backward; masked scores of causal attention are not counted."""
        return np.asarray(3 * sum(self.forward_flops()) * self.global_batch)

    def hardware_flops(self) -> Array:
        """The same with recomputation and, for standard attention, the masked half that is computed anyway.

        With full recomputation this is equation 3 of arXiv 2104.04473.
        """
        linear, attention, head = self.forward_flops()
        if not self.flash:
            widths = self.model.query_size + self.model.mixed_size
            attention = 2 * self.model.layers * widths * self.sequence**2
        again = self.recomputed_share
        attention_again = np.where(self.recompute == RECOMPUTE["selective"], 1.0, again)
        blocks = linear * (3 + again) + attention * (3 + attention_again)
        return np.asarray((blocks + 3 * head) * self.global_batch)


def of_no_shape(columns: frozenset[str], engine: Engine) -> frozenset[str]:
    """Of columns on which nothing of a block hangs, those on which our trainer's description does not hang either."""
    return columns if engine.fused else columns - {"dp", "zero", "pp"}


def candidates_of(
    model: ModelConfig, layouts: list[Layout], *, sequence: int, global_batch: int, flash: bool = True
) -> Candidates:
    """One model under several layouts."""
    rows = [layout_columns(layout) for layout in layouts]
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    return candidates_of_table(model, columns, sequence=sequence, global_batch=global_batch, flash=flash)


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


def candidates_of_table(
    model: ModelConfig, columns: Mapping[str, Array], *, sequence: int, global_batch: int, flash: bool = True
) -> Candidates:
    """One model under layouts whose columns are given (those of `layout_columns`)."""
    count = len(columns["dp"])
    groups = Counter(layer_groups(model))
    batch = {"sequence": sequence, "global_batch": global_batch, "imbalance": 0}
    arrays: dict[str, Any] = {name: np.full(count, float(value)) for name, value in batch.items()} | dict(columns)
    kinds = {group: layers / model.layers for group, layers in groups.items()}
    return Candidates(model, kinds, flash, *extra_launches(model), **arrays)


def structure(row: Mapping[str, float]) -> tuple[bool, ...]:
    """What measured runs of one `Candidates` have in common."""
    return tuple(row.get(name, 0.0) > 0 for name in FLAGS)


def candidates_of_rows(rows: Sequence[Mapping[str, float]]) -> Candidates:
    """One candidate for each mapping of column to number, all of one `structure`."""
    assert len({structure(row) for row in rows}) == 1
    columns = {name: np.array([row[name] for row in rows], dtype=float) for name in rows[0]}
    ones = np.ones(len(rows))
    layout: dict[str, Any] = {name: columns.get(name, default * ones) for name, default in LAYOUT_DEFAULTS.items()}
    layout |= {f.name: columns[f.name] for f in fields(Candidates) if f.name in columns and f.name != "flash"}
    base = model_of(structure(rows[0]))
    sizes: dict[str, Any] = {name: columns[name] for name in ("layers", "hidden", "heads", "ffn", "vocab")}
    sizes["context"] = columns["sequence"]
    kinds: dict[str, Size] = {"block": 1.0}
    if base.latent is not None:
        of = {"key_value_rank": "latent_rank", "query_rank": "query_rank", "rotary_size": "rotary_size",
              "value_size": "value_size"}  # fmt: skip
        latent: dict[str, Any] = {name: columns[column] for name, column in of.items() if column in columns}
        if base.latent.query_rank is None:
            latent["query_rank"] = None
        latent["plain_size"] = columns["head_size"] - columns["rotary_size"]
        sizes["latent"] = base.latent.model_copy(update=latent)
    else:
        sizes |= {"kv_heads": columns["kv_heads"], "head_size": columns["head_size"]}
    if base.moe is not None:
        of = {"experts": "experts", "experts_per_token": "experts_per_token", "expert_ffn": "expert_ffn",
              "groups": "expert_groups", "groups_per_token": "groups_per_token"}  # fmt: skip
        moe = {name: columns[column] for name, column in of.items() if column in columns}
        if base.moe.shared_experts:
            moe["shared_ffn"] = columns["shared_ffn"]
        sizes["moe"] = base.moe.model_copy(update=moe)
        share = columns["expert_layers"] / columns["layers"]
        kinds = {"block": 1 - share, MOE_GROUP: share}
    return Candidates(base.model_copy(update=sizes), kinds, rows[0]["flash"] > 0, *extra_launches(base), **layout)


@lru_cache(maxsize=64)
def model_of(flags: tuple[bool, ...]) -> ModelConfig:
    """A model of that structure whose sizes stand for others."""
    is_ = dict(zip(FLAGS, flags, strict=True))
    biased = is_["biased"] and not is_["latent_rank"] and not is_["experts"]
    moe = MoEConfig(experts=2, experts_per_token=1, shared_experts=int(is_["shared_ffn"])) if is_["experts"] else None
    latent = LatentConfig(query_rank=32 if is_["query_rank"] else None) if is_["latent_rank"] else None
    return ModelConfig(
        layers=1, hidden=64, heads=2, vocab=64, context=64, gated_ffn=is_["gated"], tied=is_["tied"], bias=biased,
        activation="silu" if is_["gated"] else "gelu", norm="layernorm" if biased else "rmsnorm",
        positions="learned" if biased else "rope", moe=moe, latent=latent,
    )  # fmt: skip


def _arrays(model: ModelConfig) -> list[Array]:
    """Sizes of a model that differ between candidates."""
    tables = [table for table in (model, model.moe, model.latent) if table is not None]
    return [value for table in tables for value in table.__dict__.values() if is_array(value)]


def _taken(model: ModelConfig, index: Any) -> ModelConfig:
    """The model with the sizes of some candidates."""
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
