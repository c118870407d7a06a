"""The answer to `ironlaw plan WHAT --on CLUSTER`: the chosen layout's ledger and everything that goes with it."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from ironlaw.ledger import Estimate, Ledger
from ironlaw.plan.answer import Answer
from ironlaw.plan.answers.advice import first_change, plan_layout, scaling, search_layouts, terms, would_fit
from ironlaw.plan.answers.savers import cluster_savers
from ironlaw.plan.ask import Ask
from ironlaw.plan.budget import budget
from ironlaw.plan.cluster.allocator import usable_bytes
from ironlaw.plan.cluster.candidates import candidates_of
from ironlaw.plan.cluster.checked import evidence
from ironlaw.plan.cluster.estimate import bounded
from ironlaw.plan.cluster.layout_space import counted_in
from ironlaw.plan.cluster.search import Candidate, Found
from ironlaw.plan.cluster.system import System, system_of
from ironlaw.plan.cluster.utilisation import other_conventions
from ironlaw.plan.engines.named import engine as engine_named
from ironlaw.workload.layout import Layout, parse_layout

SHOWN = 5

KEPT = 200

SURE_AT_MOST = 1.03
"""A layout that fits for sure is chosen over the fastest, which may not, if it is at most this many times slower."""

SIMPLE_AT_MOST = 1.01
"""And one with fewer kinds of parallelism over one at most this many times faster: far inside the plan's own error."""


def answer_on_cluster(ask: Ask) -> Answer:
    """Plan the given layout, or search for the best one. UserError when nothing can even be formed."""
    found = search_layouts(ask, keep=KEPT) if ask.layout is None else None
    where = system_of(ask.cluster, engine_named(ask.engine), ask.precision)
    layout, choice = ask.layout, "given"
    if found is not None:
        candidate, choice = chosen(ask, found, usable_bytes(where))
        layout = candidate.layout
        if layout.offload != "none" and found.best:
            choice = "nothing fits without offloading to the host, whose time no measured run backs"
    assert layout is not None
    ledger = plan_layout(ask, layout)
    if layout.recompute.startswith("budget:"):  # the ledger is of what the budget came to
        layout = replace(parse_layout(ledger.facts["layout"]), accumulation=layout.accumulation)
        choice = ledger.facts["recompute_choice"]
    fits = bool(ledger.facts["fits"])
    more: dict[str, Any] = {
        "layout": _layout(layout, ask),
        "cluster": _cluster(ask),
        "work": _work(ask),
        "precision": ask.precision,
        "engine": evidence(ask.engine, ask.cluster.accelerator.generation),
        "assumed": [assumption.to_json() for assumption in ask.work.assumed],
        "candidates": [_candidate(ask, candidate) for candidate in _different(found.best, layout)] if found else [],
        "ruled_out": _constraints(found) if found else {},
        "searched": {"planned": found.planned, "fitting": found.fitting} if found else None,
        "terms": terms(ledger),
    }
    limit = float(ledger.facts["memory_limit_bytes"])
    _add_totals(ask, layout, ledger, where)
    if fits:
        more |= _when_it_fits(ask, layout, ledger, found, limit)
        more["margin"]["choice"] = choice
    else:
        more |= _when_it_does_not(ask, ledger, limit)
    return Answer(ledger, fits, more)


def chosen(ask: Ask, found: Found, limit_bytes: float) -> tuple[Candidate, str]:
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
    upper = bounded(1.0, "memory", ask.engine, ask.cluster, ask.model, "").high or 1.0
    safe = [c for c in near if c.peak_bytes * upper <= limit_bytes]
    best = min([sure, *safe], key=lambda c: (_kinds(c.layout), c.step_seconds))
    if fastest.layout == best.layout:
        return fastest, "fastest"
    return best, "simpler" if best is not sure else "its memory fits with the interval's upper end too"


def _kinds(layout: Layout) -> int:
    """How many kinds of parallelism beside data parallelism, and what else must be set up for them."""
    degrees = sum(degree > 1 for degree in (layout.tp, layout.pp, layout.cp, layout.virtual_stages))
    return degrees + (layout.shard is not None) + (layout.schedule != "1f1b")


