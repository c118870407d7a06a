"""Plans requests on a catalogued cluster: given settings, assumptions, and the complete answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ironlaw.catalog.accelerators import Accelerator
from ironlaw.catalog.formats import computing_formats, number_format
from ironlaw.catalog.models import alias_of_model
from ironlaw.catalog.nodes import Cluster, parse_cluster
from ironlaw.errors import UserError, did_you_mean
from ironlaw.ledger import Estimate, Ledger
from ironlaw.model.config import ModelConfig
from ironlaw.plan.budget import add_costs, run_seconds
from ironlaw.plan.cluster.candidates import Candidates
from ironlaw.plan.cluster.estimate import DEFAULT_ENGINE, ClusterPlan, ClusterRequest, bounded, plan_cluster
from ironlaw.plan.cluster.intervals import DEFAULT_ON, checked_runs, evidence
from ironlaw.plan.cluster.layout_space import UNITS, engines_for, lacking
from ironlaw.plan.cluster.search import RankedLayout, SearchResult, search
from ironlaw.plan.cluster.system import update_cost, usable_bytes
from ironlaw.plan.emit.trainers import emit, trainer_named
from ironlaw.plan.engines.engine import TrainingEngine
from ironlaw.plan.engines.named import GENERIC
from ironlaw.plan.engines.named import engine as engine_named
from ironlaw.plan.request_types import Assumption, Options, PlanOutcome, RequestedModel, Work, settle
from ironlaw.plan.requests.advice import cluster_savings, fastest, first_change, scaling, terms, would_fit
from ironlaw.plan.requests.hardware import assumed_links, parse_hardware
from ironlaw.plan.requests.replicas import plan_adapters
from ironlaw.workload.layout import Layout
from ironlaw.workload.moe import IMBALANCE


def plan_on_cluster(requested: RequestedModel, on: str, options: Options) -> PlanOutcome:
    """Plans the given layout, or searches for one; all defaults are among the assumptions."""
    config = requested.config
    if config is not None and config.finetune.adapts:
        return plan_adapters(requested, parse_cluster(on), options)
    cluster, layout, assumed = parse_hardware(on, options)
    if layout is None and cluster.count == 1 and config and config.train.offload != "none":
        # A config with offloading determines the whole layout of a single device.
        layout = Layout(micro_batch=config.micro_batch, recompute=config.recompute, offload=config.train.offload)
    work = settle(requested.model, options, cluster.count, config)
    work.assumed += assumed
    return plan_work(requested, cluster, work, options, layout)


def plan_work(
    requested: RequestedModel, cluster: Cluster, work: Work, options: Options, layout: Layout | None = None
) -> PlanOutcome:
    """Plans the work on a cluster, in the layout if one is given."""
    request = request_of(requested, cluster, work, options, layout)
    request, answer = _plan_in_turn(request, software_for(options, cluster.accelerator))
    if options.emit and answer.fits and answer.layout:
        answer.more["emit"] = emit(options.emit, request, answer.layout)
    return answer.check_limits(options.limits)


def request_of(
    requested: RequestedModel, cluster: Cluster, work: Work, options: Options, layout: Layout | None = None
) -> ClusterRequest:
    """Returns the request, under no software yet. Raises UserError for a precision without a rate, or a layout that
    the trainer of `--emit` refuses."""
    config, assumed = requested.config, [*work.assumed, *assumed_links(cluster)]
    precision = _precision(requested, cluster.accelerator, options, assumed)
    if requested.model.moe is not None and requested.model.moe.capacity_factor is None:
        load = f"{IMBALANCE:g} x the mean on the busiest expert parallel rank"
        why = "no measurement; balancing aims at 1 (arXiv 2408.15664)"
        assumed.append(Assumption("expert load", load, why, "a capacity factor"))
    if not cluster.accelerator.has_flash:
        why = f"FlashAttention has no kernels for {cluster.accelerator.name}"
        assumed.append(Assumption("attention", "scores in memory", why, ""))
    if (other := alias_of_model(requested.model.name)) and other[1]:
        assumed.append(Assumption("model", other[0], f"'{requested.model.name}' is {other[1]}", ""))
    assumed += [Assumption("left out", part, "the model is built without it", "") for part in requested.left_out]
    if config and layout is None:
        own = {"train.micro_batch": config.train.micro_batch, "[layout]": config.layout,
               "train.offload": config.train.offload != "none",
               "[recompute]": config.recompute.mode != "none"}  # fmt: skip
        if own_devices := " and ".join(key for key, value in own.items() if value):
            assumed.append(
                Assumption("layout", "searched", f"the config's {own_devices} is for its own devices", "--layout")
            )
    optimizer = options.optimizer or (config.optimizer.name if config else "adamw")
    request = ClusterRequest(
        requested.model, cluster, work.sequence, work.global_batch, precision,
        optimizer=update_cost(optimizer, requested.model).name, config=config, steps=work.steps, assumed=assumed,
        prices=options.prices, layout=layout,
    )  # fmt: skip
    if options.emit is None:
        return request
    trainer = trainer_named(options.emit)
    trainer.check(request, layout)

    def excluded(candidate: Layout) -> str | None:
        reason = trainer.cannot(candidate, requested.model, request.optimizer)
        return f"{trainer.name}: {reason}" if reason else None

    return replace(request, excluded=excluded)


def _precision(requested: RequestedModel, acc: Accelerator, options: Options, assumed: list[Assumption]) -> str:
    """Returns the given precision, else the config's, else the first of bf16 and fp16 that has a peak, else bf16."""
    wanted = options.precision
    if wanted is None and requested.config and requested.config.train.precision != "auto":
        wanted = requested.config.train.precision
    if wanted is None:
        wanted = next((name for name in ("bf16", "fp16") if name in acc.peak_flops_per_second), "bf16")
        assumed.append(Assumption("precision", wanted, f"usual on {acc.name}", "--precision"))
    if wanted not in computing_formats():
        raise UserError(f"unknown precision '{wanted}': {did_you_mean(wanted, computing_formats())}")
    usable = [name for name in computing_formats() if number_format(name).multiplied_by(acc)]
    if not usable:
        raise UserError(
            f"the catalogue has no rate of products on {acc.name}, for its maker prints none: choose another"
        )
    if wanted not in usable:
        raise UserError(f"the catalogue has no {wanted} peak of {acc.name}: use --precision {' or '.join(usable)}")
    return wanted


