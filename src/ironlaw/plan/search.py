"""All layouts of a model on a cluster, planned at once and ranked; what was ruled out, and by which wall.

    found = search(model, cluster, sequence=8192, global_batch=1024)
    found.best[0].layout, found.best[0].step_seconds
    found.ruled_out                     # {"memory": 5120, "heads not divisible by tp": 64, ...}

Nothing is pruned by a bound: every layout whose numbers divide is planned in chunks of arrays, so the first of the
ranking is the best of the space by the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from ironlaw.catalog.nodes import Cluster
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster import DEFAULT_ENGINE, Outcome, plan_jobs
from ironlaw.plan.engine import Engine
from ironlaw.plan.engine import engine as engine_named
from ironlaw.plan.jobs import RECOMPUTE, Jobs
from ironlaw.plan.layout import Layout
from ironlaw.plan.setting import setting

CHUNK = 50_000  # jobs planned at once: bounds memory at a few hundred MiB
MAX_TP = 64
MAX_CP = 64
MAX_MICRO_BATCH = 64
_COLUMNS = ("dp", "zero", "tp", "sp", "pp", "virtual", "cp", "micro_batch", "recompute")


@dataclass(frozen=True)
class Candidate:
    """One layout that fits, planned."""

    layout: Layout
    step_seconds: float
    peak_bytes: float
    why_slower: str = ""  # what it loses to the best, largest term first


@dataclass
class Found:
    """The ranking, fastest first, and the layouts that are not in it by reason."""

    best: list[Candidate]
    planned: int
    fitting: int
    ruled_out: dict[str, int] = field(default_factory=dict)
    nearest_miss_bytes: float | None = None  # least memory over the limit, when nothing fits


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def grids(
    model: ModelConfig, count: int, sequence: int, global_batch: int, ruled_out: dict[str, int]
) -> Iterator[tuple[int, ...]]:
    """Every (dp, tp, pp, cp) whose product is `count` and that can run; the others are counted by reason."""
    for tp, pp, cp in product(divisors(count), repeat=3):
        if count % (tp * pp * cp):
            continue
        dp = count // (tp * pp * cp)
        if model.heads % tp or model.ffn_size % tp or tp > MAX_TP:
            reason = "heads or feed-forward width not divisible by tp"
        elif model.key_value_heads % tp and tp % model.key_value_heads:
            reason = "key/value heads not divisible by tp"
        elif pp > model.layers or model.layers % pp:
            reason = "layers not divisible by pp"
        elif sequence % (cp * tp) or cp > MAX_CP or (sequence // cp < 1024 and cp > 1):
            reason = "sequence too short for cp"
        elif global_batch % dp:
            reason = "global batch not divisible by dp"
        else:
            yield dp, tp, pp, cp
            continue
        ruled_out[reason] = ruled_out.get(reason, 0) + 1


def layouts(
    model: ModelConfig, count: int, sequence: int, global_batch: int, ruled_out: dict[str, int]
) -> Iterator[tuple[int, ...]]:
    """Rows of `_COLUMNS`: every combination that can run."""
    for dp, tp, pp, cp in grids(model, count, sequence, global_batch, ruled_out):
        per_replica = global_batch // dp
        zeros = [z for z in (0, 1, 2, 3) if (z == 0 or dp * cp > 1) and (z < 2 or pp == 1)]
        parallel = (0, 1) if tp > 1 else (0,)
        chunks = divisors(model.layers // pp) if pp > 1 else [1]
        for micro_batch in (d for d in divisors(per_replica) if d <= MAX_MICRO_BATCH):
            accumulation = per_replica // micro_batch
            allowed = [v for v in chunks if v == 1 or accumulation % pp == 0]
            yield from (
                (dp, zero, tp, sp, pp, v, cp, micro_batch, recompute)
                for zero, sp, v, recompute in product(zeros, parallel, allowed, RECOMPUTE.values())
            )


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
) -> Found:
    """Plan every layout and keep the fastest that fit. UserError when no layout can even be formed."""
    chosen = engine_named(engine) if isinstance(engine, str) else engine
    where = setting(cluster, chosen, precision)
    found = Found([], 0, 0)
    rows = list(layouts(model, cluster.count, sequence, global_batch, found.ruled_out))
    if not rows:
        reasons = "; ".join(f"{reason}: {n}" for reason, n in found.ruled_out.items())
        raise UserError(f"no layout of {model.name} uses {cluster.count} accelerators ({reasons}): change the batch")
    table = np.array(rows, dtype=float)
    best: list[tuple[float, float, np.ndarray, dict[str, float]]] = []
    least_over = np.inf
    for start in range(0, len(table), CHUNK):
        part = table[start : start + CHUNK]
        outcome = plan_jobs(_jobs(model, part, sequence, global_batch, attention == "flash"), where)
        fits = outcome.fits
        found.planned += len(part)
        found.fitting += int(fits.sum())
        if not fits.all():
            least_over = min(least_over, float((outcome.peak.total[~fits] - outcome.limit_bytes).min()))
        order = np.flatnonzero(fits)[np.argsort(outcome.step_seconds[fits], kind="stable")][:keep]
        best += [
            (float(outcome.step_seconds[i]), float(outcome.peak.total[i]), part[i], _terms(outcome, i)) for i in order
        ]
        best = sorted(best, key=lambda entry: entry[0])[:keep]
    if found.planned > found.fitting:
        found.ruled_out["memory"] = found.planned - found.fitting
    if not best:
        found.nearest_miss_bytes = least_over
    found.best = [_candidate(entry, best[0][3]) for entry in best]
    return found


def _jobs(model: ModelConfig, table: np.ndarray, sequence: int, global_batch: int, flash: bool) -> Jobs:
    def same(value: float) -> np.ndarray:
        return np.full(len(table), float(value))

    columns = {name: table[:, i] for i, name in enumerate(_COLUMNS)}
    return Jobs(
        layers=same(model.layers), hidden=same(model.hidden), heads=same(model.heads),
        kv_heads=same(model.key_value_heads), head_size=same(model.size_of_head), ffn=same(model.ffn_size),
        gated=same(model.gated_ffn), vocab=same(model.vocab), tied=same(model.tied), biased=same(model.bias),
        sequence=same(sequence), global_batch=same(global_batch), flash=same(flash), **columns,
    )  # fmt: skip


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


def _candidate(entry: tuple[float, float, np.ndarray, dict[str, float]], winner: dict[str, float]) -> Candidate:
    seconds, peak, row, terms = entry
    values = dict(zip(_COLUMNS, (int(v) for v in row), strict=True))
    names = {number: word for word, number in RECOMPUTE.items()}
    layout = Layout(
        dp=values["dp"], zero=values["zero"], tp=values["tp"], sp=bool(values["sp"]), pp=values["pp"],
        virtual_stages=values["virtual"], cp=values["cp"], micro_batch=values["micro_batch"],
        recompute=names[values["recompute"]],
    )  # fmt: skip
    losses = sorted(((terms[word] - winner[word], word) for word in terms), reverse=True)
    worse = [f"{word} +{1e3 * loss:.1f} ms" for loss, word in losses if loss > 1e-3 * seconds][:2]
    return Candidate(layout, seconds, peak, ", ".join(worse))
