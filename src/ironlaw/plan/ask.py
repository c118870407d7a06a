"""What is asked of the planner on a catalogued cluster, with nothing left open but the layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ironlaw.catalog.nodes import Cluster
from ironlaw.model.config import ModelConfig
from ironlaw.plan.budget import Prices
from ironlaw.plan.work import Work
from ironlaw.workload.layout import Layout


@dataclass(frozen=True)
class Ask:
    """`layout` is the one to plan, or None to search; `excluded` names what a search must leave out, and why."""

    model: ModelConfig
    cluster: Cluster
    work: Work
    precision: str
    engine: str
    prices: Prices = field(default_factory=Prices)
    layout: Layout | None = None
    optimizer: str = "adamw"
    excluded: Callable[[Layout], str | None] | None = None
