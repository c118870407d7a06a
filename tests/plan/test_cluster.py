"""The plan of one layout as a ledger."""

import subprocess
import sys

import pytest

from ironlaw.catalog.nodes import parse_cluster
from ironlaw.errors import UserError
from ironlaw.ledger import Kind, Ledger, Phase
from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster.estimate import ClusterRequest, plan_cluster
from ironlaw.workload.layout import parse_layout

LLAMA = ModelConfig.named("llama3-8b")


def plan(layout="dp=8 zero=1", cluster="8xh100-sxm-80gb", **options):
    arguments = {"sequence": 8192, "global_batch": 64} | options
    return plan_cluster(ClusterRequest(LLAMA, parse_cluster(cluster), **arguments), parse_layout(layout)).ledger


def test_lines_add_up_to_the_totals():
    ledger = plan("dp=2 tp=2 sp=1 pp=2 zero=1 recompute=selective")
    seconds = sum(line.seconds for line in ledger.lines if line.seconds is not None)
    assert seconds == pytest.approx(ledger.totals["step_seconds"].value, rel=1e-9)
    assert ledger.flops() == ledger.totals["flops_per_step"].value
    held = sum(line.bytes for line in ledger.memory if line.bytes is not None)
    assert held == pytest.approx(ledger.totals["peak_bytes"].value)
    assert all(line.seconds is None or line.seconds >= 0 for line in ledger.lines)


def test_totals_are_consistent_and_carry_an_interval():
    totals = plan().totals
    step = totals["step_seconds"]
    assert step.low < step.value < step.high
    assert totals["tokens_per_second"].value == pytest.approx(64 * 8192 / step.value)
    assert totals["tokens_per_second"].low == pytest.approx(64 * 8192 / step.high)
    assert totals["parameters"].value == LLAMA.parameters
    mfu = totals["flops_per_step"].value / (step.value * 8 * 989.4e12)
    assert totals["mfu"].value == pytest.approx(mfu)
    assert 0.2 < mfu < 0.7


def test_the_ledger_survives_json():
    ledger = plan("dp=8 zero=3 recompute=full")
    again = Ledger.from_json(ledger.to_json())
    assert again.totals == ledger.totals and again.lines == ledger.lines
    assert any(line.operation == "qkv again" for line in again.lines)


def test_phases_say_where_the_time_goes():
    ledger = plan("dp=1 tp=8 sp=1", engine="megatron-core")
    by_phase = ledger.seconds_by_phase()
    assert by_phase[Phase.BACKWARD] > 1.5 * by_phase[Phase.FORWARD]
    assert by_phase[Phase.COMMUNICATION] > 0
    assert ledger.seconds_by_kind()[Kind.MATMUL] > ledger.seconds_by_kind()[Kind.ATTENTION]


def test_what_does_not_fit_is_said_not_refused():
    facts = plan("dp=8 micro_batch=8").facts
    assert facts["fits"] is False and facts["peak_stage"] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layout": "dp=4"}, "the cluster has 8"),
        ({"engine": "megatron-cor"}, "did you mean megatron-core"),
        ({"precision": "fp12"}, "fp12"),
    ],
)
def test_wrong_input_is_a_user_error(options, words):
    with pytest.raises(UserError, match=words):
        plan(**options)


def test_planning_does_not_import_torch():
    code = (
        "import sys, ironlaw.plan.cluster.estimate, ironlaw.plan.cluster.search, ironlaw.plan.measured.validate;"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama3-8b", "dp=4 tp=4 sp=1 pp=2 cp=2 zero=1"),
        ("mixtral-8x7b", "dp=16 tp=4 sp=1 ep=8 etp=1"),
        ("deepseek-moe-16b", "dp=16 tp=4"),
    ],
)
def test_listed_products_are_the_flops_of_all_blocks(name, layout):
    """3 x their FLOPs, over layers, micro-batches and ranks; experts of the busiest rank have more rows."""
    model, chosen = ModelConfig.named(name), parse_layout(layout)
    ledger = plan_cluster(
        ClusterRequest(model, parse_cluster("64xh100-sxm-80gb"), sequence=4096, global_batch=64), chosen
    ).ledger
    products = {p["name"]: p for p in ledger.facts["products"]}
    assert {"qkv", "attention_out"} <= set(products)
    uneven = {"expert_up": 1.1, "expert_down": 1.1} if chosen.ep > 1 else {}
    copies = {"router": 1 if chosen.sp else chosen.tp}
    flops = sum(p["flops"] * p["share_of_layers"] / uneven.get(n, 1) / copies.get(n, 1) for n, p in products.items())
    ranks_and_passes = 3 * chosen.accelerators / chosen.pp * 64 / chosen.dp * model.layers
    linear = sum(line.flops or 0 for line in ledger.select(kind=Kind.MATMUL) if line.operation != "head")
    assert flops * ranks_and_passes == pytest.approx(linear, rel=1e-9)
    assert all(p["forward_seconds"] > 0 for p in products.values())
