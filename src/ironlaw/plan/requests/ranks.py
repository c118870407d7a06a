"""`ironlaw plan CONFIG --ranks N`: the run on N processes of this machine, in the given layout or the best one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ironlaw.config import LayoutConfig, RunConfig
from ironlaw.errors import UserError
from ironlaw.machine.links import RankFabric, load_costs
from ironlaw.machine.profile import load_profile
from ironlaw.plan.layouts import best_layout
from ironlaw.plan.recipe import layout_of, micro_batch_of
from ironlaw.plan.request_types import Options, PlanOutcome
from ironlaw.plan.step import StepPlan, plan_step
from ironlaw.workload.layout import Layout, parse_layout

SHOWN = 8


def result_on_ranks(config: RunConfig, options: Options) -> PlanOutcome:
    """UserError where no layout divides the model and the batch, or this machine's ranks were not measured."""
    ranks = options.ranks or 1
    profile, fabric = load_profile(), RankFabric(load_costs())
    if options.layout or config.layout:
        layout = _given(config, options.layout, ranks)
        if options.runnable is not None and not options.runnable(config, layout):
            layout.check(
                config.model, sequence=config.sequence, global_batch=config.train.global_batch, accelerators=ranks
            )
            raise UserError(f"this trainer cannot run layout '{layout}' on {ranks} ranks: leave --layout out")
        plan = plan_step(config, profile, layout, fabric, ranks)
        return PlanOutcome(plan.ledger, plan.fits, {"layout": str(plan.layout), "candidates": [_candidate(plan)]})
    runnable = options.runnable

    def runs(layout: Layout) -> bool:
        return runnable is None or runnable(config, layout)

    choice = best_layout(config, profile, ranks, fabric, runs)
    more: dict[str, Any] = {
        "layout": str(choice.best.layout),
        "reason": choice.reason,
        "searched": choice.tried,
        "candidates": [_candidate(plan) for plan in choice.plans[:SHOWN]],
    }
    return PlanOutcome(choice.best.ledger, choice.best.fits, more)


def _given(config: RunConfig, text: str | None, ranks: int) -> Layout:
    """The layout in words, or else the config's own; replicas and micro-batch follow where they are not said."""
    written = parse_layout(text) if text else layout_of(config.layout or LayoutConfig(), 1)
    others = written.tp * written.pp * written.cp
    dp_given = "dp=" in text if text else config.layout is not None and config.layout.dp is not None
    dp = written.dp if dp_given or ranks % others else ranks // others
    share = max(1, config.train.global_batch // dp)
    micro_batch = written.micro_batch if text and "micro_batch" in text else micro_batch_of(config, share, written.pp)
    return replace(written, dp=dp, micro_batch=micro_batch)


def _candidate(plan: StepPlan) -> dict[str, Any]:
    return {
        "layout": str(plan.layout), "step_seconds": plan.step_seconds, "peak_bytes": plan.peak_bytes,
        "exposed_communication_seconds": sum(t.exposed_seconds for s in plan.stages for t in s.communication)
        / len(plan.stages),
    }  # fmt: skip
