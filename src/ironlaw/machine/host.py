"""The computer this process runs on: who it is, what it has, one setting that CPU training needs, who else uses it.

How much other programs use this process's cores adds to a kernel's time: that is no property of the machine.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from pathlib import Path

import psutil

from ironlaw.cores import group_limits

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h


def cpu_name() -> str:
    """The processor's marketing name where the system tells it, else its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def is_virtual() -> bool | None:
    """Whether this is a guest of a hypervisor, whose neighbours on the same host it cannot see; None if unknown."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return None
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return "hypervisor" in flags.split() if flags else None


def memory_bytes() -> int:
    """Memory this process may use: the machine's, or its control group's limit when that is lower."""
    limits = [int(limit) for (limit,) in group_limits("memory.max") if limit != "max"]
    return min([int(psutil.virtual_memory().total), *limits])


def available_bytes() -> int:
    """Memory that is free to take, on the machine and within the control group."""
    held = zip(group_limits("memory.max"), group_limits("memory.current"), strict=False)
    free = [int(limit) - int(used) for (limit,), (used,) in held if limit != "max"]
    return max(0, min([int(psutil.virtual_memory().available), *free]))


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def keep_freed_memory() -> bool:
    """Tell the C allocator to keep freed memory for reuse instead of returning it to the system.

    A training step frees and allocates the same large tensors again and again; by default glibc gives each back
    to the kernel and pays a page fault per 4 KiB to get it again. On two CPU cores a step of a 4 x 256 GPT became
    1.15 to 1.5 times faster. What was freed before, preparing data for one, goes back first. Only glibc has the
    switches; returns whether they were set.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.malloc_trim(0)
        return bool(libc.mallopt(_M_MMAP_THRESHOLD, 2**30)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
    except (OSError, AttributeError):
        return False


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
