"""The ranks that train one model. One process is a mesh of one: what many ranks agree on, it knows by itself.

The trainer talks to a `Mesh`, a `Step` and an `Observer`, which a `Strategy` makes, and does not ask how many processes
there are. Those of a job of many are in `train/parallel`: `Ranks`, `LayoutStep`, `RankObserver` and `RankStrategy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from ironlaw.config import LayoutConfig
from ironlaw.cores import usable_threads
from ironlaw.ledger import Ledger
from ironlaw.machine.profile import Profile
from ironlaw.observe.clock import StepClock
from ironlaw.observe.measured import Observations
from ironlaw.observe.profile import StepProfile

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

    def threads(self, profile: Profile) -> int:
        return min(profile.threads, usable_threads())


class Agreed(NamedTuple):
    """The same on every rank: loss over the global batch, norm of the whole gradient before clipping, whether any rank
    wants to stop, and the sums of what each had to add."""

    loss: float
    norm: float
    stop: bool
    added: list[float]


class Observer:
    """What looks at the steps of a rank beside the clock. One process has nobody to look at."""

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
