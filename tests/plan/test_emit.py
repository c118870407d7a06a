"""Layouts as other trainers' options: what is written says the layout, what cannot be said is refused."""

import json
import re
import tomllib
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from ironlaw.catalog.nodes import parse_cluster
from ironlaw.config import build_config
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster.estimate import ClusterRequest
from ironlaw.plan.emit.trainers import TRAINERS, emit, trainer_named
from ironlaw.workload.layout import parse_layout

LLAMA = ModelConfig.named("llama3-8b")
GPT2 = ModelConfig.named("gpt2")


NAMES = tomllib.loads((Path(__file__).parent / "option_names.toml").read_text())


def written(
    trainer, layout, model=LLAMA, precision="bf16", global_batch=128, optimizer="adamw", engine="generic", on="b200-sxm"
):
    chosen = parse_layout(layout)
    cluster = parse_cluster(f"{chosen.accelerators}x{on}")
    sequence = min(8192, model.context)
    ask = ClusterRequest(model, cluster, sequence, global_batch, precision, engine, optimizer, steps=1000)
    return emit(trainer, ask, chosen)["text"]


def test_torchtitan_says_the_whole_layout():
    text = tomllib.loads(written("torchtitan", "dp=8 zero=3 tp=2 sp=1 micro_batch=2 recompute=selective"))
    parallelism = text["parallelism"]
    assert parallelism["data_parallel_shard_degree"] == 8 and parallelism["data_parallel_replicate_degree"] == 1
    assert parallelism["tensor_parallel_degree"] == 2 and parallelism["fsdp_reshard_after_forward"] == "always"
    assert text["training"]["local_batch_size"] == 2 and text["training"]["global_batch_size"] == 128
    assert text["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "op"}


def test_torchtitan_pipelines_take_all_micro_batches_at_once():
    text = tomllib.loads(written("torchtitan", "dp=1 pp=4 virtual_stages=2 micro_batch=2"))
    assert text["training"]["local_batch_size"] == 128
    assert text["parallelism"]["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert text["parallelism"]["pipeline_parallel_microbatch_size"] == 2
    assert text["parallelism"]["pipeline_parallel_layers_per_stage"] == 32 // 8


def test_megatron_flags():
    text = written("megatron", "dp=4 zero=1 tp=2 sp=1 pp=2 virtual_stages=2 micro_batch=2 recompute=full")
    for flag in (
        "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--sequence-parallel",
        "--num-layers-per-virtual-pipeline-stage 8", "--use-distributed-optimizer", "--recompute-granularity full",
        "--group-query-attention", "--num-query-groups 8", "--swiglu", "--normalization RMSNorm", "--bf16",
        "--micro-batch-size 2", "--global-batch-size 128", "--disable-bias-linear",
    ):  # fmt: skip
        assert f"{flag} \\\n" in text + " \\\n", flag
    assert "--use-megatron-fsdp" not in text
    assert "optim_grads_params" in written("megatron", "dp=8 zero=3")
    plain = written("megatron", "dp=8", model=GPT2, precision="fp16")
    assert "--position-embedding-type learned_absolute" in plain and "--fp16" in plain
    assert "--untie-embeddings-and-output-weights" not in plain and "--use-distributed-optimizer" not in plain


def test_deepspeed_batches_multiply():
    document = json.loads(written("deepspeed", "dp=8 zero=2 micro_batch=4"))
    sizes = (document["train_micro_batch_size_per_gpu"], document["gradient_accumulation_steps"])
    assert document["train_batch_size"] == 128 == sizes[0] * sizes[1] * 8
    assert document["zero_optimization"]["stage"] == 2 and document["bf16"] == {"enabled": True}
    assert json.loads(written("deepspeed", "dp=4 tp=2"))["tensor_parallel"] == {"autotp_size": 2}


def test_accelerate_chooses_its_backend_by_the_layout():
    sharded = written("accelerate", "dp=8 zero=3 recompute=full")
    assert "distributed_type: FSDP" in sharded and "fsdp_reshard_after_forward: true" in sharded
    assert "fsdp_activation_checkpointing: true" in sharded and "num_processes: 8" in sharded
    assert "distributed_type: MULTI_GPU" in written("accelerate", "dp=8")
    split = written("accelerate", "dp=2 tp=2 sp=1 pp=2 zero=1")
    assert "megatron_lm_tp_degree: 2" in split and "megatron_lm_use_distributed_optimizer: true" in split


def test_ironlaws_own_config_is_valid():
    text = tomllib.loads(written("ironlaw", "dp=1 micro_batch=8", model=GPT2))
    config = build_config(text)
    assert config.model.parameters == GPT2.parameters and config.accumulation == 16


@pytest.mark.parametrize(
    ("trainer", "layout", "reason"),
    [
        ("torchtitan", "dp=8 zero=1", "optimizer state alone"),
        ("torchtitan", "dp=4 tp=2 zero=3", "shards the sequence"),
        ("torchtitan", "dp=2 tp=4 sp=1", "does not combine"),
        ("deepspeed", "dp=4 pp=2", "PipelineModule"),
        ("deepspeed", "dp=8 recompute=selective", "model's code"),
        ("deepspeed", "dp=4 tp=2 sp=1", "does not shard the sequence"),
        ("accelerate", "dp=8 zero=3 recompute=selective", "whole blocks or nothing"),
        ("accelerate", "dp=4 tp=2 zero=3", "plan of its own"),
        ("accelerate", "dp=8 cp=2", "context parallelism"),
        ("accelerate", "dp=8 recompute=full", "recomputes selectively"),
        ("torchtitan", "dp=2 pp=4 zero=2 schedule=zb", "use virtual_stages=2"),
        ("torchtitan", "dp=8 zero=3 offload=optimizer", "moves the weights too"),
        ("torchtitan", "dp=4 cp=2 zero=2 cp_kind=all_to_all", "no all-to-all between heads"),
        ("ironlaw", "dp=4 cp=2 cp_kind=ring", "use cp_kind=all_gather"),
        ("megatron", "dp=2 pp=4 schedule=zbv", "no schedule=zbv"),
        ("megatron", "dp=2 pp=4 zero=3", "use zero=0 or 1"),
        ("megatron", "dp=8 zero=3 offload=optimizer", "use zero=1"),
        ("deepspeed", "dp=8 zero=3 shard=4", "MiCS was removed"),
        ("deepspeed", "dp=8 zero=2 offload=activations", "use recompute=full"),
        ("accelerate", "dp=8 zero=3 recompute=every:2", "all of them or none"),
        ("ironlaw", "dp=8 zero=1 offload=optimizer", "on one device only"),
        ("ironlaw", "dp=2 pp=4 zero=3 schedule=zb", "use schedule=1f1b"),
    ],
)
def test_what_cannot_be_said_is_refused(trainer, layout, reason):
    with pytest.raises(UserError, match=reason):
        written(trainer, layout)


def test_precisions_without_an_option_are_refused():
    with pytest.raises(UserError, match="--precision bf16 or fp32 or fp8 or mxfp8"):
        written("torchtitan", "dp=8", precision="nvfp4")
    with pytest.raises(UserError, match="--optimizer adamw or sgd or momentum or muon"):
        written("megatron", "dp=8", optimizer="galore")


def test_every_trainer_can_write_one_device():
    for name in TRAINERS:
        assert trainer_named(name).cannot(replace(parse_layout("dp=1"), micro_batch=1), LLAMA) is None
        assert written(name, "dp=1")


def keys(document, prefix=""):
    for key, value in document.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from keys(value, f"{prefix}{key}.")


def option_names(trainer, text):
    """Section of option_names.toml -> option names in the text."""
    if trainer == "megatron":
        return {"megatron": re.findall(r"^(--[\w-]+)", text, re.M)}
    if trainer == "deepspeed":
        return {"deepspeed": list(keys(json.loads(text)))}
    if trainer == "accelerate":
        return {"accelerate": re.findall(r"^\s*(\w+):", text, re.M)}
    options = re.findall(r"^#   (\S+)", text, re.M)
    return {"torchtitan": list(keys(tomllib.loads(text))), "torchtitan_options": options}


@pytest.mark.parametrize("trainer", ["torchtitan", "megatron", "deepspeed", "accelerate"])
def test_every_option_exists_in_the_release_it_was_looked_up_in(trainer):
    kinds = ("dp=8", "dp=4 tp=2 sp=1", "dp=2 pp=4 virtual_stages=2", "dp=2 pp=4 schedule=zbv", "dp=4 cp=2", "dp=4 pp=2")
    more = ("zero=0", "zero=1", "zero=2 recompute=full", "zero=3 shard=2", "zero=1 offload=optimizer",
            "zero=3 recompute=every:2", "zero=1 shard=2", "recompute=selective")  # fmt: skip
    models = (LLAMA, GPT2, ModelConfig.named("mistral-7b"), LLAMA.model_copy(update={"layers": 30}))
    if trainer == "torchtitan":
        models += (ModelConfig.named("mixtral-8x7b"),)
        kinds += ("dp=4 tp=2 sp=1 ep=4 etp=1",)
    seen, written_layouts = set(), 0
    for kind, extra, model in product(kinds, more, models):
        layout = parse_layout(f"{kind} {extra}")
        if trainer_named(trainer).cannot(layout, model):
            continue
        written_layouts += 1
        for section, names in option_names(trainer, written(trainer, f"{kind} {extra}", model)).items():
            assert set(names) <= set(NAMES[section]["names"]), (section, set(names) - set(NAMES[section]["names"]))
            seen |= set(names)
    assert written_layouts > 10 and len(seen) > 12


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-moe-16b", "qwen2-57b-a14b", "qwen3-30b-a3b", "olmoe-1b-7b",
                                  "deepseek-v2-lite", "deepseek-v3"])  # fmt: skip
