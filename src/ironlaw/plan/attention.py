"""Which kernel computes attention: what the config names, or what takes less time at this shape on this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ironlaw.config import RunConfig
from ironlaw.errors import UserError
from ironlaw.machine.profile import Profile
from ironlaw.plan.machines import measured_precision
from ironlaw.plan.memory import peak_memory
from ironlaw.plan.recipe import batch_of
from ironlaw.workload.layout import Layout
from ironlaw.workload.program import micro_batch_shape, step
from ironlaw.workload.recipe import Recipe


@dataclass(frozen=True)
class AttentionChoice:
    """The kernel, "fused" or "blocked", and why."""

    value: str
    reason: str


def choose_attention(config: RunConfig, recipe: Recipe, profile: Profile) -> tuple[Recipe, AttentionChoice]:
    """`recipe` with the kernel that the config names, or with `auto` the one that takes less time here.

    UserError where the one that it names cannot compute this attention.
    """
    wanted, blocked = config.train.attention, replace(recipe, blocked=True)
    batch, measured = batch_of(config), measured_precision(recipe.precision, profile)
    shape = micro_batch_shape(config.model, config.micro_batch, batch, recipe)
    possible = shape.can_block_attention and config.layout is None and profile.device == "cpu"
    if wanted == "blocked" and not possible:
        raise UserError(
            'train.attention = "blocked" is plain causal attention of one process on a CPU, without dropout, windows, '
            'documents apart or recomputation: use train.attention = "auto"'
        )
    if wanted == "blocked" and measured not in profile.blocked_attention:
        raise UserError("attention in blocks has not been measured on this machine: run `ironlaw measure` again")
    if wanted != "auto":
        return (blocked if wanted == "blocked" else recipe), AttentionChoice(wanted, "train.attention in the config")
    if not possible:
        return recipe, AttentionChoice("fused", "what attention is here, no other kernel computes")
    if not profile.blocked_is_faster(measured, config.sequence, config.model.size_of_head):
        reason = "as fast as attention in blocks at this shape, as measured, and it keeps less"
        return recipe, AttentionChoice("fused", reason)
    held = peak_memory(step(config.model, batch, Layout(micro_batch=config.micro_batch), blocked)).total
    if held + profile.runtime_bytes > profile.memory_bytes:
        reason = "attention in blocks is faster here, but its scores do not fit into memory"
        return recipe, AttentionChoice("fused", reason)
    return blocked, AttentionChoice("blocked", "takes less time than the fused kernel at this shape, as measured here")
