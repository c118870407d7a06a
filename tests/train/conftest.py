from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ironlaw.config import RunConfig
from ironlaw.machine.profile import Profile
from ironlaw.train.loop import Outcome
from ironlaw.train.session import run_training


@pytest.fixture
def train(user_cache: Path, machine_profile: Profile) -> Callable[..., Outcome]:
    """Train in this process, on a machine that nobody measured."""

    def run(config: RunConfig, out: Path, **options: Any) -> Outcome:
        return run_training(config, out, machine_profile, **options)

    return run


@pytest.fixture
def losses(read_metrics: Callable[[Path], list[dict[str, Any]]]) -> Callable[[Path], dict[int, float]]:
    """Loss by step; every step exactly once, in order."""

    def read(run: Path) -> dict[int, float]:
        entries = read_metrics(run)
        steps = [entry["step"] for entry in entries]
        assert steps == list(range(1, len(steps) + 1))
        return {entry["step"]: entry["loss"] for entry in entries}

    return read
