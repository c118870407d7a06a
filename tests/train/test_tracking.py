"""Trackers get the metrics, and can neither hold up nor end a run."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ironlaw.config import RunConfig
from ironlaw.errors import UserError
from ironlaw.train import tracking
from ironlaw.train.result import Outcome

Config = Callable[..., RunConfig]
Train = Callable[..., Outcome]
Losses = Callable[[Path], dict[int, float]]


def tracked(config: RunConfig, *to: str, every: int = 1) -> RunConfig:
    return RunConfig(**(config.model_dump() | {"tracking": {"to": to, "every": every}}))


def needs(package: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@needs("tensorboard")
def test_tensorboard_has_every_step_also_of_a_resumed_run(
    tiny_config: Config, train: Train, train_until: Any, losses: Losses, tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config, run = tracked(tiny_config(), "tensorboard"), tmp_path / "run"
    train_until(6, config, run)
    train(config, run, resume=True)
    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    scalars = {event.step: event.value for event in found.Scalars("loss")}
    assert scalars == pytest.approx(losses(run))
    assert len(found.Scalars("loss")) == 12  # steps 5 and 6 of the first session are hidden
    assert [event.step for event in found.Scalars("validation_loss")] == [6, 12]


@needs("mlflow")
def test_mlflow_in_a_folder_of_the_run(
    tiny_config: Config, train: Train, losses: Losses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    said: list[str] = []
    for steps in (6, 12):  # two sessions, one run
        config = tracked(tiny_config(train={"steps": steps}), "mlflow", every=4)
        train(config, tmp_path / "run", resume=True, say=said.append)
    assert said == ["resumed from step 6"]
    client = MlflowClient(tracking_uri=(tmp_path / "run" / "mlruns").as_uri())
    (experiment,) = [e for e in client.search_experiments() if e.name == "ironlaw"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["train.global_batch"] == "8"
    history = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "loss")}
    expected = losses(tmp_path / "run")
    assert history == pytest.approx({step: expected[step] for step in (4, 6, 8, 12)})  # every 4th, and validated ones


@needs("wandb")
@pytest.mark.slow
def test_weights_and_biases_offline(
    tiny_config: Config, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    said: list[str] = []
    train(tracked(tiny_config(), "wandb"), tmp_path / "run", say=said.append)
    assert said == []
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    (data,) = folder.glob("run-*.wandb")
    assert b"validation_loss" in data.read_bytes()


class Recorder:
    def __init__(self, config: RunConfig, folder: Path, first_step: int) -> None:
        self.seen: list[int] = []
        made.append(self)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.seen.append(step)

    def close(self) -> None:
        self.seen.append(-1)


made: list[Recorder] = []


def tracker(kind: type[Recorder]) -> Callable[..., tracking.Tracker]:
    def start(*arguments: Any) -> tracking.Tracker:
        recorder = kind(*arguments)
        return tracking.Tracker(recorder.log, recorder.close)

    return start


@pytest.fixture(autouse=True)
def _nothing_made() -> None:
    made.clear()


@pytest.mark.parametrize("moment", ["start", "log", "close"])
def test_a_tracker_that_fails_is_dropped_and_the_others_go_on(
    tiny_config: Config, train: Train, losses: Losses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    class Broken(Recorder):
        def __init__(self, *arguments: Any) -> None:
            if moment == "start":
                raise ConnectionError("no network\nand a long story")

        def log(self, step: int, values: Mapping[str, float]) -> None:
            if moment == "log" and step == 3:
                raise ConnectionError("no network\nand a long story")

        def close(self) -> None:
            if moment == "close":
                raise ConnectionError("no network\nand a long story")

    monkeypatch.setattr(tracking, "TRACKERS", {"tensorboard": tracker(Broken), "mlflow": tracker(Recorder)})
    monkeypatch.setattr(tracking, "check_installed", lambda config: None)
    monkeypatch.setattr("ironlaw.train.session.check_installed", lambda config: None)
    said: list[str] = []
    train(tracked(tiny_config(), "tensorboard", "mlflow"), tmp_path / "run", say=said.append)
    assert said == ["tracking to tensorboard stopped: no network; metrics.jsonl goes on"]
    assert made[0].seen == [*range(1, 13), -1]
    assert len(losses(tmp_path / "run")) == 12


def test_a_tracker_that_hangs_holds_up_nothing(
    tiny_config: Config, train: Train, losses: Losses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = threading.Event()

    class Stuck(Recorder):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            assert free.wait(timeout=200)

    plain = tracking.Tracking.close
    monkeypatch.setattr(tracking.Tracking, "close", lambda self, seconds=0.0: plain(self, 0.05))
    monkeypatch.setattr(tracking, "TRACKERS", {"tensorboard": tracker(Stuck)})
    monkeypatch.setattr(tracking, "WAITING", 5)
    monkeypatch.setattr("ironlaw.train.session.check_installed", lambda config: None)
    said: list[str] = []
    try:
        train(tracked(tiny_config(), "tensorboard"), tmp_path / "run", say=said.append)
    finally:
        free.set()
    assert len(losses(tmp_path / "run")) == 12
    assert len(said) == 1 and "is left behind; metrics.jsonl is complete" in said[0]


def test_a_missing_package_is_said_before_anything_is_written(
    tiny_config: Config, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"tracking\.to has 'mlflow', .*pip install 'ironlaw\[track\]'") as error:
        train(tracked(tiny_config(), "mlflow"), tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_an_unknown_tracker_is_refused(tiny_document: Callable[..., dict[str, Any]]) -> None:
    from ironlaw.config import build_config

    with pytest.raises(UserError, match=r"tracking\.to"):
        build_config(tiny_document() | {"tracking": {"to": ["comet"]}})
