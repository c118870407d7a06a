"""All layouts of a model on a cluster, planned at once and ranked; what was ruled out, and by which wall.

    found = search(model, cluster, sequence=8192, global_batch=1024)
    found.best[0].layout, found.best[0].step_seconds
    found.ruled_out                     # {"memory": 5120, "heads not divisible by tp": 64, ...}

Nothing is pruned by a bound: every layout whose numbers divide is planned in chunks of arrays, so the first of the
ranking is the best of the space by the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from ironlaw.catalog.nodes import Cluster
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster import DEFAULT_ENGINE, Outcome, plan_jobs
from ironlaw.plan.engine import Engine
from ironlaw.plan.engine import engine as engine_named
from ironlaw.plan.intervals import interval_factors
from ironlaw.plan.jobs import RECOMPUTE, SCHEDULES, Jobs, jobs_of_table
from ironlaw.plan.layout import V_SHAPED, Layout, ends_lighter
from ironlaw.plan.setting import setting

CHUNK = 20_000  # jobs planned at once: bounds memory at a few hundred MiB
MAX_TP = 64  # and never beyond an island or a node: no measured run says how much of it would be hidden there
MAX_CP = 64
MAX_MICRO_BATCH = 64
_COLUMNS = ("dp", "zero", "shard", "tp", "sp", "pp", "virtual", "schedule", "cp", "micro_batch", "recompute")


@dataclass(frozen=True)
class Candidate:
    """One layout that fits, planned."""

    layout: Layout
    step_seconds: float
    peak_bytes: float
    why_slower: str = ""  # what it loses to the best, largest term first
    terms: dict[str, float] = field(default_factory=dict)  # seconds of the step by term


@dataclass
class Found:
    """The ranking, fastest first, and the layouts that are not in it by reason."""

    best: list[Candidate]
    planned: int
    fitting: int
    ruled_out: dict[str, int] = field(default_factory=dict)
    nearest_miss_bytes: float | None = None  # least memory over the limit, when nothing fits
    nearest_miss: Candidate | None = None  # the layout that misses by that
    safest: Candidate | None = None  # the fastest of which even the upper end of the memory interval fits


GRID_WALLS = (
    "tensor parallelism across the network",
    "heads or feed-forward width not divisible by tp",
    "key/value heads not divisible by tp",
    "more pipeline stages than layers",
    "sequence too short for cp",
    "global batch not divisible by dp",
)
"""Reasons that rule out a whole grid (dp, tp, pp, cp) before its layouts are formed."""


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def grids(
    model: ModelConfig, count: int, sequence: int, global_batch: int, ruled_out: dict[str, int], widest_tp: int
) -> Iterator[tuple[int, ...]]:
    """Every (dp, tp, pp, cp) whose product is `count` and that can run; the others are counted by reason."""
    for tp, pp, cp in product(divisors(count), repeat=3):
        if count % (tp * pp * cp):
            continue
        dp = count // (tp * pp * cp)
        if tp > widest_tp:
            reason = GRID_WALLS[0]
        elif model.heads % tp or model.ffn_size % tp:
            reason = GRID_WALLS[1]
        elif model.key_value_heads % tp and tp % model.key_value_heads:
            reason = GRID_WALLS[2]
        elif pp > model.layers:
            reason = GRID_WALLS[3]
        elif sequence % (cp * tp) or cp > MAX_CP or (sequence // cp < 1024 and cp > 1):
            reason = GRID_WALLS[4]
        elif global_batch % dp:
            reason = GRID_WALLS[5]
        else:
            yield dp, tp, pp, cp
            continue
        ruled_out[reason] = ruled_out.get(reason, 0) + 1


def layouts(
    model: ModelConfig, count: int, sequence: int, global_batch: int, ruled_out: dict[str, int], widest_tp: int = MAX_TP
) -> Iterator[tuple[int, ...]]:
    """Rows of `_COLUMNS`: every combination that can run."""
    for dp, tp, pp, cp in grids(model, count, sequence, global_batch, ruled_out, widest_tp):
        per_replica = global_batch // dp
        sharding = _shardings(dp, cp)
        parallel = (0, 1) if tp > 1 else (0,)
        chunks = _pipelines(model.layers, pp)
        for micro_batch in (d for d in divisors(per_replica) if d <= MAX_MICRO_BATCH):
            accumulation = per_replica // micro_batch
            allowed = [pair for pair in chunks if _fills(pair, accumulation, pp)]
            yield from (
                (dp, zero, shard, tp, sp, pp, v, schedule, cp, micro_batch, recompute)
                for (zero, shard), sp, (v, schedule), recompute in product(
                    sharding, parallel, allowed, RECOMPUTE.values()
                )
            )


def _shardings(dp: int, cp: int) -> list[tuple[int, int]]:
    """(zero, shard) of so many replicas: nothing, everything over all of them, or over groups of them."""
    if dp * cp == 1:
        return [(0, 0)]
    groups = [0] + [d for d in divisors(dp)[:-1] if d * cp > 1]
    return [(0, 0)] + [(zero, shard) for zero in (1, 2, 3) for shard in groups]


def _pipelines(layers: int, pp: int) -> list[tuple[int, int]]:
    """(virtual stages, schedule) of a pipeline; GPipe takes as long as 1F1B and never holds less, so it is left out."""
    if pp == 1:
        return [(1, SCHEDULES["1f1b"])]
    most = layers // pp + 1
    even = [v for v in range(1, most + 1) if v == 1 or ends_lighter(layers, pp * v) is not None]
    found = [(v, SCHEDULES[name]) for v in even for name in ("1f1b", "zb")]
    return found + [(2, SCHEDULES[name]) for name in V_SHAPED if 2 in even]


def _fills(pair: tuple[int, int], accumulation: int, pp: int) -> bool:
    """Whether there are as many micro-batches as the schedule wants."""
    virtual, schedule = pair
    if schedule in (SCHEDULES["zbv"], SCHEDULES["dualpipe"]):
        return accumulation >= 2 * pp
    return virtual == 1 or accumulation % pp == 0


def search(
    model: ModelConfig,
    cluster: Cluster,
    *,
    sequence: int,
    global_batch: int,
    precision: str = "bf16",
    engine: str | Engine = DEFAULT_ENGINE,
    attention: str = "flash",
    keep: int = 20,
    excluded: Callable[[Layout], str | None] | None = None,
) -> Found:
    """Plan every layout and keep the fastest that fit. UserError when no layout can even be formed.

    `excluded` gives the reason why a layout must not be considered; those are counted as ruled out by it.
    """
    chosen = engine_named(engine) if isinstance(engine, str) else engine
    where = setting(cluster, chosen, precision)
    found = Found([], 0, 0)
    widest_tp = min(MAX_TP, max(cluster.node.scale_up_accelerators, cluster.node.accelerators))
    rows = list(layouts(model, cluster.count, sequence, global_batch, found.ruled_out, widest_tp))
    if excluded is not None and rows:
        rows = _permitted(rows, excluded, found.ruled_out)
        if not rows:
            reasons = "; or ".join(reason for reason in found.ruled_out if reason not in GRID_WALLS)
            raise UserError(f"no layout of {model.name} on {cluster.count} accelerators can be used: {reasons}")
    if not rows:
        reasons = "; ".join(f"{reason}: {n}" for reason, n in found.ruled_out.items())
        raise UserError(f"no layout of {model.name} uses {cluster.count} accelerators ({reasons}): change the batch")
    table = np.array(rows, dtype=float)
    table = table[np.argsort(table[:, _COLUMNS.index("pp")], kind="stable")]  # alike ones share more of their shapes
    best: list[Entry] = []
    safest: Entry | None = None
    nearest: tuple[float, Entry] | None = None
    generation = cluster.accelerator.generation
    upper = np.exp(interval_factors("memory", where.engine.name, generation, cluster.count, model.parameters)[1])
    for start in range(0, len(table), CHUNK):
        part = table[start : start + CHUNK]
        outcome = plan_jobs(_jobs(model, part, sequence, global_batch, attention == "flash"), where)
        fits = outcome.fits
        found.planned += len(part)
        found.fitting += int(fits.sum())
        if not fits.any():
            least = int(outcome.peak.total.argmin())
            missed = (float(outcome.peak.total[least] - outcome.limit_bytes), _entry(outcome, part, least))
            nearest = min(nearest or missed, missed, key=lambda pair: pair[0])
        best = sorted(best + _fastest(outcome, fits, part, keep), key=lambda entry: entry[:2])[:keep]
        sure = fits & (outcome.peak.total * upper <= outcome.limit_bytes)
        safest = min(_fastest(outcome, sure, part, 1) + ([safest] if safest else []), key=lambda e: e[:2], default=None)
    if found.planned > found.fitting:
        found.ruled_out["memory"] = found.planned - found.fitting
    if not best and nearest is not None:
        found.nearest_miss_bytes = nearest[0]
        found.nearest_miss = _candidate(nearest[1], nearest[1][3])
    found.best = [_candidate(entry, best[0][3]) for entry in best]
    found.safest = _candidate(safest, best[0][3]) if safest else None
    return found


Entry = tuple[float, float, np.ndarray, dict[str, float]]
"""Step seconds, peak bytes, row of `_COLUMNS`, terms."""


def _fastest(outcome: Outcome, among: np.ndarray, part: np.ndarray, keep: int) -> list[Entry]:
    """The fastest of those marked; of equally fast ones that with the lowest peak."""
    index = np.flatnonzero(among)
    order = index[np.lexsort((outcome.peak.total[index], outcome.step_seconds[index]))][:keep]
    return [_entry(outcome, part, i) for i in order]


def _entry(outcome: Outcome, part: np.ndarray, i: int) -> Entry:
    return float(outcome.step_seconds[i]), float(outcome.peak.total[i]), part[i], _terms(outcome, i)


def _permitted(
    rows: list[tuple[int, ...]], excluded: Callable[[Layout], str | None], ruled_out: dict[str, int]
) -> list[tuple[int, ...]]:
    kept = []
    for row in rows:
        reason = excluded(_layout(row))
        if reason is None:
            kept.append(row)
        else:
            ruled_out[reason] = ruled_out.get(reason, 0) + 1
    return kept


def _jobs(model: ModelConfig, table: np.ndarray, sequence: int, global_batch: int, flash: bool) -> Jobs:
    columns = {name: table[:, i] for i, name in enumerate(_COLUMNS)}
    return jobs_of_table(model, columns, sequence=sequence, global_batch=global_batch, flash=flash)


_TERMS = {
    "compute": ("forward", "backward"),
    "pipeline bubble": ("bubble",),
    "tensor parallel communication": ("tp_exposed",),
    "context parallel communication": ("cp_exposed",),
    "pipeline messages": ("pp_exposed",),
    "gathering of sharded weights": ("fsdp_exposed",),
    "data parallel communication": ("dp_exposed",),
    "launch time": ("host_excess",),
    "optimizer": ("optimizer",),
}


def _terms(outcome: Outcome, index: int) -> dict[str, float]:
    return {word: sum(float(getattr(outcome.times, name)[index]) for name in names) for word, names in _TERMS.items()}


_RECOMPUTE_NAMES = {number: word for word, number in RECOMPUTE.items()}
_SCHEDULE_NAMES = {number: word for word, number in SCHEDULES.items()}


def _layout(row: tuple[int, ...]) -> Layout:
    dp, zero, shard, tp, sp, pp, virtual, schedule, cp, micro_batch, recompute = row
    return Layout(
        dp=dp, zero=zero, shard=shard or None, tp=tp, sp=bool(sp), pp=pp, virtual_stages=virtual,
        schedule=_SCHEDULE_NAMES[schedule], cp=cp, micro_batch=micro_batch, recompute=_RECOMPUTE_NAMES[recompute],
    )  # fmt: skip


def _candidate(entry: Entry, winner: dict[str, float]) -> Candidate:
    seconds, peak, row, terms = entry
    losses = sorted(((terms[word] - winner[word], word) for word in terms), reverse=True)
    worse = [f"{word} +{1e3 * loss:.1f} ms" for loss, word in losses if loss > 1e-3 * seconds][:2]
    return Candidate(_layout(tuple(int(v) for v in row)), seconds, peak, ", ".join(worse), terms)
