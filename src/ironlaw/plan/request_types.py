"""What `ironlaw plan` is asked and what it gives back. A plan of this machine needs nothing of the cluster planner."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ironlaw.config import RunConfig
from ironlaw.errors import refuse_options
from ironlaw.ledger import Ledger
from ironlaw.model.config import ModelConfig
from ironlaw.plan.totals import fits
from ironlaw.plan.work import Assumption, WorkOptions
from ironlaw.workload.layout import Layout

DECODER, CLUSTER = "training a decoder", "clusters, --on 8xh100-sxm-80gb"
RANKS = "processes of this machine, --ranks 2 without --on"
TRACED, SERVED = "a traced module, PACKAGE.MODULE:FUNCTION", 'serving, --serve "input=1024 output=256 rate=10/s"'

SUBJECTS = {
    **dict.fromkeys(("tokens", "steps", "seq", "global_batch", "precision", "optimizer"), (DECODER,)),
    **dict.fromkeys(("network", "per_node"), (CLUSTER,)), **dict.fromkeys(("engine", "emit"), (CLUSTER, SERVED)),
    "layout": (CLUSTER, RANKS, SERVED), "ranks": (RANKS,), "input": (TRACED,), "real": (TRACED,), "weights": (SERVED,),
    "kv": (SERVED,),
}  # fmt: skip
"""Of an option, what is planned with it."""


@dataclass(frozen=True)
class Prices:
    """What the user says of money and power; None: the catalogue's."""

    usd_per_hour: float | None = None
    grid: str | None = None
    pue: str | None = None  # a number, or a kind of data centre


@dataclass(frozen=True)
class Options(WorkOptions):
    """What can be said beside WHAT and WHERE; None: not said."""

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
    weights: str | None = None  # of a server: their format, and the cache's
    kv: str | None = None
    runnable: Callable[[RunConfig, Layout], bool] | None = None  # whether the trainer runs a layout

    def refuse_beside(self, *subjects: str) -> None:
        """UserError for an option of something else than these."""
        refuse_options(vars(self) | {"seq": self.sequence, "input": self.inputs}, SUBJECTS, *subjects)


@dataclass(frozen=True)
class PlanOutcome:
    """`ledger` is the plan; `more` the sections beside it (candidates, budget, advice), empty on this machine."""

    ledger: Ledger
    fits: bool
    more: dict[str, Any] = field(default_factory=dict)
    layout: Layout | None = None  # of a cluster

    @classmethod
    def of(cls, ledger: Ledger, assumed: Iterable[Assumption]) -> PlanOutcome:
        """A plan of one process, or of replicas alike."""
        return cls(ledger, fits(ledger), {"assumed": [one.to_json() for one in assumed]})

    def to_json(self) -> dict[str, Any]:
        """`fits` and the totals at the top, each {value, interval, origin, basis}; the whole ledger below."""
        totals = {name: estimate.to_json() for name, estimate in self.ledger.totals.items()}
        return {"fits": self.fits} | totals | self.more | {"ledger": self.ledger.to_json()}


@dataclass(frozen=True)
class RequestedModel:
    """The model, and the run around it where a config file gives one."""

    model: ModelConfig
    config: RunConfig | None = None
    left_out: tuple[str, ...] = ()  # of what was asked about, what the model here has not
    has_file: bool = False  # whether the config is one that somebody wrote
