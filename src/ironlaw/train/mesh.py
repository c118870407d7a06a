"""The ranks that train one model. One process is a mesh of one: what many ranks agree on, it knows by itself.

The trainer talks to a `Mesh`, a `Step` and an `Observer`, and does not ask how many processes there are. Those of a job
of many are in `train/parallel`: `Ranks`, `LayoutStep` and `RankObserver`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ironlaw.config import LayoutConfig, RunConfig
from ironlaw.cores import usable_threads
from ironlaw.data.dataset import Dataset
from ironlaw.data.prepare import prepare
from ironlaw.errors import UserError
from ironlaw.ledger import Ledger
from ironlaw.machine.measure import Probe
from ironlaw.machine.profile import Profile
from ironlaw.observe.clock import StepClock
from ironlaw.observe.measured import Observations
from ironlaw.observe.profile import StepProfile
from ironlaw.plan.step import plan_run
from ironlaw.plan.totals import fits
from ironlaw.train.step import Agreed, Step

LOOK_SECONDS = 0.6  # at the machine's speed before a run, where that is under so much of it
WORTH_A_LOOK = 0.02
Result = TypeVar("Result")


@dataclass(frozen=True)
class Mesh:
    """`rank` of `size` ranks with a layout `config`, on `device`; `sites` as in `train/parallel/outer.py`."""

    device: torch.device
    rank: int = 0
    size: int = 1
    config: LayoutConfig = field(default_factory=lambda: LayoutConfig(dp=1))
    sites: int = 1

    @property
    def first(self) -> bool:
        """Whether this rank writes files and speaks."""
        return self.rank == 0

    @property
    def dp(self) -> int:
        """Replicas, which share the sequences of a batch."""
        assert self.config.dp is not None
        return self.config.dp

    def index(self, dimension: str) -> int:
        """Coordinate along tp, cp, dp, pp or site."""
        return 0

    # -- what ranks do together; every rank calls it ---------------------------------------------------------

    def first_does(self, function: Callable[[], Result]) -> Result:
        """What rank 0 makes of it, on every rank. Its UserError ends all."""
        return function()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in order of ranks."""
        return [value]

    def sum(self, values: list[float]) -> list[float]:
        """Element by element, over the ranks."""
        return values

    def barrier(self) -> None:
        """No rank goes on before all have come."""

    # -- what a trainer is made of ---------------------------------------------------------------------------

    def threads(self, profile: Profile) -> int:
        return min(profile.threads, usable_threads())

    def plan(self, config: RunConfig, profile: Profile) -> Ledger:
        """UserError for a config that cannot run."""
        plan = plan_run(config, profile)
        worth = WORTH_A_LOOK * plan.totals["total_seconds"].value
        if profile.probe and profile.device == "cpu" and worth > LOOK_SECONDS:
            torch.set_num_threads(self.threads(profile))
            now = Probe(profile.fp32_products).now(profile, LOOK_SECONDS)
            plan = plan_run(config, profile, now) if now is not None else plan
        if not fits(plan):
            raise UserError(
                "the plan does not fit this machine's memory: lower train.micro_batch; "
                "`ironlaw plan` shows what holds it"
            )
        return plan

    def prepare(
        self, config: RunConfig, progress: Callable[[int, int], None] | None, say: Callable[[str], None]
    ) -> Dataset:
        return prepare(config.data, config.model.vocab, progress, say)

    def step(self, config: RunConfig, plan: Ledger, profile: Profile, **named: Any) -> Step:
        """The model and what trains it, as this rank holds it."""
        return Step(config, plan.decided, self, onednn=profile.fp32_products == "onednn", **named)


class Observer:
    """What looks at the steps of a rank beside the clock. One process has nobody to look at."""

    peak_bytes: int | None = None  # of tensors held in a recorded step, where the observer counts them

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *error: object) -> None:
        """The run is over."""

    @contextmanager
    def step(self, number: int, clock: StepClock) -> Iterator[None]:
        """Around step `number`, counted from 1."""
        yield

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around steps under the profiler."""
        yield

    def recorded(self, profiler: Any, profile: StepProfile, persistent_bytes: int) -> None:
        """Told of a finished profiler, of what was read from it, and of the bytes that are held between steps."""

    def numbers(self, number: int) -> list[float]:
        """To be added up over the ranks in step `number`, as many on every rank."""
        return []

    def told(self, agreed: Agreed, number: int, event: Callable[..., None], say: Callable[[str], None]) -> None:
        """After step `number`: what the ranks' numbers add up to."""

    def gather(self, observed: Observations) -> None:
        """At the end, on every rank."""

    def complete(self, ledger: Ledger) -> None:
        """Add what all ranks have seen; on the first one."""
