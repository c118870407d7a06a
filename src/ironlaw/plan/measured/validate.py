"""The planner's record on measured runs: errors by group beside a trivial baseline, ranking, regret, feasibility.

    record = validate(Path("runs.csv"))
    record.to_json()        # {"groups": {...}, "overall": {...}, "rows": [...], "not_planned": [...]}

Errors are relative to the measurement: (planned - measured) / measured. Bias is the median signed error. The baseline
of time is hardware FLOPs, recomputation included, at one constant fraction of the dense peak (`BASELINE_FRACTION`);
that of memory is the model's state alone, sharded by the layout. Where there is nothing to compare, n is 0 and the
figures are null.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from ironlaw.errors import UserError
from ironlaw.plan.cluster.candidates import Array, Candidates, TrainingJob, candidates_of_jobs, structure
from ironlaw.plan.cluster.estimate import plan_candidates
from ironlaw.plan.cluster.intervals import interval_factors
from ironlaw.plan.cluster.memory import peak_memory, reported_bytes
from ironlaw.plan.cluster.system import ClusterSystem, system_of, usable_bytes
from ironlaw.plan.engines.engine import TrainingEngine
from ironlaw.plan.measured.read import Alternative, Rejected, Run, read_runs, unread_columns


@dataclass(frozen=True)
class Prediction:
    """Planned times and memory, one entry per run."""

    step_seconds: Array
    reported_bytes: Array  # peak of the rank in the engine's log
    highest_bytes: Array  # peak of the fullest rank
    limit_bytes: Array  # usable by an allocator
    peak_flops_per_second: Array  # dense, in the run's precision

    @property
    def fits(self) -> np.ndarray:
        return self.highest_bytes <= self.limit_bytes


def alike(runs: Sequence[Run]) -> list[list[int]]:
    """Groups the indices of runs with the same accelerator, node, engine, precision and structure of the model."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for index, run in enumerate(runs):
        several = run.cluster.count > 1  # one accelerator needs no link
        key = (
            run.engine.name, run.engine.rows_sent, run.cluster.accelerator.name, run.cluster.node, run.precision,
            several, structure(run.job),
        )  # fmt: skip
        found.setdefault(key, []).append(index)
    return list(found.values())


def systems_of(runs: Sequence[Run]) -> list[tuple[ClusterSystem, list[int]]]:
    """Returns the groups of `alike` with the system that each shares."""
    first = [(runs[indices[0]], indices) for indices in alike(runs)]
    return [(system_of(run.cluster, run.engine, run.precision), indices) for run, indices in first]


def plannable(runs: Sequence[Run]) -> tuple[list[Run], list[Rejected]]:
    """Returns the runs on sufficiently known hardware, and (id, group, reason) of the others."""
    good: list[int] = []
    rejected = []
    for indices in alike(runs):
        try:
            evaluate([runs[indices[0]]])
        except UserError as error:
            rejected += [(runs[i].id, runs[i].group, str(error)) for i in indices]
        else:
            good += indices
    return _possible([runs[i] for i in sorted(good)]), rejected


def _possible(runs: list[Run]) -> list[Run]:
    """Returns the runs without step times that are less than their products take at the highest peak of the device."""
    flops = of_runs(runs, lambda candidates: candidates.model_flops() / candidates.accelerators)
    for i, run in enumerate(runs):
        least = flops[i] / max(peak.value for peak in run.cluster.accelerator.peak_flops_per_second.values())
        if (run.step_seconds or math.inf) < least:
            note = f"step time = not compared ({run.step_seconds:.3g} s are less than {least:.3g} s at the peak: "
            note += "tokens_per_second_per_accelerator is of one accelerator, global_batch of all)"
            runs[i] = replace(run, step_seconds=None, assumed=(*run.assumed, note))
    return runs


