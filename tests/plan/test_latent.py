"""Latent attention on clusters: exact parameters and FLOPs, what ranks hold whole, keep, gather and send."""

import json
import tomllib
from dataclasses import replace

import pytest
from block_products import block_products

from ironlaw.catalog.nodes import parse_cluster
from ironlaw.config import build_config
from ironlaw.machine.efficiency.attention import attention_flops, attention_seconds
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.configs import to_fields
from ironlaw.plan.cluster.candidates import candidates_of
from ironlaw.plan.cluster.collective_costs import spared_collectives
from ironlaw.plan.cluster.estimate import ClusterRequest, plan_candidates
from ironlaw.plan.cluster.memory import kept_activation_bytes, layer_activation_bytes
from ironlaw.plan.cluster.search import search
from ironlaw.plan.cluster.system import system_of
from ironlaw.plan.emit.trainers import emit
from ironlaw.plan.engines.named import engine
from ironlaw.plan.request import plan_request
from ironlaw.plan.request_types import Options
from ironlaw.workload.blocks import Shape
from ironlaw.workload.latent import widened_bytes
from ironlaw.workload.layout import parse_layout
from ironlaw.workload.operations import total_flops
from ironlaw.workload.program import step, training_operations
from ironlaw.workload.recipe import Recipe, StepBatch
from ironlaw.workload.sharding import stage_parameters

