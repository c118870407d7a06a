"""Mixtures of experts on clusters: what expert parallelism divides, moves and costs; dense models are left alone."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from ironlaw.catalog.nodes import parse_cluster
from ironlaw.errors import UserError
from ironlaw.ledger import Estimate, Origin, Phase
from ironlaw.model.config import ModelConfig
from ironlaw.model.dimensions import MoEConfig
from ironlaw.model.parameters import of_blocks
from ironlaw.plan.cluster.candidates import candidates_of, extra_launches
from ironlaw.plan.cluster.collective_costs import rows_sent_per_token
from ironlaw.plan.cluster.estimate import ClusterRequest, plan_candidates, plan_cluster
from ironlaw.plan.cluster.layout_space import EXPERT_CONSTRAINT
from ironlaw.plan.cluster.search import search
from ironlaw.plan.cluster.system import system_of
from ironlaw.plan.emit.trainers import TRAINERS, emit
from ironlaw.plan.engines.named import engine
from ironlaw.plan.measured.accelerator import named_experts
from ironlaw.plan.measured.read import read_runs
from ironlaw.plan.requests.cluster import other_conventions
from ironlaw.workload.blocks import Shape
from ironlaw.workload.layout import parse_layout
from ironlaw.workload.messages import expert_parts_per_token
from ironlaw.workload.moe import IMBALANCE
from ironlaw.workload.program import training_operations
from ironlaw.workload.sharding import of_experts, shard_of

MIXTRAL = ModelConfig.named("mixtral-8x7b")
SEQUENCE, BATCH = 4096, 1024


def outcome(model, *texts, on="64xh100-sxm-80gb"):
    layouts = [parse_layout(text) for text in texts]
    candidates = candidates_of(model, layouts, sequence=SEQUENCE, global_batch=BATCH)
    return candidates, plan_candidates(candidates, system_of(parse_cluster(on), engine("nemo"), "bf16"))


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-moe-16b", "qwen2-57b-a14b"])
def test_parameters_are_the_models(name):
    model = ModelConfig.named(name)
    candidates, _ = outcome(model, "dp=64 zero=3")
    # The planner leaves out biases and norms of queries, keys and gates.
    assert candidates.parameters[0] == pytest.approx(model.parameters, rel=1e-3)


def test_flops_are_six_per_active_matrix_element_and_attention():
    candidates, _ = outcome(MIXTRAL, "dp=64 zero=3")
    matrices = MIXTRAL.active_parameters - MIXTRAL.embedding_parameters - 65 * MIXTRAL.hidden
    attention = 6 * MIXTRAL.layers * SEQUENCE * MIXTRAL.query_size
    assert candidates.model_flops()[0] == pytest.approx((6 * matrices + attention) * SEQUENCE * BATCH)


def test_other_conventions_count_the_experts_that_a_token_meets():
    layout = parse_layout("dp=64 zero=1 ep=8")
    candidates = candidates_of(MIXTRAL, [layout], sequence=SEQUENCE, global_batch=BATCH)
    step = Estimate(10.0, Origin.CALCULATED, "", 9.0, 11.0)
    found = other_conventions(MIXTRAL, candidates, step, 64 * 1e15)
    assert found["mfu_6nd"].value == pytest.approx(6 * MIXTRAL.active_parameters * SEQUENCE * BATCH / 64e16)
    assert MIXTRAL.active_parameters < 0.3 * MIXTRAL.parameters
    assert found["hfu"].value == pytest.approx(float(candidates.model_flops()[0]) / 64e16)  # nothing is recomputed


def test_expert_parallelism_divides_the_weights_of_experts_alone():
    _, plans = outcome(MIXTRAL, *(f"dp=64 ep={ep}" for ep in (1, 2, 4, 8)))
    experts = MIXTRAL.layers * 8 * MIXTRAL.expert_parameters
    rest = MIXTRAL.parameters - experts
    expected = [2 * (rest + experts / ep) for ep in (1, 2, 4, 8)]
    np.testing.assert_allclose(plans.peak.weights, expected, rtol=1e-3)


def test_sharded_state_is_the_same_whatever_ep():
    _, plans = outcome(MIXTRAL, *(f"dp=64 zero=1 ep={ep}" for ep in (1, 2, 8)))
    np.testing.assert_allclose(plans.peak.moments, plans.peak.moments[0])
    assert plans.peak.weights[2] < plans.peak.weights[1] < plans.peak.weights[0]


def test_rows_travel_only_between_ranks_and_their_volume_sets_the_time():
    candidates, plans = outcome(MIXTRAL, "dp=64 zero=1", "dp=64 zero=1 ep=8", "dp=64 zero=1 ep=8 micro_batch=2",
                          "dp=8 pp=8 zero=1 ep=8 recompute=full", "dp=8 pp=8 zero=1 ep=8")  # fmt: skip
    times = plans.times.ep_exposed
    assert times[0] == 0 < times[1]
    # Out and back, forward and backward, of 2 choices x 4096 bytes x 2 per token, at what an island carries.
    sent = SEQUENCE * 2 * MIXTRAL.hidden * 2 * IMBALANCE * 7 / 8
    per_layer = times[1] / (candidates.accumulation[1] * MIXTRAL.layers)
    rate = 4 * sent / per_layer
    assert 0.3 * 450e9 < rate < 450e9
    assert times[2] == pytest.approx(times[1], rel=0.1)  # half as many exchanges of twice as much
    assert times[3] == pytest.approx(1.5 * times[4], rel=0.01)  # recomputed rows travel again


def test_expert_gradients_are_reduced_over_fewer_ranks():
    """Inside one node the experts of 8 ranks have one replica each: only the rest is reduced. Across nodes a card has
    as much to send either way, for the ranks of a node have reduced among themselves before."""
    _, plans = outcome(MIXTRAL, "dp=8", "dp=8 ep=8", on="8xh100-sxm-80gb")
    assert plans.costs.dp_reduce[1] < 0.1 * plans.costs.dp_reduce[0]
    _, plans = outcome(MIXTRAL, "dp=64", "dp=64 ep=8")
    assert 0.5 * plans.costs.dp_reduce[0] < plans.costs.dp_reduce[1] < plans.costs.dp_reduce[0]


def test_a_capacity_sets_the_rows_instead_of_the_assumed_load():
    capped = MIXTRAL.model_copy(update={"moe": MIXTRAL.moe.model_copy(update={"capacity_factor": 1.5})})
    _, free = outcome(MIXTRAL, "dp=64 ep=8 zero=1")
    _, limited = outcome(capped, "dp=64 ep=8 zero=1")
    assert limited.peak.activations[0] > free.peak.activations[0]
    assert limited.times.ep_exposed[0] == pytest.approx(free.times.ep_exposed[0] * 1.5 / IMBALANCE, rel=0.05)


def test_folded_experts_are_divided_by_ep_and_etp():
    """2 bytes x (dense / tp + experts / (ep etp)) on a rank; every parameter's state is somewhere once under ZeRO."""
    layouts = ("dp=32 tp=2 sp=1 ep=4", "dp=32 tp=2 sp=1 ep=4 etp=1", "dp=32 tp=2 sp=1 ep=8 etp=1", "dp=32 tp=2 sp=1")
    _, plans = outcome(MIXTRAL, *layouts)
    experts = MIXTRAL.layers * 8 * MIXTRAL.expert_parameters
    dense = (MIXTRAL.parameters - experts) / 2
    expected = [2 * (dense + experts / n) for n in (8, 4, 8, 2)]
    np.testing.assert_allclose(plans.peak.weights, expected, rtol=2e-3)
    _, sharded = outcome(MIXTRAL, *(f"{layout} zero=1" for layout in layouts))
    np.testing.assert_allclose(sharded.peak.moments, 8 * MIXTRAL.parameters / 64, rtol=1e-3)


