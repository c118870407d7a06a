"""A layout and a model as command-line flags of Megatron-LM (`megatron/training/arguments.py`, Megatron core)."""

from __future__ import annotations

from ironlaw.catalog.formats import number_format
from ironlaw.model.config import ModelConfig
from ironlaw.model.yarn import is_yarn
from ironlaw.plan.cluster.estimate import ClusterRequest
from ironlaw.plan.emit import first_reason
from ironlaw.plan.engines.low_precision import storage_by
from ironlaw.workload.layout import Layout
from ironlaw.workload.schedule import fewer_layers_at_ends

Flags = dict[str, object]
"""Values by flag. True: the flag has no value; None or False: it is left out."""

PRECISION_FLAGS: dict[str, Flags] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "fp8": {"bf16": True, "fp8-format": "hybrid"},
    "fp8_block": {"bf16": True, "fp8-format": "e4m3", "fp8-recipe": "blockwise"},
    "mxfp8": {"bf16": True, "fp8-format": "e4m3", "fp8-recipe": "mxfp8"},
    "nvfp4": {"bf16": True, "fp4-format": "e2m1", "fp4-recipe": "nvfp4"},
}

CP_COMM_TYPES = {"ring": "p2p", "all_gather": "all_gather", "all_to_all": "a2a"}

OPTIMIZER_FLAGS: dict[str, Flags] = {
    "adamw": {},
    "sgd": {"optimizer": "sgd", "sgd-momentum": 0},
    "momentum": {"optimizer": "sgd", "sgd-momentum": 0.9},
    "muon": {"optimizer": "muon"},
}


def megatron_cannot(layout: Layout, model: ModelConfig) -> str | None:
    """Returns why Megatron-LM's flags cannot express this layout, or None."""
    chunk, every, zero = _chunk(model, layout), layout.recompute.stride, layout.zero
    uneven = fewer_layers_at_ends(model.layers, layout.pp * layout.virtual_stages) is None
    return (
        _model_refused(model)
        or first_reason(
            (uneven, f"{model.layers} layers are not divisible by pp = {layout.pp}, nor with one less at the ends"),
            (layout.schedule != "1f1b",
             f"its flags have no schedule={layout.schedule}: use 1f1b, interleaved by virtual_stages"),
            (zero >= 2 and layout.cp * layout.pp > 1,
             "its FSDP with context or pipeline parallelism is not written by this planner: use zero=0 or 1"),
            (layout.offload in ("activations", "both"),
             "it offloads chosen modules' activations only: use offload=none or optimizer"),
            (layout.offload == "optimizer" and zero != 1, "it offloads its distributed optimizer: use zero=1"),
            (every > 1 and chunk < every, f"chunks of {chunk} layers have no {every}th block to recompute"),
        )
        or _positions_refused(model)
        or _experts_refused(layout, model)
    )  # fmt: skip


def _positions_refused(model: ModelConfig) -> str | None:
    """Returns why no flags scale positions so, or None. Flags lack some YaRN numbers of `MLATransformerConfig`."""
    scaling = model.rope_scaling
    if not scaling:
        return None
    if model.latent is None:
        return None if "low_freq_factor" in scaling else "it stretches positions as Llama 3.1 does (rope_scaling)"
    if not is_yarn(scaling) or "attention_factor" in scaling:
        return "its latent attention stretches positions by YaRN with mscale only"
    fixed = {"original_context": 4096.0, "beta_fast": 32.0, "beta_slow": 1.0}
    odd = next((name for name, value in fixed.items() if scaling[name] != value), None)
    return f"it has no option for rope_scaling.{odd} = {scaling[odd]:g} under latent attention" if odd else None


SWITCHES = {"sliding_window", "full_every", "full_first", "unrotated_every", "rotary_size", "attention_sinks"}
"""Switches of a model for which flags exist."""


def _model_refused(model: ModelConfig) -> str | None:
    """Returns why no flags express the arithmetic of this family of models, or None."""
    biases = (model.has_qkv_bias, model.has_out_bias, model.has_ffn_bias)
    whole = biases in ((True, True, True), (False, False, False), (True, False, False))
    others = sorted(set(model.switched) - SWITCHES - {"out_bias", "ffn_bias"})
    return first_reason(
        (not whole, "its flags have biases in all linear layers of a block, in none, or in query, key and value"),
        (others, f"its flags have no {''.join(others[:1])}"),
        (model.positions == "alibi", "its flags have no alibi"),
        (model.activation == "relu", "its flags have no relu"),
        (model.activation == "relu2" and model.gated_ffn,
         "its flags have squared relu in a feed-forward network without a gate only"),
        (model.rope_scaling and set(model.rope_scaling) == {"factor"},
         "its flags have no positions scaled alike at all frequencies"),
        (model.gated_ffn and model.activation != "silu",
         f"its flags have no gated {model.activation} feed-forward network"),
        (not model.gated_ffn and model.activation == "silu",
         "its flags have silu in a gated feed-forward network only"),
    )  # fmt: skip


