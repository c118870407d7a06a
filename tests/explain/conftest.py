from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from synthetic import make_config, make_profile

from ironlaw.config import RunConfig
from ironlaw.ledger import Ledger
from ironlaw.machine.profile import Profile
from ironlaw.plan.step import plan_run


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What this machine remembers of earlier runs must not change a plan here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def profile() -> Profile:
    return make_profile()


@pytest.fixture(scope="session")
def config() -> RunConfig:
    return make_config()


@pytest.fixture(scope="session")
def plan(config: RunConfig, profile: Profile) -> Ledger:
    return plan_run(config, profile)
