"""How much other programs use this process's cores: what they add to a kernel's time is no property of the machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
_SCHEDULE = Path("/proc/thread-self/schedstat")
LEAST_SECONDS = 0.5  # the system counts in hundredths of a second
_BUSY = (1, 2, 3, 6, 7)  # user, nice, system, irq, softirq; not idle, waiting for a disk, nor stolen by a neighbour


class OtherLoad:
    """`share()`: of the usable cores' time since the last call, what everything but this process computed.

    Neighbours on the same host do not show in it: the system sees their work as a slower machine, or as stolen time.
    """

    def __init__(self, stat: Path = _STAT) -> None:
        self._stat = stat
        self._last = self._now()
        self._share: float | None = None

    def share(self) -> float | None:
        """What it said before when asked again at once; None where the system does not tell."""
        now, before = self._now(), self._last
        busy, own, wall = (a - b for a, b in zip(now, before, strict=True))
        if wall < LEAST_SECONDS:
            return self._share
        known = now[0] >= 0 and before[0] >= 0
        self._last, self._share = now, max(0.0, busy - own) / (wall * len(_cores())) if known else None
        return self._share

    def _now(self) -> tuple[float, float, float]:
        return busy_seconds(self._stat), time.process_time(), time.perf_counter()


class CoreWait:
    """`seconds()`: how long the thread that made this has waited for a core; 0 off Linux."""

    def __init__(self) -> None:
        self._file = _SCHEDULE.open("rb", buffering=0) if _SCHEDULE.is_file() else None

    def seconds(self) -> float:
        if self._file is None:
            return 0.0
        return int(os.pread(self._file.fileno(), 64, 0).split()[1]) / 1e9


def busy_seconds(stat: Path = _STAT) -> float:
    """Seconds that the usable cores have computed since the system started; -1 where it does not tell."""
    wanted = {f"cpu{core}" for core in _cores()}
    try:
        rows = [line.split() for line in stat.read_text(encoding="ascii").splitlines() if line.startswith("cpu")]
        ticks = [sum(int(row[column]) for column in _BUSY) for row in rows if row[0] in wanted]
    except (OSError, ValueError, IndexError):
        return -1.0
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else -1.0


def _cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))
