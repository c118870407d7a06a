"""Layouts as other trainers' options: what is written says the layout, what cannot be said is refused."""

import json
import tomllib
from dataclasses import replace

import pytest

from ironlaw.catalog.nodes import parse_cluster
from ironlaw.config import build_config
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.plan.ask import Ask
from ironlaw.plan.emit import TRAINERS, emit, trainer_named
from ironlaw.plan.layout import parse_layout
from ironlaw.plan.work import Work

LLAMA = ModelConfig.named("llama3-8b")
GPT2 = ModelConfig.named("gpt2")


def written(trainer, layout, model=LLAMA, precision="bf16", global_batch=128):
    chosen = parse_layout(layout)
    cluster = parse_cluster(f"{chosen.accelerators}xh100-sxm-80gb")
    sequence = min(8192, model.context)
    ask = Ask(model, cluster, Work(sequence, global_batch, 1000), precision, "generic")
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
        ("ironlaw", "dp=8", "one device"),
    ],
)
def test_what_cannot_be_said_is_refused(trainer, layout, reason):
    with pytest.raises(UserError, match=reason):
        written(trainer, layout)


def test_precisions_without_an_option_are_refused():
    with pytest.raises(UserError, match="--precision bf16"):
        written("torchtitan", "dp=8", precision="fp8")


def test_every_trainer_can_write_one_device():
    for name in TRAINERS:
        assert trainer_named(name).cannot(replace(parse_layout("dp=1"), micro_batch=1), LLAMA) is None
        assert written(name, "dp=1")