def test_folding_takes_expert_ranks_from_tensor_parallel_ones():
    """8 ranks of one node, tp 8: whole experts, one on each; without folding no ep fits beside tp."""
    folded, split = parse_layout("dp=1 tp=8 sp=1 ep=8 etp=1"), parse_layout("dp=1 tp=8 sp=1 ep=8")
    checked = {"sequence": SEQUENCE, "global_batch": BATCH, "accelerators": 8}
    assert folded.reason_invalid(MIXTRAL, **checked) is None
    assert "cannot be taken" in split.reason_invalid(MIXTRAL, **checked)
    candidates, plans = outcome(MIXTRAL, str(folded), "dp=1 tp=8 sp=1", on="8xh100-sxm-80gb")
    # Own tokens' rows only: T k / 8 rows of 4096 are kept as they went in (Megatron's experts weigh inside and keep
    # none as they came out), inner width whole instead.
    rows = SEQUENCE * 2 * IMBALANCE / 8
    inner = 3 * (rows * 14336 - SEQUENCE * 2 * 14336 / 8)
    stream = MIXTRAL.hidden * (rows - SEQUENCE * 2)
    saved = 2 * MIXTRAL.layers * (inner + stream)
    assert plans.peak.activations[0] - plans.peak.activations[1] == pytest.approx(saved, rel=1e-6)
    # No gathering of tokens before the experts and no scattering after them: half of the collectives.
    assert plans.times.tp_exposed[0] == pytest.approx(plans.times.tp_exposed[1] / 2)
    sent = rows * MIXTRAL.hidden * 2 * 7 / 8
    rate = 4 * sent / (plans.times.ep_exposed[0] / (candidates.accumulation[0] * MIXTRAL.layers))
    assert 0.2 * 450e9 < rate < 450e9


