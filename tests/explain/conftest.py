from __future__ import annotations

import pytest
from synthetic import make_config, make_profile

from ironlaw.config import RunConfig
from ironlaw.ledger import Ledger
from ironlaw.machine.profile import Profile
from ironlaw.plan.estimate import plan_run


@pytest.fixture(scope="session")
def profile() -> Profile:
    return make_profile()


@pytest.fixture(scope="session")
def config() -> RunConfig:
    return make_config()


@pytest.fixture(scope="session")
def plan(config: RunConfig, profile: Profile) -> Ledger:
    return plan_run(config, profile)
