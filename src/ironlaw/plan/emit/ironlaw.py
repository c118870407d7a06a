"""A layout as a config file of Ironlaw's own trainer."""

from __future__ import annotations

from typing import Any, get_args

import tomli_w

from ironlaw.plan.cluster.request import ClusterRequest
from ironlaw.workload.layout import Layout
from ironlaw.workload.optimizers import OptimizerName

IRONLAW_OPTIMIZERS = get_args(OptimizerName)


def ironlaw_config(request: ClusterRequest, layout: Layout) -> tuple[str, list[str]]:
    document: dict[str, Any] = {
        "model": request.model.model_dump(mode="json", exclude_defaults=True, exclude_none=True),
        "train": {
            "steps": request.steps,
            "global_batch": request.global_batch,
            "micro_batch": layout.micro_batch,
            "sequence": request.sequence,
            "precision": request.precision,
        },
        "optimizer": {"name": request.optimizer},
    }
    notes = ["for `ironlaw train`; [data] is yours to add"]
    if layout.recompute.mode != "none":
        document["recompute"] = layout.recompute.section()
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
