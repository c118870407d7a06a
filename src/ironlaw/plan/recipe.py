"""Conversion of a config into the planner's recipe, and the plan's decisions where the config leaves them open: the
attention kernel and recomputation under a memory budget.

The policies of one block form a frontier of kept bytes against seconds of recomputation, from the same operations and
times as the rest of the plan. A path leads from "keep everything" to "keep nothing", layer by layer along the convex
hull of this frontier; each step costs the fewest seconds per byte freed. The first point that fits is taken.
By convexity, no other mixture of layers that fits is faster by more than one layer's choice.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, pairwise
from math import inf
from typing import Any, TypeVar, cast

from ironlaw import units
from ironlaw.catalog.formats import number_format, precision_recipe
from ironlaw.config import LayoutConfig, RunConfig, build_config
from ironlaw.errors import UserError
from ironlaw.machine.profile import Profile
from ironlaw.machine.timing import measured_precision
from ironlaw.model.config import ModelConfig
from ironlaw.plan.memory import highest_peak
from ironlaw.schema import refuse
from ironlaw.workload.blocks import FP32, Policy, Precision, Shape
from ironlaw.workload.division import local_shape
from ironlaw.workload.kinds import forward_of, layer_groups
from ironlaw.workload.layout import SPLIT_BACKWARD, Layout, reason_indivisible
from ironlaw.workload.operations import Operation
from ironlaw.workload.optimizers import ELEMENTWISE, MATRIX_OPTIMIZERS, PAGED, QUANTIZED
from ironlaw.workload.program import micro_batch_shape
from ironlaw.workload.recipe import Recipe, StepBatch
from ironlaw.workload.recompute import keepable, kept_bytes, kept_results, policies, recomputed_operations
from ironlaw.workload.sections import KEEPABLE
from ironlaw.workload.sharding import expert_dp

FULL_LOGITS_BYTES = 64 * 2**20  # above this, three copies of the logits dominate the peak of a small machine
CHUNK_BYTES = {False: 128 * 2**20, True: 2**30}  # by whether the device is CUDA


def batch_of(config: RunConfig) -> StepBatch:
    return StepBatch(
        config.train.global_batch, config.sequence, config.data.masks_documents, config.data.packing == "best_fit",
        config.micro_batch,
    )  # fmt: skip


def layout_of(layout: LayoutConfig, micro_batch: int) -> Layout:
    """Returns the config's layout with the micro-batch size (sequences) and, if it leaves `dp` open, one replica."""
    return Layout(**layout.model_dump() | {"dp": layout.dp or 1}, micro_batch=micro_batch)


