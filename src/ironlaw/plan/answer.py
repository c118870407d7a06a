"""What `ironlaw plan` answers with. Light on purpose: a plan of this machine needs nothing of the cluster planner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ironlaw.config import RunConfig
from ironlaw.ledger import Ledger
from ironlaw.plan.budget import Prices
from ironlaw.plan.work import Wishes

if TYPE_CHECKING:
    from ironlaw.workload.layout import Layout


@dataclass(frozen=True)
class Options:
    """What can be said beside WHAT and WHERE; None: not said."""

    work: Wishes = field(default_factory=Wishes)
    precision: str | None = None
    optimizer: str | None = None
    engine: str | None = None
    layout: str | None = None
    emit: str | None = None
    prices: Prices = field(default_factory=Prices)
    inputs: tuple[str, ...] = ()  # of a traced module: NAME=SIZES:DTYPE
    real: bool = False  # a traced module runs one step on real tensors
    network: str | None = None  # of a node, in words, where it is not the usual one
    per_node: int | None = None  # accelerators, likewise
    ranks: int | None = None  # on this machine: CPU ranks that torchrun starts
    runnable: Callable[[RunConfig, Layout], bool] | None = None  # whether the trainer runs a layout


@dataclass(frozen=True)
class Answer:
    """`ledger` is the plan; `more` the sections beside it (candidates, budget, advice), empty on this machine."""

    ledger: Ledger
    fits: bool
    more: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """`fits` and the totals at the top, each {value, interval, origin, basis}; the whole ledger below."""
        totals = {name: estimate.to_json() for name, estimate in self.ledger.totals.items()}
        return {"fits": self.fits} | totals | self.more | {"ledger": self.ledger.to_json()}