def settled(runs: Sequence[Run]) -> list[Run]:
    """Returns the runs with open settings chosen by what fits: sharded weights, micro-batch, recomputation."""
    for name in ("zero", "micro_batch", "recompute"):
        result = list(runs)
        for where, indices in systems_of(runs):
            open_runs = [i for i in indices if name in runs[i].open]
            choices = {i: _choices_of(name, runs[i].job, where.engine) for i in open_runs}
            while open_runs and choices[open_runs[0]]:  # the first choice that fits is taken, else the last
                for i in open_runs:
                    job, notes = choices[i].pop(0)
                    assumed = (*runs[i].assumed, *notes)
                    result[i] = replace(runs[i], job=job, assumed=assumed, open=runs[i].open - {name})
                peak = peak_memory(candidates_of_jobs([result[i].job for i in open_runs]), where.engine).total
                open_runs = [i for i, held in zip(open_runs, peak, strict=True) if held > usable_bytes(where)]
        runs = result
    return list(runs)


def _choices_of(name: str, job: TrainingJob, engine: TrainingEngine) -> list[tuple[TrainingJob, tuple[str, ...]]]:
    """Returns the job with each choice of an open setting, from the fastest to that of the least memory, with notes."""
    choices: dict[str, dict[str, Any]]
    if name == "zero":  # pipelines keep their weights whole, which all micro-batches of a step use in turn
        more = {"zero": 3 if job.layout.pp == 1 else 2}
        choices = {"": {}, "zero = 3, in pipelines 2, for with less sharding the run would not fit": more}
    elif name == "micro_batch":  # without a pipeline, fewer and larger ones are never slower; above 8 little changes
        choices = {
            f"micro_batch = {most} at most" + ", for with more the run would not fit" * (most < 8): {
                "micro_batch": math.gcd(most, int(job.global_batch) // job.layout.dp)
            }
            for most in (8, 4, 2, 1)
        }
    else:
        choices = {"recompute = none": {"recompute": "none"}}
        if engine.recomputes_by_block:  # assumed tuned: no more blocks than necessary
            choices |= {
                f"recompute = full in {eighths} of 8 blocks, for with less the run would not fit": {
                    "recompute": "full", "every": 8 / eighths,
                }
                for eighths in range(1, 8)
            }  # fmt: skip
        for word in ("selective", "full") if engine.recomputes_selectively else ("full",):
            choices[f"recompute = {word}, for without it the run would not fit"] = {"recompute": word}
    return [(_in_layout(job, **changes), (note,) if note else ()) for note, changes in choices.items()]


def _in_layout(job: TrainingJob, every: float | None = None, **changes: Any) -> TrainingJob:
    """Returns the job with some fields of its layout changed."""
    return replace(job, layout=replace(job.layout, **changes), every=every)


def of_runs(runs: Sequence[Run], function: Callable[[Candidates], Array]) -> Array:
    """Evaluates a function that does not depend on hardware, and returns one number per run."""
    found = np.zeros(len(runs))
    for indices in alike(runs):
        found[indices] = function(candidates_of_jobs([runs[i].job for i in indices]))
    return found


def with_alternative(run: Run, other: Alternative) -> Run:
    """Returns the run with alternative settings."""
    engine = run.engine
    if other.constants:  # another name, as runs of one engine are planned together
        values: dict[str, Any] = dict(other.constants)
        on = {g: dict(of) | values for g, of in engine.by_generation.items()}
        engine = replace(engine, name=f"{engine.name} alternatives", by_generation=on, **values)
    return replace(run, engine=engine, job=replace(_in_layout(run.job, run.job.every, **other.layout), **other.job))


def evaluate(runs: Sequence[Run]) -> Prediction:
    """Plans every run."""
    count = len(runs)
    seconds, reported, highest, limit, peak = (np.zeros(count) for _ in range(5))
    for where, indices in systems_of(runs):
        candidates = candidates_of_jobs([runs[i].job for i in indices])
        found = plan_candidates(candidates, where)
        seconds[indices], highest[indices], limit[indices] = found.step_seconds, found.peak.total, found.limit_bytes
        reported[indices] = reported_bytes(candidates, where.engine)
        peak[indices] = where.hardware.peak(where.precision)
    return Prediction(seconds, reported, highest, limit, peak)


# -- the record -----------------------------------------------------------------------------------------------------


BASELINE_FRACTION = 0.45
"""Fraction of the dense peak: the best constant on table 1 of arXiv 2104.04473."""

SAME_MODEL = ("layers", "hidden", "heads", "key_value_heads", "ffn_size", "vocab")
SAME_LAYOUT = ("dp", "tp", "pp", "virtual_stages", "cp", "zero", "micro_batch", "recompute")
MIN_LAYOUTS = 3


def not_planned(rejected: Sequence[Rejected]) -> list[dict[str, str]]:
    return [{"id": identity, "group": group, "reason": reason} for identity, group, reason in rejected]


@dataclass
class ValidationRecord:
    """The results of `validate`: a row per run, and errors by group."""

    runs: list[Run]
    prediction: Prediction
    rows: list[dict[str, Any]]
    rejected: list[Rejected]
    unread: list[str] = field(default_factory=list)  # columns of the file that have no meaning here
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    overall: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        missing = not_planned(self.rejected)
        return {
            "groups": self.groups, "overall": self.overall, "rows": self.rows, "not_planned": missing,
            "unread_columns": self.unread,
        }  # fmt: skip


def validate(path: Path, engine: TrainingEngine | None = None) -> ValidationRecord:
    """Plans every run of a CSV file and compares it with its measurements. `engine` replaces that of every row."""
    read, unread = read_runs(path, engine)
    known, unknown = plannable(read)
    runs = settled(known)
    p = evaluate(runs)
    stated = widened(runs, p.step_seconds, interval("time", runs, p.step_seconds))
    seconds, *bounds = mixed(runs, p.step_seconds, stated)
    p = replace(p, step_seconds=seconds)
    # FLOPs per accelerator; the baseline runs them at one constant fraction of its dense peak.
    flops = of_runs(runs, lambda candidates: candidates.hardware_flops() / candidates.accelerators)
    planned = {
        "predicted_step_seconds": p.step_seconds, "predicted_peak_bytes": p.reported_bytes,
        "step_interval": np.stack(bounds, axis=1),
        "peak_interval": np.stack(interval("memory", runs, p.reported_bytes), axis=1),
        "baseline_step_seconds": flops / (p.peak_flops_per_second * BASELINE_FRACTION),
        "baseline_peak_bytes": of_runs(runs, baseline_bytes),
    }  # fmt: skip
    rows = [
        {
            "id": run.id, "group": run.group, "engine": run.engine.name,
            "accelerator": run.cluster.accelerator.name, "accelerators": run.cluster.count, "ran": run.ran,
            "checks": run.checks, **{name: column[i].tolist() for name, column in planned.items()},
            "step_seconds": run.step_seconds, "peak_bytes": run.peak_bytes, "fits": bool(p.fits[i]),
            "over_limit": float(p.highest_bytes[i] / p.limit_bytes[i]), "assumed": list(run.assumed),
        }
        for i, run in enumerate(runs)
    ]  # fmt: skip
    record = ValidationRecord(runs, p, rows, [*unread, *unknown], unread_columns(path))
    for name in dict.fromkeys([run.group for run in runs] + [group for _, group, _ in record.rejected]):
        record.groups[name] = _summary(record, [i for i, run in enumerate(runs) if run.group == name], name)
    record.overall = _summary(record, list(range(len(runs))), None)
    return record


def baseline_bytes(candidates: Candidates) -> Array:
    """Returns the bytes that most memory estimators count: weights, gradients and Adam's state, 16 per parameter.

    Of the 16, ZeRO 1 shards 12 over the data parallel ranks, ZeRO 2 14 and ZeRO 3 all (arXiv 1910.02054).
    """
    shards = candidates.dp * candidates.cp
    sharded = np.select([candidates.zero >= 3, candidates.zero >= 2, candidates.zero >= 1], [16.0, 14.0, 12.0], 0.0)
    return candidates.parameters / (candidates.tp * candidates.pp) * (16 - sharded + sharded / shards)


def errors(predicted: Array, measured: Array) -> dict[str, Any]:
    """Returns median, mean and 90th percentile of the absolute relative error, and the median signed error."""
    if not len(measured):
        return {"n": 0, "median": None, "mean": None, "p90": None, "bias": None}
    signed = predicted / measured - 1
    size = np.abs(signed)
    return {
        "n": len(signed),
        "median": float(np.median(size)),
        "mean": float(size.mean()),
        "p90": float(np.quantile(size, 0.9)),
        "bias": float(np.median(signed)),
    }


def _summary(record: ValidationRecord, index: list[int], group: str | None) -> dict[str, Any]:
    missing = sum(group in (None, of) for _, of, _ in record.rejected)
    summary: dict[str, Any] = {"n": len(index) + missing}
    known = {}
    for key, name, interval in (("time", "step_seconds", "step_interval"), ("memory", "peak_bytes", "peak_interval")):
        rows = {i: row for i in index if (row := record.rows[i])["ran"] and row[name] and key in row["checks"]}
        planned, measured, baseline = (
            np.array([row[column] for row in rows.values()], dtype=float)
            for column in (f"predicted_{name}", name, f"baseline_{name}")
        )
        inside = [row[interval][0] <= row[name] <= row[interval][1] for row in rows.values()]
        known[key] = list(rows)
        summary[key] = errors(planned, measured) | {
            "coverage": float(np.mean(inside)) if inside else None, "baseline": errors(baseline, measured),
        }  # fmt: skip
    summary["regret"] = _ranking_of_groups(record) if group is None else ranking(record, known["time"])
    summary["fits"] = _feasibility(record, index)
    summary["not_planned"] = missing
    return summary


def _ranking_of_groups(record: ValidationRecord) -> dict[str, Any]:
    """Returns means over the groups that vary the layout on the same work."""
    known = [g["regret"] for g in record.groups.values() if g["regret"]["n"]]
    means, correlations = ([g[name] for g in known] for name in ("mean", "rank_correlation"))
    return _choices(sum(g["n"] for g in known), means, min((g["worst"] for g in known), default=0.0), correlations)


def _choices(n: int, regrets: list[float], worst: float, correlations: list[float]) -> dict[str, Any]:
    mean, correlation = (float(np.mean(values)) if n else None for values in (regrets, correlations))
    return {"n": n, "mean": mean, "worst": worst if n else None, "rank_correlation": correlation}


def same_work(runs: Sequence[Run], index: Iterable[int]) -> dict[tuple[Any, ...], list[int]]:
    """Groups runs that did the same work on the same accelerators in different layouts."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for i in index:
        run = runs[i]
        key: tuple[Any, ...] = tuple(getattr(run.job.model, name) for name in SAME_MODEL)
        key += (run.job.sequence, run.job.global_batch)
        key += (run.cluster.accelerator.name, run.cluster.count, run.precision, run.engine.name)
        found.setdefault(key, []).append(i)
    return {k: v for k, v in found.items() if len(v) >= MIN_LAYOUTS and len({_layout(runs[i]) for i in v}) > 1}


def _layout(run: Run) -> tuple[Any, ...]:
    return tuple(getattr(run.job.layout, name) for name in SAME_LAYOUT)


def ranking(record: ValidationRecord, timed: list[int]) -> dict[str, Any]:
    """Returns the regret of `n` choices: throughput of the layout the plan picks over that of the best measured one.

    1: the best layout every time. Also Spearman's rank correlation of planned and measured step times.
    """
    regrets, correlations = [], []
    for index in same_work(record.runs, timed).values():
        measured = np.array([record.runs[i].step_seconds for i in index], dtype=float)
        planned = record.prediction.step_seconds[index]
        regrets.append(float(measured.min() / measured[planned.argmin()]))
        correlations.append(_spearman(planned, measured))
    return _choices(len(regrets), regrets, min(regrets, default=0.0), correlations)


def _spearman(a: Array, b: Array) -> float:
    # Equal values share the mean of their ranks.
    x, y = (((v[:, None] > v).sum(axis=1) + (v[:, None] >= v).sum(axis=1)).astype(float) for v in (a, b))
    if x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def _feasibility(record: ValidationRecord, index: list[int]) -> dict[str, int]:
    fits = record.prediction.fits
    counts = Counter((record.runs[i].ran, bool(fits[i])) for i in index)
    return {
        "ran_said_to_fit": counts[True, True],
        "ran_denied": counts[True, False],
        "failed_said_to_fit": counts[False, True],
        "failed_denied": counts[False, False],
    }


def interval(quantity: str, runs: Sequence[Run], planned: Array) -> tuple[Array, Array]:
    """Returns the lower and upper bounds of the step seconds or of the reported peak bytes of each run."""
    parameters = of_runs(runs, lambda candidates: candidates.parameters)
    pairs = [
        interval_factors(
            quantity, run.engine.name, run.cluster.accelerator.generation, run.cluster.count, float(size),
            run.job.model.moe is not None, run.precision,
        )
        for run, size in zip(runs, parameters, strict=True)
    ]  # fmt: skip
    bounds = np.exp(np.array(pairs, dtype=float).reshape(-1, 2))
    return planned * bounds[:, 0], planned * bounds[:, 1]


def widened(runs: Sequence[Run], planned: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
    """Returns the interval widened by the rows' open settings: each alternative adds a one-sided error of its own."""
    low, high = np.log(bounds[0] / planned) ** 2, np.log(bounds[1] / planned) ** 2
    for number in range(max((len(run.alternatives) for run in runs), default=0)):
        index = [i for i, run in enumerate(runs) if len(run.alternatives) > number]
        seconds = evaluate([with_alternative(runs[i], runs[i].alternatives[number]) for i in index]).step_seconds
        swing = np.log(seconds / planned[index]) * [runs[i].alternatives[number].weight for i in index]
        low[index] += np.minimum(swing, 0.0) ** 2
        high[index] += np.maximum(swing, 0.0) ** 2
    return planned * np.exp(-np.sqrt(low)), planned * np.exp(np.sqrt(high))


def mixed(runs: Sequence[Run], planned: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    """Returns step time and interval; runs with several possible number formats get those of the mixture.

    Each format has its own step time, with the same spread around it. The plan is their weighted mean of logarithms,
    and the interval is from the 10th to the 90th percentile of the mixture.
    """
    index = [i for i, run in enumerate(runs) if len(run.precisions) > 1]
    centre, low, high = planned.copy(), *(bound.copy() for bound in bounds)
    if not index:
        return centre, low, high
    formats = sorted({name for i in index for name in runs[i].precisions})
    logs = [np.log(evaluate([replace(runs[i], precision=name) for i in index]).step_seconds) for name in formats]
    share = np.array([[runs[i].precisions.get(name, 0.0) for name in formats] for i in index])
    spreads = np.log(planned[index] / low[index]), np.log(high[index] / planned[index])
    for row, i in enumerate(index):
        at = np.array([log[row] for log in logs])
        below, above = spreads[0][row], spreads[1][row]
        grid = np.linspace(at.min() - 3 * below, at.max() + 3 * above, 2001)
        off = grid[:, None] - at
        normal = NormalDist()
        reach = np.where(off < 0, off / below, off / above) * normal.inv_cdf(0.9)
        under = np.vectorize(normal.cdf)(reach) @ share[row]
        centre[i] = np.exp(share[row] @ at)
        low[i], high[i] = np.exp(np.interp([0.1, 0.9], under, grid))
    return centre, low, high
