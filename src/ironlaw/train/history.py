"""The log of a run: one line of metrics per step, events, sessions, and output to trackers.

A run may consist of several sessions if it is interrupted, killed, resumed or rolled back; its ledger covers all of
them. `sessions.jsonl` has one line for the start of a session and one for its end. A killed session writes no end line:
the next session reads from the metrics how far it got and which of its steps must be repeated.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from ironlaw.config import RunConfig
from ironlaw.data.batch import Batch
from ironlaw.errors import reported
from ironlaw.ledger import Ledger, Phase
from ironlaw.observe.clock import StepTimes
from ironlaw.observe.measured import Observations
from ironlaw.observe.profile import StepProfile
from ironlaw.train.jsonl import JsonLines, append_line, read_lines
from ironlaw.train.run_directory import RunDirectory, now
from ironlaw.train.tracking import Tracking


def wall_seconds_of(entries: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the wall-clock seconds per activity that these metrics entries account for."""
    wall = dict.fromkeys(("training", "evaluation", "checkpoint", "profiling"), 0.0)
    for entry in entries:
        wall["profiling" if entry.get("recorded") else "training"] += entry["seconds"]
        wall["evaluation"] += entry.get("evaluation_seconds", 0.0)
        wall["checkpoint"] += entry.get("checkpoint_seconds", 0.0)
    return wall


def _count_as_repeated(wall: dict[str, float], lost: Sequence[dict[str, Any]]) -> None:
    """Move the time of `lost` steps to "repeated": it was spent all the same."""
    for name, seconds in wall_seconds_of(lost).items():
        if seconds:
            wall[name] = max(0.0, wall.get(name, 0.0) - seconds)
            wall["repeated"] = wall.get("repeated", 0.0) + seconds


ENDING = ("ended", "how", "to_step", "wall_seconds", "joules", "repeated_steps")  # fields set when a session ends


@dataclass(config=ConfigDict(strict=True, validate_assignment=True))
class Session:
    """One invocation of the command, from start to end. `wall_seconds["repeated"]` is time of steps taken again."""

    session: int  # its number
    started: str
    from_step: int
    setting: dict[str, Any]  # step times are comparable only between sessions with equal settings
    wall_seconds: dict[str, float] = field(default_factory=dict)
    to_step: int | None = None
    ended: str | None = None
    how: str | None = None
    joules: float | None = None
    repeated_steps: int = 0


class Sessions:
    """The earlier sessions of a run and the current one. `metrics`: the entries found on disk at the start."""

    def __init__(self, path: Path, from_step: int, setting: dict[str, Any], metrics: Sequence[dict[str, Any]]) -> None:
        self._path = path
        self.earlier = read_sessions(path)
        last = self.earlier[-1] if self.earlier else None
        if last is not None and last.how is None:
            done = [entry for entry in metrics if entry["step"] > last.from_step]
            last.how, last.wall_seconds = "killed", wall_seconds_of(done)
            last.to_step = done[-1]["step"] if done else last.from_step
            self._end(last)
        lost = [entry for entry in metrics if entry["step"] > from_step]
        if last is not None and lost:  # steps that will be taken again
            _count_as_repeated(last.wall_seconds, lost)
            last.repeated_steps += len(lost)
            self._end(last)
        self.current = Session(len(self.earlier) + 1, now(), from_step, setting)
        beginning = {"started": self.current.started, "from_step": from_step, "setting": setting}
        append_line(path, {"session": self.current.session} | beginning)

    def end(self, how: str, to_step: int, observed: Observations) -> None:
        session = self.current
        session.how, session.to_step, session.ended = how, to_step, now()
        session.wall_seconds, session.joules = dict(observed.wall_seconds), observed.joules
        self._end(session)

    def _end(self, session: Session) -> None:
        append_line(self._path, {"session": session.session} | {name: getattr(session, name) for name in ENDING})

    # -- the whole run ---------------------------------------------------------------------------------------

    def merge(self, observed: Observations, metrics: Sequence[dict[str, Any]]) -> None:
        """Extend `observed` from this session to the run: all comparable steps, and the seconds of all sessions."""
        if not self.earlier:
            return
        alike = [s for s in self.earlier if s.setting == self.current.setting and s.to_step is not None]
        earlier = [
            entry for entry in metrics
            if entry["step"] <= self.current.from_step and not entry.get("recorded") and not entry.get("warmup")
            and any(s.from_step < entry["step"] <= (s.to_step or 0) for s in alike)
        ]  # fmt: skip
        observed.steps[:0] = [step_times(entry) for entry in earlier]
        residents = [entry["resident_bytes"] for entry in metrics if "resident_bytes" in entry]
        observed.resident_peak_bytes = max([*residents, observed.resident_peak_bytes or 0]) or None
        for session in self.earlier:
            for name, seconds in session.wall_seconds.items():
                observed.wall_seconds[name] = observed.wall_seconds.get(name, 0.0) + seconds
        joules = [session.joules for session in self.earlier]
        if observed.joules is not None:  # a killed session has no figure, so the sum is unknown
            known = all(value is not None for value in joules)
            observed.joules = observed.joules + sum(value or 0.0 for value in joules) if known else None

    def facts(self) -> list[dict[str, Any]]:
        return [
            {
                "session": s.session, "started": s.started, "ended": s.ended, "how": s.how, "from_step": s.from_step,
                "to_step": s.to_step, "repeated_steps": s.repeated_steps, "seconds": sum(s.wall_seconds.values()),
            }
            for s in (*self.earlier, self.current)
        ]  # fmt: skip


