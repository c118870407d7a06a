"""The number of cores and threads this process may use, by its affinity mask and its control group."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ironlaw.errors import UserError, shortened_repr

GROUPS, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def group_limits(name: str) -> Iterator[list[str]]:
    """Yield the words of the file `name` in this process's control group (version 2) and in each of its parents; in a
    container, the topmost visible one is the container's own."""
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
    """Return the number of cores this process may use: those of its affinity mask, at most its control group's quota
    (a container with `--cpus 2` sees all cores of its host, but is throttled when it uses more than two)."""
    cores = len(os.sched_getaffinity(0))
    paid = [math.ceil(int(quota) / int(period)) for quota, period in group_limits("cpu.max") if quota != "max"]
    return max(1, min([cores, *paid]))


def torchrun_integer(name: str, default: int = 1) -> int:
    """Return an integer that torchrun puts into the environment, such as RANK; `default` if it is absent."""
    given = os.environ.get(name) or str(default)
    if not given.isdecimal() or (name.endswith("SIZE") and not int(given)):
        raise UserError(
            f"{name}={shortened_repr(given)} in the environment is no number of a job: unset it, or start with torchrun"
        )
    return int(given)


def usable_threads() -> int:
    """Return the number of compute threads: one per usable core, or OMP_NUM_THREADS if that is fewer.

    torchrun sets an unset OMP_NUM_THREADS to 1, because most programs would take all cores in every rank. Here the
    ranks share the cores, so torchrun's 1 is ignored.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    of_torchrun = asked == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    if not asked.isdecimal() or int(asked) < 1 or of_torchrun:
        return usable_cores()
    return min(int(asked), usable_cores())
