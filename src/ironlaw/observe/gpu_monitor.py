"""Reads energy, clock, and reasons for a low clock of a GPU from its driver.

Uses NVML (`nvidia-ml-py`, in the extra `ironlaw[energy]`); without it none of this is measured.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from pathlib import Path
from typing import Any

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