def test_every_option_of_experts_exists_in_the_release_it_was_looked_up_in(name):
    text = written("megatron", "dp=8 ep=8 zero=1", ModelConfig.named(name))
    said = set(option_names("megatron", text)["megatron"])
    assert said <= {*NAMES["megatron"]["names"], *NAMES["megatron_experts"]["names"]}
    assert "--num-experts" in said


def test_torchtitan_says_hybrid_sharding_schedules_and_lighter_ends():
    parallelism = tomllib.loads(written("torchtitan", "dp=8 zero=3 shard=2"))["parallelism"]
    assert parallelism["data_parallel_replicate_degree"] == 4 and parallelism["data_parallel_shard_degree"] == 2
    zbv = tomllib.loads(written("torchtitan", "dp=2 pp=4 zero=2 schedule=zbv"))["parallelism"]
    assert zbv["pipeline_parallel_schedule"] == "ZBVZeroBubble" and zbv["pipeline_parallel_layers_per_stage"] == 4
    model = LLAMA.model_copy(update={"layers": 30})
    uneven = tomllib.loads(written("torchtitan", "dp=2 pp=4 zero=2", model))["parallelism"]
    assert uneven["pipeline_parallel_layers_per_stage"] == 8
    ends = [uneven[f"pipeline_parallel_{end}_stage_less_layers"] for end in ("first", "last")]
    assert ends == [1, 1]
    every = tomllib.loads(written("torchtitan", "dp=8 zero=3 recompute=every:2"))["activation_checkpoint"]
    assert every == {"mode": "selective", "selective_ac_option": "2"}


