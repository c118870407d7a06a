"""A layout as the TOML job config of torchtitan 0.2, and as command-line options of 0.3."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import tomli_w

from ironlaw.model.config import ModelConfig
from ironlaw.model.dimensions import MoEConfig
from ironlaw.plan.cluster.estimate import ClusterRequest
from ironlaw.plan.emit import first_reason, given
from ironlaw.workload.layout import Layout
from ironlaw.workload.schedule import fewer_layers_at_ends

SCHEDULES = {"gpipe": "GPipe", "zb": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble", "dualpipe": "DualPipeV"}


NARROW: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # Row scales are the library's default and were used in published runs; the output layer stays in bf16.
    "fp8": ("float8", {"recipe_name": "rowwise", "filter_fqns": ["output"]}, {"fqns": ["experts"]}),
    "mxfp8": (
        "mx", {"recipe_name": "mxfp8_cublas", "filter_fqns": ["output"]},
        {"recipe_name": "mxfp8", "fqns": ["experts"]},
    ),
}  # fmt: skip
"""By precision: the kind of converter, its options for linear layers, and those for grouped products."""


def torchtitan_cannot(layout: Layout, model: ModelConfig) -> str | None:
    """Returns why torchtitan's options cannot express this layout, or None."""
    known = {"full_first", "full_every", "attention_sinks"} | ({"ffn_bias"} if model.moe and model.moe.bias else set())
    others, stages = sorted(set(model.switched) - known), layout.pp * layout.virtual_stages
    zero, tp, cp, ep, latent, experts = layout.zero, layout.tp, layout.cp, layout.ep, model.latent, model.moe
    return first_reason(
        (others, f"none of its models has {''.join(others[:1])}"),
        (model.positions not in ("rope", "learned"), f"none of its models has {model.positions}"),
        (model.activation in ("relu", "relu2"), f"none of its models has {model.activation}"),
        (tp > 1 and not layout.sp, "its tensor parallelism always shards the sequence too (sp=1)"),
        (zero == 1, "it has no sharding of the optimizer state alone (zero=0, 2 or 3)"),
        (zero == 0 and layout.dp > 1 and tp * layout.pp * cp > 1,
         "its replicated data parallelism does not combine with other kinds: use zero=2 or 3"),
        (zero == 0 and cp > 1, "context parallel ranks always shard the weights there: use zero=2 or 3"),
        (cp > 1 and layout.cp_kind == "all_to_all",
         "its context parallelism has no all-to-all between heads: use cp_kind=all_gather or ring"),
        (cp > 1 and layout.cp_kind == "ring" and model.sliding_window,
         "its rings have no sliding window: use cp_kind=all_gather"),
        (latent and _flavor(model) is None,
         f"of latent attention it has DeepSeek's {', '.join(FLAVORS)} as released, and this is none of them"),
        (latent and cp > 1, "its DeepSeek models have no context parallelism: use cp=1"),
        (experts and ep > 1 and zero < 2, "its expert parallel ranks share the sharded state: use zero=2 or 3"),
        (experts and (layout.expert_tp not in (1, tp) or (ep == 1 and layout.expert_tp != tp)),
         "it splits experts over tp, or with ep > 1 not at all: use etp=1 with ep > 1, or leave it out"),
        (layout.offload != "none",
         "its enable_cpu_offload moves the weights too, which this planner does not plan: use offload=none"),
        (layout.pp > 1 and fewer_layers_at_ends(model.layers, stages) is None,
         f"{model.layers} layers are not divisible by {stages} stages"),
        (layout.schedule == "zb" and layout.virtual_stages == 1,
         "its zero-bubble schedules hold two chunks or more per rank: use virtual_stages=2"),
    )  # fmt: skip


FLAVORS = {"16B": "deepseek-v2-lite", "236B": "deepseek-v2", "671B": "deepseek-v3"}
"""Flavors of torchtitan's `deepseek_v3`, and the catalogued models that they are."""


@lru_cache(maxsize=16)
def _flavor(model: ModelConfig) -> str | None:
    """Returns the flavor with these dimensions, or None; torchtitan derives the positions' range from the sequence."""
    free = {"name", "context", "rope_scaling", "dropout"}
    for flavor, name in FLAVORS.items():
        known = ModelConfig.named(name)
        same_experts = model.moe is not None and known.moe is not None and _routing(model.moe) == _routing(known.moe)
        if same_experts and model.model_dump(exclude=free | {"moe"}) == known.model_dump(exclude=free | {"moe"}):
            return flavor
    return None


def _routing(moe: MoEConfig) -> dict[str, Any]:
    return moe.model_dump(exclude={"balance", "balance_loss", "bias_rate"})


