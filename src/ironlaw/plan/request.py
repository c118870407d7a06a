"""From what a user asks (`ironlaw plan WHAT --on WHERE`) to a planned ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ironlaw.catalog import parse_cluster
from ironlaw.config import RunConfig, load_config
from ironlaw.errors import UserError
from ironlaw.ledger import Ledger
from ironlaw.machine.profile import load_profile
from ironlaw.plan.estimate import fits, plan_run


@dataclass(frozen=True)
class Answer:
    ledger: Ledger
    fits: bool


def plan_request(what: str, *, on: str, overrides: Sequence[str] = (), layout: str | None = None) -> Answer:
    config = load_config(Path(what), overrides)
    if on != "this":
        cluster = parse_cluster(on)  # an unknown name is an error that says the nearest ones
        raise UserError(f"plans on {cluster} are not there yet: leave out --on to plan on this machine")
    return plan_on_this(config)


def plan_on_this(config: RunConfig) -> Answer:
    ledger = plan_run(config, load_profile())
    return Answer(ledger, fits(ledger))
