"""A chosen layout as another trainer's own options.

    trainer = trainer_named("torchtitan")
    trainer.cannot(layout, model)            # None, or in one line why this layout cannot be written for it
    emit("torchtitan", ask, layout)          # {"trainer": .., "format": .., "text": .., "notes": [..]}

What a trainer has no option for is refused, never approximated: options that run another layout than the planned one
would make the plan wrong without anybody noticing. Option names are those of the public documentation and sources of
torchtitan (the TOML job config of 2025), Megatron-LM (`megatron/training/arguments.py`), DeepSpeed (configuration JSON)
and Accelerate (`accelerate config` YAML, FSDP version 2 and Megatron-LM plugin).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tomli_w

from ironlaw.errors import UserError, did_you_mean
from ironlaw.model.config import ModelConfig
from ironlaw.plan.ask import Ask
from ironlaw.plan.emit_megatron import megatron_cannot, megatron_flags
from ironlaw.plan.layout import Layout

ENGINE_OF_TRAINER = {
    "torchtitan": "torchtitan",
    "megatron": "megatron-core",
    "deepspeed": "megatron-deepspeed",
    "accelerate": "composer-fsdp",
    "ironlaw": "generic",
}
"""Whose constants a plan for that trainer uses unless told otherwise."""


@dataclass(frozen=True)
class Trainer:
    """`cannot`: why a layout cannot be written, or None; `write`: the text and notes that go with it."""

    name: str
    format: str
    precisions: tuple[str, ...]
    cannot: Callable[[Layout, ModelConfig], str | None]
    write: Callable[[Ask, Layout], tuple[str, list[str]]]


def trainer_named(name: str) -> Trainer:
    if name not in TRAINERS:
        raise UserError(f"cannot emit options for '{name}': {did_you_mean(name, TRAINERS)}")
    return TRAINERS[name]


def emit(name: str, ask: Ask, layout: Layout) -> dict[str, Any]:
    """The options of trainer `name`. UserError when they cannot say this layout."""
    trainer = trainer_named(name)
    if reason := trainer.cannot(layout, ask.model):
        raise UserError(f"layout '{layout}' cannot be written for {name}: {reason}")
    if ask.precision not in trainer.precisions:
        raise UserError(
            f"{ask.precision} cannot be written as options of {name}: use --precision {' or '.join(trainer.precisions)}"
        )
    text, notes = trainer.write(ask, layout)
    return {"trainer": name, "format": trainer.format, "text": text, "notes": notes}


def _accumulation(ask: Ask, layout: Layout) -> int:
    return ask.work.global_batch // (layout.dp * layout.micro_batch)


def _dimensions(model: ModelConfig) -> str:
    return (
        f"{model.layers} layers, {model.hidden} hidden, {model.heads} heads ({model.key_value_heads} key/value), "
        f"{model.ffn_size} feed-forward, vocabulary {model.vocab}"
    )


# torchtitan


def _torchtitan_cannot(layout: Layout, model: ModelConfig) -> str | None:
    if model.moe is not None:
        return "torchtitan builds experts in a model's own code, not in its options"
    if layout.tp > 1 and not layout.sp:
        return "its tensor parallelism always shards the sequence too (sp=1)"
    if layout.zero == 1:
        return "it has no sharding of the optimizer state alone (zero=0, 2 or 3)"
    if layout.zero == 0 and layout.dp > 1 and layout.tp * layout.pp * layout.cp > 1:
        return "its replicated data parallelism does not combine with other kinds: use zero=2 or 3"
    if layout.zero == 0 and layout.cp > 1:
        return "context parallel ranks always shard the weights there: use zero=2 or 3"
    if model.layers % (layout.pp * layout.virtual_stages):
        return f"{model.layers} layers are not divisible by {layout.pp * layout.virtual_stages} stages"
    return None


def _torchtitan(ask: Ask, layout: Layout) -> tuple[str, list[str]]:
    accumulation = _accumulation(ask, layout)
    sharded = layout.zero >= 2
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": 1 if sharded else layout.dp,
        "data_parallel_shard_degree": layout.dp if sharded else 1,
        "fsdp_reshard_after_forward": "always" if layout.zero == 3 else "never",
        "tensor_parallel_degree": layout.tp,
        "pipeline_parallel_degree": layout.pp,
        "context_parallel_degree": layout.cp,
    }
    local = layout.micro_batch
    if layout.pp > 1:
        local = layout.micro_batch * accumulation
        stages = layout.pp * layout.virtual_stages
        parallelism |= {
            "pipeline_parallel_schedule": "Interleaved1F1B" if layout.virtual_stages > 1 else "1F1B",
            "pipeline_parallel_microbatch_size": layout.micro_batch,
            "pipeline_parallel_layers_per_stage": ask.model.layers // stages,
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
        }
    recompute: dict[str, Any] = {"mode": layout.recompute}
    if layout.recompute == "selective":
        recompute["selective_ac_option"] = "op"
    document = {
        "training": {
            "local_batch_size": local,
            "global_batch_size": ask.work.global_batch,
            "seq_len": ask.work.sequence,
            "steps": ask.work.steps,
            "mixed_precision_param": "bfloat16",
            "mixed_precision_reduce": "float32",
        },
        "parallelism": parallelism,
        "activation_checkpoint": recompute,
        "compile": {"enable": True},
    }
    header = [
        f"# {ask.model.name}, {ask.cluster}: {layout}",
        f"# [model] name and flavor: one with {_dimensions(ask.model)}",
    ]
    notes = ["keys of torchtitan's TOML job config (2025); later releases take the same names in Python configs"]
    return "\n".join(header) + "\n\n" + tomli_w.dumps(document), notes


# DeepSpeed


def _deepspeed_cannot(layout: Layout, model: ModelConfig) -> str | None:
    if model.moe is not None:
        return "DeepSpeed builds experts in the model's code (deepspeed.moe.layer.MoE), not in its JSON"
    if layout.pp > 1:
        return "pipeline stages are built in code there (PipelineModule), not in its JSON"
    if layout.cp > 1:
        return "its JSON has no context parallelism"
    if layout.sp:
        return "its tensor parallelism (autotp_size) does not shard the sequence: use sp=0"
    if layout.recompute == "selective":
        return "what is recomputed is decided in the model's code: use recompute=none or full"
    return None


def _deepspeed(ask: Ask, layout: Layout) -> tuple[str, list[str]]:
    document: dict[str, Any] = {
        "train_batch_size": ask.work.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": _accumulation(ask, layout),
        ask.precision: {"enabled": True},
        "zero_optimization": {
            "stage": layout.zero,
            "overlap_comm": True,
            "reduce_scatter": True,
            "contiguous_gradients": True,
        },
        "gradient_clipping": 1.0,
    }
    notes = [f"the model, its sequence of {ask.work.sequence:,} tokens and {ask.work.steps:,} steps are the script's"]
    if layout.tp > 1:
        document["tensor_parallel"] = {"autotp_size": layout.tp}
    if layout.recompute == "full":
        notes.append("recompute=full is switched on in the model: gradient_checkpointing_enable()")
    return json.dumps(document, indent=2) + "\n", notes


# Accelerate


def _accelerate_cannot(layout: Layout, model: ModelConfig) -> str | None:
    if model.moe is not None:
        return "its options say nothing of experts"
    if layout.cp > 1:
        return "its context parallelism is not written by this planner"
    plain = layout.tp == layout.pp == 1
    if plain and layout.zero in (0, 2, 3) and not (layout.zero == 0 and layout.recompute == "full"):
        fits = layout.recompute == "none" or (layout.recompute == "full" and layout.zero >= 2)
        return None if fits else "its FSDP configuration recomputes whole blocks or nothing"
    if layout.zero > 1:
        return "FSDP with tensor parallelism needs a model with a plan of its own: use zero=0 or 1"
    if layout.virtual_stages > 1:
        return "its Megatron-LM plugin has no virtual stages"
    if layout.recompute == "full":
        return "its Megatron-LM plugin recomputes selectively or nothing"
    if layout.pp > 1 and model.layers % layout.pp:
        return f"{model.layers} layers are not divisible by pp = {layout.pp}"
    return None


def _accelerate(ask: Ask, layout: Layout) -> tuple[str, list[str]]:
    accumulation = _accumulation(ask, layout)
    document: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE"}
    notes = [
        f"in the script: batches of {layout.micro_batch} sequences of {ask.work.sequence:,} tokens per process, "
        f"Accelerator(gradient_accumulation_steps={accumulation})"
    ]
    if layout.tp == layout.pp == 1 and layout.zero >= 2:
        document["distributed_type"] = "FSDP"
        document["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": layout.zero == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": layout.recompute == "full",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_offload_params": False,
        }
    elif layout.tp == layout.pp == 1 and layout.zero == 0 and layout.recompute == "none":
        document["distributed_type"] = "MULTI_GPU" if layout.dp > 1 else "NO"
    else:
        document["distributed_type"] = "MEGATRON_LM"
        document["megatron_lm_config"] = {
            "megatron_lm_tp_degree": layout.tp,
            "megatron_lm_pp_degree": layout.pp,
            "megatron_lm_num_micro_batches": accumulation,
            "megatron_lm_sequence_parallelism": layout.sp,
            "megatron_lm_recompute_activations": layout.recompute == "selective",
            "megatron_lm_use_distributed_optimizer": layout.zero == 1,
            "megatron_lm_gradient_clipping": 1.0,
        }
        notes[0] = f"in the script: micro-batches of {layout.micro_batch} sequences of {ask.work.sequence:,} tokens"
    document |= {
        "mixed_precision": ask.precision,
        "num_machines": ask.cluster.nodes,
        "num_processes": layout.accelerators,
    }
    return f"# {ask.model.name}, {ask.cluster}: {layout}\n" + _yaml(document), notes


def _yaml(document: dict[str, Any], indent: str = "") -> str:
    """Two levels of plain scalars: all that these files need."""
    lines = []
    for key, value in document.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{key}:\n{_yaml(value, indent + '  ')}")
        else:
            shown = str(value).lower() if isinstance(value, bool) else "'NO'" if value == "NO" else str(value)
            lines.append(f"{indent}{key}: {shown}\n")
    return "".join(lines)


# Megatron-LM and Ironlaw itself


def _megatron(ask: Ask, layout: Layout) -> tuple[str, list[str]]:
    flags = megatron_flags(ask, layout, _accumulation(ask, layout))
    head = f"# {ask.model.name}, {ask.cluster}: {layout}\n"
    return head + " \\\n".join(flags) + "\n", ["for pretrain_gpt.py; add tokenizer, data and learning rate"]


def _ironlaw_cannot(layout: Layout, model: ModelConfig) -> str | None:
    if layout.accelerators > 1:
        return "Ironlaw's own trainer runs on one device so far"
    if layout.recompute != "none":
        return "Ironlaw's own trainer does not recompute activations yet"
    return None


def _ironlaw(ask: Ask, layout: Layout) -> tuple[str, list[str]]:
    model = ask.model.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    train = {
        "steps": ask.work.steps,
        "global_batch": ask.work.global_batch,
        "micro_batch": layout.micro_batch,
        "sequence": ask.work.sequence,
        "precision": ask.precision,
    }
    return tomli_w.dumps({"model": model, "train": train}), ["for `ironlaw train`; [data] is yours to add"]


TRAINERS = {
    trainer.name: trainer
    for trainer in (
        Trainer("torchtitan", "toml", ("bf16",), _torchtitan_cannot, _torchtitan),
        Trainer("megatron", "flags", ("bf16", "fp16", "fp8", "fp8_block", "mxfp8"), megatron_cannot, _megatron),
        Trainer("deepspeed", "json", ("bf16", "fp16"), _deepspeed_cannot, _deepspeed),
        Trainer("accelerate", "yaml", ("bf16", "fp16"), _accelerate_cannot, _accelerate),
        Trainer("ironlaw", "toml", ("bf16",), _ironlaw_cannot, _ironlaw),
    )
}