# -- engines -----------------------------------------------------------------------------------------------------------


OTHERS = 2
"""Number of other engines that a plan is compared with: those with the most checked runs on this generation."""

MODEL_PARALLEL = {"tp", "pp"}
"""Parallelism that large models need: if an engine lacks it, the next one is tried too."""


def software_for(options: Options, acc: Accelerator) -> list[Assumption]:
    """Returns the engines to plan with, in order of preference; a given engine is the only one, without a reason."""
    if options.engine is not None:
        return [Assumption("engine", engine_named(options.engine).name, "", "--engine")]
    found = {}
    if options.emit:
        trainer = trainer_named(options.emit)
        found[trainer.engine] = f"whose constants describe {trainer.name}"
    elif known := DEFAULT_ON.get(acc.generation):
        found[known] = f"checked on {checked_runs()[known][acc.generation]} runs on {acc.generation}"
    elif acc.vendor == "google":
        found["maxtext"] = "JAX, which runs on TPUs; no run of it set a constant"
    if acc.vendor == "nvidia":
        found.setdefault(DEFAULT_ENGINE, "today's Megatron core in NVIDIA's tuning")
    unknown = "no software that is known has all of it" if found else f"no runs on {acc.generation} are known"
    found[GENERIC] = unknown
    return [Assumption("engine", name, reason, "--engine") for name, reason in found.items()]


def _may_pass(engine: TrainingEngine) -> bool:
    """Returns whether another engine may have a layout that fits where this one has none."""
    return set(engine.lacks) >= MODEL_PARALLEL


def tried_in_turn(software: Sequence[Assumption]) -> list[str]:
    """Returns the engines that a search tries until a layout fits."""
    names = [one.value for one in software]
    return [name for number, name in enumerate(names) if all(_may_pass(engine_named(one)) for one in names[:number])]


