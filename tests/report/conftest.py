"""The synthetic runs of tests/explain serve here too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "explain"))

from synthetic import make_config, make_profile, make_run, write_run

from ironlaw.explain import Explanation, explain_run
from ironlaw.ledger import Ledger
from ironlaw.plan.step import plan_run


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What this machine remembers of earlier runs must not change a plan here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def plan() -> Ledger:
    return plan_run(make_config(), make_profile())


@pytest.fixture(scope="session")
def explanation(plan: Ledger, tmp_path_factory: pytest.TempPathFactory) -> Explanation:
    """A slower run than planned, on a machine that multiplies five times faster in bf16."""
    run = make_run(plan, kinds={"matmul": 1.04, "norm": 1.3}, facts={"machine_speed": 0.96})
    folder = write_run(tmp_path_factory.mktemp("runs") / "gpt-tiny", make_config(), plan, run)
    return explain_run(folder, make_profile(bf16_factor=5))


@pytest.fixture(scope="session")
def document(explanation: Explanation) -> dict[str, Any]:
    return explanation.to_json()
