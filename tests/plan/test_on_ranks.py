"""Plans of several CPU ranks: what they compute adds up to the model's work, and slow links cost what they carry."""

from __future__ import annotations

from typing import Any

import pytest

from ironlaw.config import RunConfig, build_config
from ironlaw.errors import UserError
from ironlaw.machine.links import KINDS, Link, RankCosts, RankFabric
from ironlaw.machine.profile import Curve, Profile
from ironlaw.plan.layouts import best_layout
from ironlaw.plan.stage_costs import SimulatedPipeline
from ironlaw.plan.step import StepPlan, plan_run, plan_step
from ironlaw.workload.collectives import collectives, table_of
from ironlaw.workload.layout import Layout, parse_layout
from ironlaw.workload.recipe import Recipe, StepBatch
from ironlaw.workload.schedule import passes

GPT = {"name": "gpt", "layers": 4, "hidden": 64, "heads": 4, "vocab": 512, "context": 64}
LLAMA = GPT | {
    "name": "llama", "ffn": 96, "gated_ffn": True, "activation": "silu", "norm": "rmsnorm", "positions": "rope",
    "bias": False, "tied": False,
}  # fmt: skip
CURVE = Curve((256.0, 2.0**24), (1e-4, 1e-2))
COSTS = RankCosts("this", "today", 2, dict.fromkeys(KINDS, CURVE), {"compute": 1.9, "memory": 1.5}, 1e-4, 1e-4, 1e-4)
LAYOUTS = [
    "dp=2", "dp=2 zero=1", "dp=2 zero=3", "tp=2", "tp=2 sp=1", "cp=2", "pp=2", "pp=2 virtual_stages=2",
    "pp=2 virtual_stages=2 schedule=zbv", "dp=2 pp=2 zero=1", "dp=2 tp=2 sp=1 zero=3", "dp=2 tp=2 pp=2",
]  # fmt: skip


def config(model: dict[str, Any] = GPT) -> RunConfig:
    return build_config({"model": model, "train": {"global_batch": 16, "micro_batch": 2, "precision": "fp32"}})


def planned(profile: Profile, layout: str | Layout, fabric: RankFabric | None = None, **model: Any) -> StepPlan:
    chosen = parse_layout(layout + " micro_batch=2") if isinstance(layout, str) else layout
    return plan_step(config(GPT | model), profile, chosen, fabric or RankFabric(COSTS))


LATENT: dict[str, Any] = LLAMA | {
    "kv_heads": None, "latent": {"query_rank": 20, "key_value_rank": 12, "plain_size": 8, "rotary_size": 4,
                                 "value_size": 10},
}  # fmt: skip


@pytest.mark.parametrize("family", [GPT, LLAMA, LATENT])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_share_the_models_work_and_send_what_traffic_says(
    family: dict[str, Any], layout: str, machine_profile: Profile
) -> None:
    chosen = parse_layout(layout + " micro_batch=2")
    plan = plan_step(config(family), machine_profile, chosen, RankFabric(COSTS))
    ledger = plan.ledger
    alone = plan_run(config(family), machine_profile)
    model, flops = config(family).model, alone.totals["flops_per_step"].value
    if model.latent is not None:  # every tensor parallel rank computes the narrow vectors, forward and backward
        narrow = (model.latent.query_rank or 0) + model.latent.down_size
        flops += (chosen.tp - 1) * 6 * model.layers * model.hidden * narrow * 16 * 64
    assert ledger.totals["flops_per_step"].value == pytest.approx(flops, rel=1e-3)
    for position, stage in enumerate(plan.stages):
        table = table_of(collectives(config(family).model, chosen, StepBatch(16, 64), Recipe(), position))
        sent = {(t.dimension, t.kind): t.bytes for t in stage.communication}
        assert sent == {key: value.bytes for key, value in table.items()}
        assert sum(stage.phase_seconds.values()) == pytest.approx(plan.step_seconds, rel=1e-6)
        assert all(seconds >= -1e-9 for seconds in stage.phase_seconds.values())
    assert sum(ledger.seconds_by_phase().values()) == pytest.approx(plan.step_seconds, rel=1e-6)


def test_a_link_costs_its_bytes_and_its_latency(machine_profile: Profile) -> None:
    slow = Link(latency_seconds=1e-3, bytes_per_second=1e6)
    apart = RankFabric(COSTS, ranks_per_host=1, between=slow)
    near, far = planned(machine_profile, "dp=2 zero=3"), planned(machine_profile, "dp=2 zero=3", apart)
    found = {f"{t.dimension} {t.kind}": t for t in far.stages[0].communication}
    gather = found["shard all_gather"]
    # Half of every gathered buffer comes over the link, half as much again waits for its turn; a round has its latency.
    assert gather.seconds == pytest.approx(1.5 * gather.bytes / 2 / 1e6 + gather.count * (1e-3 + 1e-4), rel=0.01)
    scatter = found["shard reduce_scatter"]
    assert scatter.seconds == pytest.approx(scatter.bytes / 1e6 + scatter.count * (2e-3 + 1e-4), rel=0.01)
    talking = sum(t.seconds for t in far.stages[0].communication) - sum(t.seconds for t in near.stages[0].communication)
    assert far.step_seconds - near.step_seconds == pytest.approx(talking, rel=0.3)  # a host each: cores of their own
    two_hosts = planned(machine_profile, "dp=4", RankFabric(COSTS, ranks_per_host=2, between=slow))
    assert two_hosts.step_seconds < planned(machine_profile, "dp=4", apart).step_seconds + 0.1


