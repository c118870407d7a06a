"""On which accelerator generations an engine's plans have been compared with measured runs (docs/accuracy.md).

Overlap and slowdowns carry over between generations only in part, so a plan elsewhere says that nobody checked it.
"""

from __future__ import annotations

from typing import Any

from ironlaw.plan.cluster.intervals import factors
from ironlaw.plan.engines.named import engine


def checked_runs() -> dict[str, dict[str, int]]:
    """Timed runs by engine and generation, of the public runs that docs/accuracy.md reports on."""
    checked = factors()["time"]["checked"]
    return {
        name: {generation: sum(group[3] for group in groups) for generation, groups in generations.items()}
        for name, generations in checked.items()
    }


DEFAULT_ON = {"ampere": "composer-fsdp", "cdna3": "torchtitan-2025"}
"""The engine that is assumed on generations where the usual default was never checked, but this one was."""


def evidence(name: str, generation: str) -> dict[str, Any]:
    """What an answer says of its engine: where it comes from, runs checked on this generation, and by which others."""
    others = {other: runs[generation] for other, runs in checked_runs().items() if generation in runs and other != name}
    return {
        "name": name,
        "source": engine(name).source,
        "generation": generation,
        "checked_runs": checked_runs().get(name, {}).get(generation, 0),
        "checked_there": dict(sorted(others.items(), key=lambda item: -item[1])),
    }
