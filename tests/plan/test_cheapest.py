"""Hardware for a training run within limits on time and rent."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from ironlaw.catalog.nodes import parse_cluster
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.plan.budget import hourly_rent
from ironlaw.plan.cluster.estimate import ClusterRequest
from ironlaw.plan.cluster.search import search
from ironlaw.plan.request import plan_request
from ironlaw.plan.request_types import Limits, Options, PlanOutcome, Prices
from ironlaw.plan.requests import cheapest

KINDS = ("h100-sxm-80gb", "l4", "rtx-4090", "tpu-v5e", "mi300x")
DAY = 86400.0
WORK = Options(tokens="10B", sequence=1024, global_batch=512)


@pytest.fixture(autouse=True)
def few_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cheapest, "accelerator_names", lambda: KINDS)


def planned(on: str, **limits: float) -> PlanOutcome:
    return plan_request("gpt2", on=on, options=replace(WORK, limits=Limits(**limits)))


@lru_cache
def rents(kind: str) -> dict[int, tuple[float, float]]:
    """Seconds and rent of the fastest layout on each number of accelerators in one node."""
    found, rate = {}, hourly_rent(parse_cluster(kind).accelerator)
    assert rate is not None
    for count in (1, 2, 4, 8):
        step = ClusterRequest(ModelConfig.named("gpt2"), parse_cluster(f"{count}x{kind}"), 1024, 512)
        seconds = search(step, keep=1).best[0].step_seconds * math.ceil(10e9 / (1024 * 512))
        found[count] = seconds, seconds / 3600 * count * rate["usd_per_hour"]
    return found


def test_the_cheapest_that_meets_a_deadline_is_no_dearer_than_any_that_is_planned_by_itself() -> None:
    answer = planned("any", seconds=DAY)
    total, rent = (answer.ledger.totals[name].value for name in ("total_seconds", "rent_usd"))
    assert answer.fits and total <= DAY and answer.more["limits"]["total_seconds"] == {"limit": DAY, "holds": True}
    alone = [rent for kind in KINDS[:2] for seconds, rent in rents(kind).values() if seconds <= DAY]
    assert alone and rent <= 1.02 * min(alone)  # of layouts as fast to 1%, the simpler or safer one is planned
    rows = answer.more["hardware"]["rows"]
    assert [row["rent_usd"] for row in rows] == sorted(row["rent_usd"] for row in rows)
    assert answer.more["hardware"]["ruled_out"]["without a known price"] == 1  # mi300x


def test_a_kind_that_is_asked_for_has_its_number_found() -> None:
    answer = planned("l4", seconds=2 * DAY)
    found = rents("l4")
    count = answer.more["cluster"]["accelerators"]
    assert found[count][0] <= 2 * DAY < found[count // 2][0]
    assert [row["accelerator"] for row in answer.more["hardware"]["rows"]] == ["l4"]


def test_hybrid_sharding_is_tried_where_it_decides_on_the_deadline() -> None:
    answer = plan_request("phi-3-mini", on="h100-sxm-80gb", options=Options(tokens="160B", limits=Limits(6 * 3600)))
    best = answer.more["hardware"]["rows"][0]
    assert answer.layout.shard and best["accelerators"] == 512 and best["rent_usd"] < 9000  # 1,024 cost 13,400


def test_without_a_deadline_the_fastest_for_the_rent_is_found() -> None:
    answer = planned("any", rent_usd=30.0)
    totals = answer.ledger.totals
    assert answer.fits and totals["rent_usd"].value <= 30
    assert all(
        seconds >= totals["total_seconds"].value / 1.03 for seconds, rent in rents("rtx-4090").values() if rent <= 30
    )
    assert planned("any", rent_usd=60.0).ledger.totals["total_seconds"].value < totals["total_seconds"].value


def test_nodes_whose_network_nobody_states_are_joined_only_where_they_are_asked_for() -> None:
    hasty = planned("rtx-4090", seconds=DAY / 12)
    assert hasty.more["cluster"]["nodes"] > 1
    assert "network" in [one["name"] for one in hasty.more["assumed"]]
    rows = planned("any", seconds=DAY / 12).more["hardware"]["rows"]
    assert all(row["accelerators"] <= parse_cluster(row["accelerator"]).node.accelerators
               for row in rows if row["accelerator"] == "rtx-4090")  # fmt: skip


def test_given_hardware_is_held_to_the_limits() -> None:
    answer = planned("8xl4", seconds=3600.0)
    assert not answer.fits and not answer.more["limits"]["total_seconds"]["holds"]
    assert answer.more["budget"]["rent"] and "candidates" in answer.more  # it fits: the plan is whole
    given = replace(WORK, limits=Limits(rent_usd=1.0), prices=Prices(usd_per_hour=0.001))
    assert plan_request("gpt2", on="8xl4", options=given).fits


@pytest.mark.parametrize(
    ("on", "limits", "says"),
    [
        ("any", Limits(), "add --within"), ("any", Limits(seconds=60.0), "raise --within"),
        ("mi300x", Limits(seconds=DAY), "without a known price"), ("this", Limits(seconds=DAY), "--within is for"),
        ("8xmi300x", Limits(rent_usd=5.0), "give --price-per-hour"),
    ],
)  # fmt: skip
def test_limits_that_nothing_holds(on: str, limits: Limits, says: str) -> None:
    with pytest.raises(UserError, match=says):
        plan_request("gpt2", on=on, options=replace(WORK, limits=limits))


def lora(on: str, **options: Any) -> PlanOutcome:
    overrides = ("finetune.method=lora", "model.layers=2")
    return plan_request("llama3-1b", on=on, overrides=overrides, options=Options(tokens="200M", **options))


def test_replicas_of_adapters_share_the_batch_and_the_tokens() -> None:
    """Each was given a batch of its own, so that eight took as long as one."""
    one, eight = lora("h100-sxm-80gb"), lora("8xh100-sxm-80gb")
    assert one.ledger.facts["steps"] == eight.ledger.facts["steps"]
    assert eight.ledger.totals["total_seconds"].value < one.ledger.totals["total_seconds"].value / 4
    assert "global batch" in [said["name"] for said in one.more["assumed"]]
    with pytest.raises(UserError, match="give --global-batch 24"):
        lora("8xh100-sxm-80gb", global_batch=20)


def test_adapters_have_their_hardware_found() -> None:
    alone = lora("l4").ledger.totals["total_seconds"].value
    answer = lora("l4", limits=Limits(seconds=alone / 3))
    assert answer.fits and answer.ledger.facts["accelerators"] == 4
    rows = lora("any", limits=Limits(seconds=alone)).more["hardware"]["rows"]
    assert {row["accelerator"] for row in rows} <= {"h100-sxm-80gb", "l4", "rtx-4090"}  # no TPU
    assert rows[0]["rent_usd"] == min(row["rent_usd"] for row in rows)
