"""Precisions, optimizers, offloading, hybrid sharding and partial recomputation, by formulas worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from ironlaw.catalog.nodes import parse_cluster
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.model.parameters import model_parameters
from ironlaw.plan.cluster.candidates import candidates_of
from ironlaw.plan.cluster.estimate import ClusterRequest, plan_candidates, plan_cluster
from ironlaw.plan.cluster.system import ADAMW, system_of, update_cost
from ironlaw.plan.engines.engine import TrainingEngine
from ironlaw.plan.engines.named import engines
from ironlaw.workload.layout import parse_layout
from ironlaw.workload.optimizers import OptimizerConfig, state_bytes

LLAMA = ModelConfig.named("llama3-8b")
GIB = 2**30


def outcome(*layouts, cluster="8xh100-sxm-80gb", precision="bf16", optimizer="adamw", model=LLAMA, batch=64, **engine):
    where = system_of(
        parse_cluster(cluster), TrainingEngine("plain", **engine), precision, update_cost(optimizer, model)
    )
    candidates = candidates_of(model, [parse_layout(text) for text in layouts], sequence=4096, global_batch=batch)
    return plan_candidates(candidates, where)


def ledger(layout, cluster="8xh100-sxm-80gb", **options):
    return plan_cluster(
        ClusterRequest(LLAMA, parse_cluster(cluster), sequence=4096, global_batch=64, **options), parse_layout(layout)
    ).ledger


def test_fp32_keeps_one_wide_copy_of_everything():
    wide, half = outcome("dp=8 zero=1", precision="fp32").peak, outcome("dp=8 zero=1").peak
    assert wide.weights[0] == 4 * LLAMA.parameters and wide.master[0] == 0 and half.master[0] > 0
    kept = wide.activations[0] / half.activations[0]
    assert kept == pytest.approx(2, rel=0.02)  # all but the log-sum-exp of attention, which is fp32 in both


def test_fp32_runs_at_its_own_peak():
    h100 = parse_cluster("h100-sxm-80gb").accelerator.peak_flops_per_second
    slower = h100["bf16"].value / h100["fp32"].value
    seconds = [ledger("dp=8 zero=3 micro_batch=2", precision=p).totals["step_seconds"].value for p in ("fp32", "bf16")]
    assert 0.4 * slower < seconds[0] / seconds[1] < 1.2 * slower
    tf32 = ledger("dp=8 zero=3 micro_batch=2", precision="tf32").totals["step_seconds"].value
    assert seconds[1] < tf32 < seconds[0]


@pytest.mark.parametrize("name", ["sgd", "momentum", "rmsprop", "adamw", "adam8bit", "adafactor", "galore", "muon"])
def test_optimizer_state_is_that_of_the_parameters_shapes(name):
    """One replica that shards nothing holds every state tensor that the trainer would make."""
    exact = state_bytes(model_parameters(LLAMA), OptimizerConfig(name=name))
    planned = outcome("dp=8", optimizer=name).peak.moments[0]
    assert planned == pytest.approx(exact, rel=1e-3, abs=1e6)


def test_state_that_is_paged_says_where_it_goes():
    moments = [
        line.note
        for line in ledger("dp=8 zero=0 micro_batch=1", optimizer="paged_adamw").memory
        if line.component == "moments"
    ]
    assert moments == ["leaves for the host where the device is full"]


def test_muon_pays_for_its_products_and_shards_them():
    adam, muon = (outcome("dp=8", "dp=8 zero=1", optimizer=name).times.optimizer for name in ("adamw", "muon"))
    # Five iterations of 2 m (m n + m^2 + m n) FLOPs on every matrix, m the smaller side (arXiv 2409.20325).
    shapes = [p.shape for p in model_parameters(LLAMA) if p.is_block_matrix]
    flops = sum(5 * 2 * min(s) * (2 * min(s) * max(s) + min(s) ** 2) for s in shapes)
    peak = parse_cluster("h100-sxm-80gb").accelerator.peak_flops_per_second["bf16"].value
    assert flops / peak < muon[0] - adam[0] < 3 * flops / peak
    assert muon[1] < muon[0] / 6  # each of eight ranks takes an eighth of the matrices


def test_sgd_moves_fewer_bytes_than_adamw():
    assert update_cost("sgd", LLAMA).block_bytes < 0.7 * ADAMW.block_bytes
    sgd, adam = (outcome("dp=8", optimizer=name).times.optimizer[0] for name in ("sgd", "adamw"))
    assert sgd < 0.7 * adam


def test_every_second_block_costs_half_of_full_recomputation():
    found = outcome(*(f"dp=8 zero=3 recompute={word}" for word in ("none", "every:2", "full")))
    none, half, full = found.times.backward - found.times.backward[0]
    assert none == 0 and half == pytest.approx(full / 2)
    kept = found.peak.activations
    assert kept[1] == pytest.approx((kept[0] + kept[2]) / 2)


def test_a_budget_is_met_with_the_least_time():
    none = ledger("dp=8 zero=3 micro_batch=4")
    budget = 0.8 * none.totals["peak_bytes"].value / GIB
    within = ledger(f"dp=8 zero=3 micro_batch=4 recompute=budget:{budget:.2f}GiB")
    assert within.totals["peak_bytes"].value <= budget * GIB
    assert "recompute=" in within.facts["layout"] and "budget" not in within.facts["layout"]
    full = ledger("dp=8 zero=3 micro_batch=4 recompute=full")
    times = [plan.totals["step_seconds"].value for plan in (none, within, full)]
    assert times[0] < times[1] < times[2]
    with pytest.raises(UserError, match="even with every block recomputed") as refused:
        ledger("dp=8 zero=3 micro_batch=4 recompute=budget:5GiB")
    named = str(refused.value).split(" needs ")[1].split(" even")[0].replace(" ", "")
    settled = ledger(f"dp=8 zero=3 micro_batch=4 recompute=budget:{named}").facts  # what it says to ask for works
    assert "recompute=full" in settled["layout"] and "every:2 would be" in settled["recompute_choice"]
    with pytest.raises(UserError, match="of the device"):
        ledger("dp=8 zero=0 micro_batch=4 recompute=budget:60GiB")


def test_a_budget_counts_materialised_scores():
    """What fits with flash attention does not with scores in memory: the choice is made for the attention asked."""
    layout = "dp=8 zero=3 micro_batch=2 recompute=budget:60GiB"
    flash, standard = ledger(layout), ledger(layout, flash=False)
    assert "recompute" not in flash.facts["layout"] and "recompute" in standard.facts["layout"]
    assert standard.totals["peak_bytes"].value <= 60 * GIB


@pytest.mark.parametrize(("count", "dp", "published"), [(16384, 128, 400e12), (8192, 64, 430e12)])
def test_llama3_405b_as_it_was_trained(count, dp, published, monkeypatch):
    """arXiv 2407.21783, table 4 and section 3.3.2: ZeRO 2 in an interleaved pipeline, lighter ends.

    torchtitan reduces gradients at the end of a step there; the paper's trainer keeps them sharded.
    """
    theirs = replace(engines()["torchtitan-2025"], name="theirs", pipeline_keeps=False)
    monkeypatch.setitem(engines(), "theirs", theirs)
    model = ModelConfig.named("llama3-405b")
    layout = parse_layout(f"dp={dp} tp=8 sp=1 pp=16 zero=2 virtual_stages=8")
    cluster = parse_cluster(f"{count}xh100-sxm-80gb")
    plan = plan_cluster(ClusterRequest(model, cluster, sequence=8192, global_batch=2048, engine="theirs"), layout)
    work = (6 * model.parameters + 12 * model.layers * model.query_size * 8192) * 8192 * 2048
    assert work / plan.step_seconds / count == pytest.approx(published, rel=0.1)
    assert plan.fits == (dp == 128)  # on 8,192 the interleaved order holds 18 micro-batches
    plain = replace(layout, virtual_stages=1)
    assert plan_cluster(ClusterRequest(model, cluster, sequence=8192, global_batch=2048, engine="theirs"), plain).fits


def test_hybrid_sharding_divides_by_the_group_and_gathers_inside_it():
    found = outcome("dp=64 zero=3", "dp=64 zero=3 shard=8", cluster="64xh100-sxm-80gb")
    state = found.peak.master + found.peak.moments
    assert state[1] / state[0] == pytest.approx(8)
    assert found.costs.fsdp_gather_layer[1] < 0.7 * found.costs.fsdp_gather_layer[0]  # NVLink instead of the network
    assert found.costs.dp_reduce[1] > 0 == found.costs.dp_reduce[0]  # copies are averaged once per step


def test_sharded_gradients_are_scattered_every_micro_batch():
    found = outcome("dp=8 zero=1 pp=1", "dp=8 zero=2", "dp=2 pp=4 zero=2", "dp=2 pp=4 zero=3")
    assert found.costs.fsdp_scatter_layer[0] == 0 < found.costs.fsdp_scatter_layer[1]
    assert (found.costs.fsdp_gather_layer[1:3] == 0).all() and found.costs.fsdp_gather_layer[3] > 0
    assert found.peak.gradients[1] == pytest.approx(found.peak.gradients[0] / 8)
    assert found.peak.weights[3] == pytest.approx(found.peak.weights[2] / 2, rel=0.05)


def test_offloaded_state_is_on_the_host_and_its_way_there_takes_time():
    found = outcome("dp=8 zero=2", "dp=8 zero=2 offload=optimizer", "dp=8 zero=2 offload=both")
    assert (found.peak.master[1:] == 0).all() and (found.peak.moments[1:] == 0).all()
    # fp32 master, two moments and the gradient of an eighth of the parameters.
    assert found.host_bytes[1] == pytest.approx(16 * LLAMA.parameters / 8, rel=0.01)
    assert found.host_bytes[2] > found.host_bytes[1] and found.peak.activations[2] < 0.1 * found.peak.activations[1]
    # The host updates an eighth at 34 bytes per parameter with an eighth of 614.4 GB/s.
    assert found.times.offload_exposed[1] == pytest.approx(34 * LLAMA.parameters / 614.4e9, rel=0.02)
    assert (np.diff(found.times.step_seconds) > 0).all()


def test_a_host_that_is_too_small_or_unknown_is_said():
    cluster = parse_cluster("8xh100-sxm-80gb")
    small = replace(cluster.node, host_memory_bytes=replace(cluster.node.host_memory_bytes, value=64e9))
    where = system_of(replace(cluster, node=small), TrainingEngine("plain"), "bf16")
    candidates = candidates_of(LLAMA, [parse_layout("dp=8 zero=1 offload=optimizer")], sequence=4096, global_batch=64)
    found = plan_candidates(candidates, where)
    assert found.peak.total[0] < found.limit_bytes and not found.fits[0]
    with pytest.raises(UserError, match="lacks the host's memory"):
        ledger("dp=8 zero=1 offload=optimizer", cluster="8xh100-sxm-80gb@pcie-server")


def test_chip_to_chip_links_carry_activations_that_pcie_does_not():
    """Offloading every activation of a block hides behind its compute where the link is fast enough."""
    slow = outcome("dp=4 zero=3 offload=activations", cluster="4xh100-sxm-80gb").times
    fast = outcome("dp=4 zero=3 offload=activations", cluster="4xgb200").times
    assert slow.offload_exposed[0] / slow.step_seconds[0] > 2 * fast.offload_exposed[0] / fast.step_seconds[0]
