"""What sending less is worth: planned savings follow the bytes, and cost what they add."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ironlaw.catalog.nodes import parse_cluster
from ironlaw.config import build_config
from ironlaw.machine.links import KINDS, RankCosts, RankFabric
from ironlaw.machine.profile import Curve, Profile
from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster.estimate import ClusterRequest
from ironlaw.plan.requests.advice import cluster_savings
from ironlaw.plan.step import plan_step
from ironlaw.workload.collectives import collectives, compressed_elements, table_of
from ironlaw.workload.layout import parse_layout
from ironlaw.workload.recipe import Recipe, StepBatch

CURVE = Curve((256.0, 2.0**24), (1e-4, 1e-2))
COSTS = RankCosts("this", "today", 2, dict.fromkeys(KINDS, CURVE), {"compute": 1.9, "memory": 1.5}, 1e-4, 1e-4, 1e-4)
GPT = {"name": "gpt", "layers": 4, "hidden": 128, "heads": 4, "vocab": 1024, "context": 64}


def asked(engine: str, global_batch: int, on: str = "32xa100-sxm-80gb") -> ClusterRequest:
    return ClusterRequest(
        ModelConfig.named("gpt2-xl"), parse_cluster(on), 1024, global_batch, "bf16", engine, steps=1000
    )


def by_setting(savings: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        next(word for word in ("bf16", "powersgd", "local") if word in saving["setting"]): saving for saving in savings
    }


def test_powersgd_sends_two_thin_matrices_or_nothing_less() -> None:
    assert compressed_elements((1000, 1000), 4) == 8000
    assert compressed_elements((1000,), 4) == 1000  # a bias
    assert compressed_elements((8, 8), 4) == 64  # would save nothing
    assert compressed_elements((300, 10, 10), 2) == 800


def test_savings_of_a_cluster_save_what_a_step_waits_for() -> None:
    found = by_setting(cluster_savings(asked("torchtitan", 64), parse_layout("dp=32 micro_batch=1")))
    assert found.keys() == {"bf16", "powersgd", "local"}
    for saving in found.values():
        assert 0 < saving["saves_seconds"] <= 1.001 * saving["exposed_seconds"]
        assert saving["costs_seconds"] > 0
    # Half the bytes, half the time over the network; nothing is left between meetings.
    assert found["bf16"]["saves_seconds"] == pytest.approx(found["bf16"]["exposed_seconds"] / 2, rel=0.1)
    assert found["powersgd"]["sent_share"] < 0.02
    assert found["local"]["pays"] and found["local"]["sent_share"] == 1 / 500
    # Compression is work of its own, whatever the network.
    assert not found["powersgd"]["pays"]


def test_nothing_is_said_where_gradients_are_not_waited_for_or_already_narrow() -> None:
    assert not cluster_savings(asked("torchtitan", 4096), parse_layout("dp=32 micro_batch=4"))
    narrow = by_setting(cluster_savings(asked("nemo", 64), parse_layout("dp=32 micro_batch=1")))
    assert "bf16" not in narrow and "powersgd" in narrow  # this engine reduces in bf16 already
    sharded = by_setting(cluster_savings(asked("torchtitan", 64), parse_layout("dp=32 zero=2 micro_batch=1")))
    assert sharded.keys() <= {"bf16"}


@pytest.mark.parametrize("gradients", ["bf16", "powersgd"])
def test_a_plan_of_ranks_sends_what_the_config_says(gradients: str, machine_profile: Profile) -> None:
    document: dict[str, Any] = {"model": GPT, "train": {"global_batch": 4, "micro_batch": 2, "precision": "fp32"}}
    config = build_config(document | {"communication": {"gradients": gradients}})
    layout = parse_layout("dp=2 micro_batch=2")
    plan = plan_step(config, machine_profile, layout, RankFabric(COSTS), 2)
    (talk,) = [t for t in plan.stages[0].communication if t.dimension == "replicate"]
    recipe = Recipe(communication=config.communication)
    table = table_of(collectives(config.model, layout, StepBatch(4, 64), recipe, position=0))
    assert talk.bytes == table["replicate", "all_reduce"].bytes < 4 * config.model.parameters
    plain = plan_step(build_config(document), machine_profile, replace(layout), RankFabric(COSTS), 2)
    assert plan.step_seconds < plain.step_seconds
