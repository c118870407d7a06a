"""The plan's line about data: measured or said not to be, never guessed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ironlaw.config import RunConfig
from ironlaw.data import supply
from ironlaw.machine.profile import Profile
from ironlaw.plan.step import plan_run
from ironlaw.report.data_view import supply_words

FACTS = {"tokens_per_second": 8e6, "stage_tokens_per_second": {"read": 2e7, "pack": 1.5e7, "copy": 9e7}}


def planned(config: RunConfig, profile: Profile) -> dict[str, Any]:
    found: dict[str, Any] = plan_run(config, profile).facts["data_supply"]
    return found


def test_nothing_is_known_before_the_first_run(tiny_config: Callable[..., RunConfig], machine_profile: Profile) -> None:
    line = planned(tiny_config(), machine_profile)
    assert line["stage_tokens_per_second"] == {"read": None, "pack": None, "copy": None}
    assert line["supply_tokens_per_second"] is line["times_demand"] is None
    words = supply_words(line)
    assert "supply is not measured: no run has loaded" in words


def test_what_a_loader_measured_is_compared_with_the_demand(
    tiny_config: Callable[..., RunConfig], machine_profile: Profile
) -> None:
    config = tiny_config()
    supply.write_supply(config.data, config.sequence, FACTS)
    plan = plan_run(config, machine_profile)
    line, demand = plan.facts["data_supply"], plan.totals["tokens_per_second"].value
    assert line["demand_tokens_per_second"] == demand
    assert line["times_demand"] == 8e6 / demand
    assert line["slowest_stage"] == "pack"
    # Another packing or length is other work: nobody has measured that.
    other = tiny_config(data={"packing": "best_fit"})
    assert planned(other, machine_profile)["supply_tokens_per_second"] is None
    shorter = tiny_config(train={"sequence": 8})
    assert planned(shorter, machine_profile)["supply_tokens_per_second"] is None


def test_a_stream_counts_with_the_tokenizer_measured_here(
    tiny_config: Callable[..., RunConfig], machine_profile: Profile
) -> None:
    line = planned(tiny_config(data={"streaming": True}), machine_profile)
    assert line["stage_tokens_per_second"]["tokenise"] == machine_profile.tokenizer_tokens_per_second
    assert line["slowest_stage"] == "tokenise" and line["supply_tokens_per_second"] is None


def test_a_damaged_memory_is_no_memory(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = tiny_config()
    path = supply.supply_path(config.data)
    path.parent.mkdir(parents=True)
    for text in ("{", "[]", '{"x": 1}'):
        path.write_text(text, encoding="utf-8")
        assert supply.read_supply(config.data, config.sequence) is None
    supply.write_supply(config.data, config.sequence, FACTS)
    assert supply.read_supply(config.data, config.sequence) is not None