def test_megatron_says_optimizers_offloading_windows_and_lighter_ends():
    text = written("megatron", "dp=8 zero=1 shard=2 offload=optimizer recompute=every:4")
    for flag in ("--optimizer-cpu-offload", "--num-distributed-optimizer-instances 4", "--recompute-num-layers 8"):
        assert flag in text, flag
    assert "--window-size 4095,0" in written("megatron", "dp=8", ModelConfig.named("mistral-7b"))
    assert "--optimizer muon" in written("megatron", "dp=8", optimizer="muon")
    model = LLAMA.model_copy(update={"layers": 30})
    uneven = written("megatron", "dp=2 pp=4 virtual_stages=2", model)
    assert "--account-for-embedding-in-pipeline-split" in uneven and "pipeline-stage 4" in uneven


def test_context_parallel_kinds_in_the_trainers_own_words():
    for kind, word in (("ring", "p2p"), ("all_gather", "all_gather"), ("all_to_all", "a2a")):
        assert f"--cp-comm-type {word}" in written("megatron", f"dp=4 cp=2 cp_kind={kind}")
    for kind, word in (("ring", "alltoall"), ("all_gather", "allgather")):
        text = tomllib.loads(written("torchtitan", f"dp=4 cp=2 zero=3 cp_kind={kind}"))
        assert text["parallelism"]["context_parallel_rotate_method"] == word


