"""Reads energy from the hardware's own counters, and the clock of a GPU with reasons for a low one, where the system
permits it. Otherwise there is no measurement.

A GPU is read by NVML (`nvidia-ml-py`, in the extra `ironlaw[energy]`).
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from pathlib import Path
from typing import Any

_RAPL = Path("/sys/class/powercap")


class _Package:
    """Energy of a processor's package by RAPL (Intel and AMD), including other programs' work."""

    name = "RAPL counters of the whole package"

    def __init__(self, folder: Path) -> None:
        self._path = folder / "energy_uj"
        # Where the counter starts again from zero.
        self.limit = int((folder / "max_energy_range_uj").read_text()) / 1e6

    def read(self) -> float | None:
        """Returns joules since an unknown moment; None if the counter cannot be read."""
        try:
            return int(self._path.read_text()) / 1e6
        except (OSError, ValueError):
            return None


class EnergyMeter:
    """Joules since the start, of the processor and of the accelerator's board, where the training runs on one.

    `joules()` is None where nothing can be read: virtual machines usually hide RAPL, and NVML needs nvidia-ml-py
    (`pip install 'ironlaw[energy]'`). With an accelerator whose board cannot be read it is None too: the processor
    alone would pass for the whole.
    """

    def __init__(self, folder: Path = _RAPL, *, accelerated: bool = False, gpu: GpuMonitor | None = None) -> None:
        self._counters: list[_Package | GpuMonitor] = list(_packages(folder))
        if accelerated:
            self._counters = [*self._counters, gpu] if gpu is not None else []
        self._last = [counter.read() for counter in self._counters]
        self._total_joules = 0.0
        if None in self._last:
            self._counters = []

    @property
    def basis(self) -> str:
        """Where the figure comes from."""
        return " and ".join(dict.fromkeys(counter.name for counter in self._counters))

    def joules(self) -> float | None:
        """Returns joules since the start. Call it at least every few minutes: the processor's counters wrap around."""
        if not self._counters:
            return None
        for index, counter in enumerate(self._counters):
            now, before = counter.read(), self._last[index]
            if now is None or before is None:
                return None
            self._total_joules += (now - before) % counter.limit if counter.limit else now - before
            self._last[index] = now
        return self._total_joules


def _packages(folder: Path) -> list[_Package]:
    found = []
    for path in sorted(folder.glob("*rapl:[0-9]*")):
        with suppress(OSError, ValueError):
            if path.name.count(":") == 1:  # packages, not their parts, which would count twice
                found.append(_Package(path))
    return found


# Bits of NVML's clock event reasons: software power cap, hardware slowdown, software and hardware thermal, power brake.
REASONS = {"power": 0x4 | 0x80, "heat": 0x20 | 0x40, "hardware slowdown": 0x8}
_THROTTLED = "cpu[0-9]*/thermal_throttle/core_throttle_count"


class GpuMonitor:
    """Monitors one GPU: call `sample()` now and then while it works, `facts()` at the end."""

    name = "NVML counter of the board"
    limit = None  # the counter of energy does not wrap around

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml, self._handle = nvml, nvml.nvmlDeviceGetHandleByIndex(index)
        self._clocks: list[float] = []
        self._reasons: list[int] = []

    def read(self) -> float | None:
        """Returns joules since the driver was loaded."""
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3  # it counts millijoules
        except self._nvml.NVMLError:
            return None

    def sample(self) -> None:
        nvml = self._nvml
        with suppress(nvml.NVMLError):
            self._clocks.append(nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM) * 1e6)
            self._reasons.append(int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)))

    def facts(self) -> dict[str, Any]:
        """Returns mean and highest clock in hertz, and in which share of the samples each reason held it down."""
        if not self._clocks or not self._reasons:
            return {}
        try:
            highest = self._nvml.nvmlDeviceGetMaxClockInfo(self._handle, self._nvml.NVML_CLOCK_SM) * 1e6
        except self._nvml.NVMLError:
            return {}
        held = {name: sum(bool(r & bits) for r in self._reasons) / len(self._reasons) for name, bits in REASONS.items()}
        return {
            "clock_hertz": sum(self._clocks) / len(self._clocks), "clock_highest_hertz": highest,
            "clock_held_down_by": {name: share for name, share in held.items() if share},
        }  # fmt: skip


def find_gpu_monitor(index: int, nvml: Any = None) -> GpuMonitor | None:
    """Returns None without nvidia-ml-py, without a driver, or if the driver hides the GPU."""
    try:
        nvml = nvml or importlib.import_module("pynvml")
    except ImportError:
        return None
    with suppress(nvml.NVMLError):
        nvml.nvmlInit()
        return GpuMonitor(nvml, index)
    return None


def processor_throttle_count(cores: Path = Path("/sys/devices/system/cpu")) -> int | None:
    """Returns how often heat has slowed a core since the system started; None if not counted (Linux on x86 counts)."""
    counts = []
    for path in cores.glob(_THROTTLED):
        with suppress(OSError, ValueError):
            counts.append(int(path.read_text()))
    return sum(counts) if counts else None
