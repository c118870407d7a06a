"""Two runs: a difference is named by phase and by setting, and noise is not called a difference."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from synthetic import make_config, make_run, write_run

from ironlaw.config import RunConfig
from ironlaw.errors import UserError
from ironlaw.explain.compare import compare, sample, threshold
from ironlaw.explain.explanation import explain_run
from ironlaw.explain.runs import list_runs
from ironlaw.ledger import Ledger
from ironlaw.machine.profile import Profile
from ironlaw.report.comparison_view import sparkline


def explained(folder: Path, config: RunConfig, plan: Ledger, profile: Profile, **changes: Any) -> Any:
    return explain_run(write_run(folder, config, plan, make_run(plan, **changes)), profile)


def test_a_slower_run_is_explained_by_phase_and_setting(
    tmp_path: Path, config: RunConfig, plan: Ledger, profile: Profile
) -> None:
    before = explained(tmp_path / "a", config, plan, profile)
    slow = make_config(clip=2.0)
    after = explained(tmp_path / "b", slow, plan, profile, phases={"data": 0.05})
    found = compare(before, after)
    assert found.real and found.change is not None and found.change > 0.05
    assert "B is" in found.sentence and "slower" in found.sentence and "data +" in found.sentence
    assert {"name": "train.clip", "before": 1.0, "after": 2.0, "of": "config"} in found.settings
    document = found.to_json()
    assert json.loads(json.dumps(document))["is_difference"] is True
    step = sum(row["difference"] or 0 for row in document["phases"])
    assert step == pytest.approx(document["totals"]["step_seconds"]["difference"], rel=0.05)
    back = compare(after, before)
    assert "faster" in back.sentence


def test_noise_is_not_a_difference(tmp_path: Path, config: RunConfig, plan: Ledger, profile: Profile) -> None:
    before = explained(tmp_path / "a", config, plan, profile)
    after = explained(tmp_path / "b", config, plan, profile, kinds={"matmul": 1.008})
    found = compare(before, after)
    assert found.real is False and "No difference beyond noise" in found.sentence


def steps(mean: float, spread: float, seed: int, trend: float = 0.0) -> list[dict[str, float]]:
    chance = random.Random(seed)
    return [{"step": n, "seconds": mean * (1 + trend * n / 200) * chance.gauss(1, spread)} for n in range(200)]


def test_false_differences_are_rare() -> None:
    """An A/A test of the judge itself: 200 pairs of runs of the same thing, on a machine of 10% jitter."""
    false = 0
    for pair in range(200):
        a, b = (sample(steps(0.1, 0.1, 2 * pair + side)) for side in (0, 1))
        limit = threshold(a, b)
        assert a and b and limit
        false += abs(b.seconds / a.seconds - 1) > limit
    assert false < 10  # 5%


def test_a_machine_that_drifts_widens_the_limit() -> None:
    steady, drifting = sample(steps(0.1, 0.01, 1)), sample(steps(0.1, 0.01, 2, trend=0.3))
    limit = threshold(steady, drifting)
    assert limit is not None and limit > 0.1
    assert threshold(steady, sample(steps(0.1, 0.01, 3)[:6])) is None


def test_runs_are_listed_with_their_figures(tmp_path: Path, config: RunConfig, plan: Ledger, profile: Profile) -> None:
    write_run(tmp_path / "slow", config, plan, make_run(plan, kinds={"matmul": 2.0}))
    write_run(tmp_path / "quick", config, plan, make_run(plan))
    write_run(tmp_path / "started", config, plan, None)
    found = list_runs(tmp_path, "tokens_per_second")
    assert [Path(run["run"]).name for run in found] == ["quick", "slow", "started"]
    assert found[0]["mfu"] > found[1]["mfu"]
    assert found[2]["state"] == "not finished"
    with pytest.raises(UserError, match="--sort"):
        list_runs(tmp_path, "colour")


def test_a_curve_in_blocks() -> None:
    assert sparkline([4.0, 3.0, 2.0, 1.0]) == "█▆▃▁"
    assert sparkline([1.0]) == ""
