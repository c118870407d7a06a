"""How many cores and threads this process may use: the only place that decides."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores this process may run on: its affinity mask's, of which a container often has fewer than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
