"""Remedies of a job on several ranks are planned on as many, over links as they were."""

from __future__ import annotations

import pytest
from synthetic import make_profile

from ironlaw.config import RunConfig, build_config
from ironlaw.errors import UserError
from ironlaw.explain.remedies import find_remedies, situation, with_settings
from ironlaw.ledger import Ledger
from ironlaw.machine.links import KINDS, Link, RankCosts, RankFabric
from ironlaw.machine.profile import Curve
from ironlaw.plan.step import plan_step
from ironlaw.workload.layout import Layout

GPT = {"name": "gpt", "layers": 4, "hidden": 64, "heads": 4, "vocab": 512, "context": 64}
CURVE = Curve((256.0, 2.0**24), (1e-4, 1e-2))
COSTS = RankCosts("this", "today", 2, dict.fromkeys(KINDS, CURVE), {"compute": 1.9, "memory": 1.5}, 1e-4, 1e-4, 1e-4)
SLOW = Link(latency_seconds=1e-3, bytes_per_second=1e6)


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ironlaw.explain.remedies.load_costs", lambda: COSTS)


def sharded() -> RunConfig:
    return build_config({
        "model": GPT, "train": {"global_batch": 16, "micro_batch": 2, "precision": "fp32"},
        "layout": {"dp": 2, "zero": 3},
    })  # fmt: skip


def run_of(config: RunConfig, fabric: RankFabric) -> Ledger:
    plan = plan_step(config, make_profile(), Layout(dp=2, zero=3, micro_batch=2), fabric, 2).ledger
    return Ledger("run", facts=plan.facts)


def test_over_a_slow_link_the_layout_that_sends_less_is_proposed() -> None:
    profile, fabric = make_profile(), RankFabric(COSTS, ranks_per_host=1, between=SLOW)
    now = situation(sharded(), profile, run_of(sharded(), fabric))
    before = now.plan.totals["step_seconds"].value
    layout = next(remedy for remedy in find_remedies(now) if remedy.name == "layout")
    assert layout.effect == 0 and layout.gain > 0.5  # every micro-batch gathers and reduces all weights over the link
    after = plan_step(
        with_settings(sharded(), layout.settings), profile,
        Layout(**{key.removeprefix("layout."): value for key, value in layout.settings.items() if "layout" in key}
               | {"micro_batch": layout.settings.get("train.micro_batch", 2)}
               | ({} if "layout.dp" in layout.settings else {"dp": 2})), fabric, 2,
    )  # fmt: skip
    assert layout.step_seconds_saved == pytest.approx(before - after.step_seconds, rel=1e-6)
    assert "--set layout." in layout.apply


def test_the_best_layout_is_not_proposed_again() -> None:
    fabric = RankFabric(COSTS, ranks_per_host=1, between=SLOW)
    run = run_of(sharded(), fabric)
    now = situation(sharded(), make_profile(), run)
    better = with_settings(sharded(), next(r for r in find_remedies(now) if r.name == "layout").settings)
    assert "layout" not in {remedy.name for remedy in find_remedies(situation(better, make_profile(), run))}


def test_what_was_not_measured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> RankCosts:
        raise UserError("what ranks cost each other was not measured")

    monkeypatch.setattr("ironlaw.explain.remedies.load_costs", missing)
    with pytest.raises(UserError, match="not measured"):
        situation(sharded(), make_profile(), run_of(sharded(), RankFabric(COSTS)))
