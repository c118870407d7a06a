"""Context parallel attention: bytes, latency, overlap and constraints of its three kinds."""

import json

import numpy as np
import pytest

from ironlaw.catalog.nodes import parse_cluster
from ironlaw.errors import UserError
from ironlaw.ledger import Phase
from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster.candidates import candidates_of
from ironlaw.plan.cluster.estimate import ClusterRequest, plan_candidates, plan_cluster
from ironlaw.plan.cluster.layout_space import possible_layouts
from ironlaw.plan.cluster.layout_table import layout_of
from ironlaw.plan.cluster.search import search
from ironlaw.plan.cluster.system import system_of
from ironlaw.plan.engines.named import engine, engines
from ironlaw.workload.layout import CP_KINDS, parse_layout
from ironlaw.workload.messages import context_messages
from ironlaw.workload.program import step
from ironlaw.workload.recipe import Recipe, StepBatch

LLAMA = ModelConfig.named("llama3-8b").model_copy(update={"context": 131_072})
LONG = 131_072


def outcome(*texts, on="8xh100-sxm-80gb", sequence=LONG, model=LLAMA, name="megatron-core"):
    chosen = [parse_layout(text) for text in texts]
    for layout in chosen:
        layout.check(model, sequence=sequence, global_batch=8)
    candidates = candidates_of(model, chosen, sequence=sequence, global_batch=8)
    return candidates, plan_candidates(candidates, system_of(parse_cluster(on), engine(name), "bf16"))


def test_bytes_of_each_kind_set_its_time():
    """Long messages on 8 ranks of an island: what a rank sends in one forward pass, over what its link carries."""
    _, plans = outcome(*(f"dp=1 cp=8 cp_kind={kind}" for kind in CP_KINDS))
    tokens, query, key_value = LONG / 8, 4096, 1024
    sent = np.array([
        7 * 2 * tokens * key_value * 2,
        7 * 2 * tokens * key_value * 2,
        (2 * query + 2 * key_value) * tokens * 2 * 7 / 8,
    ])  # fmt: skip
    rates = sent / plans.costs.cp_layer
    assert (rates > 0.4 * 450e9).all() and (rates < 450e9).all()


def test_a_ring_hides_behind_attention_and_the_others_do_not():
    candidates, plans = outcome(*(f"dp=1 cp=8 cp_kind={kind}" for kind in CP_KINDS), sequence=LONG)
    ring, gather, swap = plans.times.cp_exposed / (candidates.accumulation * LLAMA.layers)
    message = plans.costs.cp_layer
    assert gather == pytest.approx(3 * message[1]) and swap == pytest.approx(2 * message[2])
    assert ring == pytest.approx((1 - engine("megatron-core").cp_hidden) * 3 * message[0])
    # Where attention is shorter than what is sent, no more than attention is hidden.
    candidates, plans = outcome("dp=1 cp=8 cp_kind=ring", sequence=4096)
    costs, where = plans.costs, engine("megatron-core").on("hopper")
    attention = sum(costs.block["attention", phase][0] for phase in (Phase.FORWARD, Phase.BACKWARD))
    lasts = attention * where.attention_slowdown
    sent = 3 * costs.cp_layer[0]
    assert lasts < sent
    exposed = plans.times.cp_exposed[0] / (candidates.accumulation[0] * LLAMA.layers)
    assert exposed == pytest.approx(sent - where.cp_hidden * lasts * 7 / 8)


def test_recomputed_attention_exchanges_again():
    _, plans = outcome(*(f"dp=1 cp=8 cp_kind=all_gather recompute={word}" for word in ("none", "full", "selective")))
    assert plans.times.cp_exposed[1] == pytest.approx(plans.times.cp_exposed[0] * 4 / 3)
    assert plans.times.cp_exposed[2] == plans.times.cp_exposed[1]


def test_all_to_all_costs_less_on_many_ranks_and_rings_less_with_few_key_value_heads():
    wide = LLAMA.model_copy(update={"kv_heads": 32})
    _, plans = outcome(*(f"dp=1 cp=8 cp_kind={kind}" for kind in CP_KINDS), model=wide)
    assert plans.costs.cp_layer[2] < plans.costs.cp_layer[0] / 2
    few = LLAMA.model_copy(update={"kv_heads": 2})
    _, plans = outcome(*(f"dp=1 cp=2 cp_kind={kind}" for kind in CP_KINDS), model=few, on="2xh100-sxm-80gb")
    assert plans.costs.cp_layer[0] < plans.costs.cp_layer[2]


