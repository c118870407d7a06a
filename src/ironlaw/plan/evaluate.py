"""Evaluate measured runs: group them by what they share, and plan each group in one vectorised call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ironlaw.plan.jobs import Array
from ironlaw.plan.runs import Run, jobs_of_runs
from ironlaw.plan.setting import Setting, setting
from ironlaw.plan.sharded_memory import peak_memory
from ironlaw.plan.stages import stage_layers
from ironlaw.plan.timeline import assemble, step_parts


def settings_of(runs: Sequence[Run]) -> dict[int, tuple[Setting, list[int]]]:
    """Indices of the runs that share accelerator, node, engine and precision, with that setting."""
    found: dict[tuple[str, str, str, str], list[int]] = {}
    for index, run in enumerate(runs):
        key = (run.engine.name, run.cluster.accelerator.name, run.cluster.node.name, run.precision)
        found.setdefault(key, []).append(index)
    result = {}
    for number, indices in enumerate(found.values()):
        first = runs[indices[0]]
        result[number] = (setting(first.cluster, first.engine, first.precision), indices)
    return result


def evaluate(runs: Sequence[Run]) -> tuple[Array, Array]:
    """Predicted step seconds and peak bytes of every run."""
    seconds, peaks = np.zeros(len(runs)), np.zeros(len(runs))
    for where, indices in settings_of(runs).values():
        jobs = jobs_of_runs([runs[i] for i in indices])
        layers = stage_layers(jobs, where.engine.partition)
        parts = step_parts(jobs, where, layers)
        seconds[indices] = assemble(parts, jobs, where.engine, layers).step_seconds
        peaks[indices] = peak_memory(jobs, where.engine, layers).total
    return seconds, peaks