def _plan_in_turn(request: ClusterRequest, software: list[Assumption]) -> tuple[ClusterRequest, PlanOutcome]:
    """Returns the answer for the first engine that runs the given layout, or has one that fits. UserError if none."""
    passed: list[str] = []
    if request.layout is not None:
        work = {"sequence": request.sequence, "global_batch": request.global_batch}
        request.layout.check(request.model, **work, accelerators=request.cluster.count)
    for position, assumption in enumerate(software):
        engine, last = engine_named(assumption.value), position == len(software) - 1
        asked = replace(request, engine=engine.name)
        if request.layout is not None and (lacks := lacking(engine, request.layout)):
            passed.append(f"{engine.name} has no {lacks}")
            if last:
                able = ", ".join(_able(request, request.layout)) or GENERIC
                raise UserError(f"layout '{request.layout}': {passed[-1]}: use --engine {able}")
            continue
        may_pass = request.layout is None and not last and _may_pass(engine)
        try:
            answer = result_on_cluster(asked)
        except UserError:
            if not may_pass:
                raise
            passed.append(f"{engine.name}, which has no tensor or pipeline parallelism, has no layout for it")
            continue
        if may_pass and not answer.fits:
            passed.append(f"under {engine.name}, which has no tensor or pipeline parallelism, nothing fits")
            continue
        if assumption.reason:
            chosen_engine = replace(assumption, reason="; ".join([assumption.reason, *passed]))
            answer.more["assumed"].append(chosen_engine.to_json())
            answer.more["engine"]["others"] = under_others(asked, answer) if answer.fits else []
        return asked, answer
    raise AssertionError("the generic engine can run anything")


def _able(request: ClusterRequest, layout: Layout) -> list[str]:
    return engines_for(layout, request.model, request.precision, request.optimizer)


def under_others(request: ClusterRequest, answer: PlanOutcome) -> list[dict[str, Any]]:
    """Plans the same work for other engines, in the chosen layout, or in their own best if they cannot run it."""
    layout, found = answer.layout, list[dict[str, Any]]()
    assert layout is not None
    able = _able(request, layout)
    for name in list(evidence(request.system.engine, request.cluster.accelerator.generation)["checked_there"])[:OTHERS]:
        other = replace(request, engine=name)
        with suppress(UserError):
            if name in able:
                plan = plan_cluster(other, layout)
                own, seconds, fits = layout, plan.step_seconds, plan.fits
            elif request.layout is None and (best := fastest(other)):
                own, seconds, fits = best.layout, best.step_seconds, True
            else:
                continue
            found.append({"engine": name, "layout": str(own), "step_seconds": seconds, "fits": fits})
    return found


SHOWN = 5

NO_RECOMPUTATION, WALKED = 200, 20
"""Layouts kept in a ranking, and in one of Ironlaw's own trainer, where each is walked for its memory."""

MAX_SLOWDOWN_OF_SAFE = 1.03
"""A layout that surely fits is preferred to the fastest, which may not, if its step is at most this factor longer."""

MAX_SLOWDOWN_OF_SIMPLE = 1.01
"""The same for a layout with fewer kinds of parallelism: the difference is far below the plan's own error."""


def result_on_cluster(request: ClusterRequest) -> PlanOutcome:
    """Plans the given layout, or searches for the best one. Raises UserError if no layout can be formed."""
    where, layout, choice, found = request.system, request.layout, "given", None
    if layout is None:
        found = _ranking(request)
        ranked, choice = chosen(request, found)
        layout = ranked.layout
        if layout.offload != "none" and found.best:
            choice = "nothing fits without offloading to the host, whose time no measured run backs"
    plan = plan_cluster(request, layout)
    if plan.recompute_choice:
        layout, choice = plan.layout, plan.recompute_choice
    ledger = plan.ledger
    more: dict[str, Any] = {
        "layout": _layout(layout, request),
        "cluster": _cluster(request),
        "work": _work(request),
        "precision": request.precision,
        "engine": evidence(where.engine, request.cluster.accelerator.generation),
        "assumed": [assumption.to_json() for assumption in request.assumed],
        "candidates": [_candidate(request, candidate) for candidate in _different(found.best, layout)] if found else [],
        "ruled_out": {
            constraint: {"count": count, "unit": UNITS.get(constraint, "layouts")}
            for constraint, count in (Counter(found.ruled_out).most_common() if found else ())
        },
        "searched": {"planned": found.planned, "fitting": found.fitting} if found else None,
        "terms": terms(ledger),
    }
    step = ledger.totals["step_seconds"]
    peak = where.hardware.peak(request.precision) * request.cluster.count
    shares = where.engine.selective_shares
    ledger.totals |= other_conventions(request.model, request.candidates([layout]), step, peak, shares)
    ledger.totals["total_seconds"] = run_seconds(step, request.steps)
    if plan.fits:
        more |= _when_it_fits(request, layout, ledger, found, plan.outcome.limit_bytes)
        more["margin"]["choice"] = choice
    else:
        more |= _when_it_does_not(request, plan)
    return PlanOutcome(ledger, plan.fits, more, layout.filled(request.global_batch))