def test_messages_across_the_network_cost_more_and_so_does_their_latency():
    _, near = outcome("dp=1 cp=8 cp_kind=ring", "dp=1 cp=8 cp_kind=all_gather")
    _, far = outcome("dp=1 cp=16 cp_kind=ring", "dp=1 cp=16 cp_kind=all_gather", on="16xh100-sxm-80gb")
    assert far.costs.cp_layer[0] > 5 * near.costs.cp_layer[0]  # a ring's one message at a time has one card
    assert far.costs.cp_layer[1] > 1.3 * near.costs.cp_layer[1]  # a collective has those of all ranks of a node


def test_what_is_held_on_the_way():
    """Gathered keys and values of the whole sequence, and their gradients; a ring holds two blocks of both."""
    _, plans = outcome(*(f"dp=1 cp=8 cp_kind={kind}" for kind in CP_KINDS), "dp=8 zero=0")
    block = 2 * LONG / 8 * 1024 * 2
    assert plans.peak.temporaries[0] == pytest.approx(4 * block)
    assert plans.peak.temporaries[1] == pytest.approx(2 * 8 * block)
    assert plans.peak.temporaries[2] == pytest.approx(2 * LONG / 8 * 4096 * 2 + block)
    assert plans.peak.temporaries[3] == 0


@pytest.mark.parametrize(
    ("layout", "model", "reason"),
    [
        ("dp=1 cp=16 cp_kind=ulysses", LLAMA, "8 of keys and values, are not divisible by cp x tp = 16"),
        ("dp=1 cp=8 tp=2 cp_kind=a2a", LLAMA, "not divisible by cp x tp = 16"),
        ("dp=8 cp_kind=ring", LLAMA, "needs cp > 1"),
        ("dp=4 cp=2 cp_kind=ring", ModelConfig.named("mistral-7b"), "no sliding window"),
    ],
)
def test_what_cannot_run_is_said(layout, model, reason):
    with pytest.raises(UserError, match=reason):
        parse_layout(layout).check(model, sequence=min(LONG, model.context), global_batch=16)
    with pytest.raises(UserError, match="cp_kind is ring, all_gather, all_to_all"):
        parse_layout("cp=2 cp_kind=star")


def test_the_engine_decides_where_nobody_does_and_the_plan_says_which():
    def planned(name, model=LLAMA, layout="dp=4 cp=2"):
        return plan_cluster(
            ClusterRequest(model, parse_cluster("8xh100-sxm-80gb"), sequence=8192, global_batch=8, engine=name),
            parse_layout(layout),
        ).ledger.facts

    assert "cp_kind=ring" in planned("nemo")["layout"]
    assert "all-gather" in planned("torchtitan")["context_parallel"]
    assert "cp_kind=all_gather" in planned("nemo", ModelConfig.named("mistral-7b"))["layout"]  # its window is 4,096
    assert planned("nemo", layout="dp=8")["context_parallel"] is None
    assert all(set(e.cp_kinds) <= set(CP_KINDS) and e.cp_kinds for e in engines().values())
    json.dumps(planned("nemo"))


def test_the_search_tries_the_kinds_that_the_engine_has():
    rows = {layout_of(row).cp_kind for row in possible_layouts(LLAMA, 8, 8192, 8, {}, cp_kinds=engine("nemo").cp_kinds)}
    assert rows == {None, "ring", "all_gather", "all_to_all"}
    rows = {
        layout_of(row).cp_kind
        for row in possible_layouts(LLAMA, 8, 8192, 8, {}, cp_kinds=engine("torchtitan").cp_kinds)
    }
    assert rows == {None, "ring", "all_gather"}
    found = search(ClusterRequest(LLAMA, parse_cluster("32xh100-sxm-80gb"), sequence=LONG, global_batch=4), keep=5)
    assert found.best and all(c.layout.cp_kind for c in found.best)


@pytest.mark.parametrize("name", ["llama3-8b", "deepseek-v2-lite"])
def test_messages_of_many_layouts_are_those_of_the_program_of_one(name):
    model, degrees = ModelConfig.named(name), [(1, 2), (2, 2), (1, 8), (4, 2)]
    tp, cp = (np.array(sizes, dtype=float) for sizes in zip(*degrees, strict=True))
    many = context_messages(model, 2 * 4096 / cp, tp, cp, 2.0, padded=True)["all_gather"][0]
    for i, (tensor, context) in enumerate(degrees):
        program = step(
            model, StepBatch(2, 4096), parse_layout(f"tp={tensor} cp={context} micro_batch=2"), Recipe("bf16")
        )
        (sent,) = (c for c in program.collectives[0] if (c.dimension, c.kind) == ("cp", "all_gather"))
        assert sent.bytes / sent.calls == many.bytes[i]
