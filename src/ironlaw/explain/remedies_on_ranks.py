"""Remedies of a job on several ranks: planned on as many, CPUs over what their links were when it ran."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ironlaw import units
from ironlaw.config import RunConfig
from ironlaw.errors import UserError
from ironlaw.ledger import Ledger
from ironlaw.machine.links import Link, RankFabric, load_costs
from ironlaw.machine.profile import Profile
from ironlaw.plan.layouts import best_layout
from ironlaw.workload.layout import Layout


def ranks_of(run: Ledger) -> int:
    """Returns the ranks of a job that can be planned on as many; else 1."""
    known = "fabric" in run.facts or run.facts.get("device", "cpu") != "cpu"
    return int(run.facts.get("ranks") or 1) if known else 1


def fabric_of(run: Ledger) -> RankFabric:
    """Returns the links of the run; UserError if what two ranks of this machine cost each other was not measured."""
    facts = run.facts["fabric"]
    between = Link(**facts["between"]) if facts["between"] else None
    return RankFabric(load_costs(), facts["ranks_per_host"], between)


def planner_on_ranks(profile: Profile, run: Ledger) -> Callable[[RunConfig], Ledger]:
    """Returns a function that plans a config on the ranks of `run`; it raises UserError if that cannot run or fit."""
    from ironlaw.train.parallel.planning import plan_config, plan_on_accelerators

    ranks, fabric = ranks_of(run), fabric_of(run) if profile.device == "cpu" else None

    def replan(config: RunConfig) -> Ledger:
        plan = plan_config(config, profile, ranks, fabric) if fabric else plan_on_accelerators(config, profile, ranks)
        if not plan.fits:
            raise UserError(f"{plan.layout} does not fit: {units.bytes_(plan.peak_bytes)} a rank")
        return plan.ledger

    return replan


def other_layouts(config: RunConfig, profile: Profile, run: Ledger) -> Iterable[dict[str, Any]]:
    """Returns the settings of the best planned layout for as many ranks, if it is not the run's own."""
    if ranks_of(run) == 1 or "fabric" not in run.facts or (config.layout is not None and config.layout.shard):
        return []
    from ironlaw.train.parallel.planning import can_run

    free = config.model_copy(update={"train": config.train.model_copy(update={"micro_batch": None})})
    choice = best_layout(free, profile, ranks_of(run), fabric_of(run), lambda layout: can_run(free, layout))
    return [changed(config, choice.best.layout)]


def changed(config: RunConfig, layout: Layout) -> dict[str, Any]:
    """Returns the settings of `layout` that differ from the config."""
    names = ("dp", "zero", "tp", "sp", "pp", "virtual_stages", "schedule", "cp", "ep")
    now = config.layout.model_dump() if config.layout is not None else {}
    settings = {f"layout.{name}": getattr(layout, name) for name in names if now.get(name) != getattr(layout, name)}
    if layout.micro_batch != config.train.micro_batch:
        settings["train.micro_batch"] = layout.micro_batch
    return settings
