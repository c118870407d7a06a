"""The dimensions of a job's mesh: which ranks make a group, and which groups are the same ranks under two names.

Ranks are placed tp, cp, dp, pp from the inside out; `shard` and `replicate` are how dp and cp hold the state.
"""

from __future__ import annotations

from ironlaw.model.config import ModelConfig
from ironlaw.workload.layout import Layout
from ironlaw.workload.recipe import Recipe, StepBatch
from ironlaw.workload.sharding import expert_dp, of_site


def replicas_of(layout: Layout) -> tuple[int, int]:
    """Ranks that share a copy of the state, and copies."""
    return layout.sharing, layout.dp * layout.cp // layout.sharing


def aliases_of(model: ModelConfig, layout: Layout, batch: StepBatch, recipe: Recipe) -> dict[str, str]:
    """Dimensions whose groups have the same ranks as another's: a run counts both under the name of the first.

    `world` stays apart: what all ranks agree on there shows how long they wait for the slowest.
    """
    inner = of_site(layout, recipe.communication)
    names = ["replicate", "shard", "tp", "pp", "expert_replicate", "expert_shard", "ep", "cp"]
    groups = {name: group_of(inner, name) for name in names}
    groups["site"] = layout.dp // inner.dp, inner.accelerators
    if model.moe is not None:
        groups["micro_batch"] = counted_together(layout, batch) * layout.cp, layout.tp
    first: dict[tuple[int, int], str] = {}
    aliases = {}
    for name in ("replicate", "shard", "tp", "pp", "site", "micro_batch", *names[4:]):
        if groups.get(name, (1, 1))[0] > 1 and first.setdefault(groups[name], name) != name:
            aliases[name] = first[groups[name]]
    return aliases


def group_of(layout: Layout, dimension: str) -> tuple[int, int]:
    """Ranks of one group of a mesh dimension, and the distance between neighbours in it."""
    tp, ep, (shard, copies) = layout.tp, layout.ep, replicas_of(layout)
    same_experts = (expert_dp(layout.dp, layout.cp, ep), tp * ep) if ep > 1 else (1, 1)
    return {
        "world": (layout.accelerators, 1), "tp": (tp, 1), "shard": (shard, tp), "replicate": (copies, tp * shard),
        "pp": (layout.pp, tp * shard * copies), "cp": (layout.cp, tp), "ep": (ep, tp),
        "micro_batch": (max(2, layout.cp), tp),  # who count experts' load together: of one sequence, or two replicas
        "expert_shard": same_experts if layout.zero else (1, 1),
        "expert_replicate": (1, 1) if layout.zero else same_experts,
    }[dimension]  # fmt: skip


def counted_together(layout: Layout, batch: StepBatch) -> int:
    """Replicas whose sequences are one micro-batch of the config, of which the load of experts is counted."""
    return max(1, batch.counted // (batch.sequences // layout.dp))
