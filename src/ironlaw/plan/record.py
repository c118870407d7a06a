"""The record of past predictions on this machine: what the interval of the next one is learned from."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np

from ironlaw.files import append_json_line, cache_folder, read_json_lines
from ironlaw.machine import interference
from ironlaw.machine.profile import Profile

ENOUGH_RUNS = 8
# Until there are enough runs of one's own: measured / planned over the configurations of `benchmarks/plan_error.py`
# (the table is in benchmarks/results) and over repeated demo runs, whose low end is lower.
DEFAULT_LOW, DEFAULT_HIGH = 0.90, 1.22


def record_path() -> Path:
    return cache_folder() / "machine" / "record.jsonl"


def remember(profile_created: str, planned_seconds: float, measured_seconds: float, run: str) -> None:
    """Append one finished run."""
    seconds = {"planned_step_seconds": planned_seconds, "measured_step_seconds": measured_seconds}
    append_json_line(record_path(), {"run": run, "profile": profile_created} | seconds)


def past_ratios() -> list[float]:
    """Measured / planned of the runs remembered; unreadable lines are passed over."""
    ratios = []
    for entry in read_json_lines(record_path()):
        with suppress(ValueError, KeyError, TypeError, ZeroDivisionError):
            ratios.append(float(entry["measured_step_seconds"]) / float(entry["planned_step_seconds"]))
    return ratios


def time_interval(profile: Profile) -> tuple[float, float, str]:
    """Factors on a planned time that held 80% of past runs, and in one phrase where they come from."""
    ratios = past_ratios()
    if len(ratios) >= ENOUGH_RUNS:
        # As `np.percentile`, which imports `numpy.ma`: a twentieth of the time of a plan.
        low, high = np.interp((10, 90), np.linspace(0, 100, len(ratios)), sorted(ratios)).tolist()
        low, high, basis = min(low, 1.0), max(high, 1.0), f"interval from {len(ratios)} past runs on this machine"
    else:
        low, high = DEFAULT_LOW, DEFAULT_HIGH
        basis = "interval from the planner's record, no runs of this machine yet"
    share = interference.disturbed(profile)
    if share is not None:  # assumed: what shares its cores waits for all of them, and again for the slowest
        low *= max(0.1, 1 - share) ** 2
        basis += f"; widened: other programs used {share:.0%} of the cores while this machine was measured"
    return low, high, basis
