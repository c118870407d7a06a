"""Observes the ranks of a job: communication, slow and hanging ranks, and their measured ledger.

It uses the timed calls of `communication.py` and the thread of `watcher.py`. At the end rank 0 merges the observations
of all ranks. In a step with collectives every rank takes as long as the slowest; a slow rank is one whose own time,
without its waits for other ranks, is an outlier.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from ironlaw.config import RunConfig
from ironlaw.ledger import STEP_PHASES, Estimate, Key, Kind, Ledger, Line, Origin, Phase
from ironlaw.observe.clock import StepClock, StepTimes
from ironlaw.observe.events import recorded_allocations
from ironlaw.observe.measured import Observations, typical
from ironlaw.observe.profile import Recorded, StepProfile
from ironlaw.train.mesh import Observer
from ironlaw.train.parallel.communication import Traffic, observed
from ironlaw.train.parallel.ranks import Ranks
from ironlaw.train.parallel.watcher import Watcher, kernel_seconds
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
    _windows: list[set[int]] = field(default_factory=list)  # slow ranks of the latest ones
    _known: set[int] = field(default_factory=set)

    def observe(self, own: Sequence[float], wall: float, steps: int) -> tuple[list[SlowRank], list[int]]:
        """Add a window of `steps` steps with its own and wall seconds. Returns newly slow ranks, and recovered ones."""
        self.total = [a + b for a, b in zip(self.total or [0.0] * len(own), own, strict=True)]
        self.steps += steps
        slow = {each.rank: each for each in slow_ranks(own, wall, self.stages, self.threshold)}
        self._windows = [*self._windows, set(slow)][-self.patience :]
        lasting = set.intersection(*self._windows) if len(self._windows) == self.patience else set()
        slowed = sorted(lasting - self._known)
        recovered = sorted(self._known.difference(*self._windows))
        self._known = (self._known | lasting) - set(recovered)
        return [slow[rank] for rank in slowed], recovered

    @property
    def own_seconds(self) -> list[float]:
        """Mean own seconds per step of each rank, over the whole run."""
        return [seconds / self.steps for seconds in self.total] if self.steps else []


OTHER = "between collectives"
"""Ledger line for communication time outside the observed collectives: work done for them in that phase."""


class RankObserver(Observer):
    """The observer of one rank. Enter it before the model is built, since it replaces PyTorch's collectives."""

    def __init__(self, ranks: Ranks, config: RunConfig, watcher: Watcher) -> None:
        self.ranks, self.watcher, self.every = ranks, watcher, config.recovery.straggler_every
        per_stage = ranks.size // ranks.layout.pp
        stages = [rank // per_stage for rank in range(ranks.size)]
        self.stragglers = StragglerDetector(stages, config.recovery.straggler_threshold)
        self._by_rank: list[dict[str, Any]] = []
        self._own_seconds = self._wall_seconds = 0.0  # of the steps since the last comparison of ranks
        self._first_ended_ns = 0  # end of the first profiled step
        self.peak_bytes: int | None = None  # of tensors, within one step
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> RankObserver:
        self._entered.enter_context(self.watcher)
        self.traffic: Traffic = self._entered.enter_context(observed(self.ranks))
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.close()

    @contextmanager
    def step(self, number: int, clock: StepClock) -> Iterator[None]:
        self.watcher.step = number
        began = time.perf_counter()
        with self.traffic.counting(clock):
            yield
        wall = time.perf_counter() - began
        self._wall_seconds += wall
        self._own_seconds += wall - sum(clock.times.waited_seconds.values())
        self._first_ended_ns = self._first_ended_ns or time.time_ns()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Wait for each collective where it is called. Counts of these steps are dropped."""
        self.traffic.synchronous, self._first_ended_ns = True, 0
        try:
            yield
        finally:  # a loss spike may end the profile while the run continues
            self.traffic.synchronous = False
            self.traffic.reset()

    def recorded(self, profiler: Any, profile: StepProfile, persistent_bytes: int) -> None:
        """Average the operations over ranks. The peak is that of the first profiled step, before any work between
        steps. The profile reader, written for one process, cannot split it into gradients and activations."""
        allocated = Recorded(recorded_allocations(profiler)).peak_bytes(end=self._first_ended_ns)
        self.peak_bytes = persistent_bytes + allocated
        profile.lines = mean_lines(self.ranks.gather(profile.lines))
        profile.peak_bytes, profile.peak_parts = None, {}

    # -- slow ranks ------------------------------------------------------------------------------------------

    def after_step(self, number: int, event: Callable[..., None], say: Callable[[str], None]) -> None:
        """Compare the ranks every few steps. All ranks get the same numbers; rank 0 reports slow ones."""
        if not self.every or number % self.every:
            return
        own, wall = self._own_seconds, self._wall_seconds
        self._own_seconds = self._wall_seconds = 0.0
        if self.ranks.device.type == "cuda":  # the host does not wait for collectives, the device does
            own = max(0.0, wall - kernel_seconds())
        by_rank = [0.0] * self.ranks.size
        by_rank[self.ranks.rank] = own
        wall, *by_rank = self.ranks.sum([wall / self.ranks.size, *by_rank])
        if not self.ranks.is_rank_0:
            return
        slowed, recovered = self.stragglers.observe(by_rank, wall, self.every)
        for slow in slowed:
            host = self.watcher.host(slow.rank)
            say(
                f"rank {slow.rank} on {host} is slow: it works {slow.excess_fraction:.0%} longer than the others, "
                f"which wait for it {slow.share:.0%} of the time (step {number})"
            )
            event("slow_rank", step=number, host=host, **asdict(slow))
        for rank in recovered:
            say(f"rank {rank} on {self.watcher.host(rank)} is as fast as the others again")
            event("slow_rank_over", step=number, rank=rank)

    # -- the ledger ------------------------------------------------------------------------------------------

    def gather(self, observed: Observations) -> None:
        # Rank 0 selects the steps, so that the phases of all ranks refer to the same steps.
        kept = {id(step) for step in typical(observed.steps)}
        chosen = self.ranks.on_rank_0(lambda: [i for i, step in enumerate(observed.steps) if id(step) in kept])
        steps = [observed.steps[index] for index in chosen if index < len(observed.steps)]
        self._by_rank = self.ranks.gather(self._observations(steps))

    def _observations(self, steps: Sequence[StepTimes]) -> dict[str, Any]:
        """Return this rank's observations as plain data: seconds, counts and bytes per step."""
        traffic, count = self.traffic, max(1, self.traffic.steps)
        exposed = means([s.waited_seconds for s in steps])
        communication = [
            {
                "dimension": dimension, "kind": kind, "count": found.count / count, "bytes": found.bytes / count,
                "seconds": None if found.seconds is None else found.seconds / count,
                "exposed_seconds": exposed.get(f"{dimension} {kind}", 0.0),
            }
            for (dimension, kind), found in sorted(traffic.found.items())
        ]  # fmt: skip
        return {
            "rank": self.ranks.rank, "position": self.ranks.index("pp"),
            "step_seconds": float(np.mean([s.wall_seconds for s in steps])) if steps else None,
            "phase_seconds": means([s.phase_seconds for s in steps]), "communication": communication,
            "peak_bytes": self.peak_bytes,
        }  # fmt: skip

    def complete(self, ledger: Ledger) -> None:
        merge(ledger, self._by_rank)
        own = self.stragglers.own_seconds
        if any(own):
            ledger.facts |= {"rank_own_seconds": own, "slowest_rank": own.index(max(own))}


def mean_lines(by_rank: Sequence[Sequence[Line]]) -> list[Line]:
    """Average ledger lines over ranks, as in a plan. An operation that a rank lacks takes it no time."""
    found: dict[Key, list[Line]] = {}
    for line in (line for lines in by_rank for line in lines):
        found.setdefault(line.key, []).append(line)
    ranks = len(by_rank)
    return [
        replace(
            lines[0], count=round(sum(line.count or 0 for line in lines) / ranks),
            seconds=sum(line.seconds or 0.0 for line in lines) / ranks,
        )
        for lines in found.values()
    ]  # fmt: skip


def means(rows: Sequence[Mapping[Any, float]]) -> dict[str, float]:
    """Return the mean of every name over all rows. A missing value counts as 0."""
    names = {name for row in rows for name in row}
    return {str(name): float(np.mean([row.get(name, 0.0) for row in rows])) for name in names}


def merge(ledger: Ledger, by_rank: Sequence[dict[str, Any]]) -> None:
    """Set phases to means over ranks, and add one communication line per kind of collective, as in a plan."""
    count = len(by_rank)
    found = {Phase(name) for one in by_rank for name in one["phase_seconds"]}
    if found:
        ledger.phase_seconds = {
            phase: sum(one["phase_seconds"].get(str(phase), 0.0) for one in by_rank) / count
            for phase in Phase
            if phase in found
        }
    calls: dict[str, list[dict[str, Any]]] = {}
    for call in (call for one in by_rank for call in one["communication"]):
        calls.setdefault(f"{call['dimension']} {call['kind']}", []).append(call)
    lines = [
        Line(
            Phase.COMMUNICATION, Kind.COLLECTIVE, name, count=max(round(call["count"]) for call in same),
            bytes_moved=sum(call["bytes"] / count for call in same),
            seconds=sum(call["exposed_seconds"] / count for call in same), origin=Origin.MEASURED,
        )
        for name, same in calls.items()
    ]  # fmt: skip
    waited = ledger.phase_seconds.get(Phase.COMMUNICATION)
    if waited is not None:
        rest = waited - sum(line.seconds or 0.0 for line in lines)
        if rest > 1e-6:
            lines.append(Line(Phase.COMMUNICATION, Kind.COLLECTIVE, OTHER, seconds=rest, origin=Origin.MEASURED))
    ledger.lines = [line for line in ledger.lines if line.phase is not Phase.COMMUNICATION] + lines
    peaks = [one["peak_bytes"] for one in by_rank if one["peak_bytes"] is not None]
    if peaks:
        ledger.totals["peak_bytes"] = Estimate(
            max(peaks), Origin.MEASURED, "tensors held by the rank that held most, in one step of its own"
        )
    ledger.facts["ranks"] = count
    ledger.facts["by_rank"] = list(by_rank)
    ledger.facts["spread"] = spread(by_rank)


def spread(by_rank: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the fastest and the slowest rank of each phase."""
    result = []
    for phase in STEP_PHASES:
        times = [(one["phase_seconds"][str(phase)], one["rank"]) for one in by_rank
                 if str(phase) in one["phase_seconds"]]  # fmt: skip
        if times:
            (least, fastest), (most, slowest) = min(times), max(times)
            result.append({
                "phase": str(phase), "fastest_rank": fastest, "fastest_seconds": least, "slowest_rank": slowest,
                "slowest_seconds": most,
            })  # fmt: skip
    return result
