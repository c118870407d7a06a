"""Estimates how much the step time of a run varies by itself: a difference must exceed that.

Steps that follow each other are alike, so blocks of neighbours are compared, not single steps; and the two halves of
one run are an A/A test that every run brings along.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BLOCKS = 8
FLOOR = 0.02  # relative: two runs of the same thing on a quiet machine differ by as much
SIGMAS = 2.5


@dataclass(frozen=True)
class Sample:
    """Seconds per step of one run: its typical value, the error of that, and how far its halves lie apart."""

    seconds: float
    error: float
    drift: float  # relative


def sample(metrics: Sequence[Mapping[str, Any]], typical: float | None = None) -> Sample | None:
    """Returns the sample of the steps of `metrics.jsonl` without recorded ones and the first eighth; None below 8."""
    seconds = [m["seconds"] for m in metrics if m.get("seconds") and not m.get("recorded")]
    seconds = seconds[min(10, len(seconds) // 8) :]
    if len(seconds) < BLOCKS:
        return None
    size = len(seconds) // BLOCKS
    blocks = [statistics.median(seconds[i * size : (i + 1) * size]) for i in range(BLOCKS)]
    middle = typical if typical is not None else statistics.mean(blocks)
    error = statistics.stdev(blocks) / len(blocks) ** 0.5
    half = len(seconds) // 2
    first, second = statistics.median(seconds[:half]), statistics.median(seconds[half:])
    return Sample(middle, error, abs(second - first) / middle)


def threshold(before: Sample | None, after: Sample | None) -> float | None:
    """Returns the relative difference from which on two runs differ; None if one of them has too few steps."""
    if before is None or after is None:
        return None
    error = (before.error**2 + after.error**2) ** 0.5 / before.seconds
    return max(FLOOR, SIGMAS * error, before.drift, after.drift)