def test_a_pipeline_waits_for_the_gradients_of_its_tied_weight(machine_profile: Profile) -> None:
    """The first stage and the last send them to each other when all passes are through."""
    apart = RankFabric(COSTS, ranks_per_host=1, between=Link(latency_seconds=0.0, bytes_per_second=1e6))
    near = RankFabric(COSTS, ranks_per_host=1, between=Link(latency_seconds=0.0, bytes_per_second=1e9))
    more = [
        planned(machine_profile, "pp=2", apart, vocab=vocab).step_seconds
        - planned(machine_profile, "pp=2", near, vocab=vocab).step_seconds
        for vocab in (512, 4096)
    ]
    assert more[1] - more[0] == pytest.approx((4096 - 512) * 64 * 4 / 1e6, rel=0.05)
    untied = [planned(machine_profile, "pp=2", apart, vocab=vocab, tied=False).step_seconds for vocab in (512, 4096)]
    assert untied[1] - untied[0] < 0.1 * (more[1] - more[0])


def test_ddp_hides_reductions_behind_the_backward_pass_only_where_a_link_is_slow(machine_profile: Profile) -> None:
    link = Link(latency_seconds=0.0, bytes_per_second=2e8)
    plan = planned(machine_profile, "dp=2", RankFabric(COSTS, ranks_per_host=1, between=link), hidden=512, layers=8)
    (reduce,) = [t for t in plan.stages[0].communication if t.dimension == "replicate"]
    assert 0 < reduce.exposed_seconds < 0.9 * reduce.seconds
    here = planned(machine_profile, "dp=2", hidden=512, layers=8)
    (reduce,) = [t for t in here.stages[0].communication if t.dimension == "replicate"]
    assert reduce.exposed_seconds == pytest.approx(reduce.seconds, rel=0.2)


def test_every_pass_is_there_and_first_stages_run_ahead() -> None:
    ours = ["".join(p.kind for p in order) for order in passes("1f1b", 4, 1, 6)]
    assert [order.index("B") for order in ours] == [4, 3, 2, 1]
    for schedule, virtual in (("gpipe", 1), ("1f1b", 2), ("zb", 1), ("zbv", 2), ("dualpipe", 2)):
        for order in passes(schedule, 2, virtual, 8):
            kinds = [p.kind for p in order]
            assert kinds.count("F") == 8 * virtual == kinds.count("B") + kinds.count("W")


def test_a_pipeline_of_equal_stages_idles_as_the_formula_says() -> None:
    seconds = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    for micro_batches in (4, 8):
        played = SimulatedPipeline(passes("1f1b", 4, 1, micro_batches), lambda p: seconds[p.kind], lambda a, b: 0.0)
        assert max(played.ends) == pytest.approx(3.0 * (micro_batches + 3))
        assert played.busy == pytest.approx([3.0 * micro_batches] * 4)
    # Two cores for four stages: nothing is idle but at the ends.
    played = SimulatedPipeline(
        passes("1f1b", 4, 1, 8), lambda p: seconds[p.kind], lambda a, b: 0.0, cores=lambda rank: (0, 2.0)
    )
    assert max(played.ends) >= 4 * 8 * 3.0 / 2
    slow = SimulatedPipeline(passes("1f1b", 2, 1, 8), lambda p: seconds[p.kind], lambda a, b: 5.0)
    assert max(slow.ends) > 8 * 5.0


def test_the_best_layout_is_the_fastest_that_fits(machine_profile: Profile) -> None:
    fabric = RankFabric(COSTS)
    choice = best_layout(config(), machine_profile, 4, fabric, lambda layout: True)
    assert all(plan.fits for plan in choice.plans) and choice.tried >= len(choice.plans) > 10
    assert choice.best.step_seconds <= 1.01 * min(plan.step_seconds for plan in choice.plans)
    assert "\n" not in choice.reason and str(choice.best.layout) in choice.reason
    # Links a thousand times slower than this machine's: whatever talks least wins.
    far = RankFabric(COSTS, ranks_per_host=1, between=Link(latency_seconds=1e-4, bytes_per_second=1e5))
    apart = best_layout(config(), machine_profile, 4, far, lambda layout: True).best
    least = min(sum(t.bytes for t in plan.stages[0].communication) for plan in choice.plans)
    assert sum(t.bytes for t in apart.stages[0].communication) < 3 * least
    only = best_layout(config(), machine_profile, 4, fabric, lambda layout: layout.tp == 4 and not layout.sp)
    assert only.best.layout.tp == 4
    with pytest.raises(UserError, match="no layout divides"):
        best_layout(config(), machine_profile, 4, fabric, lambda layout: False)


def test_what_cannot_be_planned_is_said(machine_profile: Profile) -> None:
    with pytest.raises(UserError, match="accelerators, the cluster has 4"):
        plan_step(config(), machine_profile, Layout(dp=2, micro_batch=2), RankFabric(COSTS), 4)


@pytest.mark.parametrize("layout", ["dp=2 zero=3", "pp=2"])
def test_what_is_recomputed_and_how_the_loss_is_computed_is_the_configs(layout: str, machine_profile: Profile) -> None:
    """The trainer does what its plan says: a plan without these would train without them."""
    document = {"model": GPT, "train": {"global_batch": 16, "micro_batch": 2, "precision": "fp32", "loss": "chunked"}}
    wanted = build_config(document | {"recompute": {"mode": "every", "every": 2}})
    chosen = parse_layout(layout + " micro_batch=2")
    plan = plan_step(wanted, machine_profile, chosen, RankFabric(COSTS), 2)
    alone, ledger = plan_run(wanted, machine_profile), plan.ledger
    assert ledger.decided.recompute and ledger.decided.loss_chunk
    assert ledger.decisions == alone.decisions
    assert (
        ledger.totals["flops_per_step"].value >= planned(machine_profile, layout).ledger.totals["flops_per_step"].value
    )
