"""A layout as a config file of Ironlaw's own trainer."""

from __future__ import annotations

from typing import Any

import tomli_w

from ironlaw.model.config import ModelConfig
from ironlaw.plan.ask import Ask
from ironlaw.workload.layout import SPLIT_BACKWARD, Layout, budget_bytes, undivided
from ironlaw.workload.sharding import expert_holders

IRONLAW_OPTIMIZERS = ("adamw", "adam", "sgd", "momentum", "rmsprop", "adafactor", "adam8bit", "galore", "muon")


def ironlaw_cannot(layout: Layout, model: ModelConfig) -> str | None:
    """Why Ironlaw's own trainer cannot run this, or None."""
    if layout.offload != "none" and layout.accelerators > 1:
        return "Ironlaw's own trainer offloads on one device only so far: use offload=none"
    if layout.cp > 1 and layout.cp_kind not in (None, "all_gather"):
        return f"Ironlaw's own trainer gathers keys and values: use cp_kind=all_gather, not {layout.cp_kind}"
    if layout.recompute == "selective":
        return "its selective recomputation keeps other results than the plan's: use recompute=full or every:K"
    if layout.schedule in SPLIT_BACKWARD and (layout.zero == 3 or layout.recompute != "none"):
        return f"Ironlaw's own trainer has {layout.schedule} with neither ZeRO 3 nor recomputation: use schedule=1f1b"
    if model.moe is not None and layout.accelerators > 1:
        if layout.etp not in (None, layout.tp):
            return "Ironlaw's own trainer splits experts over tp like the rest: leave out etp"
        if layout.ep > 1 and layout.shard is not None:
            return "Ironlaw's own trainer has no expert parallelism inside hybrid sharding: leave out shard"
        holders = expert_holders(layout.dp, layout.cp, layout.ep)
        if layout.ep > 1 and layout.zero and model.hidden % holders:
            return f"Ironlaw's own trainer shards experts by hidden = {model.hidden}, not divisible by {holders} ranks"
    if reason := undivided(model, layout.tp, layout.cp, layout.ep):
        return reason
    if model.key_value_heads % layout.tp:
        return f"Ironlaw's own trainer does not copy {model.key_value_heads} key/value heads over tp = {layout.tp}"
    return None


def recomputation(layout: Layout) -> dict[str, Any]:
    """A layout's recomputation as a section of a config, or nothing."""
    if layout.recompute == "selective":
        return {"recompute": {"mode": "selective"}}
    if layout.recompute.startswith("budget:"):
        return {"recompute": {"mode": "budget", "budget": str(int(budget_bytes(layout.recompute)))}}
    if layout.recompute == "full":
        return {"recompute": {"mode": "full"}}
    return {"recompute": {"mode": "every", "every": layout.every}} if layout.recompute.startswith("every") else {}


def ironlaw_config(ask: Ask, layout: Layout) -> tuple[str, list[str]]:
    document: dict[str, Any] = {
        "model": ask.model.model_dump(mode="json", exclude_defaults=True, exclude_none=True),
        "train": {
            "steps": ask.work.steps,
            "global_batch": ask.work.global_batch,
            "micro_batch": layout.micro_batch,
            "sequence": ask.work.sequence,
            "precision": ask.precision,
        },
        "optimizer": {"name": ask.optimizer},
    }
    notes = ["for `ironlaw train`; [data] is yours to add"]
    document |= recomputation(layout)
    if layout.offload != "none":
        document["train"]["offload"] = layout.offload
    if layout.accelerators > 1:
        words = ("dp", "zero", "shard", "tp", "sp", "pp", "virtual_stages", "schedule", "cp", "ep")
        plain = Layout()
        document["layout"] = {
            word: getattr(layout, word)
            for word in words
            if word == "dp" or getattr(layout, word) != getattr(plain, word)
        }
        notes.append(f"start {layout.accelerators} processes with torchrun, one per device")
    return tomli_w.dumps(document), notes