def test_torchtitan_says_experts_inside_hybrid_sharding():
    mixtral = ModelConfig.named("mixtral-8x7b")
    parallelism = tomllib.loads(written("torchtitan", "dp=8 zero=3 shard=4 ep=4", mixtral))["parallelism"]
    degrees = [parallelism[f"{word}_degree"] for word in ("data_parallel_replicate", "expert_parallel")]
    assert degrees == [2, 4] and parallelism["expert_tensor_parallel_degree"] == 1
    folded = tomllib.loads(written("torchtitan", "dp=4 tp=2 sp=1 zero=3 ep=8 etp=1", mixtral))["parallelism"]
    assert folded["expert_tensor_parallel_degree"] == 1 and folded["expert_parallel_degree"] == 8
    for layout, reason in (("dp=8 ep=4", "use zero=2 or 3"), ("dp=4 tp=2 sp=1 zero=3 etp=1", "use etp=1 with ep > 1")):
        with pytest.raises(UserError, match=reason):
            written("torchtitan", layout, mixtral)


def test_torchtitan_0_3_runs_pipelines_and_shared_experts_without_the_graphs_that_refuse_them():
    mixtral = ModelConfig.named("mixtral-8x7b")
    for layout, wanted in (("dp=8 zero=3", False), ("dp=2 pp=4 zero=2", True), ("dp=8 zero=3 ep=8", True)):
        assert ("--training.disable_cuda_graphs" in written("torchtitan", layout, mixtral)) == wanted


def test_narrow_precisions_as_planned():
    fp8 = tomllib.loads(written("torchtitan", "dp=8 zero=3", precision="fp8"))
    assert fp8["model"]["converters"] == ["quantize.linear.float8"]
    assert fp8["quantize"]["linear"]["float8"]["recipe_name"] == "rowwise"
    experts = tomllib.loads(written("torchtitan", "dp=8 zero=3 ep=4", ModelConfig.named("mixtral-8x7b"), "mxfp8"))
    assert experts["quantize"]["grouped_mm"]["mx"] == {"recipe_name": "mxfp8", "fqns": ["experts"]}
    # As the plan has them: NeMo stores 8 bits, Megatron both. Without a sharded optimizer there is no option for it.
    assert "--fp8-param-gather" in written("megatron", "dp=8 zero=1", precision="fp8", engine="nemo")
    assert "--fp4-param-gather" in written("megatron", "dp=8 zero=1", precision="nvfp4", engine="nemo")
    for layout, name in (("dp=8 zero=1", "megatron-core"), ("dp=8", "nemo")):
        assert "--fp8-param-gather" not in written("megatron", layout, precision="fp8", engine=name)


