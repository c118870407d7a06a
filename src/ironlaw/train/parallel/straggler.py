"""Finds ranks that are slower than the others.

In a step with collectives every rank takes as long as the slowest; ranks differ in the time they spend waiting. A
rank's own time is the step's without its waits for other ranks (`observer.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from ironlaw.train.recovery import SIGMA

CERTAIN_SIGMAS = 4.0  # robust standard deviations above the median


@dataclass(frozen=True)
class SlowRank:
    rank: int
    own_seconds: float
    typical_seconds: float
    share: float  # of the step, for which the others wait

    @property
    def excess_fraction(self) -> float:
        """The excess over the others' time, as a fraction of that."""
        return self.own_seconds / self.typical_seconds - 1 if self.typical_seconds else float("inf")


def slow_ranks(own: Sequence[float], wall: float, stages: Sequence[int], threshold: float) -> list[SlowRank]:
    """Return the ranks whose own seconds exceed the median of their pipeline stage by `threshold` of the step and by
    four robust standard deviations. Stages with a single rank are skipped."""
    found = []
    for stage in sorted(set(stages)):
        members = [rank for rank, its in enumerate(stages) if its == stage]
        if len(members) < 2 or wall <= 0:
            continue
        values = sorted(own[rank] for rank in members)
        middle = values[(len(values) - 1) // 2]
        spread = SIGMA * statistics.median(abs(value - middle) for value in values)
        for rank in members:
            excess = own[rank] - middle
            # With two or three ranks the deviation is of no use: the slow rank may be half of them.
            if excess > threshold * wall and (len(members) < 4 or excess > CERTAIN_SIGMAS * spread):
                found.append(SlowRank(rank, own[rank], middle, excess / wall))
    return found


@dataclass
class StragglerDetector:
    """Follows the ranks of one run. `observe` returns changes: ranks that became slow, and those slow no more."""

    stages: Sequence[int]
    threshold: float
    patience: int = 2  # consecutive windows
    total: list[float] = field(default_factory=list)  # own seconds by rank
    steps: int = 0
    _streak: dict[int, int] = field(default_factory=dict)
    _known: set[int] = field(default_factory=set)

    def observe(self, own: Sequence[float], wall: float, steps: int) -> tuple[list[SlowRank], list[int]]:
        """Add a window of `steps` steps with its own and wall seconds. Returns newly slow ranks, and recovered ones."""
        self.total = [a + b for a, b in zip(self.total or [0.0] * len(own), own, strict=True)]
        self.steps += steps
        slow = {each.rank: each for each in slow_ranks(own, wall, self.stages, self.threshold)}
        before = dict(self._streak)
        self._streak = {}
        for rank in range(len(own)):
            sign = 1 if rank in slow else -1
            streak = before.get(rank, 0)
            self._streak[rank] = streak + sign if streak * sign > 0 else sign
        lasting = [rank for rank in slow if self._streak[rank] >= self.patience]
        slowed = [slow[rank] for rank in lasting if rank not in self._known]
        recovered = [rank for rank in sorted(self._known) if self._streak[rank] <= -self.patience]
        self._known = (self._known | {each.rank for each in slowed}) - set(recovered)
        return slowed, recovered

    @property
    def own_seconds(self) -> list[float]:
        """Mean own seconds per step of each rank, over the whole run."""
        return [seconds / self.steps for seconds in self.total] if self.steps else []
