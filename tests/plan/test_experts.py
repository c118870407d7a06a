"""Mixtures of experts on clusters: what expert parallelism divides, moves and costs; dense models are left alone."""

import numpy as np
import pytest

from ironlaw.catalog.nodes import parse_cluster
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster import plan_cluster, plan_jobs
from ironlaw.plan.emit import TRAINERS
from ironlaw.plan.engine import engine
from ironlaw.plan.experts import IMBALANCE
from ironlaw.plan.jobs import jobs_of
from ironlaw.plan.layout import parse_layout
from ironlaw.plan.layout_space import EXPERT_WALL
from ironlaw.plan.runs import read_runs
from ironlaw.plan.search import search
from ironlaw.plan.setting import setting

MIXTRAL = ModelConfig.named("mixtral-8x7b")
SEQUENCE, BATCH = 4096, 1024


def outcome(model, *texts, on="64xh100-sxm-80gb"):
    layouts = [parse_layout(text) for text in texts]
    jobs = jobs_of(model, layouts, sequence=SEQUENCE, global_batch=BATCH)
    return jobs, plan_jobs(jobs, setting(parse_cluster(on), engine("nemo"), "bf16"))


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-moe-16b", "qwen2-57b-a14b"])
def test_parameters_are_the_models(name):
    model = ModelConfig.named(name)
    jobs, _ = outcome(model, "dp=64 zero=3")
    # The planner leaves out biases and norms of queries, keys and gates.
    assert jobs.parameters[0] == pytest.approx(model.parameters, rel=1e-3)


def test_flops_are_six_per_active_matrix_element_and_attention():
    jobs, _ = outcome(MIXTRAL, "dp=64 zero=3")
    matrices = MIXTRAL.active_parameters - MIXTRAL.embedding_parameters - 65 * MIXTRAL.hidden
    attention = 6 * MIXTRAL.layers * SEQUENCE * MIXTRAL.query_size
    assert jobs.model_flops()[0] == pytest.approx((6 * matrices + attention) * SEQUENCE * BATCH)


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
    jobs, plans = outcome(MIXTRAL, "dp=64 zero=1", "dp=64 zero=1 ep=8", "dp=64 zero=1 ep=8 micro_batch=2",
                          "dp=8 pp=8 zero=1 ep=8 recompute=full", "dp=8 pp=8 zero=1 ep=8")  # fmt: skip
    times = plans.times.ep_exposed
    assert times[0] == 0 < times[1]
    # Out and back, forward and backward, of 2 choices x 4096 bytes x 2 per token, at what an island carries.
    sent = SEQUENCE * 2 * MIXTRAL.hidden * 2 * IMBALANCE * 7 / 8
    per_layer = times[1] / (jobs.accumulation[1] * MIXTRAL.layers)
    rate = 4 * sent / per_layer
    assert 0.3 * 450e9 < rate < 450e9
    assert times[2] == pytest.approx(times[1], rel=0.1)  # half as many exchanges of twice as much
    assert times[3] == pytest.approx(1.5 * times[4], rel=0.01)  # recomputed rows travel again


def test_expert_gradients_are_reduced_over_fewer_ranks():
    """Inside one node the experts of 8 ranks have one replica each: only the rest is reduced. Across nodes a card has
    as much to send either way, for the ranks of a node have reduced among themselves before."""
    _, plans = outcome(MIXTRAL, "dp=8", "dp=8 ep=8", on="8xh100-sxm-80gb")
    assert plans.parts.dp_reduce[1] < 0.1 * plans.parts.dp_reduce[0]
    _, plans = outcome(MIXTRAL, "dp=64", "dp=64 ep=8")
    assert 0.5 * plans.parts.dp_reduce[0] < plans.parts.dp_reduce[1] < plans.parts.dp_reduce[0]


def test_a_capacity_sets_the_rows_instead_of_the_assumed_load():
    capped = MIXTRAL.model_copy(update={"moe": MIXTRAL.moe.model_copy(update={"capacity_factor": 1.5})})
    _, free = outcome(MIXTRAL, "dp=64 ep=8 zero=1")
    _, limited = outcome(capped, "dp=64 ep=8 zero=1")
    assert limited.peak.activations[0] > free.peak.activations[0]
    assert limited.times.ep_exposed[0] == pytest.approx(free.times.ep_exposed[0] * 1.5 / IMBALANCE, rel=0.05)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("dp=63 ep=3", "63"),
        ("dp=64 ep=16", "8 experts are not divisible by ep = 16"),
        ("dp=4 tp=8 pp=2 ep=8", "cannot be taken from dp 4"),
        ("dp=64 zero=3 shard=8 ep=8", "hybrid sharding"),
    ],
)
def test_what_cannot_run_is_said(layout, reason):
    with pytest.raises(UserError, match=reason):
        parse_layout(layout).check(MIXTRAL, accelerators=64, sequence=SEQUENCE, global_batch=BATCH)
    with pytest.raises(UserError, match="this model is dense"):
        parse_layout("dp=64 ep=2").check(
            ModelConfig.named("llama3-8b"), accelerators=64, sequence=SEQUENCE, global_batch=BATCH
        )


def test_the_search_tries_ep_and_says_what_it_ruled_out():
    found = search(MIXTRAL, parse_cluster("16xh100-sxm-80gb"), sequence=SEQUENCE, global_batch=16, hybrid=False)
    assert found.best and any(candidate.layout.ep > 1 for candidate in found.best)
    assert found.ruled_out[EXPERT_WALL] > 0
    assert found.best == sorted(found.best, key=lambda candidate: candidate.step_seconds)


def test_the_ledger_adds_up_with_its_exchange():
    layout = parse_layout("dp=64 zero=1 ep=8")
    ledger = plan_cluster(MIXTRAL, parse_cluster("64xh100-sxm-80gb"), layout, sequence=SEQUENCE, global_batch=BATCH)
    assert sum(line.seconds or 0 for line in ledger.lines) == pytest.approx(ledger.totals["step_seconds"].value)
    assert next(ledger.select(operation="expert_parallel")).seconds > 0
    assert ledger.flops() == ledger.totals["flops_per_step"].value


def test_trainers_that_cannot_say_experts_refuse():
    layout = parse_layout("dp=64 zero=1 ep=8")
    assert TRAINERS["megatron"].cannot(layout, MIXTRAL) is None
    for name in ("torchtitan", "deepspeed", "accelerate", "ironlaw"):
        assert TRAINERS[name].cannot(layout, MIXTRAL)


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
    assert not runs and "do not say how many experts" in rejected[0][2]
    runs, rejected = read_runs(full)
    assert not rejected
    assert runs[0].columns["ep"] == 8 and runs[0].columns["expert_ffn"] == 14336
