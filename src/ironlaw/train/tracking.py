"""Sends metrics to TensorBoard, Weights & Biases and MLflow, in addition to `metrics.jsonl`.

Trackers run in one thread with a bounded queue, so that a slow server never delays a step. A tracker that fails is
dropped with a message, and the run continues. A missing package is an error before the run starts.
"""

from __future__ import annotations

import importlib.util
import os
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ironlaw.config import RunConfig, TrackingConfig
from ironlaw.errors import UserError, first_line

WAITING = 1000  # queued steps; further ones are dropped rather than delay the run


class Tracker(NamedTuple):
    log: Callable[[int, Mapping[str, float]], object]  # step and values
    close: Callable[[], object]


def check_installed(config: TrackingConfig) -> None:
    """Raise UserError if the package of a configured tracker is missing."""
    for name in config.to:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"tracking.to has {name!r}, not installed: pip install 'ironlaw[track]' or leave it out")


def _tensorboard(config: RunConfig, folder: Path, first_step: int) -> Tracker:
    from torch.utils.tensorboard.writer import SummaryWriter

    # `purge_step` hides steps that a killed session wrote and that this session repeats.
    writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)
    writer.add_text("config", f"```\n{config.to_toml()}\n```", first_step)

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Tracker(log, writer.close)


def _weights_and_biases(config: RunConfig, folder: Path, first_step: int) -> Tracker:
    import wandb

    run: Any = wandb.init(
        project=config.tracking.project, name=config.tracking.name or folder.name, dir=str(folder),
        id=_run_id(folder / ".wandb-run", lambda: os.urandom(6).hex()), resume="allow",
        config=config.model_dump(mode="json"),
    )  # fmt: skip
    return Tracker(lambda step, values: run.log(dict(values), step=step), run.finish)


def _mlflow(config: RunConfig, folder: Path, first_step: int) -> Tracker:
    if "MLFLOW_TRACKING_URI" not in os.environ:  # store files in the run directory
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    uri = os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlruns").absolute().as_uri()
    client: Any = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(config.tracking.project)
    experiment = found.experiment_id if found else client.create_experiment(config.tracking.project)

    def create() -> str:
        created: str = client.create_run(experiment, run_name=config.tracking.name or folder.name).info.run_id
        for section, table in config.model_dump(mode="json").items():
            for key, value in table.items() if isinstance(table, dict) else ():
                client.log_param(created, f"{section}.{key}", value)
        return created

    run = _run_id(folder / ".mlflow-run", create)

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            client.log_metric(run, name, value, step=step)

    return Tracker(log, lambda: client.set_terminated(run))


def _run_id(file: Path, create: Callable[[], str]) -> str:
    """Return a tracker's id of the run, which all sessions share: the one in `file`, or a new one."""
    if not file.is_file():
        file.write_text(create(), encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()


TRACKERS = {"tensorboard": _tensorboard, "wandb": _weights_and_biases, "mlflow": _mlflow}


class Tracking:
    """All trackers of a run, behind one queue. No method raises an error of a tracker."""

    def __init__(self, config: RunConfig, folder: Path, first_step: int, say: Callable[[str], None]) -> None:
        self._config, self._folder, self._first, self._say = config, folder, first_step, say
        self._every = config.tracking.every
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(WAITING)
        self._dropped = 0
        self._thread: threading.Thread | None = None
        if config.tracking.to:
            self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)
            self._thread.start()

    def log(self, entry: Mapping[str, Any]) -> None:
        """Queue a metrics entry: always if it has a validation loss, otherwise every `tracking.every` steps."""
        if self._thread is None or (entry["step"] % self._every and "validation_loss" not in entry):
            return
        values = {name: float(value) for name, value in entry.items() if _number(value) and name != "step"}
        try:
            self._queue.put_nowait((entry["step"], values))
        except queue.Full:
            self._dropped += 1

    def close(self, seconds: float = 30.0) -> None:
        """Wait at most about `seconds` for the trackers to send queued entries."""
        if self._thread is None:
            return
        try:
            self._queue.put(None, timeout=seconds)
        except queue.Full:
            self._dropped += self._queue.qsize()
        self._thread.join(timeout=seconds)
        if self._thread.is_alive():
            self._say(f"tracking has not finished after {seconds:.0f} s and is left behind; metrics.jsonl is complete")
        elif self._dropped:
            self._say(f"tracking was too slow for {self._dropped} steps; metrics.jsonl is complete")
        self._thread = None

    def _run(self) -> None:
        trackers: dict[str, Tracker] = {}
        for kind in self._config.tracking.to:
            self._safely(kind, trackers, self._start, kind, trackers)
        while (item := self._queue.get()) is not None:
            for name, tracker in list(trackers.items()):
                self._safely(name, trackers, tracker.log, *item)
        for name, tracker in list(trackers.items()):
            self._safely(name, trackers, tracker.close)

    def _start(self, name: str, trackers: dict[str, Tracker]) -> None:
        trackers[name] = TRACKERS[name](self._config, self._folder, self._first)

    def _safely(self, name: str, trackers: dict[str, Tracker], call: Callable[..., object], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:  # no failure of a tracker may end the run
            trackers.pop(name, None)
            self._say(f"tracking to {name} stopped: {first_line(error)}; metrics.jsonl goes on")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
