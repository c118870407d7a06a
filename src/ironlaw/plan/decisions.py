"""What a plan decides where a config leaves it open: precision, attention kernel, recomputation under a budget.

Choices of one block under a budget form a frontier of kept bytes against seconds of recomputation, from the same
operations and times as the rest of the plan. Going from "keep everything" to "keep nothing", layer by layer along the
convex hull of that frontier, each step gives up the fewest seconds per byte; the first point of that path that fits is
taken. By convexity no other mixture of layers that fits is more than one layer's choice faster.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, pairwise
from math import inf
from typing import TypeVar

from ironlaw import units
from ironlaw.config import RunConfig
from ironlaw.errors import UserError
from ironlaw.machine.profile import Profile
from ironlaw.machine.timing import measured_precision
from ironlaw.model.config import ModelConfig
from ironlaw.plan.memory import highest_peak
from ironlaw.plan.recipe import batch_of
from ironlaw.workload.blocks import FP32, Policy, Shape
from ironlaw.workload.division import local_shape
from ironlaw.workload.kinds import forward_of, layer_groups
from ironlaw.workload.layout import Layout
from ironlaw.workload.operations import Operation
from ironlaw.workload.program import micro_batch_shape
from ironlaw.workload.recipe import Recipe, StepBatch
from ironlaw.workload.recompute import again, effective, keepable, kept_bytes
from ironlaw.workload.sections import KEEPABLE

T = TypeVar("T")


@dataclass(frozen=True)
class Decision:
    """What a plan decided on, and why."""

    value: str
    reason: str


def choose_attention(config: RunConfig, recipe: Recipe, profile: Profile) -> tuple[Recipe, Decision]:
    """`recipe` with the kernel that the config names, or with `auto` the one that takes less time here: PyTorch's
    "fused" one, or our "native" one.

    UserError where the one that it names cannot compute this attention.
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
    """One block under one policy: bytes it holds for its backward pass and seconds it computes a second time."""

    policy: Policy
    held_bytes: int
    seconds: float


def choices(shape: Shape, seconds: Callable[[Operation], float], kind: str = "block") -> list[Choice]:
    """The convex hull of all policies of a block, from everything kept to least kept.

    `seconds`: of one call of an operation. `kind`: the group of the block's operations.
    """
    saved = sum(op.saved_bytes for op in forward_of(shape, kind))
    result = shape.tokens * shape.model.hidden * FP32
    names = [name for name in KEEPABLE if name in keepable(shape.model, kind)]
    sets = {effective(shape, frozenset(some)) for size in range(len(names) + 1) for some in combinations(names, size)}
    found = [Choice(None, saved, 0.0)]
    for policy in sets:
        time = sum(seconds(op) for op in again(shape, policy, kind) if op.repeat)
        found.append(Choice(policy, result + kept_bytes(shape, policy), time))
    return _hull(found)


def _hull(found: list[Choice]) -> list[Choice]:
    """From the most bytes to the fewest, each step the one that gives up the fewest seconds per byte."""
    hull = [min(found, key=lambda c: (c.seconds, c.held_bytes))]
    while True:
        last = hull[-1]
        smaller = [c for c in found if c.held_bytes < last.held_bytes]
        if not smaller:
            return hull
        hull.append(min(smaller, key=partial(_seconds_per_byte, last)))


def _seconds_per_byte(last: Choice, choice: Choice) -> tuple[float, int]:
    """Of equals the smallest, which needs no step in between."""
    slope = (choice.seconds - last.seconds) / (last.held_bytes - choice.held_bytes)
    return slope, choice.held_bytes


def first_within(path: Sequence[T], budget_bytes: float, peak_bytes: Callable[[T], float], limit: float = inf) -> T:
    """Of a path along which seconds rise and bytes fall, the first point whose step stays within a budget. UserError
    where not even the last one does; `limit`: of the device."""
    least = peak_bytes(path[-1])
    if least > budget_bytes:
        advice = "raise the budget to that, shard more, or lower train.micro_batch"
        if least > limit:
            advice = f"more than the {units.bytes_(limit)} of the device: shard more, or lower train.micro_batch"
        # In whole MiB, not rounded down: the size that it names is enough.
        raise UserError(
            f"a recomputation budget of {units.bytes_(budget_bytes)} is too little: the step needs "
            f"{math.ceil(least / 2**20)} MiB even with every block recomputed: {advice}"
        )
    return path[bisect_left(path, True, key=lambda point: peak_bytes(point) <= budget_bytes)]


def mixtures(shape: Shape, seconds: Callable[[Operation], float]) -> list[tuple[Policy, ...]]:
    """Policies of all layers from nothing recomputed to everything, each with the fewest seconds per byte given up.

    Layers that recompute come first: when it is their turn in the backward pass, the others have let go of theirs.
    """
    kinds = layer_groups(shape.model)
    moves = []  # (seconds per byte, kind, the choice it leads to)
    for kind in dict.fromkeys(kinds):
        hull = choices(shape, seconds, kind)
        moves += [(_seconds_per_byte(a, b)[0], kind, b.policy) for a, b in pairwise(hull)]
    moves.sort(key=lambda move: move[0])  # stable, and a hull's own slopes rise: no choice is passed over
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
    """The recipe with one policy per layer, so that the rank of the layout that holds most stays within the budget."""
    shape = local_shape(micro_batch_shape(model, layout.micro_batch, batch, recipe), layout)

    def peak(policies: tuple[Policy, ...]) -> float:
        return highest_peak(model, batch, layout, replace(recipe, recompute=policies))[1].total

    return replace(recipe, recompute=first_within(mixtures(shape, seconds), budget_bytes, peak, limit))
