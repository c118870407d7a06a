"""A layout and a model as command-line flags of Megatron-LM (`megatron/training/arguments.py`, Megatron core)."""

from __future__ import annotations

from ironlaw.catalog.formats import number_format
from ironlaw.model.config import ModelConfig
from ironlaw.model.yarn import is_yarn
from ironlaw.plan.cluster.estimate import ClusterRequest
from ironlaw.plan.emit import first_reason, given
from ironlaw.plan.engines.low_precision import storage_by
from ironlaw.workload.layout import Layout
from ironlaw.workload.schedule import fewer_layers_at_ends

PRECISION_FLAGS = {
    "fp32": [],
    "bf16": ["--bf16"],
    "fp16": ["--fp16"],
    "fp8": ["--bf16", "--fp8-format hybrid"],
    "fp8_block": ["--bf16", "--fp8-format e4m3", "--fp8-recipe blockwise"],
    "mxfp8": ["--bf16", "--fp8-format e4m3", "--fp8-recipe mxfp8"],
    "nvfp4": ["--bf16", "--fp4-format e2m1", "--fp4-recipe nvfp4"],
}

CP_COMM_TYPES = {"ring": "p2p", "all_gather": "all_gather", "all_to_all": "a2a"}

OPTIMIZER_FLAGS = {
    "adamw": [],
    "sgd": ["--optimizer sgd", "--sgd-momentum 0"],
    "momentum": ["--optimizer sgd", "--sgd-momentum 0.9"],
    "muon": ["--optimizer muon"],
}


def megatron_cannot(layout: Layout, model: ModelConfig) -> str | None:
    """Return why Megatron-LM's flags cannot express this layout, or None."""
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
    """Return why no flags scale positions so, or None. Flags lack some YaRN numbers of `MLATransformerConfig`."""
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
    """Return why no flags express the arithmetic of this family of models, or None."""
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
    """Return why Megatron core 0.16 would raise an error (`transformer_config.py`, `moe_layer.py`), or None."""
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
    """Return the layers of a virtual stage that is not lighter than the others."""
    chunks = layout.pp * layout.virtual_stages
    return (model.layers + sum(fewer_layers_at_ends(model.layers, chunks) or (0, 0))) // chunks


def megatron_config(request: ClusterRequest, layout: Layout) -> tuple[str, list[str]]:
    """Return the flags, one `--flag value` per line, and notes."""
    # Name what selective recomputation repeats where the plan assumes something other than attention.
    widens = layout.recompute.mode == "selective" and request.system.engine.widens_again(request.model)
    flags = [
        *_model_flags(request.model, request.sequence),
        f"--micro-batch-size {layout.micro_batch}",
        f"--global-batch-size {request.global_batch}",
        f"--train-iters {request.steps}",
        *PRECISION_FLAGS[request.precision],
        *_narrow_flags(request, layout),
        *OPTIMIZER_FLAGS[request.optimizer],
        *_layout_flags(request.model, layout),
        *given((widens, "--recompute-modules mla_up_proj")),
        *_expert_flags(request.model, layout),
    ]
    head = f"# {request.model.name}, {request.cluster}: {layout}\n"
    return head + " \\\n".join(flags) + "\n", ["for pretrain_gpt.py; add tokenizer, data and learning rate"]


def _narrow_flags(request: ClusterRequest, layout: Layout) -> list[str]:
    """Return the flag that stores weights in 8 or 4 bits, where the plan assumes that they are."""
    held = storage_by("transformer-engine", request.precision, request.cluster.accelerator.generation, True)
    stored = (
        number_format(request.precision).narrow
        and request.system.engine.narrow_parameters
        and "in place of" in held.description
    )
    if not stored or not layout.zero:  # supported under Megatron's distributed optimizer only
        return []
    return ["--fp4-param-gather" if request.precision == "nvfp4" else "--fp8-param-gather"]


