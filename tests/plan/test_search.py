"""Search: the first of the ranking is the best of the space."""

import time

import pytest

from ironlaw.catalog.nodes import parse_cluster
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.plan import search as searching
from ironlaw.plan.cluster import plan_cluster
from ironlaw.plan.search import layouts, search

TINY = ModelConfig.named("gpt2")
EIGHT = parse_cluster("4xa100-sxm-80gb")


def test_brute_force_one_layout_at_a_time_finds_nothing_better(monkeypatch):
    monkeypatch.setattr(searching, "CHUNK", 64)
    found = search(TINY, EIGHT, sequence=1024, global_batch=8, engine="megatron-core", keep=5)
    everything = []
    for row in layouts(TINY, 4, 1024, 8, {}):
        layout = searching._layout(row)
        assert layout.reason_invalid(TINY, sequence=1024, global_batch=8, accelerators=4) is None
        ledger = plan_cluster(TINY, EIGHT, layout, sequence=1024, global_batch=8, engine="megatron-core")
        if ledger.facts["fits"]:
            everything.append(ledger.totals["step_seconds"].value)
    assert found.planned == len(list(layouts(TINY, 4, 1024, 8, {}))) and found.fitting == len(everything)
    best = sorted(everything)[:5]
    assert [c.step_seconds for c in found.best] == pytest.approx(best)


def test_ruled_out_layouts_are_counted_by_reason():
    found = search(ModelConfig.named("llama3-70b"), parse_cluster("8xh100-sxm-80gb"), sequence=8192, global_batch=8)
    assert found.best == [] and found.ruled_out["memory"] == found.planned
    assert found.nearest_miss_bytes is not None and found.nearest_miss_bytes > 10e9


def test_nothing_to_plan_is_an_error_with_reasons():
    with pytest.raises(UserError, match="global batch not divisible"):
        search(ModelConfig.named("gpt2"), parse_cluster("17xa100-sxm-80gb"), sequence=1024, global_batch=2)


def test_gpt3_on_4096_accelerators_takes_seconds():
    start = time.perf_counter()
    found = search(
        ModelConfig.named("gpt3-175b"), parse_cluster("4096xa100-sxm-80gb"), sequence=2048, global_batch=4096
    )
    assert time.perf_counter() - start < 10
    assert found.planned > 10_000 and found.best[0].step_seconds <= found.best[-1].step_seconds
    assert found.best[-1].why_slower
