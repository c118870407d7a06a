"""Search: the first of the ranking is the best of the space."""

import time
from dataclasses import replace

import pytest

from ironlaw.catalog.figures import Figure
from ironlaw.catalog.nodes import parse_cluster
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster.estimate import ClusterRequest, plan_cluster
from ironlaw.plan.cluster.layout_space import NO_SAVING, lacking, possible_layouts, saving, savings
from ironlaw.plan.cluster.layout_table import layout_of
from ironlaw.plan.cluster.search import search
from ironlaw.plan.engines.named import engine

TINY = ModelConfig.named("gpt2").model_copy(update={"layers": 6})
EIGHT = parse_cluster("4xa100-sxm-80gb")


def brute_force(cluster, offload=False):
    """Every layout of the space, one at a time: (seconds, layout) of those that fit, fastest first; how many."""
    fitting, count = [], 0
    table = possible_layouts(TINY, 4, 1024, 4, {}, cp_kinds=engine("megatron-core").cp_kinds)
    for variant in (NO_SAVING, *savings(TINY, offload=offload)):
        for row in saving(table, variant):
            layout = layout_of(row)
            if lacking(engine("megatron-core"), layout):
                continue
            assert layout.reason_invalid(TINY, sequence=1024, global_batch=4, accelerators=4) is None
            plan = plan_cluster(
                ClusterRequest(TINY, cluster, sequence=1024, global_batch=4, engine="megatron-core"), layout
            )
            count += 1
            if plan.fits:
                fitting.append((plan.step_seconds, str(layout)))
    return sorted(fitting), count


@pytest.mark.parametrize("memory_gib", [None, pytest.param(2.2, marks=pytest.mark.long)])
def test_brute_force_one_layout_at_a_time_finds_nothing_better(monkeypatch, memory_gib):
    """Recomputing variants are planned of few layouts only; the best is that of planning all of them."""
    cluster = EIGHT
    if memory_gib is not None:
        small = replace(EIGHT.accelerator, memory_bytes=Figure(memory_gib * 2**30, "test"))
        cluster = replace(EIGHT, accelerator=small)
    monkeypatch.setattr("ironlaw.plan.cluster.search.CHUNK", 64)
    found = search(ClusterRequest(TINY, cluster, sequence=1024, global_batch=4, engine="megatron-core"), keep=5)
    fitting, count = brute_force(cluster)
    assert found.best[0].step_seconds == pytest.approx(fitting[0][0])
    assert {str(c.layout) for c in found.best} <= {text for _, text in fitting}
    assert found.planned < count and found.fitting <= len(fitting)


def test_offloading_is_tried_where_nothing_fits_without():
    model, cluster = ModelConfig.named("llama3-70b"), parse_cluster("8xh100-sxm-80gb")
    found = search(ClusterRequest(model, cluster, sequence=4096, global_batch=8))
    assert found.best and all(candidate.layout.offload != "none" for candidate in found.best)
    unknown = parse_cluster("8xh100-sxm-80gb@pcie-server")  # a host of which nothing is known
    assert not search(ClusterRequest(model, unknown, sequence=4096, global_batch=8)).best


def test_ruled_out_layouts_are_counted_by_reason():
    found = search(
        ClusterRequest(
            ModelConfig.named("llama3-405b"), parse_cluster("8xh100-sxm-80gb"), sequence=8192, global_batch=8
        )
    )
    assert found.best == [] and found.ruled_out["memory"] == found.planned
    assert found.nearest_miss is not None and found.nearest_miss.peak_bytes > 80e9 + 10e9


def test_nothing_to_plan_is_an_error_with_reasons():
    with pytest.raises(UserError, match="global batch not divisible"):
        search(
            ClusterRequest(ModelConfig.named("gpt2"), parse_cluster("17xa100-sxm-80gb"), sequence=1024, global_batch=2)
        )


def test_gpt3_on_4096_accelerators_takes_seconds():
    start = time.process_time()  # of one core, whatever else the machine does
    found = search(
        ClusterRequest(
            ModelConfig.named("gpt3-175b"), parse_cluster("4096xa100-sxm-80gb"), sequence=2048, global_batch=4096
        )
    )
    assert time.process_time() - start < 10
    assert found.planned > 10_000 and found.best[0].step_seconds <= found.best[-1].step_seconds
    assert found.best[-1].why_slower