def _experts_refused(layout: Layout, model: ModelConfig) -> str | None:
    """Returns why Megatron core 0.16 would raise an error (`transformer_config.py`, `moe_layer.py`), or None."""
    moe = model.moe
    if moe is None:
        return None
    counted = moe.experts_per_token // (moe.groups_per_token or 1)  # `group_limited_topk` in `moe_utils.py`
    return first_reason(
        (moe.limits_groups and counted != (2 if moe.score == "sigmoid" else 1),
         f"it ranks groups of experts by the sum of their {counted} best, and this model otherwise"),
        (layout.tp > 1 and not layout.sp,
         "it trains experts under tensor parallelism with sequence parallelism only: use sp=1"),
        (moe.balance == "bias" and moe.score != "sigmoid",
         "it balances experts by a bias under sigmoid scores only"),
        (moe.experts_per_token == 1 and moe.score == "softmax" and moe.normalize,
         "it weighs a single expert per token by its softmax only: use moe.normalize = false"),
    )  # fmt: skip


def _chunk(model: ModelConfig, layout: Layout) -> int:
    """Returns the layers of a virtual stage that is not lighter than the others."""
    chunks = layout.pp * layout.virtual_stages
    return (model.layers + sum(fewer_layers_at_ends(model.layers, chunks) or (0, 0))) // chunks


def megatron_config(request: ClusterRequest, layout: Layout) -> tuple[str, list[str]]:
    """Returns the flags, one `--flag value` per line, and notes."""
    # Name what selective recomputation repeats where the plan assumes something other than attention.
    widens = layout.recompute.mode == "selective" and request.system.engine.repeats_up_projections(request.model)
    flags = (
        _model_flags(request.model, request.sequence)
        | {
            "micro-batch-size": layout.micro_batch,
            "global-batch-size": request.global_batch,
            "train-iters": request.steps,
        }
        | PRECISION_FLAGS[request.precision]
        | _narrow_flags(request, layout)
        | OPTIMIZER_FLAGS[request.optimizer]
        | _layout_flags(request.model, layout)
        | {"recompute-modules": widens and "mla_up_proj"}
        | _expert_flags(request.model, layout)
    )
    given = ((flag, value) for flag, value in flags.items() if value is not None and value is not False)
    lines = [f"--{flag}" if value is True else f"--{flag} {value}" for flag, value in given]
    head = f"# {request.model.name}, {request.cluster}: {layout}\n"
    return head + " \\\n".join(lines) + "\n", ["for pretrain_gpt.py; add tokenizer, data and learning rate"]


def _narrow_flags(request: ClusterRequest, layout: Layout) -> Flags:
    """Returns the flag that stores weights in 8 or 4 bits, where the plan assumes that they are."""
    held = storage_by("transformer-engine", request.precision, request.cluster.accelerator.generation, True)
    stored = (
        number_format(request.precision).narrow
        and request.system.engine.narrow_parameters
        and "in place of" in held.description
    )
    if not stored or not layout.zero:  # supported under Megatron's distributed optimizer only
        return {}
    return {f"{'fp4' if request.precision == 'nvfp4' else 'fp8'}-param-gather": True}


def _model_flags(model: ModelConfig, sequence: int) -> Flags:
    window = model.sliding_window if model.sliding_window and model.sliding_window < sequence else None
    few = model.key_value_heads != model.heads
    skipped = model.full_every or (model.full_first and f"[0]*{model.full_first}+[1]*{model.layers - model.full_first}")
    positions = {"rope": "rope", "none": "none"}.get(model.positions, "learned_absolute")
    rotates = positions == "rope"
    scaling = model.rope_scaling if rotates and model.latent is None else None
    return {
        "num-layers": model.layers,
        "hidden-size": model.hidden,
        "ffn-hidden-size": model.ffn_size,
        "num-attention-heads": model.heads,
        "kv-channels": model.size_of_head,
        "seq-length": sequence,
        "max-position-embeddings": model.context,
        "vocab-size": model.vocab,
        "attention-dropout": 0,
        "hidden-dropout": 0,
        "norm-epsilon": f"{model.norm_eps:g}",
        "window-size": window and f"{window - 1},0",  # tokens to the left, without the query's own
        "window-attn-skip-freq": (window and skipped) or None,
        "softmax-type": model.attention_sinks and "learnable",
        "squared-relu": model.activation == "relu2",
        "rotary-percent": model.rotary_size and f"{model.rotary_size / model.size_of_head:g}",
        "no-rope-freq": model.unrotated_every or None,
        **_latent_flags(model),
        "group-query-attention": few,
        "num-query-groups": few and model.key_value_heads,
        "swiglu": model.gated_ffn,
        "normalization": model.norm == "rmsnorm" and "RMSNorm",
        "qk-layernorm": bool(model.qk_norm or model.latent),
        "position-embedding-type": positions,
        "rotary-base": rotates and f"{model.rope_theta:.0f}",
        "use-rope-scaling": bool(scaling),
        "rope-scaling-factor": scaling and f"{scaling.get('factor', 0):g}",
        "disable-bias-linear": not model.has_ffn_bias,
        "add-qkv-bias": not model.has_ffn_bias and model.has_qkv_bias,
        "untie-embeddings-and-output-weights": not model.tied,
    }


