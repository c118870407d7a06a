"""Names the programs beside the loop that use its cores."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil

from ironlaw.cores import usable_cores

MIN_CORES = 0.05  # of a program that is named
Computed = dict[tuple[int, float], tuple[str, float]]  # process -> name and processor seconds


class OtherPrograms:
    """Counts processor time of all processes from here to `facts`, without this one and those it has started."""

    def __init__(self) -> None:
        self._began, self._before = time.perf_counter(), _computed_seconds()

    def facts(self) -> dict[str, Any] | None:
        """Returns the part of the usable cores that other programs used, with the busiest ones; None without any."""
        wall, own = time.perf_counter() - self._began, {p.pid for p in psutil.Process().children(recursive=True)}
        used = [((seconds - self._before.get(key, ("", 0.0))[1]) / wall, f"{name} (process {key[0]})")
                for key, (name, seconds) in _computed_seconds().items() if key[0] not in own]  # fmt: skip
        found = sorted((one for one in used if one[0] >= MIN_CORES), reverse=True)
        names = [f"{name}: {cores:.1f} cores" for cores, name in found]
        part = sum(cores for cores, _ in found) / usable_cores()
        return {"part": part, "place": names[0], "lines": names[1:3]} if found else None


def _computed_seconds() -> Computed:
    found: Computed = {}
    for process in psutil.process_iter(["create_time", "cpu_times", "cmdline", "name"]):
        about, times = process.info, process.info["cpu_times"]
        if times is not None and process.pid != os.getpid():
            script = next(iter((about["cmdline"] or [])[1:2]), "")  # no other arguments: they may hold secrets
            name = about["name"] if script.startswith("-") else f"{about['name']} {Path(script).name}".strip()
            found[process.pid, about["create_time"]] = name, times.user + times.system
    return found
