"""How many cores and threads this process may use, and what its control group allows: the only place that decides."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ironlaw.errors import UserError, as_given

GROUPS, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def group_limits(name: str) -> Iterator[list[str]]:
    """Words of a file of this process's control group (version 2) and of those above it; a container sees its own on
    top."""
    try:
        lines = OWN_GROUP.read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    own = GROUPS / next((line[3:] for line in lines if line.startswith("0::")), "/").strip("/")
    for folder in (own, *own.parents):
        with suppress(OSError):
            yield (folder / name).read_text(encoding="ascii").split()
        if folder == GROUPS:
            return


def usable_cores() -> int:
    """Cores this process may run on: those of its affinity mask, or as many as its control group's quota pays for (a
    container with `--cpus 2` sees all cores of its host, and is stopped when it uses more)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    paid = [math.ceil(int(quota) / int(period)) for quota, period in group_limits("cpu.max") if quota != "max"]
    return max(1, min([cores, *paid]))


def torchrun_says(name: str, otherwise: int = 1) -> int:
    """A number of this process's job from the environment, where torchrun leaves it; `otherwise` without torchrun."""
    said = os.environ.get(name) or str(otherwise)
    if not said.isdecimal() or (name.endswith("SIZE") and not int(said)):
        raise UserError(
            f"{name}={as_given(said)} in the environment is no number of a job: unset it, or start with torchrun"
        )
    return int(said)


def usable_threads() -> int:
    """Threads to compute with: one per usable core, or as many fewer as OMP_NUM_THREADS asks for.

    torchrun sets that variable to 1 where nobody has, for programs that would take all cores in every rank. Ranks
    here share them, so its 1 is no wish.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    of_torchrun = asked == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    if not asked.isdecimal() or int(asked) < 1 or of_torchrun:
        return usable_cores()
    return min(int(asked), usable_cores())
