"""A layout as a configuration JSON of DeepSpeed."""

from __future__ import annotations

import json
from typing import Any

from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster.request import ClusterRequest
from ironlaw.plan.emit import first_reason
from ironlaw.workload.layout import Layout


def deepspeed_cannot(layout: Layout, model: ModelConfig) -> str | None:
    """Why its JSON cannot say this, or None."""
    return first_reason(
        (model.moe is not None,
         "DeepSpeed builds experts in the model's code (deepspeed.moe.layer.MoE), not in its JSON"),
        (layout.pp > 1, "pipeline stages are built in code there (PipelineModule), not in its JSON"),
        (layout.cp > 1, "its JSON has no context parallelism"),
        (layout.sp, "its tensor parallelism (autotp_size) does not shard the sequence: use sp=0"),
        (layout.recompute.mode in ("selective", "every"),
         "what is recomputed is decided in the model's code: use recompute=none or full"),
        (layout.shard, "it shards over all replicas since its MiCS was removed: use no shard"),
        (layout.offload in ("activations", "both") and layout.recompute.mode != "full",
         "it offloads the inputs of recomputed blocks only (cpu_checkpointing): use recompute=full"),
        (layout.offload in ("optimizer", "both") and layout.zero == 0,
         "its optimizer is offloaded with ZeRO only: use zero=1, 2 or 3"),
    )  # fmt: skip


def deepspeed_config(request: ClusterRequest, layout: Layout) -> tuple[str, list[str]]:
    zero: dict[str, Any] = {
        "stage": layout.zero,
        "overlap_comm": True,
        "reduce_scatter": True,
        "contiguous_gradients": True,
    }
    notes = [f"the model, its sequence of {request.sequence:,} tokens and {request.steps:,} steps are the script's"]
    if layout.offload in ("optimizer", "both"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    document: dict[str, Any] = {
        "train_batch_size": request.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": request.global_batch // (layout.dp * layout.micro_batch),
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
    }
    if request.precision != "fp32":
        document[request.precision] = {"enabled": True}
    if layout.tp > 1:
        document["tensor_parallel"] = {"autotp_size": layout.tp}
    if request.optimizer not in ("adam", "adamw"):
        document["zero_allow_untested_optimizer"] = True
        notes.append(f"{request.optimizer} is built in the script and passed to deepspeed.initialize")
    if layout.recompute.mode == "full":
        notes.append("recompute=full is switched on in the model: gradient_checkpointing_enable()")
    if layout.offload in ("activations", "both"):
        document["activation_checkpointing"] = {"cpu_checkpointing": True}
        notes.append("cpu_checkpointing works with deepspeed.checkpointing.checkpoint in the model's code")
    return json.dumps(document, indent=2) + "\n", notes