def test_what_lies_between_whole_and_split_experts_has_rows_between():
    _, plans = outcome(MIXTRAL, *(f"dp=8 tp=8 sp=1 ep=8 etp={etp}" for etp in (1, 2, 4, 8)))
    kept = plans.peak.activations
    np.testing.assert_allclose(np.diff(kept), np.diff(kept)[0] * np.array([1, 2, 4]), rtol=1e-6)
    _, same = outcome(MIXTRAL, "dp=8 tp=8 sp=1 ep=8")
    assert same.step_seconds[0] == plans.step_seconds[3] and same.peak.total[0] == plans.peak.total[3]


def test_offloaded_state_of_experts_is_all_of_it():
    """Every parameter's master copy, moments and gradient is on exactly one host, whatever ep."""
    candidates, plans = outcome(MIXTRAL, *(f"dp=64 zero=1 offload=optimizer {more}" for more in ("", "ep=8")))
    per_parameter = 4 + 8 + engine("nemo").gradient_communication_bytes
    np.testing.assert_allclose(plans.host_bytes, candidates.parameters * per_parameter / 64, rtol=1e-6)


def test_wide_numbers_double_what_experts_keep_and_send():
    layout = [parse_layout("dp=64 ep=8 zero=1")]
    candidates = candidates_of(MIXTRAL, layout, sequence=SEQUENCE, global_batch=BATCH)
    cluster = parse_cluster("64xh100-sxm-80gb")
    narrow, wide = (plan_candidates(candidates, system_of(cluster, engine("nemo"), word)) for word in ("bf16", "fp32"))
    # fp32 scores of the router and the log-sum-exp are as wide in both.
    assert wide.peak.activations[0] == pytest.approx(2 * narrow.peak.activations[0], rel=2e-3)
    assert wide.times.ep_exposed[0] == pytest.approx(2 * narrow.times.ep_exposed[0], rel=0.1)  # and latency once


def test_megatron_writes_folding_in_its_own_words():
    layout = parse_layout("dp=8 tp=8 sp=1 ep=8 etp=1 zero=1")
    ask = ClusterRequest(MIXTRAL, parse_cluster("64xh100-sxm-80gb"), SEQUENCE, BATCH, engine="megatron-core", steps=10)
    text = emit("megatron", ask, layout)["text"]
    assert "--expert-model-parallel-size 8" in text and "--expert-tensor-parallel-size 1" in text


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("dp=63 ep=3", "63"),
        ("dp=64 ep=16", "8 experts are not divisible by ep = 16"),
        ("dp=4 tp=8 pp=2 ep=8", "cannot be taken from dp 4"),
        ("dp=64 zero=3 shard=4 ep=8", "cannot be taken from shard 4 x cp 1"),
        ("dp=32 tp=2 ep=8 etp=1", "use sp=1"),
        ("dp=4 tp=8 sp=1 pp=2 ep=8 etp=3", "width of an expert, 14336, is not divisible by etp = 3"),
        ("dp=32 tp=2 sp=1 etp=4", "does not divide tp = 2"),
    ],
)
def test_what_cannot_run_is_said(layout, reason):
    with pytest.raises(UserError, match=reason):
        parse_layout(layout).check(MIXTRAL, accelerators=64, sequence=SEQUENCE, global_batch=BATCH)
    with pytest.raises(UserError, match="this model is dense"):
        parse_layout("dp=64 ep=2").check(
            ModelConfig.named("llama3-8b"), accelerators=64, sequence=SEQUENCE, global_batch=BATCH
        )