def read_sessions(path: Path) -> list[Session]:
    """Return the sessions in order of number. If a session has several end lines, the last one counts."""
    found: dict[int, dict[str, Any]] = {}
    told = f"{path} has a line of no session: remove it, or give a new --out"
    with reported(told, KeyError, TypeError, ValueError):
        for line in read_lines(path):
            if "started" in line or line["session"] in found:
                found[line["session"]] = found.get(line["session"], {}) | line
        return [Session(**fields) for _, fields in sorted(found.items())]


def step_times(entry: dict[str, Any]) -> StepTimes:
    """Convert a metrics entry to the step times that the clock measured."""
    between = (Phase.EVALUATION, Phase.CHECKPOINT)
    names = {phase: f"{phase}_seconds" for phase in Phase if phase not in between}
    return StepTimes(entry["seconds"], {phase: entry[name] for phase, name in names.items() if name in entry})


def save_step_profile(path: Path, observed: Observations) -> None:
    """Save the profiled steps for the ledger of a later session that profiles none."""
    assert observed.profile is not None
    ledger = Ledger("run", lines=observed.profile.lines)
    ledger.facts = {
        "peak_bytes": observed.profile.peak_bytes, "peak_parts": observed.profile.peak_parts,
        "profiled_seconds": observed.profiled_seconds,
    }  # fmt: skip
    ledger.save(path)


def load_step_profile(path: Path, observed: Observations) -> None:
    """Load the profile of an earlier session, which counts unless this one makes its own."""
    if path.is_file():
        ledger = Ledger.load(path)
        with reported(f"{path} is damaged: it lacks {{reason}}; remove it, or take it from a copy", KeyError):
            observed.profiled_seconds = ledger.facts["profiled_seconds"]
            observed.profile = StepProfile(ledger.lines, ledger.facts["peak_bytes"], ledger.facts["peak_parts"])


class Journal:
    """Writes the log of a run, starting at `step`. Metrics of later steps, left by a killed session, are dropped."""

    def __init__(
        self, config: RunConfig, run: RunDirectory, step: int, setting: dict[str, Any], say: Callable[[str], None]
    ) -> None:
        self.run, self._say = run, say
        there = list(run.metrics())
        self.sessions = Sessions(run.sessions_file, step, setting, there)
        run.drop_after(step)
        self._metrics = JsonLines(run.metrics_file, say)
        self._tracking = Tracking(config, run.path, step, say)
        self.event = run.write_event

    def step(self, entry: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl. On return it is in the kernel's page cache and survives a kill."""
        self._metrics.append(entry)
        self._tracking.log(entry)

    def sync(self) -> None:
        """Flush all lines to disk. Raises OSError if the disk is full."""
        self._metrics.sync()

    def drop_after(self, step: int, observed: Observations) -> None:
        """Drop the metrics of the discarded steps after `step`; their time is still accounted for."""
        self._metrics.close()
        lost = [entry for entry in self.run.metrics() if entry["step"] > step]
        _count_as_repeated(observed.wall_seconds, lost)
        self.sessions.current.repeated_steps += len(lost)
        self.run.drop_after(step)
        self._metrics = JsonLines(self.run.metrics_file, self._say)

    def abandon(self, error: BaseException, step: int, observed: Observations) -> None:
        """End the session with an error and record it for the next session. Write failures are ignored."""
        reason = (str(error).splitlines() or [""])[0]
        with contextlib.suppress(OSError):
            self.sessions.end(f"{type(error).__name__}: {reason}".removesuffix(": "), step, observed)
        with contextlib.suppress(OSError):
            self._metrics.close()
        self._tracking.close(seconds=2.0)

    def close(self) -> None:
        """Close the log after the last step. Raises OSError if the disk has no room for pending lines."""
        self._tracking.close()
        self._metrics.close()


class NoJournal:
    """A no-op journal for ranks that write nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: None


def batch_crc32(batch: Batch[Any]) -> int:
    """Return the CRC-32 of a batch's input and target tokens."""
    return zlib.crc32(batch.targets.cpu().numpy().tobytes(), zlib.crc32(batch.inputs.cpu().numpy().tobytes()))