def torchtitan_config(request: ClusterRequest, layout: Layout) -> tuple[str, list[str]]:
    precise = "float32" if request.precision == "fp32" else "bfloat16"
    document: dict[str, Any] = {
        "optimizer": {"name": {"adam": "Adam"}.get(request.optimizer, "AdamW")},
        "training": {
            # Per rank and accumulation step; a pipeline takes all micro-batches of a step at once.
            "local_batch_size": request.global_batch // layout.dp if layout.pp > 1 else layout.micro_batch,
            "global_batch_size": request.global_batch,
            "seq_len": request.sequence,
            "steps": request.steps,
            "mixed_precision_param": precise,
            "mixed_precision_reduce": "float32",
        },
        "parallelism": _parallelism(request, layout),
        "activation_checkpoint": _recomputation(layout),
        "compile": {"enable": True},
    }
    model = request.model
    if request.precision in NARROW:
        kind, linear, of_experts = NARROW[request.precision]
        products = {"linear": {kind: linear}} | ({"grouped_mm": {kind: of_experts}} if model.moe is not None else {})
        document["model"] = {"converters": [f"quantize.{name}.{kind}" for name in products]}
        document["quantize"] = products
    if model.latent is not None:
        document["model"] = {"name": "deepseek_v3", "flavor": _flavor(model)} | document.get("model", {})
    experts = ""
    if model.moe is not None:
        moe = model.moe
        experts = f", {moe.experts} experts of {model.expert_ffn_size}, {moe.experts_per_token} per token"
    header = [
        f"# {model.name}, {request.cluster}: {layout}",
        f"# [model] name and flavor: one with {model.layers} layers, {model.hidden} hidden, {model.heads} heads "
        f"({model.key_value_heads} key/value), {model.ffn_size} feed-forward, vocabulary {model.vocab}{experts}",
    ]
    text = "\n".join(header) + "\n\n" + tomli_w.dumps(document)
    # 0.3 has no expert tensor parallelism: experts are whole.
    options = [] if model.moe is not None and layout.expert_tp > 1 else _options(document, layout)
    if options:
        text += "\n# torchtitan 0.3 has no TOML; after --module and --config of such a model:\n"
        text += "".join(f"#   {option}\n" for option in options)
    newer = "options of 0.3 in its last comment" if options else "0.3 has no option for all of it"
    return text, [f"a TOML job config of torchtitan 0.2; {newer}"]


def _parallelism(request: ClusterRequest, layout: Layout) -> dict[str, Any]:
    shards = (layout.shard or layout.dp) if layout.zero else 1
    result: dict[str, Any] = {
        "data_parallel_replicate_degree": layout.dp // shards,
        "data_parallel_shard_degree": shards,
        "fsdp_reshard_after_forward": "always" if layout.zero == 3 else "never",
        "tensor_parallel_degree": layout.tp,
        "pipeline_parallel_degree": layout.pp,
        "context_parallel_degree": layout.cp,
    }
    if layout.ep > 1:
        result["expert_parallel_degree"] = layout.ep
        result["expert_tensor_parallel_degree"] = layout.expert_tp
    if layout.cp > 1:  # its "alltoall" rotates keys and values in a ring; it does not exchange heads
        result["context_parallel_rotate_method"] = "alltoall" if layout.cp_kind == "ring" else "allgather"
    if layout.pp > 1:
        chunks = layout.pp * layout.virtual_stages
        less = fewer_layers_at_ends(request.model.layers, chunks)
        assert less is not None
        plain = "Interleaved1F1B" if layout.virtual_stages > 1 else "1F1B"
        result |= {
            "pipeline_parallel_schedule": SCHEDULES.get(layout.schedule, plain),
            "pipeline_parallel_microbatch_size": layout.micro_batch,
            "pipeline_parallel_layers_per_stage": (request.model.layers + sum(less)) // chunks,
            "pipeline_parallel_first_stage_less_layers": less[0],
            "pipeline_parallel_last_stage_less_layers": less[1],
        }
    return result


def _recomputation(layout: Layout) -> dict[str, Any]:
    chosen = layout.recompute
    if chosen.mode in ("selective", "every"):
        return {"mode": "selective", "selective_ac_option": "op" if chosen.mode == "selective" else str(chosen.every)}
    return {"mode": chosen.mode}


def _options(document: dict[str, Any], layout: Layout) -> list[str]:
    """Returns command-line options of 0.3; none if it lacks an option that 0.2 had. Its config sets the optimizer."""
    gone = layout.recompute.mode == "every" or layout.cp_kind == "ring" or "quantize" in document
    if gone or document["optimizer"]["name"] != "AdamW":
        return []
    words = []
    for section in ("training", "parallelism"):
        skipped = ("context_parallel_rotate_method", "expert_tensor_parallel_degree")
        words += [f"--{section}.{key} {value}" for key, value in document[section].items() if key not in skipped]
    # Its graphs, on by default, hold no pipeline, and of the exchanges of experts only some.
    eager = given((layout.pp * layout.ep > 1, "--training.disable_cuda_graphs"))
    return [*words, "--compile.enable", *eager, f"activation-checkpoint:{layout.recompute}"]