def test_deepspeed_offloads_the_optimizer():
    document = json.loads(written("deepspeed", "dp=8 zero=2 offload=optimizer"))
    assert document["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert "bf16" not in json.loads(written("deepspeed", "dp=8", precision="fp32"))


def test_ironlaws_own_config_has_the_layout_in_its_words():
    text = written("ironlaw", "dp=4 zero=3 shard=2 tp=2 sp=1", optimizer="momentum")
    config = build_config(tomllib.loads(text))
    assert config.layout.dp == 4 and config.layout.shard == 2 and config.layout.sp and config.layout.tp == 2
    assert config.optimizer.name == "momentum"
    alone = build_config(tomllib.loads(written("ironlaw", "dp=1 recompute=every:2 offload=both")))
    assert alone.recompute.mode == "every" and alone.recompute.every == 2 and alone.train.offload == "both"
    assert build_config(tomllib.loads(written("ironlaw", "dp=8 recompute=full"))).recompute.mode == "full"
    mixtral = ModelConfig.named("mixtral-8x7b")
    experts = build_config(tomllib.loads(written("ironlaw", "dp=8 ep=4", model=mixtral)))
    assert experts.layout.ep == 4 and experts.model.moe.experts == 8
    recomputed = build_config(tomllib.loads(written("ironlaw", "dp=8 zero=1 recompute=full")))
    assert recomputed.recompute.mode == "full" and recomputed.layout is not None and recomputed.layout.dp == 8


def test_positions_stretched_by_yarn_are_not_llamas():
    scaling = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_context": 4096.0}
    with pytest.raises(UserError, match="as Llama"):
        written("megatron", "dp=8", LLAMA.model_copy(update={"rope_scaling": scaling}))


def test_latent_attention_in_megatrons_words():
    text = written("megatron", "dp=8 ep=8 zero=1", ModelConfig.named("deepseek-v3"))
    for flag in (
        "--multi-latent-attention", "--qk-layernorm", "--q-lora-rank 1536", "--kv-lora-rank 512", "--qk-head-dim 128",
        "--qk-pos-emb-head-dim 64", "--v-head-dim 128", "--rope-type yarn", "--rotary-scaling-factor 40", "--mscale 1",
        "--mscale-all-dim 1", "--moe-router-num-groups 8", "--moe-router-group-topk 4",
        "--moe-router-score-function sigmoid", "--moe-router-enable-expert-bias",
    ):  # fmt: skip
        assert flag in text, flag
    assert "--group-query-attention" not in text and "--use-rope-scaling" not in text
    whole = written("megatron", "dp=8 ep=8 zero=1", ModelConfig.named("deepseek-v2-lite"))
    assert "--q-lora-rank" not in whole and "--mscale-all-dim 0.707" in whole


def test_latent_attention_as_torchtitan_has_it():
    document = tomllib.loads(written("torchtitan", "dp=8 ep=8 zero=3", ModelConfig.named("deepseek-v3")))
    assert document["model"] == {"name": "deepseek_v3", "flavor": "671B"}
    narrow = tomllib.loads(written("torchtitan", "dp=8 zero=3", ModelConfig.named("deepseek-v2-lite"), precision="fp8"))
    assert narrow["model"]["flavor"] == "16B" and narrow["model"]["converters"]


@pytest.mark.parametrize(
    ("trainer", "model", "layout", "reason"),
    [
        ("megatron", "kimi-k2", "dp=8 zero=1", "rope_scaling.beta_fast"),
        ("megatron", "deepseek-v2", "dp=8 zero=1", "sum of their 2 best"),
        ("torchtitan", "kimi-k2", "dp=8 zero=3", "16B, 236B, 671B"),
        ("torchtitan", "deepseek-v3", "dp=4 cp=2 zero=3", "cp=1"),
    ],
)
def test_latent_attention_that_cannot_be_said_is_refused(trainer, model, layout, reason):
    with pytest.raises(UserError, match=reason):
        written(trainer, layout, ModelConfig.named(model))


FAMILIES = {
    "windows in some layers": ({"sliding_window": 1024, "full_every": 4}, "--window-attn-skip-freq 4"),
    "upper windows": ({"sliding_window": 1024, "full_first": 20}, "--window-attn-skip-freq [0]*20+[1]*12"),
    "squared relu": ({"gated_ffn": False, "activation": "relu2", "rotary_size": 64}, "--rotary-percent 0.5"),
    "layers without positions": ({"unrotated_every": 4}, "--no-rope-freq 4"),
    "sinks": ({"attention_sinks": True}, "--softmax-type learnable"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_megatron_says_switches_by_flags_it_has(name):
    change, flag = FAMILIES[name]
    text = written("megatron", "dp=8 zero=1", LLAMA.model_copy(update=change))
    assert flag in text
    known = {*NAMES["megatron"]["names"], *NAMES["megatron_switches"]["names"]}
    assert set(option_names("megatron", text)["megatron"]) <= known


@pytest.mark.parametrize(
    ("change", "word"),
    [({"norm_place": "post"}, "norm_place"), ({"parallel_norms": 1}, "parallel_norms"),
     ({"positions": "alibi"}, "alibi"), ({"embedding_scale": 2.0}, "embedding_scale"),
     ({"attention_cap": 50.0}, "attention_cap")],
)  # fmt: skip
def test_what_no_option_says_of_a_model_is_refused(change, word):
    model = LLAMA.model_copy(update=change)
    for trainer in ("megatron", "torchtitan"):
        assert word in str(trainer_named(trainer).cannot(parse_layout("dp=8 zero=2"), model))
    biased = LLAMA.model_copy(update={"qkv_bias": True, "ffn_bias": True})
    assert "biases" in str(trainer_named("megatron").cannot(parse_layout("dp=8"), biased))


def test_a_search_for_torchtitan_compares_a_latent_model_with_its_flavors_once(monkeypatch):
    read = []
    model = ModelConfig.named("deepseek-v2-lite").model_copy(update={"name": "our v2 lite"})
    named = ModelConfig.named
    monkeypatch.setattr(ModelConfig, "named", lambda name: read.append(name) or named(name))
    layouts = [parse_layout(f"dp={dp} zero=3") for dp in range(1, 200)]
    assert {trainer_named("torchtitan").cannot(layout, model) for layout in layouts} == {None}
    assert len(read) <= 3  # a layout took milliseconds, and a search has a hundred thousand
