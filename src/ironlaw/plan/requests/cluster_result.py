"""The answer to `ironlaw plan WHAT --on CLUSTER`: the chosen layout's ledger and everything that goes with it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from ironlaw.ledger import Estimate, Ledger
from ironlaw.model.config import ModelConfig
from ironlaw.plan.budget import budget
from ironlaw.plan.cluster.candidates import Candidates
from ironlaw.plan.cluster.estimate import ClusterPlan, bounded, plan_cluster
from ironlaw.plan.cluster.intervals import evidence
from ironlaw.plan.cluster.layout_space import counted_in
from ironlaw.plan.cluster.request import ClusterRequest
from ironlaw.plan.cluster.search import RankedLayout, SearchResult, search
from ironlaw.plan.cluster.system import ClusterSystem, usable_bytes
from ironlaw.plan.request_types import PlanOutcome
from ironlaw.plan.requests.advice import first_change, scaling, terms, would_fit
from ironlaw.plan.requests.communication_savings import cluster_savings
from ironlaw.workload.layout import Layout

SHOWN = 5

KEPT, WALKED = 200, 20
"""Of a ranking; and of one of our own trainer's layouts, each of which is walked."""

SURE_AT_MOST = 1.03
"""A layout that fits for sure is chosen over the fastest, which may not, if it is at most this many times slower."""

SIMPLE_AT_MOST = 1.01
"""And one with fewer kinds of parallelism over one at most this many times faster: far inside the plan's own error."""


def result_on_cluster(request: ClusterRequest) -> PlanOutcome:
    """Plan the given layout, or search for the best one. UserError when nothing can even be formed."""
    found = _ranking(request) if request.layout is None else None
    where = request.system
    if found is not None:
        layout, plan, choice = _best_layout(request, found, usable_bytes(where))
    else:
        assert request.layout is not None
        layout, plan, choice = request.layout, plan_cluster(request, request.layout), "given"
    if plan.recompute_choice:
        layout, choice = plan.layout, plan.recompute_choice
    ledger = plan.ledger
    more: dict[str, Any] = {
        "layout": _layout(layout, request),
        "cluster": _cluster(request),
        "work": _work(request),
        "precision": request.precision,
        "engine": evidence(request.engine, request.cluster.accelerator.generation),
        "assumed": [assumption.to_json() for assumption in request.assumed],
        "candidates": [_candidate(request, candidate) for candidate in _different(found.best, layout)] if found else [],
        "ruled_out": {
            constraint: {"count": count, "unit": counted_in(constraint)}
            for constraint, count in (Counter(found.ruled_out).most_common() if found else ())
        },
        "searched": {"planned": found.planned, "fitting": found.fitting} if found else None,
        "terms": terms(ledger),
    }
    _add_totals(request, layout, ledger, where)
    if plan.fits:
        more |= _when_it_fits(request, layout, ledger, found, plan.outcome.limit_bytes)
        more["margin"]["choice"] = choice
    else:
        more |= _when_it_does_not(request, plan)
    return PlanOutcome(ledger, plan.fits, more, layout.filled(request.global_batch))


def _ranking(request: ClusterRequest) -> SearchResult:
    return search(request, keep=KEPT if request.system.engine.fused else WALKED)


def _best_layout(request: ClusterRequest, found: SearchResult, limit: float) -> tuple[Layout, ClusterPlan, str]:
    """The chosen layout and its plan."""
    candidate, choice = chosen(request, found, limit)
    plan = plan_cluster(request, candidate.layout)
    if candidate.layout.offload != "none" and found.best:
        choice = "nothing fits without offloading to the host, whose time no measured run backs"
    return candidate.layout, plan, choice


def chosen(request: ClusterRequest, found: SearchResult, limit_bytes: float) -> tuple[RankedLayout, str]:
    """The layout to recommend and why; the fastest, unless another is hardly slower and safer or simpler.

    Out of memory after a day in the queue costs more than a percent of speed. Where nothing fits: the nearest miss.
    """
    if not found.best:
        assert found.nearest_miss is not None
        return found.nearest_miss, "misses by least"
    fastest = found.best[0]
    sure = found.safest
    if sure is None or sure.step_seconds > SURE_AT_MOST * fastest.step_seconds:
        return fastest, "fastest"
    near = [c for c in found.best if c.step_seconds <= SIMPLE_AT_MOST * sure.step_seconds]
    upper = bounded(1.0, "memory", request, "").high or 1.0
    safe = [c for c in near if c.peak_bytes * upper <= limit_bytes]
    best = min([sure, *safe], key=lambda c: (_kinds(c.layout), c.step_seconds))
    if fastest.layout == best.layout:
        return fastest, "fastest"
    return best, "simpler" if best is not sure else "its memory fits with the interval's upper end too"


def _kinds(layout: Layout) -> int:
    """How many kinds of parallelism beside data parallelism, and what else must be set up for them."""
    degrees = sum(degree > 1 for degree in (layout.tp, layout.pp, layout.cp, layout.virtual_stages))
    return degrees + (layout.shard is not None) + (layout.schedule != "1f1b")


def _add_totals(request: ClusterRequest, layout: Layout, ledger: Ledger, where: ClusterSystem) -> None:
    """Total time and the other conventions of MFU."""
    step = ledger.totals["step_seconds"]
    candidates = request.candidates([layout])
    peak = where.hardware.peak(request.precision) * request.cluster.count
    ledger.totals |= other_conventions(request.model, candidates, step, peak)
    words = f"{request.steps:,} steps x step time; no data loading, checkpoints, failures or restarts"
    ledger.totals["total_seconds"] = step.scaled(request.steps, words)