def micro_batch_of(config: RunConfig, share: int, stages: int | None = None) -> int:
    """Returns the sequences per forward pass of a replica with `share` sequences per step: train.micro_batch, or the
    largest divisor of `share` below it, so that a job can continue on fewer ranks with the same config.

    If train.micro_batch is not set, there are four micro-batches per pipeline stage (`stages`, default: the config's)
    if the share allows: the bubble is then at most a fifth of the step (arXiv 2104.04473, section 2.2).
    """
    if stages is None:
        stages = config.layout.pp if config.layout is not None else 1
    wanted = config.micro_batch
    if config.train.micro_batch is None and stages > 1:
        wanted = max(1, share // (4 * stages))
    return next(size for size in range(min(wanted, share), 0, -1) if share % size == 0)


def recipe_of(
    config: RunConfig, precision: str, *, cuda: bool = False, onednn: bool = False, gloo: bool = True
) -> Recipe:
    """Returns the recipe of a config. A recomputation budget has no effect until `within_budget` solves it."""
    return Recipe(
        cast(Precision, number_format(precision).held_as), cuda, onednn, gloo,
        policies(config.recompute, config.model), loss_chunk(config, cuda), config.optimizer, config.communication,
        config.train.offload, config.train.average_decay is not None,
        0 < config.checkpoint.every < config.train.steps,
        compiled=config.train.compile in ("on", "graphs") or (config.train.compile == "auto" and cuda),
    )  # fmt: skip


def loss_chunk(config: RunConfig, cuda: bool = False) -> int:
    """Returns the number of tokens whose logits exist at a time; 0 means all of a micro-batch.

    A chunk is an eighth of the micro-batch, but at most 128 MiB of logits (1 GiB on CUDA, whose products and launches
    want more rows), and at least 64 tokens: products of fewer are slow. There are no chunks if the logits are more than
    a product or the objective needs all of them.
    """
    if not config.model.logits_are_a_product or config.objective.needs_logits:
        return 0
    tokens, row = config.micro_batch * config.sequence, config.model.vocab * FP32
    wanted = config.train.loss == "chunked" or (config.train.loss == "auto" and tokens * row > FULL_LOGITS_BYTES)
    return max(64, min(-(-tokens // 8), CHUNK_BYTES[cuda] // row)) if wanted else 0


NOT_ON_THE_HOST = (*QUANTIZED, *PAGED, *MATRIX_OPTIMIZERS)


def check_supported(config: RunConfig, device: str) -> None:
    """Raises UserError for settings that this kind of device cannot run; a CUDA device is checked in training."""
    train, optimizer, cuda = config.train, config.optimizer.name, device == "cuda"
    offload = f'train.offload = "{train.offload}"'
    refuse((
        (train.offloads_optimizer and optimizer in NOT_ON_THE_HOST,
         f'{offload} updates on the host, which {optimizer} does not: use optimizer.name = "adamw"'),
        (train.offloads_optimizer and train.precision == "fp16",
         f'{offload} updates on the host, where no loss scale is undone: use train.precision = "bf16"'),
        (not cuda and train.precision == "tf32",
         'train.precision = "tf32" needs an NVIDIA GPU; a CPU computes fp32 in full: use "fp32"'),
        (not cuda and train.compile == "graphs",
         'train.compile = "graphs" needs CUDA graphs, which a CPU has not: use train.compile = "on"'),
        (not cuda and optimizer in PAGED,
         f'optimizer.name = "{optimizer}" pages its state between a GPU and the host, and there is no GPU: use '
         f'"{"adam8bit" if optimizer in QUANTIZED else "adamw"}"'),
        (not cuda and train.offload != "none",
         f'{offload} moves memory from a GPU to the host, and there is no GPU: use "none"'),
    ))  # fmt: skip


def not_trained_here(
    layout: Layout, model: ModelConfig, precision: str = "", optimizer: str = "adamw"
) -> str | None:  # fmt: skip
    """Returns the reason why Ironlaw's own trainer cannot run this layout, or None."""
    if optimizer not in ELEMENTWISE and (layout.zero or layout.tp * layout.pp * layout.ep > 1):
        return (
            f"optimizer.name = {optimizer!r} works on whole tensors and this layout divides them: use one of "
            f"{', '.join(ELEMENTWISE)}, or dp alone with layout.zero = 0"
        )
    if precision_recipe(precision) and layout.accelerators > 1:
        return f"Ironlaw's own trainer multiplies in {precision} on one device only so far: use precision bf16"
    if precision_recipe(precision) and model.moe is not None:
        return f"Ironlaw's own trainer has no experts in {precision} yet: use precision bf16"
    if layout.offload != "none" and layout.accelerators > 1:
        return "Ironlaw's own trainer offloads on one device only so far: use offload=none"
    if layout.cp > 1 and layout.cp_kind not in (None, "all_gather"):
        return f"Ironlaw's own trainer gathers keys and values: use cp_kind=all_gather, not {layout.cp_kind}"
    if layout.schedule in SPLIT_BACKWARD and (layout.zero == 3 or layout.recompute.mode != "none"):
        # Between the two backward passes, ZeRO 3 may free weights, and gradients of freed weights are lost;
        # PyTorch recomputes a block for each group of its weights, ten times.
        return f"Ironlaw's own trainer has {layout.schedule} with neither ZeRO 3 nor recomputation: use schedule=1f1b"
    if model.moe is not None and layout.accelerators > 1:
        if layout.etp not in (None, layout.tp):
            return "Ironlaw's own trainer splits experts over tp like the rest: leave out etp"
        if layout.ep > 1 and layout.shard is not None:
            return "Ironlaw's own trainer has no expert parallelism inside hybrid sharding: leave out shard"
        sharing = expert_dp(layout.dp, layout.cp, layout.ep)
        if layout.ep > 1 and layout.zero and model.hidden % sharing:
            return f"Ironlaw's own trainer shards experts by hidden = {model.hidden}, not divisible by {sharing} ranks"
    if reason := reason_indivisible(model, layout.tp, layout.cp, layout.ep):
        return reason
    if model.key_value_heads % layout.tp:
        return f"Ironlaw's own trainer does not copy {model.key_value_heads} key/value heads over tp = {layout.tp}"
    return None


def recipe_of_layout(
    model: ModelConfig, layout: Layout, sequence: int, global_batch: int, precision: str, optimizer: str,
    config: RunConfig | None = None,
) -> tuple[StepBatch, Recipe]:  # fmt: skip
    """Returns batch and recipe of Ironlaw's trainer on accelerators; other settings are those of `config`, if any."""
    document: dict[str, Any] = config.model_dump(exclude_none=True, exclude={"layout"}) if config else {}
    document["train"] = document.get("train", {}) | {
        "sequence": sequence, "global_batch": global_batch, "micro_batch": layout.micro_batch,
        "precision": precision, "offload": layout.offload,
    }  # fmt: skip
    document["optimizer"] = document.get("optimizer", {}) | {"name": optimizer}
    document["recompute"] = layout.recompute.section()
    document["model"] = model.model_dump(mode="json", exclude_none=True)
    settled = build_config(document)
    return batch_of(settled), recipe_of(settled, precision, cuda=True, gloo=False)


# -- decisions of a plan --------------------------------------------------------------------------------------------


T = TypeVar("T")


@dataclass(frozen=True)
class Decision:
    """A choice of the planner and its reason."""

    value: str
    reason: str


def choose_attention(config: RunConfig, recipe: Recipe, profile: Profile) -> tuple[Recipe, Decision]:
    """Returns `recipe` with the attention kernel that the config names, or with "auto" the faster one on this machine:
    PyTorch's "fused" or Ironlaw's "native".

    Raises UserError if the named kernel cannot compute this attention.
    """
    wanted, native = config.train.attention, replace(recipe, native=True)
    measured = measured_precision(recipe.precision, profile)
    shape = micro_batch_shape(config.model, config.micro_batch, batch_of(config), recipe)
    possible = shape.is_plain_attention and config.layout is None and profile.device == "cpu"
    if wanted == "native" and not possible:
        raise UserError(
            'train.attention = "native" is plain causal attention of one process on a CPU, without dropout, windows, '
            'documents apart or recomputation: use train.attention = "auto"'
        )
    if wanted == "native" and measured not in profile.native_attention:
        raise UserError(
            'train.attention = "native" was not measured on this machine: run `ironlaw measure` again where there is '
            "a C compiler"
        )
    if wanted != "auto":
        return (native if wanted == "native" else recipe), Decision(wanted, "train.attention in the config")
    if not possible:
        return recipe, Decision("fused", "what attention is here, no other kernel computes")
    if not profile.native_is_faster(measured, config.sequence, config.model.size_of_head):
        return recipe, Decision("fused", "as fast as Ironlaw's own at this shape, as measured")
    return native, Decision("native", "takes less time than PyTorch's fused kernel at this shape, as measured")


@dataclass(frozen=True)
class Choice:
    """One block under one policy: bytes kept for its backward pass and seconds of recomputation."""

    policy: Policy
    held_bytes: int
    seconds: float


def choices(shape: Shape, seconds: Callable[[Operation], float], kind: str = "block") -> list[Choice]:
    """Returns the convex hull of all policies of a block, from all kept to least kept.

    `seconds` returns the time of one call of an operation; `kind` is the group of the block's operations.
    """
    saved = sum(op.saved_bytes for op in forward_of(shape, kind))
    result = shape.tokens * shape.model.hidden * FP32
    names = [name for name in KEEPABLE if name in keepable(shape.model, kind)]
    subsets = (frozenset(some) for size in range(len(names) + 1) for some in combinations(names, size))
    sets = {kept_results(shape, subset) for subset in subsets}
    found = [Choice(None, saved, 0.0)]
    for policy in sets:
        time = sum(seconds(op) for op in recomputed_operations(shape, policy, kind) if op.repeat)
        found.append(Choice(policy, result + kept_bytes(shape, policy, kind), time))
    return _hull(found)


def _hull(found: list[Choice]) -> list[Choice]:
    """Returns the lower convex hull from the most bytes to the fewest; each step costs the fewest seconds per byte."""
    hull = [min(found, key=lambda c: (c.seconds, c.held_bytes))]
    while True:
        last = hull[-1]
        smaller = [c for c in found if c.held_bytes < last.held_bytes]
        if not smaller:
            return hull
        hull.append(min(smaller, key=partial(_seconds_per_byte, last)))


def _seconds_per_byte(last: Choice, choice: Choice) -> tuple[float, int]:
    """Sort key of a step: its slope, then its bytes; of equal slopes, the smallest needs no step in between."""
    slope = (choice.seconds - last.seconds) / (last.held_bytes - choice.held_bytes)
    return slope, choice.held_bytes


def first_within(path: Sequence[T], budget_bytes: float, peak_bytes: Callable[[T], float], limit: float = inf) -> T:
    """Returns the first point within a memory budget on a path along which seconds rise and bytes fall. Raises
    UserError if the last point exceeds the budget; `limit` is the device's memory in bytes."""
    least = peak_bytes(path[-1])
    if least > budget_bytes:
        advice = "raise the budget to that, shard more, or lower train.micro_batch"
        if least > limit:
            advice = f"more than the {units.bytes_(limit)} of the device: shard more, or lower train.micro_batch"
        # Round up to whole MiB, so that the named size is enough.
        raise UserError(
            f"a recomputation budget of {units.bytes_(budget_bytes)} is too little: the step needs "
            f"{math.ceil(least / 2**20)} MiB even with every block recomputed: {advice}"
        )
    return path[bisect_left(path, True, key=lambda point: peak_bytes(point) <= budget_bytes)]


def mixtures(shape: Shape, seconds: Callable[[Operation], float]) -> list[tuple[Policy, ...]]:
    """Returns policies of all layers, from no to full recomputation; each step costs the fewest seconds per byte freed.

    The first layers recompute first: when the backward pass reaches them, the later layers have freed theirs.
    """
    kinds = layer_groups(shape.model)
    moves = []  # (seconds per byte, kind, the choice it leads to)
    for kind in dict.fromkeys(kinds):
        hull = choices(shape, seconds, kind)
        moves += [(_seconds_per_byte(a, b)[0], kind, b.policy) for a, b in pairwise(hull)]
    moves.sort(key=lambda move: move[0])  # stable, and slopes rise along a hull: the order within a hull stays
    path, mixed = list[tuple[Policy, ...]]([()]), list[Policy]([None] * len(kinds))
    for _, of, policy in moves:
        for layer in (n for n, kind in enumerate(kinds) if kind == of):
            mixed[layer] = policy
            path.append(tuple(mixed))
    return path


def within_budget(
    model: ModelConfig, batch: StepBatch, layout: Layout, recipe: Recipe, budget_bytes: float,
    seconds: Callable[[Operation], float], limit: float = inf,
) -> Recipe:  # fmt: skip
    """Returns the recipe with one policy per layer, such that the layout's fullest rank stays within the budget."""
    shape = local_shape(micro_batch_shape(model, layout.micro_batch, batch, recipe), layout)

    def peak(policies: tuple[Policy, ...]) -> float:
        return highest_peak(model, batch, layout, replace(recipe, recompute=policies))[1].total

    return replace(recipe, recompute=first_within(mixtures(shape, seconds), budget_bytes, peak, limit))
