"""Reads energy from the hardware's own counters, where the system permits it. Otherwise there is no measurement."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ironlaw.observe.gpu_monitor import GpuMonitor

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
