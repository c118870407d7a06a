"""Evaluate measured runs: group them by what they share, and plan each group in one vectorised call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ironlaw.catalog.nodes import Node
from ironlaw.errors import UserError
from ironlaw.plan.cluster.candidates import Array, Candidates, TrainingJob, candidates_of_jobs, structure
from ironlaw.plan.cluster.estimate import plan_candidates
from ironlaw.plan.cluster.memory import peak_memory, reported_bytes
from ironlaw.plan.cluster.system import ClusterSystem, system_of, usable_bytes
from ironlaw.plan.engines.engine import TrainingEngine
from ironlaw.plan.measured.read import Alternative, Run


@dataclass(frozen=True)
class Prediction:
    """One entry per run."""

    step_seconds: Array
    reported_bytes: Array  # peak of the rank that the engine's log speaks of
    highest_bytes: Array  # peak of the rank that needs most
    limit_bytes: Array  # what an allocator can hand out
    peak_flops_per_second: Array  # dense, in the run's precision

    @property
    def fits(self) -> np.ndarray:
        return self.highest_bytes <= self.limit_bytes


def alike(runs: Sequence[Run]) -> list[list[int]]:
    """Indices of the runs that share accelerator, node, engine, precision and the structure of their model."""
    found: dict[tuple[str, str, Node, str, bool, tuple[bool, ...]], list[int]] = {}
    for index, run in enumerate(runs):
        several = run.cluster.count > 1  # one accelerator needs no link
        key = (
            run.engine.name, run.cluster.accelerator.name, run.cluster.node, run.precision, several,
            structure(run.job),
        )  # fmt: skip
        found.setdefault(key, []).append(index)
    return list(found.values())


def systems_of(runs: Sequence[Run]) -> list[tuple[ClusterSystem, list[int]]]:
    """The same with the system that they share."""
    first = [(runs[indices[0]], indices) for indices in alike(runs)]
    return [(system_of(run.cluster, run.engine, run.precision), indices) for run, indices in first]


def plannable(runs: Sequence[Run]) -> tuple[list[Run], list[tuple[str, str, str]]]:
    """The runs on hardware that enough is known of, and (id, group, reason) of the others."""
    good: list[int] = []
    rejected = []
    for indices in alike(runs):
        try:
            evaluate([runs[indices[0]]])
        except UserError as error:
            rejected += [(runs[i].id, runs[i].group, str(error)) for i in indices]
        else:
            good += indices
    return [runs[i] for i in sorted(good)], rejected


def settled(runs: Sequence[Run]) -> list[Run]:
    """The runs with what their rows leave open decided by what fits: sharded weights, micro-batch, recomputation."""
    attempts_at = (("open_zero", _sharding), ("open_micro_batch", _micro_batch), ("open_recompute", _recomputation))
    for flag, attempts in attempts_at:
        result = list(runs)
        for where, indices in systems_of(runs):
            unsaid = [i for i in indices if getattr(runs[i], flag)]
            for change, notes in attempts(where.engine):
                if not unsaid:
                    break
                for i in unsaid:
                    decided: dict[str, Any] = {"assumed": (*runs[i].assumed, *notes), flag: False}
                    result[i] = replace(runs[i], job=change(runs[i].job), **decided)
                peak = peak_memory(candidates_of_jobs([result[i].job for i in unsaid]), where.engine).total
                unsaid = [i for i, held in zip(unsaid, peak, strict=True) if held > usable_bytes(where)]
        runs = result
    return list(runs)


Attempt = tuple[Callable[[TrainingJob], TrainingJob], tuple[str, ...]]
"""What is changed of a job, and how it is said that it was assumed. The first that fits is taken, or else the last."""


def in_layout(every: float | None = None, **changes: Any) -> Callable[[TrainingJob], TrainingJob]:
    """A job in its own layout but for some fields."""
    return lambda job: replace(job, layout=replace(job.layout, **changes), every=every)


def _sharding(engine: TrainingEngine) -> Iterator[Attempt]:
    yield in_layout(), ()
    yield in_layout(zero=3), ("zero = 3, for with less sharding the run would not fit",)


def _micro_batch(engine: TrainingEngine) -> Iterator[Attempt]:
    """Without a pipeline few large micro-batches are never slower than many small ones; above eight little changes."""
    for most in (8, 4, 2, 1):

        def change(job: TrainingJob, most: int = most) -> TrainingJob:
            return in_layout(micro_batch=math.gcd(most, int(job.global_batch) // job.layout.dp))(job)

        why = "" if most == 8 else ", for with more the run would not fit"
        yield change, (f"micro_batch = {most} at most{why}",)


def _recomputation(engine: TrainingEngine) -> Iterator[Attempt]:
    """An engine that recomputes block by block is taken to be tuned: no more of them than needed."""
    yield in_layout(recompute="none"), ("recompute = none",)
    if engine.recomputes_by_block:
        for eighths in range(1, 8):
            least = f"recompute = full in {eighths} of 8 blocks, for with less the run would not fit"
            yield in_layout(8 / eighths, recompute="full"), (least,)
    if engine.recomputes_selectively:
        yield in_layout(recompute="selective"), ("recompute = selective, for without it the run would not fit",)
    yield in_layout(recompute="full"), ("recompute = full, for without it the run would not fit",)


def of_runs(runs: Sequence[Run], function: Callable[[Candidates], Array]) -> Array:
    """One number per run, of what is no matter of hardware."""
    found, groups = np.zeros(len(runs)), dict[tuple[bool, ...], list[int]]()
    for i, run in enumerate(runs):
        groups.setdefault(structure(run.job), []).append(i)
    for indices in groups.values():
        found[indices] = function(candidates_of_jobs([runs[i].job for i in indices]))
    return found


def with_alternative(run: Run, other: Alternative) -> Run:
    """The run as it may have been instead."""
    engine = run.engine
    if other.constants:  # named apart: runs of one engine are planned together
        values: dict[str, Any] = dict(other.constants)
        on = {g: dict(of) | values for g, of in engine.by_generation.items()}
        engine = replace(engine, name=f"{engine.name} alternatives", by_generation=on, **values)
    return replace(run, engine=engine, job=in_layout(run.job.every, **other.layout)(run.job))


def evaluate(runs: Sequence[Run]) -> Prediction:
    """Plan every run."""
    count = len(runs)
    seconds, reported, highest, limit, peak = (np.zeros(count) for _ in range(5))
    for where, indices in systems_of(runs):
        candidates = candidates_of_jobs([runs[i].job for i in indices])
        found = plan_candidates(candidates, where)
        seconds[indices], highest[indices], limit[indices] = found.step_seconds, found.peak.total, found.limit_bytes
        reported[indices] = reported_bytes(candidates, where.engine)
        peak[indices] = where.hardware.peak(where.precision)
    return Prediction(seconds, reported, highest, limit, peak)