def test_launches_of_experts_are_the_workloads_own_calls():
    """PyTorch's own calls of one block of each kind, forward and backward, as listed."""
    dense = MIXTRAL.model_copy(update={"moe": None})
    for model, extra in ((MIXTRAL, 0.64), (ModelConfig.named("deepseek-moe-16b"), 1.12), (dense, 0.0)):
        assert extra_launches(model)[0] == pytest.approx(extra, abs=0.01)
    both = [training_operations(Shape(model, 1, 64)) for model in (MIXTRAL, dense)]
    calls = [sum(op.repeat for op in ops if op.group in ("block", "moe_block")) for ops in both]
    assert calls[0] / calls[1] == pytest.approx(1 + extra_launches(MIXTRAL)[0])
    # A model so small that its launches are all that counts.
    tiny = {"layers": 8, "hidden": 256, "heads": 4, "kv_heads": 4, "head_size": 64, "ffn": 256}
    few = ModelConfig.named("mixtral-8x7b").model_copy(update=tiny | {"vocab": 1000})
    _, plans = outcome(few, "dp=64")
    _, plain = outcome(few.model_copy(update={"moe": None}), "dp=64")
    assert plans.times.host_excess[0] > 1.3 * plain.times.host_excess[0]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_experts_inside_hybrid_sharding(zero):
    """Every copy has all experts: ZeRO divides them over the copy's ranks that hold the same ones."""
    one, copies, split = f"dp=64 zero={zero} ep=4", f"dp=64 zero={zero} shard=16 ep=4", f"dp=64 zero={zero} shard=16"
    candidates, plans = outcome(MIXTRAL, one, copies, split)
    assert list(candidates.expert_replicas) == [16, 16, 64] and list(candidates.expert_shard_ranks) == [16, 4, 16]
    state = 8 * candidates.parameters[0]
    np.testing.assert_allclose(plans.peak.moments, [state / 64, state / 16, state / 16], rtol=1e-6)
    if zero == 3:
        np.testing.assert_allclose(plans.peak.weights, 2 * candidates.parameters / [64, 16, 16], rtol=1e-6)
        # A block's gathered weights: a quarter of the experts.
        assert plans.peak.temporaries[1] == plans.peak.temporaries[0] < 0.5 * plans.peak.temporaries[2]
    # Averaging the copies moves what a rank owns, with ep or without: the same bytes between the same nodes.
    assert plans.costs.dp_reduce[1] > 0
    if zero >= 2:
        assert plans.costs.dp_reduce[0] == pytest.approx(0, abs=1e-3)
        assert plans.costs.dp_reduce[1] == pytest.approx(plans.costs.dp_reduce[2], rel=1e-6)
        assert plans.costs.fsdp_scatter_layer[1] < plans.costs.fsdp_scatter_layer[2]
    _, trivial = outcome(MIXTRAL, one, f"dp=64 zero={zero} shard=64 ep=4")
    assert trivial.step_seconds[0] == trivial.step_seconds[1] and trivial.peak.total[0] == trivial.peak.total[1]


SMALL = MIXTRAL.model_copy(
    update={
        "layers": 4, "hidden": 1024, "heads": 16, "kv_heads": 8, "head_size": 64, "ffn": 2048, "vocab": 32000,
        "moe": MIXTRAL.moe.model_copy(update={"experts": 4}),
    }
)  # fmt: skip