def _latent_flags(model: ModelConfig) -> Flags:
    """Returns the flags of latent attention, whose narrow vectors have norms under `--qk-layernorm` only."""
    latent, scaling = model.latent, model.rope_scaling
    if latent is None:
        return {}
    flags: Flags = {
        "multi-latent-attention": True,
        "qk-layernorm": True,
        "q-lora-rank": latent.query_rank or None,
        "kv-lora-rank": latent.key_value_rank,
        "qk-head-dim": latent.plain_size,
        "qk-pos-emb-head-dim": latent.rotary_size,
        "v-head-dim": latent.value_size,
        "rope-type": "yarn" if scaling else "rope",
    }
    if scaling:
        flags["rotary-scaling-factor"] = f"{scaling['factor']:g}"
        flags |= {name.replace("_", "-"): f"{scaling.get(name, 0):g}" for name in ("mscale", "mscale_all_dim")}
    return flags


def _expert_flags(model: ModelConfig, layout: Layout) -> Flags:
    """Returns the flags of experts as Megatron core computes them: grouped products, rows exchanged by all-to-all."""
    moe = model.moe
    if moe is None:
        return {}
    pattern = ",".join(str(int(moe.in_layer(layer))) for layer in range(model.layers))
    return {
        "num-experts": moe.experts,
        "moe-router-topk": moe.experts_per_token,
        "moe-ffn-hidden-size": model.expert_ffn_size,
        "expert-model-parallel-size": layout.ep,
        "expert-tensor-parallel-size": layout.expert_tp,
        "moe-token-dispatcher-type": "alltoall",
        "moe-grouped-gemm": True,
        "moe-permute-fusion": True,
        "moe-router-score-function": moe.score,
        # By default Megatron takes the softmax over the chosen experts, which sums to 1.
        "moe-router-pre-softmax": not moe.normalize,
        "moe-router-topk-scaling-factor": moe.routed_scale != 1.0 and f"{moe.routed_scale:g}",
        "moe-router-num-groups": moe.limits_groups and moe.groups,
        "moe-router-group-topk": moe.limits_groups and moe.groups_per_token,
        "moe-layer-freq": (moe.dense_layers > 0 or moe.every > 1) and f"[{pattern}]",
        "moe-shared-expert-intermediate-size": moe.shared_experts > 0 and model.shared_ffn_size,
        "moe-shared-expert-gate": moe.shared_gate,
        "moe-expert-capacity-factor": moe.capacity_factor is not None and f"{moe.capacity_factor:g}",
        "moe-router-load-balancing-type": "aux_loss" if moe.balance == "loss" else "none",
        "moe-aux-loss-coeff": moe.balance == "loss" and f"{moe.balance_loss:g}",
        "moe-router-enable-expert-bias": moe.balance == "bias",
        "moe-router-bias-update-rate": moe.balance == "bias" and f"{moe.bias_rate:g}",
    }


RECOMPUTE_FLAGS: dict[str, Flags] = {
    "full": {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1},
    "selective": {"recompute-granularity": "selective"},
}
OFFLOAD_FLAGS: Flags = {
    "use-precision-aware-optimizer": True, "optimizer-cpu-offload": True, "optimizer-offload-fraction": 1.0,
    "overlap-cpu-optimizer-d2h-h2d": True,
}  # fmt: skip


def _layout_flags(model: ModelConfig, layout: Layout) -> Flags:
    first_less, last_less = fewer_layers_at_ends(model.layers, layout.pp * layout.virtual_stages) or (0, 0)
    chunk, again = _chunk(model, layout), RECOMPUTE_FLAGS.get(layout.recompute.mode, {})
    if layout.recompute.mode == "every":  # as many blocks, but the first ones of every chunk
        again = RECOMPUTE_FLAGS["full"] | {
            "recompute-method": "block", "recompute-num-layers": chunk // layout.recompute.every,
        }  # fmt: skip
    sharded = "optim_grads_params" if layout.zero == 3 else "optim_grads"
    fsdp: Flags = {  # Megatron FSDP
        "use-megatron-fsdp": True,
        "data-parallel-sharding-strategy": sharded,
        "no-gradient-accumulation-fusion": True,
        "ckpt-format": "fsdp_dtensor",
    }
    return {
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": layout.pp,
        "context-parallel-size": layout.cp,
        "cp-comm-type": layout.cp > 1 and CP_COMM_TYPES.get(layout.cp_kind or ""),
        "sequence-parallel": layout.sp,
        "num-layers-per-virtual-pipeline-stage": layout.virtual_stages > 1 and chunk,
        "account-for-embedding-in-pipeline-split": bool(first_less),
        "account-for-loss-in-pipeline-split": bool(last_less),
        **again,
        "use-distributed-optimizer": layout.zero > 0,
        "num-distributed-optimizer-instances": layout.shard and layout.dp // layout.shard,
        **(OFFLOAD_FLAGS if layout.offload == "optimizer" else {}),
        **(fsdp if layout.zero >= 2 else {}),
        "overlap-grad-reduce": layout.dp > 1,
        "overlap-param-gather": layout.dp > 1 and layout.zero > 0,
    }
