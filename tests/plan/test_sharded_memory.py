"""Bytes of a rank, term by term, against the formulas they come from."""

from dataclasses import replace

import numpy as np
import pytest

from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster.candidates import candidates_of
from ironlaw.plan.cluster.memory import in_flight, layer_activation_bytes, peak_memory, reported_bytes
from ironlaw.plan.cluster.stages import stage_layers
from ironlaw.plan.engines.engine import TrainingEngine
from ironlaw.workload.layout import Layout, parse_layout

PLAIN = TrainingEngine("plain", gradient_bytes=2.0)
GPT = ModelConfig.named("gpt2-xl")


def candidates(*layouts, model=GPT, sequence=1024, global_batch=64, flash=True):
    parsed = [parse_layout(text) for text in layouts]
    return candidates_of(model, parsed, sequence=sequence, global_batch=global_batch, flash=flash)


def test_mixed_precision_adam_is_16_bytes_per_parameter_and_18_with_fp32_gradients():
    peak = peak_memory(candidates("dp=1"), PLAIN)
    states = peak.weights + peak.gradients + peak.master + peak.moments
    assert states[0] == 16 * GPT.parameters
    fp32 = peak_memory(candidates("dp=1"), replace(PLAIN, gradient_bytes=4.0))
    assert (fp32.weights + fp32.gradients + fp32.master + fp32.moments)[0] == 18 * GPT.parameters


def test_zero_divides_12_14_and_16_of_the_16_bytes():
    peak = peak_memory(candidates("dp=8 zero=0", "dp=8 zero=1", "dp=8 zero=2", "dp=8 zero=3"), PLAIN)
    states = (peak.weights + peak.gradients + peak.master + peak.moments) / GPT.parameters
    assert states == pytest.approx([16, 4 + 12 / 8, 2 + 14 / 8, 16 / 8])


def test_a_layer_keeps_s_b_h_34_plus_5_a_s_over_h():
    """arXiv 2205.05198, table 2: half precision, dropout, no flash, no recomputation."""
    s, b, h, a = 1024, 8, GPT.hidden, GPT.heads
    column = candidates("micro_batch=8", flash=False)
    total, core, _ = layer_activation_bytes(column, replace(PLAIN, dropout_mask_bytes=1))
    assert total[0] == s * b * h * (34 + 5 * a * s / h)
    assert core[0] == 5 * a * s * s * b


def test_tensor_and_sequence_parallelism_divide_activations():
    """arXiv 2205.05198: 10 of the 34 stay whole under tensor parallelism alone, none with sequence parallelism."""
    s, h, a = 1024, GPT.hidden, GPT.heads
    column = candidates("tp=5 micro_batch=1", "tp=5 sp=1 micro_batch=1", flash=False)
    total, _, _ = layer_activation_bytes(column, replace(PLAIN, dropout_mask_bytes=1))
    assert total[0] == pytest.approx(s * h * (10 + 24 / 5 + 5 * a * s / (h * 5)))
    assert total[1] == pytest.approx(s * h * (34 / 5 + 5 * a * s / (h * 5)))


def test_few_key_value_heads_are_copied_over_tensor_parallel_ranks():
    """Of 8 ranks each holds the only key and value head whole: 2 h d per block, not 2 h d / 8."""
    model = ModelConfig.named("llama3-8b").model_copy(update={"kv_heads": 1})
    peak = peak_memory(candidates("tp=8", model=model), PLAIN)
    head = 2 * 4096 * 128 * 32
    whole = (model.parameters - head) / 8 + head
    assert (peak.weights + peak.gradients + peak.master + peak.moments)[0] == pytest.approx(16 * whole, rel=1e-6)
    sharded = peak_memory(candidates("dp=4 tp=8 zero=3", model=model), PLAIN)
    assert (sharded.weights + sharded.moments)[0] == pytest.approx(10 * whole / 4, rel=1e-6)


def test_chunks_of_a_stage_hold_the_messages_of_the_next():
    peak = peak_memory(candidates("pp=4", "pp=4 virtual_stages=2"), PLAIN)
    message = 2 * 1024 * GPT.hidden  # a gradient and an input, 2 bytes each
    assert peak.temporaries[1] - peak.temporaries[0] == 2 * message


