"""What a run leaves behind while it goes: a line per step, events, sessions, and the trackers that want them too."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable
from typing import Any

from ironlaw.config import RunConfig
from ironlaw.data.batch import Batch
from ironlaw.observe.measured import Observations
from ironlaw.train.history import Sessions, now
from ironlaw.train.jsonl import JsonLines, append_line
from ironlaw.train.run_directory import RunDirectory
from ironlaw.train.tracking import Tracking


class Journal:
    """Opened at step `step`: metrics of later steps, left by a session that was killed, are dropped."""

    def __init__(
        self, config: RunConfig, run: RunDirectory, step: int, setting: dict[str, Any], say: Callable[[str], None]
    ) -> None:
        self.run, self._say = run, say
        there = list(run.metrics())
        self.sessions = Sessions(run.sessions_file, step, setting, there)
        run.forget_after(step)
        self._metrics = JsonLines(run.metrics_file, say)
        self._tracking = Tracking(config, run.path, step, say)

    def step(self, entry: dict[str, Any]) -> None:
        """One line of metrics.jsonl, in the kernel's hands when this returns."""
        self._metrics.append(entry)
        self._tracking.log(entry)

    def sync(self) -> None:
        """Every line is on the disk; OSError when it has no room."""
        self._metrics.sync()

    def event(self, event: str, **fields: Any) -> None:
        """Something that happened to the run, on the disk when this returns; OSError when it cannot be."""
        write_event(self.run, event, **fields)

    def forget_after(self, step: int, observed: Observations) -> None:
        """The steps after `step` were given up; their time stays accounted for."""
        self._metrics.close()
        self.sessions.rolled_back([entry for entry in self.run.metrics() if entry["step"] > step], observed)
        self.run.forget_after(step)
        self._metrics = JsonLines(self.run.metrics_file, self._say)

    def abandon(self, error: BaseException, step: int, observed: Observations) -> None:
        """The session ends with an error: say so where the next one looks, without standing in its way."""
        reason = (str(error).splitlines() or [""])[0]
        with contextlib.suppress(OSError):
            self.sessions.end(f"{type(error).__name__}: {reason}".removesuffix(": "), step, observed)
        with contextlib.suppress(OSError):
            self._metrics.close()
        self._tracking.close(seconds=2.0)

    def close(self) -> None:
        """The end of the steps. OSError when there are lines for which the disk has no room."""
        self._tracking.close()
        self._metrics.close()


class Silent:
    """The journal of ranks that write nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: None


def write_event(run: RunDirectory, kind: str, **fields: Any) -> None:
    """Append to events.jsonl and wait until it is on the disk."""
    append_line(run.events_file, {"event": kind, "time": now(), **fields}, sync=True)


def batch_crc32(batch: Batch[Any]) -> int:
    """A checksum of the tokens of a batch, as it is consumed."""
    return zlib.crc32(batch.targets.cpu().numpy().tobytes(), zlib.crc32(batch.inputs.cpu().numpy().tobytes()))