NAMES = ("deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "kimi-k2")
V3 = ModelConfig.named("deepseek-v3")
DENSE = V3.model_copy(update={"moe": None, "layers": 4})  # its attention, and a network that every token visits
MEGATRON, TITAN = engine("nemo"), engine("torchtitan")


def candidates(model, *layouts, sequence=4096, batch=1024):
    return candidates_of(model, [parse_layout(text) for text in layouts], sequence=sequence, global_batch=batch)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_and_flops_are_the_models(name):
    model = ModelConfig.named(name)
    one = candidates(model, "dp=1", batch=1)
    assert round(one.parameters[0]) == model.parameters
    assert round(one.model_flops()[0]) == total_flops(training_operations(Shape(model, 1, 4096)))


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("model", [DENSE, ModelConfig.named("deepseek-v2-lite").model_copy(update={"moe": None})])
def test_a_tensor_parallel_rank_holds_narrow_vectors_whole(model, tp):
    layout = parse_layout(f"dp=8 tp={tp}")
    held = [p.elements for p in stage_parameters(model, layout, 0) if p.name.startswith("blocks.1.")]
    planned = candidates(model, str(layout)).local_block_parameters[0]
    norms = 2 * model.hidden  # of the residual stream, which the planner counts as divided
    assert planned == pytest.approx(sum(held) - norms * (1 - 1 / tp))


@pytest.mark.parametrize("which", [MEGATRON, TITAN])
def test_products_are_the_projections(which):
    tp, tokens = 4, 4096
    shapes = {
        name: product[:3] for name, product in block_products(candidates(DENSE, f"dp=8 tp={tp} sp=1"), which).items()
    }
    own = tokens / tp if which is MEGATRON else tokens  # Megatron narrows each rank's own tokens
    assert "qkv" not in shapes
    assert shapes["query_down"] == (1536, 7168, own) and shapes["latent_down"] == (576, 7168, own)
    assert shapes["query_up"] == (128 * 192 / tp, 1536, tokens)
    assert shapes["latent_up"] == (128 * 256 / tp, 512, tokens)
    assert shapes["attention_out"] == (7168, 128 * 128 / tp, tokens)


def test_megatron_gathers_narrow_vectors_in_place_of_the_stream():
    some = candidates(DENSE, "dp=8 tp=4 sp=1", "dp=8 tp=4")
    where, titan = (system_of(parse_cluster("32xh100-sxm-80gb"), e, "bf16") for e in (MEGATRON, TITAN))
    spared = spared_collectives(some, where)
    assert spared[0] == pytest.approx(0.5 * (1 - (1536 + 512 + 64) / 7168)) and spared[1] == 0
    assert not spared_collectives(some, titan).any()
    assert not spared_collectives(candidates(ModelConfig.named("llama3-8b"), "dp=8 tp=4 sp=1"), where).any()


def test_an_engine_by_another_name_plans_the_same():
    """As a calibrated profile does: what an engine is like must not hang on what it is called."""
    some, cluster = candidates(DENSE, "dp=8 tp=4 sp=1"), parse_cluster("32xh100-sxm-80gb")
    plans = [
        plan_candidates(some, system_of(cluster, e, "bf16")) for e in (MEGATRON, replace(MEGATRON, name="my-cluster"))
    ]
    assert plans[0].step_seconds == plans[1].step_seconds and plans[0].peak.total == plans[1].peak.total


def test_kept_bytes_by_hand():
    """Of a token and block: queries and keys of 192, values and what they mix of 128 per head; the narrow vectors
    before and after their norms; twice the stream and its norm, and the network."""
    one = candidates(DENSE, "dp=8")
    plain = MEGATRON.computing_in("bf16")
    narrow = 2 * (2 * (1536 + 512) + 64) * 4096
    everything, core, _ = layer_activation_bytes(one, plain)
    llama = candidates(DENSE.model_copy(update={"latent": None, "head_size": 128, "kv_heads": 128}), "dp=8")
    usual, usual_core, _ = layer_activation_bytes(llama, plain)
    views = 128 * plain.unrotated_kept * (128 - 2 * 128) * 2 * 4096  # keys' parts in place of queries and keys
    more = 128 * (2 * 192 + 2 * 128 - 4 * 128) * 2 * 4096 + narrow + views
    assert everything[0] - usual[0] == pytest.approx(plain.activation_slack * more)
    assert core[0] == usual_core[0]


def test_context_parallel_ranks_send_keys_and_values_of_their_sizes():
    where = system_of(parse_cluster("64xh100-sxm-80gb"), MEGATRON, "bf16")
    equal = DENSE.model_copy(update={"latent": None, "head_size": 160, "kv_heads": 128})  # the same bytes: 192 + 128
    seconds = [
        plan_candidates(candidates(model, "dp=8 cp=8 cp_kind=ring"), where).costs.cp_layer[0]
        for model in (DENSE, equal)
    ]
    assert seconds[0] == pytest.approx(seconds[1])


def test_attention_with_values_narrower_than_keys():
    """QK^T as wide as keys, PV as values; backward three products of the first kind and two of the second."""
    hardware = system_of(parse_cluster("8xh100-sxm-80gb"), MEGATRON, "bf16").hardware
    forward = attention_flops(1, 8, 2, 192, causal=False, value_size=128)
    assert forward == 2 * 2 * 8 * 8 * (192 + 128)
    backward = attention_flops(1, 8, 2, 192, causal=False, direction="backward", value_size=128)
    assert backward == 2 * 2 * 8 * 8 * (3 * 192 + 2 * 128)
    narrow, wide, mean = (
        attention_seconds(1, 8192, 128, 128, d, hardware=hardware, value_size=v)
        for d, v in ((128, 128), (192, 192), (192, 128))
    )
    assert narrow < mean < wide
    same = attention_seconds(2, 4096, 32, 8, 128, hardware=hardware)
    assert attention_seconds(2, 4096, 32, 8, 128, hardware=hardware, value_size=128) == same


def test_the_published_training_of_deepseek_v3():
    """180,000 H800 hours per trillion tokens on 2,048 of them (arXiv 2412.19437, section 1): pp 16, ep 64, ZeRO 1, fp8,
    batches of 15,360 sequences of 4,096 tokens: 19.9 s. Nothing is fitted to it. Our H100s have twice the NVLink, no
    second token is predicted, and pipelines are zero-bubble ones."""
    where = system_of(parse_cluster("2048xh100-sxm-80gb"), MEGATRON, "fp8")
    one = candidates(V3, "dp=128 pp=16 ep=64 zero=1 schedule=zb micro_batch=1", batch=15_360)
    reported = 180e3 * 3600 / 2048 * 15_360 * 4096 / 1e12
    assert reported == pytest.approx(19.9, abs=0.05)
    assert 0.7 < plan_candidates(one, where).step_seconds[0] / reported < 1.3


def test_the_search_finds_a_layout():
    found = search(
        ClusterRequest(ModelConfig.named("deepseek-v2-lite"), parse_cluster("8xh200"), sequence=4096, global_batch=64)
    )
    assert found.best and found.fitting < found.planned
    assert any("tp" in str(one.layout) for one in found.best)


def test_ironlaws_own_config_holds_the_model():
    model = ModelConfig.named("deepseek-v2-lite")
    ask = ClusterRequest(model, parse_cluster("8xb200-sxm"), 4096, 128, engine="generic", steps=1000)
    text = emit("ironlaw", ask, parse_layout("dp=8 zero=3"))["text"]
    config = build_config(tomllib.loads(text)).model
    assert config.parameters == model.parameters and config.latent == model.latent
    assert config.rope_scaling == model.rope_scaling


def test_a_second_prediction_is_left_out_and_said_to_be(tmp_path):
    fields = to_fields(ModelConfig.named("deepseek-v3")) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    layout = "dp=256 pp=8 ep=64 zero=1 recompute=full"
    answer = plan_request(str(tmp_path), on="2048xh100-sxm-80gb", options=Options(layout=layout))
    assert answer.ledger.totals["parameters"].value == V3.parameters
    assert any("num_nextn_predict_layers" in one["value"] for one in answer.more["assumed"])


def test_selective_recomputation_in_nemo_widens_again():
    """DeepSeek-V3 at tp 2: queries and keys of 192 and values of 128 for 64 of its heads, and the 128 of keys
    that values are a view beside: 2 x 4096 x 64 x (192 + 192 + 128 + 128) B = 336 MB a layer less, for products with
    1536 x 24576 + 512 x 32768 weights over two ranks once more."""
    both = candidates(
        V3, "dp=32 tp=2 sp=1 pp=16 ep=64 etp=1 zero=1", "dp=32 tp=2 sp=1 pp=16 ep=64 etp=1 zero=1 recompute=selective"
    )
    where = system_of(parse_cluster("1024xh100-sxm-80gb"), MEGATRON, "bf16")
    kept, back, _ = kept_activation_bytes(both, where.engine)
    freed = 2 * 4096 * 64 * (192 + 192 + 128 + 128)
    assert widened_bytes(both.shape(where.engine))[0] == pytest.approx(freed)
    assert kept[0] - kept[1] == pytest.approx(freed) and back[1] == pytest.approx(freed)
    plans = plan_candidates(both, where)
    flops = 2 * 4096 * (1536 * 128 * 192 + 512 * 128 * 256) / 2
    again = plans.costs.again["matmul", 1][1] * where.engine.matmul_slowdown
    assert flops / again == pytest.approx(700e12, rel=0.1)
    other = plan_candidates(both, system_of(parse_cluster("1024xh100-sxm-80gb"), engine("megatron-core"), "bf16"))
    more = [plan.times.backward[1] - plan.times.backward[0] for plan in (plans, other)]
    assert more[1] > 2 * more[0]  # attention again


def test_only_ranks_that_share_a_sequence_pad_its_values():
    for text, pads in (("dp=1", False), ("dp=2 zero=3", False), ("cp=2 micro_batch=2", True)):
        program = step(DENSE, StepBatch(4, 512), parse_layout(text), Recipe("bf16", cuda=True))
        assert any(op.kernel == "pad" for op, _ in program.operations()) is pads