def test_earlier_stages_hold_more_micro_batches():
    column = candidates("pp=4", "pp=4 virtual_stages=2", "pp=4 micro_batch=32")
    assert [in_flight(column, s)[0] for s in range(4)] == [4, 3, 2, 1]
    assert in_flight(column, 0)[1] == pytest.approx((2 * 3 + 4 + 1) / 2)
    assert in_flight(column, 0)[2] == 2  # there are only two


def test_full_recomputation_keeps_the_input_of_each_layer():
    column = candidates("micro_batch=4", "micro_batch=4 recompute=full")
    peak = peak_memory(column, PLAIN)
    assert peak.activations[1] == GPT.layers * 4 * 1024 * GPT.hidden * 2
    assert peak.activations[1] < 0.1 * peak.activations[0]


def test_the_first_stage_may_not_be_the_highest():
    """Few micro-batches in flight and a large vocabulary: the logits on the last stage decide."""
    model = ModelConfig.named("llama3-1b")
    column = candidates("pp=2 micro_batch=32", model=model, sequence=4096, global_batch=32)
    assert peak_memory(column, PLAIN).stage[0] == 1
    first = replace(PLAIN, reporting_stage="first")
    assert reported_bytes(column, first)[0] < peak_memory(column, first).total[0]


def test_components_add_up():
    column = candidates("dp=2 tp=4 sp=1 pp=2 zero=1", "dp=16 zero=3 recompute=full", "pp=8 virtual_stages=3")
    peak = peak_memory(column, PLAIN)
    names = ("weights", "gradients", "master", "moments", "activations", "logits", "temporaries", "context")
    assert peak.total == pytest.approx(sum(getattr(peak, name) for name in names))


def test_cost_balanced_stages_count_the_output_layer_as_layers():
    """A 131,072-word output layer costs as much as four blocks of 2,048: 10 + 6 layers, not 8 + 8."""
    model = ModelConfig(
        layers=16, hidden=2048, heads=32, ffn=8192, gated_ffn=True, vocab=131072, context=4096, norm="rmsnorm",
        positions="rope", bias=False,
    )  # fmt: skip
    column = candidates_of(model, [Layout(pp=2), Layout(pp=4)], sequence=4096, global_batch=8)
    counts = stage_layers(column, "cost").counts
    assert list(counts[0][:2]) == [10, 6]
    assert counts[1].sum() == 16 and counts[1][3] < 4
    assert list(stage_layers(column, "equal").counts[0][:2]) == [8, 8]


def test_layers_are_never_lost():
    column = candidates(*[f"pp={pp}" for pp in (1, 3, 5, 7, 11, 48)])
    for partition in ("equal", "cost"):
        assert np.all(stage_layers(column, partition).counts.sum(axis=1) == GPT.layers)


def test_tensors_of_queued_collectives_stay_where_no_message_holds_the_host_up():
    """Per hidden element of the micro-batch, undivided; half with one micro-batch; nothing where tp is 1."""
    ahead = replace(PLAIN, run_ahead_bytes=90.0)
    many = candidates("dp=2 tp=4 sp=1", "dp=2 tp=4 sp=1 micro_batch=32", "dp=8")
    surplus = peak_memory(many, ahead).total - peak_memory(many, PLAIN).total
    each = many.tokens * GPT.hidden * 90.0
    assert surplus == pytest.approx([each[0], each[1] / 2, 0.0])


def test_what_the_allocator_cannot_use_again_is_a_share_of_all_activations():
    one = candidates("dp=8")
    plain, slack = (peak_memory(one, e).activations for e in (PLAIN, replace(PLAIN, activation_slack=1.2)))
    assert slack == pytest.approx(1.2 * plain)


def test_software_that_keeps_gathered_weights_in_pipelines_holds_whole_gradients_too():
    """FSDP2 as torchtitan sets it: fp32 gradients of the stage undivided, where others scatter each micro-batch's."""
    wide = replace(PLAIN, weight_bytes=4.0, master_bytes=0.0, gradient_bytes=4.0)
    keeps = replace(wide, pipeline_keeps=True)
    many = candidates("dp=8 zero=2 pp=2", "dp=8 zero=2")
    scattered, whole = (peak_memory(many, e).gradients for e in (wide, keeps))
    assert whole == pytest.approx(scattered * [8, 1])
    # Reduced once a step, after all backward passes, they wait in no buffer beside activations: as under ZeRO-1.
    total = peak_memory(candidates("dp=8 zero=2 pp=2", "dp=8 zero=1 pp=2"), keeps).total
    assert total[0] == total[1]
