"""Numbers that textbooks print, from Ironlaw's own formulas. The arithmetic is in each docstring."""

from dataclasses import replace

import pytest

from ironlaw.catalog.accelerators import accelerator
from ironlaw.catalog.accelerators import peak as dense_peak
from ironlaw.catalog.formats import number_format
from ironlaw.catalog.nodes import parse_cluster
from ironlaw.machine.efficiency.collectives import collective_seconds, traffic_bytes
from ironlaw.machine.efficiency.hardware import CollectiveConstants, Fabric
from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster.candidates import candidates_of
from ironlaw.plan.cluster.estimate import plan_candidates
from ironlaw.plan.cluster.memory import layer_activation_bytes, peak_memory
from ironlaw.plan.cluster.system import system_of
from ironlaw.plan.engines.engine import TrainingEngine
from ironlaw.plan.engines.named import engine
from ironlaw.workload.layout import Layout, parse_layout

GPT2 = ModelConfig.named("gpt2")
XL = ModelConfig.named("gpt2-xl")
MIXED = TrainingEngine("mixed precision", gradient_bytes=2.0, dropout_mask_bytes=1)


def one(model, micro_batch=1, sequence=1024, recompute="none"):
    layout = Layout(micro_batch=micro_batch, recompute=recompute)
    return candidates_of(model, [layout], sequence=sequence, global_batch=micro_batch, flash=False)


def test_gpt2_parameters():
    """E (V + P) + L (12 E^2 + 13 E) + 2 E: 768 (50,257 + 1,024) + 12 (12 x 768^2 + 13 x 768) + 1,536."""
    assert one(GPT2).parameters[0] == 124_439_808
    assert one(XL).parameters[0] == 1_557_611_200


def test_gpt2_xl_states_at_16_bytes():
    """1,557,611,200 x (2 + 2 + 4 + 4 + 4) = 24.9 GB."""
    peak = peak_memory(one(XL), MIXED)
    assert (peak.weights + peak.gradients + peak.master + peak.moments)[0] == pytest.approx(24.92e9, rel=1e-3)


def test_gpt2_xl_activations():
    """s b h (34 + 5 a s / h) = 1024 x 8 x 1600 x (34 + 5 x 25 x 1024 / 1600) = 1,494.2 MB; 48 layers: 71.7 GB."""
    per_layer = layer_activation_bytes(one(XL, 8), MIXED)[0][0]
    assert per_layer == pytest.approx(1494.2e6, rel=1e-4)
    assert peak_memory(one(XL, 8), MIXED).activations[0] == pytest.approx(71.7e9, rel=1e-3)
    assert peak_memory(one(XL, 4), MIXED).activations[0] == pytest.approx(35.86e9, rel=1e-3)


def test_gpt2_xl_mixed_precision_at_batch_4_is_about_60_gb():
    """3 + 3 + 6 + 12 GB of states at 1.5B parameters and 35.9 of activations: 59.9; exact parameters give 60.8."""
    peak = peak_memory(one(XL, 4), MIXED)
    states = (peak.weights + peak.gradients + peak.master + peak.moments)[0]
    assert states * 1.5e9 / XL.parameters + peak.activations[0] == pytest.approx(59.9e9, rel=2e-3)
    assert states + peak.activations[0] == pytest.approx(60.8e9, rel=2e-3)


def test_seven_billion_parameters_need_112_gb_and_do_not_train_in_24():
    """14 + 14 + 28 + 56 GB at 16 bytes: five 24 GB cards' worth before any activation."""
    model = ModelConfig(layers=32, hidden=4096, heads=32, ffn=11008, gated_ffn=True, vocab=32000, context=2048,
                        norm="rmsnorm", positions="rope", bias=False, tied=False)  # fmt: skip
    peak = peak_memory(one(model, sequence=2048), MIXED)
    states = (peak.weights + peak.gradients + peak.master + peak.moments)[0]
    assert states * 7e9 / model.parameters == pytest.approx(112e9, rel=1e-6)
    assert states > 4 * 24e9