def _ranking(request: ClusterRequest) -> SearchResult:
    return search(request, keep=NO_RECOMPUTATION if request.system.engine.fused else WALKED)


def chosen(request: ClusterRequest, found: SearchResult) -> tuple[RankedLayout, str]:
    """Returns the recommended layout and the reason: the fastest, unless a safer or simpler one is almost as fast.

    Running out of memory after a day in the queue costs more than a percent of speed. If none fits: the nearest miss.
    """
    if not found.best:
        assert found.nearest_miss is not None
        return found.nearest_miss, "misses by least"
    fastest = found.best[0]
    sure = found.safest
    if sure is None or sure.step_seconds > MAX_SLOWDOWN_OF_SAFE * fastest.step_seconds:
        return fastest, "fastest"
    near = [c for c in found.best if c.step_seconds <= MAX_SLOWDOWN_OF_SIMPLE * sure.step_seconds]
    upper = bounded(1.0, "memory", request, "").high or 1.0
    safe = [c for c in near if c.peak_bytes * upper <= usable_bytes(request.system)]
    best = min([sure, *safe], key=lambda c: (_kinds(c.layout), c.step_seconds))
    if fastest.layout == best.layout:
        return fastest, "fastest"
    return best, "simpler" if best is not sure else "its memory fits with the interval's upper end too"


def _kinds(layout: Layout) -> int:
    """Counts the kinds of parallelism besides data parallelism, hybrid sharding, and schedules other than 1F1B."""
    degrees = sum(degree > 1 for degree in (layout.tp, layout.pp, layout.cp, layout.virtual_stages))
    return degrees + (layout.shard is not None) + (layout.schedule != "1f1b")


def _when_it_fits(
    request: ClusterRequest, layout: Layout, ledger: Ledger, found: SearchResult | None, limit: float
) -> dict[str, Any]:
    money = add_costs(ledger, request.cluster, request.prices)
    upper = ledger.totals["peak_bytes"].high
    tight = upper is not None and upper > limit
    safest = found.safest if found else None
    slower = None
    if found and found.best[0].layout != layout:
        slower = ledger.totals["step_seconds"].value / found.best[0].step_seconds - 1
    return {
        "budget": money,
        "margin": {"limit_bytes": limit, "tight": tight, "slower_than_fastest": slower},
        "safest": _candidate(request, safest) if tight and safest else None,
        "first_change": first_change(request, layout, ledger),
        "communication_savings": cluster_savings(request, layout),
        "scaling": scaling(request, ledger.totals["step_seconds"].value) if request.layout is None else None,
    }


def _when_it_does_not(request: ClusterRequest, plan: ClusterPlan) -> dict[str, Any]:
    """Returns the missing bytes, and changes that would make the plan fit."""
    limit, host = plan.outcome.limit_bytes, float(plan.outcome.host_bytes[0]) - plan.outcome.host_limit_bytes
    margin = {
        "limit_bytes": limit, "missing_bytes": plan.peak_bytes - limit, "missing_host_bytes": max(host, 0.0),
    }  # fmt: skip
    more: dict[str, Any] = {"budget": {}, "margin": margin}
    if request.layout is not None:
        found = _ranking(request)
        if found.best:
            return more | {"would_fit": [f'--layout "{chosen(request, found)[0].layout}"']}
    return more | {"would_fit": would_fit(request)}


def _different(best: list[RankedLayout], layout: Layout) -> list[RankedLayout]:
    """Returns the fastest layouts and the chosen one; of those that differ only in hybrid sharding, the fastest."""
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
    step = bounded(candidate.step_seconds, "time", request, f"engine {request.system.engine.name}")
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
    model: ModelConfig, candidates: Candidates, step: Estimate, peak_flops_per_second: float,
    selective: tuple[float, float] = (0.0, 1.0),
) -> dict[str, Estimate]:  # fmt: skip
    """Returns `mfu_palm`, `mfu_6nd` and `hfu` of the first job; the peak is that of all accelerators.

    `selective`: as in `Candidates.hardware_flops`.
    """
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
        "hfu": (float(candidates.hardware_flops(selective)[0]), "matrix FLOPs with what is recomputed"),
    }
    words = "over dense peak and step time"
    return {name: step.rate(flops / peak_flops_per_second, f"{of}; {words}") for name, (flops, of) in counted.items()}
