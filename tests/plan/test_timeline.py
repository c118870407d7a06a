"""Step time: the pipeline, overlap, host time and collectives behave as their formulas say."""

from dataclasses import replace

import numpy as np
import pytest

from ironlaw.catalog.nodes import parse_cluster
from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster.candidates import candidates_of
from ironlaw.plan.cluster.step_costs import step_costs
from ironlaw.plan.cluster.system import system_of
from ironlaw.plan.cluster.timeline import UNFUSED_SOFTMAX_LAUNCHES, Times
from ironlaw.plan.engines.engine import TrainingEngine
from ironlaw.plan.engines.named import engine_of_framework, engines
from ironlaw.workload.layout import parse_layout

GPT = ModelConfig.named("gpt2-xl")
ENGINE = TrainingEngine(
    "plain", host_layer_seconds=1e-9, host_collective_seconds=0.0, host_microbatch_seconds=0.0, host_step_seconds=0.0,
    pp_hidden=1.0,
)  # fmt: skip


def planned(*layouts, engine=ENGINE, cluster="8xa100-sxm-80gb", model=GPT, sequence=1024, global_batch=64, flash=True):
    where = system_of(parse_cluster(cluster), engine, "bf16")
    parsed = [parse_layout(text) for text in layouts]
    candidates = candidates_of(model, parsed, sequence=sequence, global_batch=global_batch, flash=flash)
    return Times(step_costs(candidates, where), candidates, engine)


def test_terms_add_up_to_the_step():
    times = planned("dp=8", "dp=2 tp=4 sp=1", "pp=8", "dp=8 zero=3 recompute=full", "dp=2 pp=4 virtual_stages=2")
    names = ("forward", "backward", "host_excess", "bubble", "tp_exposed", "cp_exposed", "pp_exposed", "fsdp_exposed")
    names += ("reduce_exposed", "gather_exposed", "optimizer", "host_step", "head_matmul", "loss", "embedding")
    assert times.step_seconds == pytest.approx(sum(getattr(times, name) for name in names), rel=1e-9)


def test_bubble_is_p_minus_1_micro_batches_and_interleaving_divides_it():
    """(p - 1) / m of the compute of a stage, over v (arXiv 2104.04473, section 2.2); equal stages, no output layer."""
    tiny = GPT.model_copy(update={"vocab": 2})
    times = planned("pp=8 virtual_stages=1", "pp=8 virtual_stages=2", "pp=8 virtual_stages=6", model=tiny)
    work = times.forward + times.backward
    assert (times.bubble / work)[0] == pytest.approx(7 / 64, rel=0.02)
    assert times.bubble[0] / times.bubble[1:] == pytest.approx([2, 6], rel=1e-6)


def test_every_further_chunk_launches_four_messages():
    """One received and one sent, forward and backward, per chunk beyond the first and micro-batch."""
    slow = replace(ENGINE, host_collective_seconds=1.0)
    times = planned("pp=8 virtual_stages=1", "pp=8 virtual_stages=2", "pp=8 virtual_stages=6", engine=slow)
    assert times.host_excess[1:] - times.host_excess[0] == pytest.approx([64 * 4, 64 * 20], rel=0.01)


def test_small_micro_batches_take_host_time_not_the_sum():
    slow = replace(ENGINE, host_layer_seconds=0.02, host_backward_ratio=1.5)
    times = planned("dp=8 micro_batch=1", engine=slow)
    host = 8 * GPT.layers * 0.02 * 2.5
    assert times.step_seconds[0] == pytest.approx(host, rel=0.02)
    assert times.host_excess[0] > 0.9 * (host - times.forward[0] - times.backward[0])


def test_full_recomputation_costs_a_third_more_of_the_blocks():
    times = planned("dp=8 micro_batch=8", "dp=8 micro_batch=8 recompute=full")
    blocks = times.forward + times.backward
    assert blocks[1] / blocks[0] == pytest.approx(4 / 3, abs=0.04)


def test_gradients_hide_behind_the_backward_pass_as_far_as_the_engine_can():
    exposed = planned("dp=8", engine=replace(ENGINE, dp_hidden=0.0)).reduce_exposed[0]
    hidden = planned("dp=8", engine=replace(ENGINE, dp_hidden=1.0)).reduce_exposed[0]
    assert exposed > 5e-3 and hidden == pytest.approx(0.0, abs=1e-6)


def test_tensor_parallelism_across_nodes_is_dear():
    times = planned("dp=2 tp=5 sp=1 micro_batch=4", "dp=1 tp=10 sp=1 micro_batch=4", cluster="10xa100-sxm-80gb")
    assert times.tp_exposed[1] > 2 * times.tp_exposed[0]


def test_materialised_scores_cost_more_than_flash_at_length():
    flash = planned("dp=8 micro_batch=1", sequence=8192, global_batch=8).step_seconds[0]
    standard = planned("dp=8 micro_batch=1", sequence=8192, global_batch=8, flash=False).step_seconds[0]
    assert standard > 1.5 * flash


def test_attention_without_a_fused_kernel_is_as_slow_as_matmuls():
    slow = replace(ENGINE, attention_slowdown=3.0)
    plain, same = (planned("dp=8 micro_batch=4", engine=e, flash=False).step_seconds for e in (ENGINE, slow))
    fused, slower = (planned("dp=8 micro_batch=4", engine=e).step_seconds for e in (ENGINE, slow))
    assert plain == same and slower > fused


