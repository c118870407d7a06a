"""Energy from the processor's own counters, where the system lets us read them. Otherwise there is no measurement."""

from __future__ import annotations

from pathlib import Path

_RAPL = Path("/sys/class/powercap")


class EnergyMeter:
    """Joules since the start, from RAPL (Intel and AMD package counters); None where there are none to read.

    Virtual machines usually hide them. They count whole packages, so other programs' work is included.
    """

    def __init__(self, folder: Path = _RAPL) -> None:
        self._packages = []
        for path in sorted(folder.glob("*rapl:[0-9]*")):
            if path.name.count(":") == 1:  # packages, not their parts, which would count twice
                try:
                    limit = int((path / "max_energy_range_uj").read_text())
                    self._packages.append((path / "energy_uj", limit))
                except (OSError, ValueError):
                    continue
        self._last = [self._read(path) for path, _ in self._packages]
        self._total_joules = 0.0
        if not self._packages or None in self._last:
            self._packages = []

    @staticmethod
    def _read(path: Path) -> int | None:
        try:
            return int(path.read_text())
        except (OSError, ValueError):
            return None

    def joules(self) -> float | None:
        """Call at least every few minutes: the counters wrap around."""
        if not self._packages:
            return None
        for index, (path, limit) in enumerate(self._packages):
            now, before = self._read(path), self._last[index]
            if now is None or before is None:
                return None
            self._total_joules += ((now - before) % limit) / 1e6
            self._last[index] = now
        return self._total_joules