def _when_it_fits(
    request: ClusterRequest, layout: Layout, ledger: Ledger, found: SearchResult | None, limit: float
) -> dict[str, Any]:
    costs = budget(ledger, request.cluster, ledger.totals["total_seconds"], request.prices)
    ledger.totals |= costs.estimates
    estimates = {name: estimate.to_json() for name, estimate in costs.estimates.items()}
    upper = ledger.totals["peak_bytes"].high
    tight = upper is not None and upper > limit
    safest = found.safest if found else None
    slower = None
    if found and found.best[0].layout != layout:
        slower = ledger.totals["step_seconds"].value / found.best[0].step_seconds - 1
    return {
        "budget": estimates | costs.facts,
        "margin": {"limit_bytes": limit, "tight": tight, "slower_than_fastest": slower},
        "safest": _candidate(request, safest) if tight and safest else None,
        "first_change": first_change(request, layout, ledger),
        "communication_savings": [saving.to_json() for saving in cluster_savings(request, layout)],
        "scaling": scaling(request, ledger.totals["step_seconds"].value) if request.layout is None else None,
    }


def _when_it_does_not(request: ClusterRequest, plan: ClusterPlan) -> dict[str, Any]:
    """How much is missing, and what would make it fit."""
    limit, host = plan.outcome.limit_bytes, float(plan.outcome.host_bytes[0]) - plan.outcome.host_limit_bytes
    margin = {
        "limit_bytes": limit, "missing_bytes": plan.peak_bytes - limit, "missing_host_bytes": max(host, 0.0),
    }  # fmt: skip
    more: dict[str, Any] = {"budget": {}, "margin": margin}
    if request.layout is not None:
        found = _ranking(request)
        if found.best:
            return more | {"would_fit": [f'--layout "{chosen(request, found, limit)[0].layout}"']}
    return more | {"would_fit": would_fit(request)}


def _different(best: list[RankedLayout], layout: Layout) -> list[RankedLayout]:
    """The fastest ones and the chosen one; of those that differ in hybrid sharding alone the fastest stands for all."""
    seen: set[Layout] = set()
    different = []
    for candidate in best:
        kind = replace(candidate.layout, shard=None)
        if kind not in seen or candidate.layout == layout:
            different.append(candidate)
        seen.add(kind)
    return different[:SHOWN]


def _layout(layout: Layout, request: ClusterRequest) -> dict[str, Any]:
    filled = layout.filled(request.global_batch)
    return {"text": str(filled)} | filled.to_json()


def _cluster(request: ClusterRequest) -> dict[str, Any]:
    cluster = request.cluster
    return {
        "text": str(cluster), "accelerator": cluster.accelerator.name, "product": cluster.accelerator.product,
        "accelerators": cluster.count, "nodes": cluster.nodes, "node": cluster.node.product,
        "per_node": cluster.node.accelerators, "fabric": cluster.node.fabric or None,
        "network_bytes_per_second": cluster.node.network_bytes_per_second,
        "oversubscription": cluster.node.oversubscription,
    }  # fmt: skip


def _work(request: ClusterRequest) -> dict[str, Any]:
    return {
        "sequence": request.sequence, "global_batch": request.global_batch, "steps": request.steps,
        "tokens": request.steps * request.tokens_per_step, "tokens_per_step": request.tokens_per_step,
    }  # fmt: skip


def _candidate(request: ClusterRequest, candidate: RankedLayout) -> dict[str, Any]:
    step = bounded(candidate.step_seconds, "time", request, f"engine {request.engine}")
    peak = bounded(candidate.peak_bytes, "memory", request, "highest stage")
    tokens = Estimate(request.tokens_per_step / step.value, step.origin, "tokens per step / step time")
    return {
        "layout": _layout(candidate.layout, request),
        "step_seconds": step.to_json(),
        "peak_bytes": peak.to_json(),
        "tokens_per_second": tokens.to_json(),
        "total_seconds": step.scaled(request.steps).to_json(),
        "why_slower": candidate.why_slower,
    }


def other_conventions(
    model: ModelConfig, candidates: Candidates, step: Estimate, peak_flops_per_second: float
) -> dict[str, Estimate]:
    """`mfu_palm`, `mfu_6nd` and `hfu` of the first job; `peak_flops_per_second` is that of all accelerators."""
    tokens = float(candidates.sequence[0] * candidates.global_batch[0])
    attention = 6 * model.layers * (model.query_size + model.mixed_size) * float(candidates.sequence[0])
    n = model.active_parameters  # all of them in a dense model
    which = "all parameters" if model.moe is None else f"the {n:,} parameters that a token meets"
    counted = {
        "mfu_palm": (
            (6 * n + attention) * tokens,
            f"6 N + 12 L H Q S per token, {which}, masked attention counted (PaLM, arXiv 2204.02311, app. B)",
        ),
        "mfu_6nd": (6 * n * tokens, f"6 N per token, {which}, no attention"),
        "hfu": (float(candidates.hardware_flops()[0]), "matrix FLOPs with what is recomputed"),
    }
    words = "over dense peak and step time"
    return {name: step.rate(flops / peak_flops_per_second, f"{of}; {words}") for name, (flops, of) in counted.items()}
