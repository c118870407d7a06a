"""Training in this process, to its end or until something ends it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ironlaw.config import RunConfig
from ironlaw.machine.profile import Profile
from ironlaw.train.result import Outcome
from ironlaw.train.session import run_training


@pytest.fixture
def train(user_cache: Path, machine_profile: Profile) -> Callable[..., Outcome]:
    """Train in this process, on a machine that nobody measured."""

    def run(config: RunConfig, out: Path, **options: Any) -> Outcome:
        return run_training(config, out, machine_profile, **options)

    return run


@pytest.fixture
def data_cache(shared_data: Path) -> Path:
    return shared_data


class Interruption(Exception):
    """Stands for whatever ends a process."""


@pytest.fixture
def train_until(train: Callable[..., Outcome]) -> Callable[..., None]:
    """`train_until(step, config, out)`: whatever comes after that step never happened."""

    def run(step: int, config: RunConfig, out: Path, **options: Any) -> None:
        def watch(entry: dict[str, Any]) -> None:
            if entry["step"] == step:
                raise Interruption("pulled the plug")

        with pytest.raises(Interruption):
            train(config, out, watch=watch, **options)

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


@pytest.fixture(scope="session")
def _undisturbed() -> dict[str, dict[int, float]]:
    return {}


@pytest.fixture
def undisturbed(
    train: Callable[..., Outcome], losses: Callable[[Path], dict[int, float]], tmp_path: Path,
    _undisturbed: dict[str, dict[int, float]],
) -> Callable[[RunConfig], dict[int, float]]:  # fmt: skip
    """Losses of the run that nothing ends; each config is trained once, wherever its data are prepared."""

    def run(config: RunConfig) -> dict[int, float]:
        known = config.model_dump_json(exclude={"data": {"cache"}})
        if known not in _undisturbed:
            train(config, tmp_path / "undisturbed")
            _undisturbed[known] = losses(tmp_path / "undisturbed")
        return _undisturbed[known]

    return run