def _model_flags(model: ModelConfig, sequence: int) -> list[str]:
    window = model.sliding_window if model.sliding_window and model.sliding_window < sequence else 0
    few, scaled = model.key_value_heads != model.heads, model.rope_scaling and model.latent is None
    layers = f"[0]*{model.full_first}+[1]*{model.layers - model.full_first}"
    positions = {"rope": "rope", "none": "none"}.get(model.positions, "learned_absolute")
    return [
        f"--num-layers {model.layers}",
        f"--hidden-size {model.hidden}",
        f"--ffn-hidden-size {model.ffn_size}",
        f"--num-attention-heads {model.heads}",
        f"--kv-channels {model.size_of_head}",
        f"--seq-length {sequence}",
        f"--max-position-embeddings {model.context}",
        f"--vocab-size {model.vocab}",
        "--attention-dropout 0",
        "--hidden-dropout 0",
        f"--norm-epsilon {model.norm_eps:g}",
        *given(
            (window, f"--window-size {window - 1},0"),  # tokens to the left, without the query's own
            (window and model.full_every, f"--window-attn-skip-freq {model.full_every}"),
            (window and model.full_first and not model.full_every, f"--window-attn-skip-freq {layers}"),
            (model.attention_sinks, "--softmax-type learnable"),
            (model.activation == "relu2", "--squared-relu"),
            (model.rotary_size, f"--rotary-percent {(model.rotary_size or 0) / model.size_of_head:g}"),
            (model.unrotated_every, f"--no-rope-freq {model.unrotated_every}"),
        ),
        *_latent_flags(model),
        *given(
            (few, "--group-query-attention"),
            (few, f"--num-query-groups {model.key_value_heads}"),
            (model.gated_ffn, "--swiglu"),
            (model.norm == "rmsnorm", "--normalization RMSNorm"),
            (model.qk_norm, "--qk-layernorm"),
            (True, f"--position-embedding-type {positions}"),
            (positions == "rope", f"--rotary-base {model.rope_theta:.0f}"),
            (positions == "rope" and scaled, "--use-rope-scaling"),
            (positions == "rope" and scaled, f"--rope-scaling-factor {(model.rope_scaling or {}).get('factor', 0):g}"),
            (not model.has_ffn_bias, "--disable-bias-linear"),
            (not model.has_ffn_bias and model.has_qkv_bias, "--add-qkv-bias"),
            (not model.tied, "--untie-embeddings-and-output-weights"),
        ),
    ]


def _latent_flags(model: ModelConfig) -> list[str]:
    """Return the flags of latent attention, whose narrow vectors have norms under `--qk-layernorm` only."""
    latent, scaling = model.latent, model.rope_scaling
    if latent is None:
        return []
    flags = ["--multi-latent-attention", "--qk-layernorm"]
    flags += [f"--q-lora-rank {latent.query_rank}"] if latent.query_rank else []
    flags += [
        f"--kv-lora-rank {latent.key_value_rank}",
        f"--qk-head-dim {latent.plain_size}",
        f"--qk-pos-emb-head-dim {latent.rotary_size}",
        f"--v-head-dim {latent.value_size}",
        f"--rope-type {'yarn' if scaling else 'rope'}",
    ]
    if scaling:
        flags.append(f"--rotary-scaling-factor {scaling['factor']:g}")
        flags += [f"--{name.replace('_', '-')} {scaling.get(name, 0):g}" for name in ("mscale", "mscale_all_dim")]
    return flags