def test_candidates_are_independent_of_what_they_are_planned_with():
    layouts = ("dp=8", "dp=2 tp=4", "pp=4 dp=2", "dp=8 zero=3")
    together = planned(*layouts).step_seconds
    alone = np.array([planned(text).step_seconds[0] for text in layouts])
    assert together == pytest.approx(alone, rel=1e-12)


def test_every_engine_file_loads_and_says_where_it_comes_from():
    for name, engine in engines().items():
        assert engine.name == name and engine.source
        assert 0.9 <= engine.matmul_slowdown <= 1.8, name
        assert 0.0 <= engine.tp_hidden <= 1.0 and 0.0 <= engine.dp_hidden <= 1.0, name


def test_framework_names_find_their_engine():
    assert engine_of_framework("Megatron-LM", "standard").name == "megatron-2021"
    assert engine_of_framework("Megatron-LM").name == "megatron-core"
    assert engine_of_framework("torchtitan 2024-04").name == "torchtitan-2024"
    assert engine_of_framework("NeMo 24.07 Large Language Models").name == "nemo"


def test_unfused_softmax_launches_more_where_rows_do_not_divide_by_four():
    """GPT-2 XL has 25 heads: 25 rows of scores at micro-batch 1, 100 at 4; flash attention never falls back."""
    slow = replace(ENGINE, host_layer_seconds=0.5)
    odd, whole = planned("dp=8 micro_batch=1", "dp=8 micro_batch=4", engine=slow, flash=False).step_seconds
    assert odd / whole == pytest.approx(4 * (1 + UNFUSED_SOFTMAX_LAUNCHES), rel=0.01)
    odd, whole = planned("dp=8 micro_batch=1", "dp=8 micro_batch=4", engine=slow).step_seconds
    assert odd / whole == pytest.approx(4, rel=0.01)


def test_the_loss_waits_for_the_device_also_where_blocks_wait_for_launches():
    slow = replace(ENGINE, host_layer_seconds=0.5)
    wordy = GPT.model_copy(update={"vocab": 2_000_000})
    with_head, without = (
        planned("dp=8 micro_batch=1", engine=replace(slow, loss_traffic=traffic), model=wordy) for traffic in (4, 1)
    )
    assert with_head.step_seconds > without.step_seconds + 2 * without.loss / 8
    assert with_head.loss > 1.5 * without.loss


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("Megatron-Core 0.14", "megatron-core"), ("GPT-NeoX", "megatron-deepspeed"), ("MaxText", "maxtext"),
        ("Levanter", "levanter"), ("Pax (GPT-3)", "paxml"),
        ("LLM Foundry 0.22", "composer-fsdp"), ("torchtitan 0.3", "torchtitan"), ("torchtitan 0.0.2/torch 2.7",
        "torchtitan-2025"), ("NeMo 26.04", "nemo"), ("Megatron-Bridge", "nemo"), ("NVIDIA NeMo 25.02", "nemo"),
        ("ROCm (Megatron-LM)", "megatron-core"), ("MLPerf, Megatron-DeepSpeed", "megatron-deepspeed"),
        ("Megatron-LM by way of NeMo", "megatron-core"), ("DeepSpeed ZeRO-3", "deepspeed"),
    ],
)  # fmt: skip
def test_software_of_a_family_is_planned_by_its_engine(said, name):
    assert engine_of_framework(said).name == name


def test_no_engine_multiplies_much_slower_than_its_kernels_do_alone():
    """What is more is something else. JAX's of 2024 stands for all that it was slower in: its five runs cannot tell."""
    assert all(e.on("hopper").matmul_slowdown < (1.4 if name == "paxml" else 1.25) for name, e in engines().items())
    for precision, casts in (("bf16", False), ("fp8", True)):
        assert bool(engines()["paxml"].computing_in(precision, "hopper").casts.weights) is casts


def test_megatron_core_overlaps_tensor_parallel_communication_as_nemo_built_on_it_does():
    core, nemo = (engines()[name].on("hopper") for name in ("megatron-core", "nemo"))
    assert core.tp_hidden == nemo.tp_hidden > 0.4


def test_ranks_of_a_collective_cost_the_host_only_in_pipelines_across_nodes():
    slow = replace(ENGINE, host_layer_seconds=5e-3, host_rank_seconds=1e-3)
    plain = replace(slow, host_rank_seconds=0.0)
    layouts = ("dp=2 tp=4 pp=2", "dp=4 tp=4", "dp=8 pp=2")
    more, less = (planned(*layouts, engine=e, cluster="16xa100-sxm-80gb") for e in (slow, plain))
    assert more.step_seconds[0] > 1.5 * less.step_seconds[0]
    assert np.array_equal(more.step_seconds[1:], less.step_seconds[1:])
    inside = [planned("tp=4 pp=2", engine=e).step_seconds for e in (slow, plain)]
    assert np.array_equal(*inside)


def test_selective_recomputation_may_repeat_attention_too():
    some = replace(ENGINE, selective_matmul_share=0.4)
    kept, again = (
        planned("dp=8 recompute=selective", engine=e, sequence=8192, global_batch=8)
        for e in (some, replace(some, selective_attention_share=1.0))
    )
    without = planned("dp=8", engine=some, sequence=8192, global_batch=8).backward[0]
    assert again.backward[0] - without > 1.2 * (kept.backward[0] - without)