def test_brute_force_over_experts_and_hybrid_sharding_finds_nothing_better():
    """Every number from 1 to 8 in every place, whatever the search's own list of layouts says."""
    cluster, fitting = parse_cluster("8xa100-sxm-80gb"), []
    ones, more = (1, 2, 4, 8), (None, 1, 2, 4)
    for dp, tp, ep, etp, zero, shard, sp in product(ones, (1, 2), ones, (None, 1), range(4), more, (0, 1)):
        for micro_batch in (1, 2, 4, 8, 16):
            words = {"dp": dp, "tp": tp, "ep": ep, "etp": etp, "zero": zero, "shard": shard, "sp": sp}
            text = " ".join(f"{k}={v}" for k, v in words.items() if v is not None) + f" micro_batch={micro_batch}"
            for pp in ("", " pp=2", " pp=2 virtual_stages=2", " pp=4", " cp=2", " pp=2 cp=2"):
                layout = parse_layout(text + pp)
                if layout.reason_invalid(SMALL, sequence=SEQUENCE, global_batch=32, accelerators=8) is None:
                    fitting.append(layout)
    candidates = candidates_of(SMALL, fitting, sequence=SEQUENCE, global_batch=32)
    plans = plan_candidates(candidates, system_of(cluster, engine("nemo"), "bf16"))
    seconds = np.where(plans.fits, plans.step_seconds, np.inf)
    found = search(ClusterRequest(SMALL, cluster, sequence=SEQUENCE, global_batch=32), keep=2000)
    planned = {str(candidate.layout): candidate.step_seconds for candidate in found.best}
    assert found.best[0].step_seconds <= seconds.min() * (1 + 1e-12)
    inside = [i for i, layout in enumerate(fitting) if layout.shard not in (None, layout.dp) and layout.ep > 1]
    assert len(inside) > 50 and {fitting[i].zero for i in inside} == {1, 2, 3}
    compared = 0
    for i in inside:  # what both list has the same time
        if str(fitting[i]) in planned:
            compared += 1
            assert planned[str(fitting[i])] == pytest.approx(seconds[i], rel=1e-12)
    assert compared > 20


def test_the_search_tries_ep_and_says_what_it_ruled_out():
    found = search(
        ClusterRequest(MIXTRAL, parse_cluster("16xh100-sxm-80gb"), sequence=SEQUENCE, global_batch=16), hybrid=False
    )
    assert found.best and any(candidate.layout.ep > 1 for candidate in found.best)
    assert found.ruled_out[EXPERT_CONSTRAINT] > 0
    assert found.best == sorted(found.best, key=lambda candidate: candidate.step_seconds)


def test_the_ledger_adds_up_with_its_exchange():
    layout = parse_layout("dp=64 zero=1 ep=8")
    ledger = plan_cluster(
        ClusterRequest(MIXTRAL, parse_cluster("64xh100-sxm-80gb"), sequence=SEQUENCE, global_batch=BATCH), layout
    ).ledger
    assert sum(line.seconds or 0 for line in ledger.lines) == pytest.approx(ledger.totals["step_seconds"].value)
    assert next(ledger.select(operation="ep all_to_all")).seconds > 0
    assert ledger.flops() == ledger.totals["flops_per_step"].value


def test_trainers_that_cannot_say_experts_refuse():
    layout = parse_layout("dp=64 zero=1 ep=8")
    assert TRAINERS["megatron"].cannot(layout, MIXTRAL) is None
    for name in ("torchtitan", "deepspeed", "accelerate"):
        assert TRAINERS[name].cannot(layout, MIXTRAL)
    assert TRAINERS["ironlaw"].cannot(layout, MIXTRAL) is None
    assert "leave out etp" in TRAINERS["ironlaw"].cannot(parse_layout("dp=32 tp=2 sp=1 ep=8 etp=1"), MIXTRAL)


@pytest.mark.parametrize(
    ("layout", "changes", "reason"),
    [
        ("dp=32 tp=2 ep=8", {}, "use sp=1"),
        ("dp=64 ep=8", {"balance": "bias"}, "sigmoid scores only"),
        ("dp=64 ep=8", {"experts_per_token": 1}, "moe.normalize = false"),
    ],
)
def test_megatron_refuses_what_its_core_raises_for(layout, changes, reason):
    assert MIXTRAL.moe is not None and MIXTRAL.moe.normalize and MIXTRAL.moe.score == "softmax"
    model = MIXTRAL.model_copy(update={"moe": MIXTRAL.moe.model_copy(update=changes)})
    assert reason in TRAINERS["megatron"].cannot(parse_layout(layout), model)


