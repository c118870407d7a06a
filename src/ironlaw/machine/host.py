"""The computer this process runs on: who it is, what it has, and one setting that CPU training needs."""

from __future__ import annotations

import ctypes
import platform
import sys
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
