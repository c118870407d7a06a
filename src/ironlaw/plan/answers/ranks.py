"""`ironlaw plan CONFIG --ranks N`: the run on N processes of this machine, in the given layout or the best one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ironlaw.config import RunConfig
from ironlaw.errors import UserError
from ironlaw.machine.links import Fabric, load_costs
from ironlaw.machine.profile import load_profile
from ironlaw.plan.answer import Answer, Options
from ironlaw.plan.ranks.estimate import RanksPlan, plan_ranks
from ironlaw.plan.ranks.search import best_layout
from ironlaw.workload.layout import Layout, parse_layout

SHOWN = 8


def answer_on_ranks(config: RunConfig, options: Options) -> Answer:
    """UserError where no layout divides the model and the batch, or this machine's ranks were not measured."""
    ranks = options.ranks or 1
    profile, fabric = load_profile(), Fabric(load_costs())
    given = options.layout or (config.layout and _words(config, ranks))
    if given:
        layout = parse_layout(given)
        if "dp=" not in given and ranks % (layout.tp * layout.pp * layout.cp) == 0:
            layout = replace(layout, dp=ranks // (layout.tp * layout.pp * layout.cp))
        if "micro_batch" not in given:
            layout = replace(
                layout, micro_batch=min(config.micro_batch, max(1, config.train.global_batch // layout.dp))
            )
        if options.runnable is not None and not options.runnable(config, layout):
            layout.check(
                config.model, sequence=config.sequence, global_batch=config.train.global_batch, accelerators=ranks
            )
            raise UserError(f"this trainer cannot run layout '{layout}' on {ranks} ranks: leave --layout out")
        plan = plan_ranks(config, profile, ranks, layout, fabric)
        return Answer(plan.ledger(), plan.fits, {"layout": str(plan.layout), "candidates": [_candidate(plan)]})
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
    return Answer(choice.best.ledger(), choice.best.fits, more)


def _words(config: RunConfig, ranks: int) -> str:
    """The config's own layout."""
    assert config.layout is not None
    named = config.layout.model_dump(exclude_none=True)
    known = {name: value for name, value in named.items() if name in Layout.__dataclass_fields__}
    return " ".join(f"{k}={int(v) if isinstance(v, bool) else v}" for k, v in known.items())


def _candidate(plan: RanksPlan) -> dict[str, Any]:
    return {
        "layout": str(plan.layout), "step_seconds": plan.step_seconds, "peak_bytes": plan.peak_bytes,
        "exposed_communication_seconds": sum(t.exposed_seconds for s in plan.stages for t in s.communication)
        / len(plan.stages),
    }  # fmt: skip