def test_rows_of_measured_runs_with_experts(tmp_path):
    head = (
        "id,layers,hidden,heads,kv_heads,ffn,gated_ffn,vocab,seq,global_batch,micro_batch,accelerator,accelerators,ep"
    )
    row = "a,32,4096,32,8,14336,1,32000,4096,256,1,h100-sxm-80gb,64,8"
    plain, full = tmp_path / "plain.csv", tmp_path / "full.csv"
    plain.write_text(f"{head}\n{row}\n")
    full.write_text(f"{head},experts,experts_per_token\n{row},8,2\n")
    runs, rejected = read_runs(plain)
    assert not runs and "say how many experts" in rejected[0][2]
    runs, rejected = read_runs(full)
    assert not rejected
    assert runs[0].job.layout.ep == 8 and runs[0].job.model.expert_ffn_size == 14336
    # tp 16 leaves four replicas: eight expert parallel ranks are possible where experts are folded only.
    folded = tmp_path / "folded.csv"
    folded.write_text(f"{head},experts,experts_per_token,tp\n{row},8,2,16\n{row.replace(',64,8', ',64,128')},8,2,16\n")
    runs, rejected = read_runs(folded)
    assert runs[0].job.layout.etp == 1 and any("etp = 1" in note for note in runs[0].assumed)
    assert "cannot be taken" in rejected[0][2]


def places(experts, per_token, parts, groups=1, groups_per_token=1):
    moe = MIXTRAL.moe.model_copy(
        update={
            "experts": experts, "experts_per_token": per_token, "groups": groups, "groups_per_token": groups_per_token,
        }
    )  # fmt: skip
    return float(expert_parts_per_token(moe, np.array([float(parts)]))[0])