def _add_totals(ask: Ask, layout: Layout, ledger: Ledger, where: System) -> None:
    """Total time and the other conventions of MFU."""
    step = ledger.totals["step_seconds"]
    candidates = candidates_of(ask.model, [layout], sequence=ask.work.sequence, global_batch=ask.work.global_batch)
    peak = where.hardware.peak(ask.precision) * ask.cluster.count
    ledger.totals |= other_conventions(ask.model, candidates, step, peak)
    words = f"{ask.work.steps:,} steps x step time; no data loading, checkpoints, failures or restarts"
    ledger.totals["total_seconds"] = step.scaled(ask.work.steps, words)


def _when_it_fits(ask: Ask, layout: Layout, ledger: Ledger, found: Found | None, limit: float) -> dict[str, Any]:
    costs = budget(ledger, ask.cluster, ledger.totals["total_seconds"], ask.prices)
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
        "safest": _candidate(ask, safest) if tight and safest else None,
        "first_change": first_change(ask, layout, ledger),
        "savers": [saver.to_json() for saver in cluster_savers(ask, layout)],
        "scaling": scaling(ask, ledger.totals["step_seconds"].value) if ask.layout is None else None,
    }


def _when_it_does_not(ask: Ask, ledger: Ledger, limit: float) -> dict[str, Any]:
    """How much is missing, and what would make it fit."""
    missing = ledger.totals["peak_bytes"].value - limit
    host = (ledger.facts["host_bytes"] or 0.0) - (ledger.facts["host_limit_bytes"] or 0.0)
    margin = {"limit_bytes": limit, "missing_bytes": missing, "missing_host_bytes": max(host, 0.0)}
    more: dict[str, Any] = {"budget": {}, "margin": margin}
    if ask.layout is not None:
        found = search_layouts(ask, keep=KEPT)
        if found.best:
            return more | {"would_fit": [f'--layout "{chosen(ask, found, limit)[0].layout}"']}
    return more | {"would_fit": would_fit(ask)}


def _different(best: list[Candidate], layout: Layout) -> list[Candidate]:
    """The fastest ones and the chosen one; of those that differ in hybrid sharding alone the fastest stands for all."""
    seen: set[Layout] = set()
    different = []
    for candidate in best:
        kind = replace(candidate.layout, shard=None)
        if kind not in seen or candidate.layout == layout:
            different.append(candidate)
        seen.add(kind)
    return different[:SHOWN]


def _constraints(found: Found) -> dict[str, dict[str, Any]]:
    """Each constraint with how much it ruled out and in which unit, the largest count first."""
    counted = sorted(found.ruled_out.items(), key=lambda item: -item[1])
    return {constraint: {"count": count, "unit": counted_in(constraint)} for constraint, count in counted}


def _layout(layout: Layout, ask: Ask) -> dict[str, Any]:
    filled = layout.filled(ask.work.global_batch)
    return {"text": str(filled)} | asdict(filled)


def _cluster(ask: Ask) -> dict[str, Any]:
    cluster = ask.cluster
    return {
        "text": str(cluster), "accelerator": cluster.accelerator.name, "product": cluster.accelerator.product,
        "accelerators": cluster.count, "nodes": cluster.nodes, "node": cluster.node.product,
        "per_node": cluster.node.accelerators, "fabric": cluster.node.fabric or None,
        "network_bytes_per_second": cluster.node.network_bytes_per_second,
        "oversubscription": cluster.node.oversubscription,
    }  # fmt: skip


def _work(ask: Ask) -> dict[str, Any]:
    work = ask.work
    return {
        "sequence": work.sequence, "global_batch": work.global_batch, "steps": work.steps,
        "tokens": work.total_tokens, "tokens_per_step": work.tokens_per_step,
    }  # fmt: skip


def _candidate(ask: Ask, candidate: Candidate) -> dict[str, Any]:
    words = f"engine {ask.engine}"
    step = bounded(candidate.step_seconds, "time", ask.engine, ask.cluster, ask.model, words, ask.precision)
    peak = bounded(candidate.peak_bytes, "memory", ask.engine, ask.cluster, ask.model, "highest stage")
    tokens = Estimate(ask.work.tokens_per_step / step.value, step.origin, "tokens per step / step time")
    return {
        "layout": _layout(candidate.layout, ask),
        "step_seconds": step.to_json(),
        "peak_bytes": peak.to_json(),
        "tokens_per_second": tokens.to_json(),
        "total_seconds": step.scaled(ask.work.steps).to_json(),
        "why_slower": candidate.why_slower,
    }
