"""On which accelerator generations an engine's plans have been compared with measured runs (docs/accuracy.md).

Overlap and slowdowns carry over between generations only in part, so a plan elsewhere says that nobody checked it.
"""

from __future__ import annotations

from typing import Any

from ironlaw.plan.engine import engine

RUNS: dict[str, dict[str, int]] = {
    "composer-fsdp": {"ampere": 61, "hopper": 59},
    "megatron-2021": {"ampere": 18, "volta": 4},
    "megatron-core": {"blackwell": 16},
    "megatron-deepspeed": {"ampere": 761},
    "nanotron": {"hopper": 1027},
    "nemo": {"hopper": 107, "blackwell": 5},
    "paxml": {"hopper": 5},
    "torchtitan": {"hopper": 6},
    "torchtitan-2024": {"ampere": 8},
    "torchtitan-2025": {"blackwell": 5, "cdna3": 4, "hopper": 1},
}
"""Timed runs by engine and generation, of the public runs that docs/accuracy.md reports on."""


DEFAULT_ON = {"ampere": "composer-fsdp", "cdna3": "torchtitan-2025"}
"""The engine that is assumed on generations where the usual default was never checked, but this one was."""


def evidence(name: str, generation: str) -> dict[str, Any]:
    """What an answer says of its engine: where it comes from, runs checked on this generation, and by which others."""
    others = {other: runs[generation] for other, runs in RUNS.items() if generation in runs and other != name}
    return {
        "name": name,
        "source": engine(name).source,
        "generation": generation,
        "checked_runs": RUNS.get(name, {}).get(generation, 0),
        "checked_there": dict(sorted(others.items(), key=lambda item: -item[1])),
    }
