"""The computer this process runs on: its processor and memory, an allocator setting for CPU training, and other load.

The load of other programs on this process's cores adds to kernel times, but is not a property of the machine.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import time
from pathlib import Path
from typing import Any

import psutil

from ironlaw.cores import group_limits

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h


def _cpu_info(key: str) -> str:
    """Return the first value of a key in /proc/cpuinfo; "" if the system has no such file or key."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def cpu_name() -> str:
    """Return the processor's marketing name if the system reports it, else its architecture."""
    return _cpu_info("model name") or platform.processor() or platform.machine()


def is_virtual() -> bool | None:
    """Whether this is a virtual machine, which cannot see its neighbours on the same host; None if unknown."""
    flags = _cpu_info("flags").split()
    return "hypervisor" in flags if flags else None


def memory_bytes() -> int:
    """Return the memory this process may use: the machine's, or its control group's limit if lower."""
    limits = [int(limit) for (limit,) in group_limits("memory.max") if limit != "max"]
    return min([int(psutil.virtual_memory().total), *limits])


def available_bytes() -> int:
    """Return the memory that can still be allocated, on the machine and within the control group."""
    limits = zip(group_limits("memory.max"), group_limits("memory.current"), strict=False)
    free = [int(limit) - int(used) for (limit,), (used,) in limits if limit != "max"]
    return max(0, min([int(psutil.virtual_memory().available), *free]))


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def keep_freed_memory() -> bool:
    """Set the C allocator to keep freed memory for reuse instead of returning it to the system.

    Every training step frees and allocates the same large tensors. By default glibc returns each to the kernel, and
    pays a page fault per 4 KiB to get it back. On two CPU cores a step of a 4 x 256 GPT became 1.15 to 1.5 times
    faster. Memory freed earlier, such as by data preparation, is returned first. Only glibc has these settings; returns
    whether they were set.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.malloc_trim(0)
        return bool(libc.mallopt(_M_MMAP_THRESHOLD, 2**30)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
    except (OSError, AttributeError):
        return False


_STAT = Path("/proc/stat")
_SCHEDULE = Path("/proc/thread-self/schedstat")
MIN_SECONDS = 0.5  # shortest interval, as the system counts hundredths of a second
_BUSY = (1, 2, 3, 6, 7)  # user, nice, system, irq, softirq; not idle, disk wait, or time stolen by a neighbour


class OtherLoad:
    """A meter of the load of other programs: the share of the usable cores' time since the last call of `share()`.

    Neighbours on the same host are not included: to the system, they appear as a slower machine or as stolen time.
    """

    def __init__(self, stat: Path = _STAT) -> None:
        self._stat = stat
        self._last = self._now()
        self._share: float | None = None

    def share(self) -> float | None:
        """Return the share, or the previous one within `MIN_SECONDS`; None if the system does not report it."""
        now, before = self._now(), self._last
        busy, own, wall = (a - b for a, b in zip(now, before, strict=True))
        if wall < MIN_SECONDS:
            return self._share
        is_known, cores = now[0] >= 0 and before[0] >= 0, len(os.sched_getaffinity(0))
        self._last, self._share = now, max(0.0, busy - own) / (wall * cores) if is_known else None
        return self._share

    def _now(self) -> tuple[float, float, float]:
        return busy_seconds(self._stat), time.process_time(), time.perf_counter()


class ThreadClock:
    """The clock, with the processor time of the thread that created it and the time that it has waited for a core (0
    outside Linux), all of one moment.

    A thread that never gave its core up has waited whenever it did not compute: the scheduler's own count misses ticks
    of other threads (Linux 6.18), and is read a system call later, behind which a busy machine takes the core away.
    """

    def __init__(self) -> None:
        self._file = _SCHEDULE.open("rb", buffering=0) if _SCHEDULE.is_file() else None
        self._last, self._waited = self._now(), 0.0

    def _now(self) -> tuple[float, float, float, int]:
        """Return the seconds of the clock, of the processor and of counted waits, and the voluntary switches."""
        seconds, computed = time.perf_counter(), time.thread_time()
        if self._file is None:
            return seconds, computed, 0.0, 0
        counted = int(os.pread(self._file.fileno(), 64, 0).split()[1]) / 1e9
        return seconds, computed, counted, resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw

    def read(self) -> tuple[float, float, float]:
        """Return the seconds of the clock, of processor time and of waits."""
        before, self._last = self._last, self._now()
        passed, computed, counted, given_up = (now - then for now, then in zip(self._last, before, strict=True))
        if self._file is not None:
            self._waited += counted if given_up else max(0.0, passed - computed)
        return self._last[0], self._last[1], self._waited


def busy_seconds(stat: Path = _STAT) -> float:
    """Return the busy seconds of the usable cores since the system started; -1 if it does not report them."""
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    try:
        rows = [line.split() for line in stat.read_text(encoding="ascii").splitlines() if line.startswith("cpu")]
        ticks = [sum(int(row[column]) for column in _BUSY) for row in rows if row[0] in cores]
    except (OSError, ValueError, IndexError):
        return -1.0
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else -1.0


def context_bytes(device: Any) -> int:
    """Return the bytes of a CUDA device that are in use beside PyTorch's allocator: the context, other processes."""
    import torch  # which the rest of this module does without

    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