def test_a_training_step_of_gpt2_xl():
    """One layer forward at batch 32, scores whole: 2,228.0 GFLOP; three times 48 of them: 320.8 TFLOP, no LM head."""
    column = one(XL, 32)
    head = 6 * XL.hidden * XL.vocab * 32 * 1024
    step = column.hardware_flops()[0] - head
    assert step / (3 * 48) == pytest.approx(2228.0e9, rel=1e-3)
    assert step == pytest.approx(320.8e12, rel=1e-3)
    assert step / 125e12 == pytest.approx(2.6, abs=0.05)  # seconds at a V100's peak


def test_ring_all_reduce_of_7b_gradients_among_8_nodes():
    """2 (8 - 1) / 8 x 14 GB = 24.5 GB; over 100 Gb/s = 12.5 GB/s: 1.96 s."""
    assert traffic_bytes("all_reduce", 14e9, 8) == pytest.approx(24.5e9)
    seconds = collective_seconds(
        "all_reduce", 14e9, 8, fabric=Fabric(8, 12.5e9, CollectiveConstants(0.0, 0.0, 0.0, 1.0, 1.0, 1e12))
    )
    assert seconds == pytest.approx(1.96, rel=1e-3)


def test_gpt3_gradients_of_a_large_ring():
    """2 x 350 GB = 700 GB per rank and step without sharding."""
    assert traffic_bytes("all_reduce", 350e9, 1024) == pytest.approx(700e9, rel=2e-3)


def test_accumulation():
    """8 accelerators x 16 x 4 = 512 sequences."""
    assert Layout(dp=8, micro_batch=16, accumulation=4).global_batch() == 512


def test_llama2_70b_on_1024_h100():
    """6 N D = 6 x 70e9 x 2e12 = 8.4e23; at 50% of 989 TFLOP/s 53.8 years on one, 19.2 days on 1,024."""
    flops = 6 * 70e9 * 2e12
    seconds = flops / (0.5 * 989e12)
    assert seconds / 31_557_600 == pytest.approx(53.8, rel=2e-3)
    assert seconds / 1024 / 86400 == pytest.approx(19.2, rel=2e-3)


@pytest.mark.parametrize(
    ("parameters", "stored", "overhead", "gigabytes"), [(70e9, "fp16", 0.2, 168.0), (120e9, "mxfp4", 0.0, 63.8)]
)
def test_weights_to_load(parameters, stored, overhead, gigabytes):
    """P x bits / 8 x (1 + overhead): 70B in fp16 and 20%, 120B at 4.25 bits. 82M in fp32: 328 MB."""
    held = parameters * number_format(stored).bytes_per_element() * (1 + overhead)
    assert held / 1e9 == pytest.approx(gigabytes, abs=0.05)
    assert 82e6 * number_format("fp32").bytes_per_element() == 328e6


def test_mfu_of_a_step():
    """6 N D: 7B, 1,024 tokens in 1.2 s on an A100 is 11.5% of its dense 312 TFLOP/s."""
    peak_flops = dense_peak(accelerator("a100-sxm-80gb"), "bf16").value
    assert 6 * 7e9 * 1024 / 1.2 / peak_flops == pytest.approx(0.115, abs=0.0005)


def test_bubble_of_a_pipeline():
    """(p - 1) / m of the compute, (p - 1) / (m + p - 1) of the step; virtual stages divide it."""
    for pp, virtual, micro_batches in ((4, 1, 8), (8, 1, 32), (8, 3, 32)):
        layout = parse_layout(f"pp={pp} micro_batch=1" + (f" virtual_stages={virtual}" if virtual > 1 else ""))
        model = ModelConfig.named("gpt3-175b").model_copy(update={"layers": 24 * virtual, "vocab": 2048})
        where = system_of(parse_cluster(f"{pp}xh200"), replace(engine("generic"), host_layer_seconds=0.0), "bf16")
        candidates = candidates_of(model, [layout], sequence=2048, global_batch=micro_batches)
        times = plan_candidates(candidates, where).times
        ideal = times.forward + times.backward + times.bubble
        assert times.bubble / ideal == pytest.approx((pp - 1) / (virtual * micro_batches + pp - 1), rel=0.05)
