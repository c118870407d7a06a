"""A layout as the configuration of DeepSpeed (JSON) or of Accelerate (YAML: plain, FSDP, or its Megatron plugin)."""

from __future__ import annotations

import json
from typing import Any

from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster.estimate import ClusterRequest
from ironlaw.plan.emit import first_reason
from ironlaw.workload.layout import Layout


def deepspeed_cannot(layout: Layout, model: ModelConfig) -> str | None:
    """Returns why DeepSpeed's JSON cannot express this layout, or None."""
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


def accelerate_cannot(layout: Layout, model: ModelConfig) -> str | None:
    """Returns why Accelerate's configuration cannot express this layout, or None."""
    plain, zero, word = layout.tp == layout.pp == 1, layout.zero, layout.recompute.mode
    fsdp = plain and zero in (0, 2, 3) and not (zero == 0 and word == "full")
    megatron = not fsdp
    return first_reason(
        (model.moe is not None, "its options say nothing of experts"),
        (layout.cp > 1, "its context parallelism is not written by this planner"),
        (layout.offload != "none",
         "its CPU offload moves the weights too, which this planner does not plan: use offload=none"),
        (layout.schedule != "1f1b", "its pipelines have the 1f1b schedule only"),
        (word == "every", "it recomputes whole blocks, all of them or none"),
        (fsdp and word != "none" and not (word == "full" and zero >= 2),
         "its FSDP configuration recomputes whole blocks or nothing"),
        (megatron and zero > 1,
         "FSDP with tensor parallelism needs a model with a plan of its own: use zero=0 or 1"),
        (megatron and layout.shard, "its Megatron-LM plugin shards over all replicas: use no shard"),
        (megatron and layout.virtual_stages > 1, "its Megatron-LM plugin has no virtual stages"),
        (megatron and word == "full", "its Megatron-LM plugin recomputes selectively or nothing"),
        (megatron and model.layers % layout.pp,
         f"{model.layers} layers are not divisible by pp = {layout.pp}"),
    )  # fmt: skip


def accelerate_config(request: ClusterRequest, layout: Layout) -> tuple[str, list[str]]:
    accumulation = request.global_batch // (layout.dp * layout.micro_batch)
    document: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE"}
    notes = [
        f"in the script: batches of {layout.micro_batch} sequences of {request.sequence:,} tokens per process, "
        f"Accelerator(gradient_accumulation_steps={accumulation})"
    ]
    if request.optimizer not in ("adam", "adamw"):
        notes.append(f"{request.optimizer} is built in the script")
    if layout.tp == layout.pp == 1 and layout.zero >= 2:
        document |= _fsdp(layout)
    elif layout.tp == layout.pp == 1 and layout.zero == 0 and layout.recompute.mode == "none":
        document["distributed_type"] = "MULTI_GPU" if layout.dp > 1 else "NO"
    else:
        document |= _megatron(layout, accumulation)
        notes[0] = f"in the script: micro-batches of {layout.micro_batch} sequences of {request.sequence:,} tokens"
    document |= {
        "mixed_precision": {"fp32": "NO"}.get(request.precision, request.precision),
        "num_machines": request.cluster.nodes,
        "num_processes": layout.accelerators,
    }
    return f"# {request.model.name}, {request.cluster}: {layout}\n" + _yaml(document), notes


def _fsdp(layout: Layout) -> dict[str, Any]:
    result: dict[str, Any] = {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": layout.zero == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": layout.recompute.mode == "full",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_offload_params": False,
        },
    }
    if layout.shard is not None:
        result["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": layout.dp // layout.shard,
            "parallelism_config_dp_shard_size": layout.shard,
        }
    return result


def _megatron(layout: Layout, accumulation: int) -> dict[str, Any]:
    return {
        "distributed_type": "MEGATRON_LM",
        "megatron_lm_config": {
            "megatron_lm_tp_degree": layout.tp,
            "megatron_lm_pp_degree": layout.pp,
            "megatron_lm_num_micro_batches": accumulation,
            "megatron_lm_sequence_parallelism": layout.sp,
            "megatron_lm_recompute_activations": layout.recompute.mode == "selective",
            "megatron_lm_use_distributed_optimizer": layout.zero == 1,
            "megatron_lm_gradient_clipping": 1.0,
        },
    }


def _yaml(document: dict[str, Any], indent: str = "") -> str:
    """Returns nested mappings of plain scalars as YAML, which is all these files need."""
    lines = []
    for key, value in document.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{key}:\n{_yaml(value, indent + '  ')}")
        else:
            shown = str(value).lower() if isinstance(value, bool) else "'NO'" if value == "NO" else str(value)
            lines.append(f"{indent}{key}: {shown}\n")
    return "".join(lines)