def _expert_flags(model: ModelConfig, layout: Layout) -> list[str]:
    """Return the flags of experts as Megatron core computes them: grouped products, rows exchanged by all-to-all."""
    moe = model.moe
    if moe is None:
        return []
    pattern = ",".join(str(int(moe.in_layer(layer))) for layer in range(model.layers))
    return [
        f"--num-experts {moe.experts}",
        f"--moe-router-topk {moe.experts_per_token}",
        f"--moe-ffn-hidden-size {model.expert_ffn_size}",
        f"--expert-model-parallel-size {layout.ep}",
        f"--expert-tensor-parallel-size {layout.expert_tp}",
        "--moe-token-dispatcher-type alltoall",
        "--moe-grouped-gemm",
        "--moe-permute-fusion",
        f"--moe-router-score-function {moe.score}",
        *given(
            # By default Megatron takes the softmax over the chosen experts, which sums to 1.
            (not moe.normalize, "--moe-router-pre-softmax"),
            (moe.routed_scale != 1.0, f"--moe-router-topk-scaling-factor {moe.routed_scale:g}"),
            (moe.limits_groups, f"--moe-router-num-groups {moe.groups}"),
            (moe.limits_groups, f"--moe-router-group-topk {moe.groups_per_token}"),
            (moe.dense_layers or moe.every > 1, f"--moe-layer-freq [{pattern}]"),
            (moe.shared_experts, f"--moe-shared-expert-intermediate-size {model.shared_ffn_size}"),
            (moe.shared_gate, "--moe-shared-expert-gate"),
            (moe.capacity_factor is not None, f"--moe-expert-capacity-factor {moe.capacity_factor or 0:g}"),
            (moe.balance == "loss", "--moe-router-load-balancing-type aux_loss"),
            (moe.balance == "loss", f"--moe-aux-loss-coeff {moe.balance_loss:g}"),
            (moe.balance != "loss", "--moe-router-load-balancing-type none"),
            (moe.balance == "bias", "--moe-router-enable-expert-bias"),
            (moe.balance == "bias", f"--moe-router-bias-update-rate {moe.bias_rate:g}"),
        ),
    ]


RECOMPUTE_FLAGS = {
    "full": ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"],
    "selective": ["--recompute-granularity selective"],
}
OFFLOAD_FLAGS = [
    "--use-precision-aware-optimizer", "--optimizer-cpu-offload", "--optimizer-offload-fraction 1.0",
    "--overlap-cpu-optimizer-d2h-h2d",
]  # fmt: skip


def _layout_flags(model: ModelConfig, layout: Layout) -> list[str]:
    first_less, last_less = fewer_layers_at_ends(model.layers, layout.pp * layout.virtual_stages) or (0, 0)
    again = RECOMPUTE_FLAGS.get(layout.recompute.mode, [])
    if layout.recompute.mode == "every":  # as many blocks, but the first ones of every chunk
        blocks = _chunk(model, layout) // layout.recompute.every
        again = ["--recompute-granularity full", "--recompute-method block", f"--recompute-num-layers {blocks}"]
    fsdp = [  # Megatron FSDP
        "--use-megatron-fsdp",
        f"--data-parallel-sharding-strategy {'optim_grads_params' if layout.zero == 3 else 'optim_grads'}",
        "--no-gradient-accumulation-fusion",
        "--ckpt-format fsdp_dtensor",
    ]
    return [
        f"--tensor-model-parallel-size {layout.tp}",
        f"--pipeline-model-parallel-size {layout.pp}",
        f"--context-parallel-size {layout.cp}",
        *given(
            (layout.cp > 1 and layout.cp_kind, f"--cp-comm-type {CP_COMM_TYPES.get(layout.cp_kind or '')}"),
            (layout.sp, "--sequence-parallel"),
            (layout.virtual_stages > 1, f"--num-layers-per-virtual-pipeline-stage {_chunk(model, layout)}"),
            (first_less, "--account-for-embedding-in-pipeline-split"),
            (last_less, "--account-for-loss-in-pipeline-split"),
        ),
        *again,
        *given(
            (layout.zero, "--use-distributed-optimizer"),
            (layout.shard, f"--num-distributed-optimizer-instances {layout.dp // (layout.shard or layout.dp)}"),
        ),
        *(OFFLOAD_FLAGS if layout.offload == "optimizer" else []),
        *(fsdp if layout.zero >= 2 else []),
        *given(
            (layout.dp > 1, "--overlap-grad-reduce"),
            (layout.dp > 1 and layout.zero, "--overlap-param-gather"),
        ),
    ]