def test_places_of_a_token_are_those_of_random_choices():
    """By counting: every choice equally likely, a token once per part of the experts that holds some of its own."""
    assert places(8, 2, 8) == pytest.approx(2)  # an expert per rank: no two choices meet
    assert places(8, 2, 2) == pytest.approx(1 + 4 / 7)  # the second of 7 others, 4 of them in the other half
    assert places(8, 2, 1) == pytest.approx(1)
    rng = np.random.default_rng(0)
    scores = rng.random((20_000, 256))
    chosen = np.argsort(scores, axis=1)[:, :8]
    drawn = np.mean([len(set(row // 32)) for row in chosen])
    assert places(256, 8, 8) == pytest.approx(drawn, rel=0.01)
    # DeepSeek-V3: four of eight groups, here a node each (arXiv 2412.19437, section 2.1.2).
    allowed = np.argsort(rng.random((20_000, 8)), axis=1)[:, 4:]
    for row, out in zip(scores, allowed, strict=True):
        row.reshape(8, 32)[out] = 2.0
    drawn = np.mean([len(set(row // 32)) for row in np.argsort(scores, axis=1)[:, :8]])
    assert places(256, 8, 8, groups=8, groups_per_token=4) == pytest.approx(drawn, rel=0.01)
    assert places(256, 8, 64, groups=8, groups_per_token=4) == pytest.approx(32 * (1 - (1 - 1 / 32) ** 8), rel=0.05)


def test_who_sends_a_token_once_per_rank_sends_less():
    """Qwen3 30B: 8 of 128 experts over 8 ranks are on 5.3 of them; over two nodes, twice at most."""
    qwen = ModelConfig.named("qwen3-30b-a3b")
    layouts = [parse_layout(f"dp=16 zero=1 ep={ep}") for ep in (8, 16)]
    candidates = candidates_of(qwen, layouts, sequence=SEQUENCE, global_batch=64)
    cluster, flex = parse_cluster("16xh100-sxm-80gb"), engine("nemo")
    plain = replace(flex, rows_sent="choices")
    once, every = (rows_sent_per_token(candidates, system_of(cluster, e, "bf16")) / IMBALANCE for e in (flex, plain))
    np.testing.assert_allclose(every, 8)
    np.testing.assert_allclose(once, [8 * (1 - 0.335), 2 * (1 - 0.0033)], rtol=0.01)
    seconds = [plan_candidates(candidates, system_of(cluster, e, "bf16")).costs.ep_layer for e in (flex, plain)]
    assert (seconds[0] < 0.75 * seconds[1]).all()


def test_torchtitan_keeps_nothing_of_experts_but_what_ranks_exchange():
    """Its list of kept operations has matmuls and exchanges, no grouped product (models/llama4/infra/parallelize.py):
    of Qwen3 30B with 64k tokens on a B200 it kept a third of what was planned before."""
    where = system_of(parse_cluster("8xb200-sxm"), engine("torchtitan"), "bf16")
    layouts = [parse_layout(f"dp=8 zero=3 recompute=selective ep={ep}") for ep in (1, 8)]
    qwen = ModelConfig.named("qwen3-30b-a3b")
    moe = qwen.moe
    wide = qwen.model_copy(update={"moe": moe.model_copy(update={"expert_ffn": 2 * moe.expert_ffn})})
    alone, exchanged = (candidates_of(m, layouts, sequence=4096, global_batch=8) for m in (qwen, wide))
    kept, more = (plan_candidates(c, where) for c in (alone, exchanged))
    np.testing.assert_allclose(kept.peak.activations, more.peak.activations)
    rows = 2 * 4096 * moe.experts_per_token * IMBALANCE * qwen.hidden * 2  # as they arrive and come back
    assert np.diff(kept.peak.activations)[0] == pytest.approx(qwen.layers * rows, rel=0.01)
    again = more.costs.again["matmul", 1] - kept.costs.again["matmul", 1]
    once = more.costs.block["matmul", Phase.FORWARD] - kept.costs.block["matmul", Phase.FORWARD]
    np.testing.assert_allclose(again, once)


def test_the_load_of_a_published_run_is_even_and_said(tmp_path):
    """NVIDIA's scripts force random choices; others train. An expert is whole on its rank there."""
    header = "id,group,framework,model,layers,hidden,heads,kv_heads,ffn,gated_ffn,vocab,seq,global_batch,micro_batch,"
    header += "accelerator,accelerators,tp,pp,ep,zero,recompute,precision,step_seconds\n"
    cells = "a,g,{},Mixtral 8x22B,56,6144,48,8,16384,true,32000,4096,256,1,h100-sxm-80gb,128,2,8,8,1,none,bf16,5\n"
    runs = []
    for name in ("NeMo", "Megatron-LM"):
        path = tmp_path / "runs.csv"
        path.write_text(header + cells.format(name), encoding="utf-8")
        (run,), _ = read_runs(path)
        runs.append(run)
    assert runs[0].job.imbalance == 1 and runs[0].job.layout.etp == 1
    assert any("imbalance = 1" in word for word in runs[0].assumed)
    assert runs[1].job.imbalance == 0 and runs[1].job.layout.etp is None


@pytest.mark.parametrize(
    ("said", "hidden", "meant"),
    [
        ("Qwen3 30B", 2048, "qwen3-30b-a3b"), ("QWEN3_235B", 4096, "qwen3-235b-a22b"), ("Grok1", 6144, "grok-1"),
        ("Llama4 Maverick", 5120, "llama-4-maverick"), ("llama4 e128", 5120, "llama-4-maverick"),
        ("llama4_e16", 5120, "llama-4-scout"), ("GPT OSS 120B", 2880, "gpt-oss-120b"), ("DSV3", 7168, "deepseek-v3"),
        ("DeepSeek V3 671B", 7168, "deepseek-v3"), ("Mixtral 8x22b", 6144, "mixtral-8x22b"),
    ],
)  # fmt: skip
def test_names_as_people_write_them(said, hidden, meant):
    found = named_experts(said, hidden, 48)
    assert found is not None and found[0] == meant
    assert named_experts(said, hidden + 64, 48) is None  # another size of the same name


def test_experts_as_wide_as_the_stream_are_divided_once():
    """Eight experts over 32 ranks by the hidden size, which the width inside equals."""
    moe = MoEConfig(experts=8, experts_per_token=2, expert_ffn=4096)
    model = ModelConfig.named("mixtral-8x7b").model_copy(update={"moe": moe})
    tensors = [p for p in of_blocks(model, range(1)) if of_experts(p)]
    assert tensors and all(shard_of(p, model, 1, 32).bytes * 32 == p.bytes for p in tensors)
