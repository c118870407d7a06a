"""The collectives of each rank in a step of Ironlaw's own trainer, by mesh dimension and kind.

    sent = collectives(model, layout, StepBatch(sequences=512, tokens=4096), Recipe(), position=0)
    table_of(sent)["shard", "all_gather"]          # Sent(count, bytes) of a rank at this pipeline position

The list is complete: for every layout it equals the counts of a run (`tests/train/parallel/test_traffic.py`). Bytes are
those of the whole buffer that is reduced, gathered or sent; a ring moves 2 (n-1)/n of a reduced one and (n-1)/n of the
others per rank. Weights and gradients are sent in fp32, as the trainer holds them; results and operands of matrix
products (keys, values, expert rows) in the products' precision. Dimensions are those of the trainer's mesh:
`replicate` (copies of the state), `shard` (ranks that share one copy), `tp`, `cp`, `pp`, `ep`, and `expert_replicate`
and `expert_shard` for the experts' state; `micro_batch` groups ranks that count expert loads together, `site` sites
that average their weights, `world` all ranks, which agree on loss, gradient norm and stop. Ranks are placed tp, cp, dp,
pp from the inside out.

Without a capacity, the rows that a rank's experts receive depend on the routers' choices. A rank sends the rows of its
tokens and gets them back, which is exact; the rows it returns to others are listed with the mean, which is exact for
the expert parallel group as a whole. Under a capacity shared by several ranks, rows are listed as if none was dropped.

FSDP2 gathers a block at a time, each tensor padded to a multiple of the ranks in its first dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import starmap
from typing import NamedTuple

from ironlaw.model.config import ModelConfig
from ironlaw.model.parameters import Parameter
from ironlaw.workload.layout import Layout
from ironlaw.workload.messages import context_messages
from ironlaw.workload.recipe import Recipe, StepBatch
from ironlaw.workload.schedule import layers_of, passes_of_rank, stages_of
from ironlaw.workload.sharding import (
    EXPERTS,
    bucket_bytes,
    expert_dp,
    is_plain,
    parameter_groups,
    shard_of,
    site_layout,
)


def replicas_of(layout: Layout) -> tuple[int, int]:
    """Return the ranks that share one copy of the state, and the number of copies."""
    return layout.sharing, layout.dp * layout.cp // layout.sharing


def aliases_of(model: ModelConfig, layout: Layout, batch: StepBatch, recipe: Recipe) -> dict[str, str]:
    """Map each dimension whose groups have the same ranks as an earlier one's to that one: a run counts them as one.

    `world` stays separate: its time shows how long ranks wait for the slowest.
    """
    site = site_layout(layout, recipe.communication)
    groups = {name: group_of(site, name) for name in ("replicate", "shard", "tp", "pp")}
    groups["site"] = layout.dp // site.dp, site.accelerators
    if model.moe is not None:
        groups["micro_batch"] = counted_together(layout, batch) * layout.cp, layout.tp
    groups |= {name: group_of(site, name) for name in ("expert_replicate", "expert_shard", "ep", "cp")}
    first: dict[tuple[int, int], str] = {}
    for name, ranks in groups.items():
        first.setdefault(ranks, name)
    return {name: first[ranks] for name, ranks in groups.items() if ranks[0] > 1 and first[ranks] != name}


def group_of(layout: Layout, dimension: str) -> tuple[int, int]:
    """Return the number of ranks in a group of a mesh dimension, and the distance between neighbouring ranks."""
    tp, ep, (shard, copies) = layout.tp, layout.ep, replicas_of(layout)
    same_experts = (expert_dp(layout.dp, layout.cp, ep), tp * ep) if ep > 1 else (1, 1)
    return {
        "world": (layout.accelerators, 1), "tp": (tp, 1), "shard": (shard, tp), "replicate": (copies, tp * shard),
        "pp": (layout.pp, tp * shard * copies), "cp": (layout.cp, tp), "ep": (ep, tp),
        "micro_batch": (max(2, layout.cp), tp),  # count expert loads together: ranks of one sequence, or two replicas
        "expert_shard": same_experts if layout.zero else (1, 1),
        "expert_replicate": (1, 1) if layout.zero else same_experts,
    }[dimension]  # fmt: skip


def counted_together(layout: Layout, batch: StepBatch) -> int:
    """Return the number of replicas that hold one micro-batch of the config, over which expert loads are counted."""
    return max(1, batch.counted // (batch.sequences // layout.dp))


FP32, BF16, INT64 = 4, 2, 8


@dataclass(frozen=True)
class Sent:
    """`count` collectives with `bytes` of buffers in total. PowerSGD's count is 0: it depends on DDP's buckets."""

    count: int
    bytes: int


Table = dict[tuple[str, str], Sent]
Line = tuple[str, str, int, int]  # dimension, kind, count, bytes


def table_of(found: Iterable[Collective], aliases: Mapping[str, str] | None = None) -> Table:
    """Sum collectives by dimension (renamed by `aliases`) and kind, without those that send nothing."""
    table: Table = {}
    for dimension, kind, count, size in found:
        key = (aliases or {}).get(dimension, dimension), kind
        known = table.get(key, Sent(0, 0))
        table[key] = Sent(known.count + count, known.bytes + size)
    return {key: sent for key, sent in sorted(table.items()) if sent.bytes}


class Collective(NamedTuple):
    """`calls` of one kind of collective over a mesh dimension in a rank's step, with `bytes` of buffers in total.

    Each size of buffer has its own entry.
    """

    dimension: str
    kind: str
    calls: int
    bytes: int


def collectives(
    model: ModelConfig, layout: Layout, batch: StepBatch, recipe: Recipe, position: int
) -> Iterator[Collective]:
    """Yield the collectives of a rank at a pipeline position in one step. The accumulation follows from the batch, not
    from `layout`. Gradients under PowerSGD are those from its start step on. Sites do not meet within a step."""
    micro_batches = batch.sequences // (layout.dp * layout.micro_batch)
    counting = counted_together(layout, batch)
    everybody, layout = layout, site_layout(layout, recipe.communication)
    sites = everybody.dp // layout.dp
    layers, together = list[int](), counting * layout.cp
    for stage in stages_of(layout.schedule, layout.pp, layout.virtual_stages, position):
        one = _Stage(model, layout, batch, recipe, micro_batches, stage, together)
        yield from starmap(Collective, one.lines())
        layers += one.layers
    yield from starmap(Collective, _once(model, layout, batch, micro_batches, layers, together, sites))


def _once(
    model: ModelConfig, layout: Layout, batch: StepBatch, micro_batches: int, layers: list[int], together: int,
    sites: int,
) -> Iterable[Line]:  # fmt: skip
    """Yield the messages sent once per step: loss, request to stop and each site's gradient norm; numbers of targets;
    expert loads."""
    yield "world", "all_reduce", 1, (2 + sites) * 8
    replicas = [name for name, ranks in zip(("shard", "replicate"), replicas_of(layout), strict=True) if ranks > 1]
    for dimension in replicas if batch.unequal else ():
        yield dimension, "all_reduce", 1, INT64
    if model.moe is None:
        return
    if batch.unequal and together > 1:
        yield "micro_batch", "all_reduce", 1, micro_batches * INT64
    routed = sum(model.moe.in_layer(layer) for layer in layers)
    for dimension in replicas if routed else ():  # loads and dropped choices
        yield dimension, "all_reduce", 1, routed * (model.moe.experts + 1) * INT64
    if layout.pp > 1:  # statistics of the loads
        yield "pp", "all_reduce", 1, 4 * 8


def message_bytes(model: ModelConfig, layout: Layout, batch: StepBatch) -> int:
    """Return the bytes of a rank's residual stream of one micro-batch between pipeline stages, in fp32."""
    return layout.micro_batch * batch.tokens // layout.cp * model.hidden * FP32 // (layout.tp if layout.sp else 1)


