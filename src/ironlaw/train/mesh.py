"""The ranks that train one model. One process is a mesh of one, where collective methods are trivial.

The trainer uses a `Mesh`, a `Step` and an `Observer`, whatever the number of processes. `train/parallel` has those for
many processes: `Ranks`, `LayoutStep` and `RankObserver`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from ironlaw.cores import usable_threads
from ironlaw.ledger import Ledger
from ironlaw.machine.profile import Profile
from ironlaw.observe.clock import StepClock
from ironlaw.observe.measured import Observations
from ironlaw.observe.profile import StepProfile
from ironlaw.workload.layout import Layout

Result = TypeVar("Result")


@dataclass(frozen=True)
class Mesh:
    """`rank` of `size` ranks with a `layout`, on `device`. For `sites` see `train/parallel/diloco.py`."""

    device: torch.device
    rank: int = 0
    size: int = 1
    layout: Layout = field(default_factory=Layout)
    sites: int = 1

    @property
    def is_rank_0(self) -> bool:
        """Whether this is the rank that writes files and messages."""
        return self.rank == 0

    def index(self, dimension: str) -> int:
        """Return this rank's coordinate along tp, cp, dp, pp or site."""
        return 0

    # -- collectives; every rank calls them ------------------------------------------------------------------

    def on_rank_0(self, function: Callable[[], Result]) -> Result:
        """Call `function` on rank 0 and return its result on every rank. A UserError there ends all ranks."""
        return function()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order of ranks."""
        return [value]

    def sum(self, values: list[float]) -> list[float]:
        """Return the elementwise sum over all ranks."""
        return values

    def barrier(self) -> None:
        """Wait until all ranks have called this."""

    def threads(self, profile: Profile) -> int:
        return min(profile.threads, usable_threads())


class StepResult(NamedTuple):
    """What all ranks agree on in a step: the loss over the global batch, the global gradient norm before clipping, and
    whether any rank requested a stop."""

    loss: float
    norm: float
    stop: bool


class Observer:
    """Observes the steps of a rank, in addition to the clock. This base class, for a single process, does nothing."""

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *error: object) -> None:
        """Called at the end of the run."""

    def step(self, number: int, clock: StepClock) -> AbstractContextManager[None]:
        """Return the context of step `number`, counted from 1."""
        return nullcontext()

    def recording(self) -> AbstractContextManager[None]:
        """Return the context of the profiled steps."""
        return nullcontext()

    def recorded(self, profiler: Any, profile: StepProfile, persistent_bytes: int) -> None:
        """Called with a finished profiler, the profile read from it, and the bytes held between steps."""

    def after_step(self, number: int, event: Callable[..., None], say: Callable[[str], None]) -> None:
        """Called on every rank after step `number`."""

    def gather(self, observed: Observations) -> None:
        """Gather observations at the end of the run. Called on every rank."""

    def complete(self, ledger: Ledger) -> None:
        """Add the observations of all ranks to `ledger`. Called on rank 0."""
