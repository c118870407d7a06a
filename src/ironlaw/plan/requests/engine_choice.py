"""Which software a plan assumes: one that can run the layout asked about, and what others would give."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from ironlaw.catalog.accelerators import Accelerator
from ironlaw.errors import UserError
from ironlaw.plan.cluster.capabilities import engines_for, lacking
from ironlaw.plan.cluster.estimate import plan_cluster
from ironlaw.plan.cluster.intervals import DEFAULT_ON, checked_runs, evidence
from ironlaw.plan.cluster.request import DEFAULT_ENGINE, ClusterRequest
from ironlaw.plan.emit.trainers import TrainerOptions
from ironlaw.plan.engines.named import GENERIC
from ironlaw.plan.engines.named import engine as engine_named
from ironlaw.plan.request_types import PlanOutcome
from ironlaw.plan.requests.advice import fastest
from ironlaw.plan.requests.cluster_result import result_on_cluster
from ironlaw.plan.work import Assumption

OTHERS = 2
"""Other engines that an answer is compared with: those with the most runs checked on this generation."""

MODEL_PARALLEL = {"tp", "pp"}
"""What a large model cannot do without: software that lacks it is not the only one to be tried."""


def software_for(said: str | None, trainer: TrainerOptions | None, acc: Accelerator) -> list[Assumption]:
    """Engines to plan with, the first choice first; one without a reason where it was given."""
    if said is not None:
        return [Assumption("engine", engine_named(said).name, "", "--engine")]
    usual = (DEFAULT_ENGINE, "today's Megatron core in NVIDIA's tuning")
    found = []
    if trainer:
        found.append((trainer.engine, f"whose constants describe {trainer.name}"))
    elif known := DEFAULT_ON.get(acc.generation):
        found.append((known, f"checked on {checked_runs()[known][acc.generation]} runs on {acc.generation}"))
    elif acc.vendor == "google":
        found.append(("maxtext", "JAX, which runs on TPUs; no run of it set a constant"))
    elif acc.vendor != "nvidia":
        found.append((GENERIC, f"no runs on {acc.generation} are known"))
    if acc.vendor == "nvidia" and usual not in found:
        found.append(usual)
    found.append((GENERIC, "no software that is known has all of it"))
    return [Assumption("engine", name, reason, "--engine") for name, reason in dict(found).items()]


def result_under(request: ClusterRequest, software: list[Assumption]) -> tuple[ClusterRequest, PlanOutcome]:
    """The answer under the first that can run the given layout, or under which a searched one fits."""
    passed: list[str] = []
    for position, assumption in enumerate(software):
        engine, last = engine_named(assumption.value), position == len(software) - 1
        asked = replace(request, engine=engine.name)
        if request.layout is not None and (lacks := lacking(engine, request.layout)):
            passed.append(f"{engine.name} has no {lacks}")
            if last:
                able = ", ".join(engines_for(request.layout)) or GENERIC
                raise UserError(f"layout '{request.layout}': {passed[-1]}: use --engine {able}")
            continue
        may_pass = request.layout is None and not last and set(engine.lacks) >= MODEL_PARALLEL
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
            said = replace(assumption, reason="; ".join([assumption.reason, *passed]))
            answer.more["assumed"].append(said.to_json())
            answer.more["engine"]["others"] = under_others(asked, answer) if answer.fits else []
        return asked, answer
    raise AssertionError("the generic engine can run anything")


def under_others(request: ClusterRequest, answer: PlanOutcome) -> list[dict[str, Any]]:
    """The same work under other engines: the chosen layout, or their own best where they cannot run it."""
    layout, found = answer.layout, list[dict[str, Any]]()
    assert layout is not None
    for name in list(evidence(request.engine, request.cluster.accelerator.generation)["checked_there"])[:OTHERS]:
        other = replace(request, engine=name)
        with suppress(UserError):
            if not lacking(engine_named(name), layout):
                plan = plan_cluster(other, layout)
                own, seconds, fits = layout, plan.step_seconds, plan.fits
            elif request.layout is None and (best := fastest(other)):
                own, seconds, fits = best.layout, best.step_seconds, True
            else:
                continue
            found.append({"engine": name, "layout": str(own), "step_seconds": seconds, "fits": fits})
    return found