def compressed_elements(shape: tuple[int, ...], rank: int) -> int:
    """Return the elements PowerSGD sends of a gradient: two matrices of `rank` columns, or all if that saves little."""
    return matrix_elements(shape, rank) or math.prod(shape)


def matrix_elements(shape: tuple[int, ...], rank: int) -> int:
    """Return the elements of PowerSGD's two matrices for a gradient; 0 if it is not compressed (PyTorch's
    `min_compression_rate` is 2)."""
    rows, columns = shape[0], math.prod(shape[1:])
    thin = (rows + columns) * min(rows, columns, rank)
    return thin if 2 * thin < rows * columns else 0


@dataclass
class _Stage:
    """The collectives of one pipeline stage in a step. `together`: ranks that count expert loads together."""

    model: ModelConfig
    layout: Layout
    batch: StepBatch
    recipe: Recipe
    micro_batches: int
    stage: int
    together: int

    def __post_init__(self) -> None:
        model, layout, recipe = self.model, self.layout, self.recipe
        self.tokens = layout.micro_batch * self.batch.tokens // layout.cp
        self.last_stage = layout.pp * layout.virtual_stages - 1
        self.first, self.last = self.stage == 0, self.stage == self.last_stage
        self.layers = layers_of(model.layers, self.last_stage + 1, layout.virtual_stages)[self.stage]
        self.adapters = recipe.adapters
        self.parameters = recipe.parameters(model, layout, self.stage, self.layers)
        self.freezes_embedding = self.adapters is not None and not self.adapters.trains("embedding.weight", model)
        self.ranks, self.copies = replicas_of(layout)
        self.gradient_bytes = BF16 if recipe.communication.gradients == "bf16" else FP32
        self.recomputed_layers = [n for n in self.layers if recipe.recompute and recipe.recompute[n] is not None]

    def lines(self) -> Iterable[Line]:
        layout = self.layout
        yield from self.data_parallel()
        if layout.tp > 1:
            yield from self.tensor_parallel()
        if layout.cp > 1:
            yield from self.context_parallel()
        if self.model.moe is not None:
            yield from self.experts()
        if layout.pp > 1:
            yield from self.pipeline()

    # -- weights and gradients -----------------------------------------------------------------------------------

    @property
    def reductions(self) -> int:
        """Gradient reductions per step. A pipeline reduces once, after its schedule, under any ZeRO stage."""
        return self.micro_batches if self.layout.zero >= 2 and self.layout.pp == 1 else 1

    def data_parallel(self) -> Iterable[Line]:
        layout, communication = self.layout, self.recipe.communication
        compressed = 0  # bytes that PowerSGD sends
        groups = parameter_groups(self.model, self.parameters, layout.ep, bool(self.recipe.loss_chunk))
        for unit, tensors in groups.items():
            if unit.endswith(EXPERTS):
                yield from self.expert_state(tensors)
                continue
            shards = [shard_of(p, self.model, layout.ep, self.ranks) for p in tensors]
            padded = sum(p.bytes for p in shards) * self.ranks
            gradients = sum(p.elements for p in shards if p.trained) * self.ranks * self.gradient_bytes
            if communication.gradients == "powersgd":
                compressed += sum(compressed_elements(p.shape, communication.rank) for p in tensors) * FP32
            if self.ranks > 1:
                gathers = self.gathers_without_input_gradient(unit) or self.gathers(root=unit == "root")
                yield "shard", "all_gather", gathers, gathers * padded
                yield "shard", "reduce_scatter", self.reductions * bool(gradients), self.reductions * gradients
            if self.copies > 1 and not is_plain(layout) and gradients:
                yield "replicate", "all_reduce", self.reductions, self.reductions * gradients // self.ranks
        if self.copies == 1 or not is_plain(layout):
            return
        if communication.gradients == "powersgd":
            yield "replicate", "all_reduce", 0, compressed
            return
        for bucket in bucket_bytes(self.parameters):
            yield "replicate", "all_reduce", 1, bucket // FP32 * self.gradient_bytes

    def gathers_without_input_gradient(self, unit: str) -> int:
        """Return the gathers of a unit whose input needs no gradient, or 0 for others. FSDP frees such a unit after the
        whole backward pass. An embedding is still prefetched, and stays until the next forward pass."""
        if not self.freezes_embedding or self.layout.pp > 1:
            return 0
        if unit == "embedding.weight":
            return self.micro_batches + 1
        return min(2, self.micro_batches) if unit == "blocks.0" and self.layout.zero < 3 else 0

    def gathers(self, root: bool = False) -> int:
        """Return a unit's gathers per step. ZeRO 3 gathers for every pass, the root unit (tensors of no block) only for
        forward passes. A pipeline keeps weights after a backward pass until the next forward pass frees them."""
        layout = self.layout
        if layout.zero < 3:
            return 1
        if layout.pp == 1:
            return self.micro_batches * (1 if root else 2)
        rank, count, is_gathered = self.rank_of(self.stage), 0, False
        order = passes_of_rank(layout.schedule, layout.pp, layout.virtual_stages, self.micro_batches, rank)
        for each in order if not root else ():
            # Of split backward passes, only the first needs weights; on stage 0 it is empty and the second is whole.
            if each.stage == self.stage and each.kind != ("I" if self.first else "W"):
                count += not is_gathered
                is_gathered = each.kind != "F"
        return count or 1

    def expert_state(self, tensors: list[Parameter]) -> Iterable[Line]:
        """Yield the collectives of one layer's experts, over the ranks that hold the same ones; nothing is padded."""
        layout = self.layout
        if expert_dp(layout.dp, layout.cp, layout.ep) == 1:
            return
        elements = sum(p.elements for p in tensors)
        reduced = elements * self.gradient_bytes
        if layout.zero == 0:
            yield "expert_replicate", "all_reduce", self.reductions, self.reductions * reduced
            return
        gathers = self.gathers()
        yield "expert_shard", "all_gather", gathers, gathers * elements * FP32
        yield "expert_shard", "reduce_scatter", self.reductions, self.reductions * reduced

    # -- activations ---------------------------------------------------------------------------------------------

    def tensor_parallel(self) -> Iterable[Line]:
        """Yield one exchange of the residual stream per block and direction for attention, and one for feed-forward.

        Products' results are summed; norm outputs, and in the backward pass gradients of results, are gathered.
        Recomputation stops once it has all saved tensors: before the last sum of a block, unless dropout follows.
        """
        stream, products = (self.tokens * self.model.hidden * size for size in (FP32, self.recipe.product_bytes))
        m, blocks, ends = self.micro_batches, len(self.layers), self.first + self.last
        summed_again = len(self.recomputed_layers) * (2 if self.model.dropout else 1)
        # Ends: the embedding forward, the output layer backward.
        # The input of the first adapted block needs no gradient.
        summed = 2 * blocks + ends - int(self.first and self.freezes_embedding)
        if self.layout.sp:
            # Forward: gathered before a branch and scattered after it; backward the reverse. The same for the ends.
            widened = summed + 2 * len(self.recomputed_layers)
            yield "tp", "all_gather", (2 * blocks + widened) * m, (widened * stream + 2 * blocks * products) * m
        kind, reduced = "reduce_scatter" if self.layout.sp else "all_reduce", 2 * blocks + summed_again
        yield "tp", kind, (reduced + summed) * m, (summed * stream + reduced * products) * m
        if self.adapters is not None:
            lengths = self.adapters.messages_of_lengths([*self.layers, *self.recomputed_layers])
            yield "tp", "all_reduce", len(lengths) * m, sum(lengths) * FP32 * m
        if self.last:  # divided logits: maximum, sum of exponentials, target's logit; chunks send the last two as one
            chunk = self.recipe.loss_chunk
            calls = 2 * -(-self.tokens // chunk) if chunk else 3
            yield "tp", "all_reduce", calls * m, 3 * m * self.tokens * FP32
        yield from self.small_gradients()

    def small_gradients(self) -> Iterable[Line]:
        """Yield the sum of gradients of undivided tensors to which each rank contributes its heads or positions."""
        partial = [p for p in self.parameters if p.partial and p.trained]
        if self.layout.sp and self.adapters is None:
            partial += [
                p for p in self.parameters if ("_norm." in p.name and not p.partial) or p.name.startswith("positions.")
            ]
        if partial:
            size = sum(-(-p.shape[0] // self.ranks) * math.prod(p.shape[1:]) for p in partial) * FP32
            yield "tp", "all_reduce", 1, size

    def context_parallel(self) -> Iterable[Line]:
        m, layout = self.micro_batches, self.layout
        messages = context_messages(
            self.model, self.tokens, layout.tp, layout.cp, self.recipe.product_bytes, padded=True
        )
        buffer_bytes = messages["all_gather"][0].bytes
        gathers, reductions = (len(self.layers) + len(self.recomputed_layers)) * m, len(self.layers) * m
        yield "cp", "all_gather", gathers, gathers * buffer_bytes
        yield "cp", "reduce_scatter", reductions, reductions * buffer_bytes

    def experts(self) -> Iterable[Line]:
        """Yield the exchange of rows with experts, forward and backward, and of loads counted together; per tp rank."""
        model, moe, shared = self.model, self.model.moe, self.together > 1
        assert moe is not None
        passes = sum(moe.in_layer(layer) for layer in self.layers) * self.micro_batches
        forward = passes + sum(moe.in_layer(layer) for layer in self.recomputed_layers) * self.micro_batches
        if not passes:
            return
        if self.layout.ep > 1:
            capacity = None if shared else moe.capacity(self.tokens)
            rows = self.tokens * moe.experts_per_token if capacity is None else moe.experts * capacity
            calls = 2 * passes + 2 * forward
            yield "ep", "all_to_all", calls, calls * rows * model.hidden * self.recipe.product_bytes
            if capacity is None:  # the number of rows for each expert, before the rows
                yield "ep", "all_to_all", forward, forward * moe.experts * INT64
        if shared and moe.balance == "loss" and moe.balance_loss and self.adapters is None:  # else the router is frozen
            yield "micro_batch", "all_reduce", forward, forward * moe.experts * INT64
        if shared and moe.capacity_factor is not None:
            chosen = self.together * self.tokens * moe.experts_per_token * INT64
            yield "micro_batch", "all_gather", forward, forward * chosen

    def pipeline(self) -> Iterable[Line]:
        """Yield activations and gradients sent to stages on other ranks, and a tied weight's gradients, both ways."""
        m = self.micro_batches
        for other in (self.stage + 1, self.stage - 1):
            if 0 <= other <= self.last_stage and self.rank_of(other) != self.rank_of(self.stage):
                yield "pp", "send", m, m * message_bytes(self.model, self.layout, self.batch)
        if (
            self.adapters is None
            and self.model.tied
            and (self.first or self.last)
            and self.rank_of(0) != self.rank_of(self.last_stage)
        ):
            (weight,) = [p for p in self.parameters if p.name in ("embedding.weight", "head.weight")]
            size = -(-weight.shape[0] // self.ranks) * weight.shape[1] * FP32
            yield "pp", "send", 1, size

    def rank_of(self, stage: int) -> int:
        layout = self.layout
        return next(
            rank for rank in range(layout.pp)
            if stage in stages_of(layout.schedule, layout.pp, layout.virtual_stages, rank)
        )  # fmt: skip
