"""Plans and ranks all layouts of a model on a cluster, and counts those ruled out by each constraint.

    found = search(ClusterRequest(model, cluster, sequence=8192, global_batch=1024))
    found.best[0].layout, found.best[0].step_seconds
    found.ruled_out                     # {"memory": 5120, "heads not divisible by tp": 64, ...}

Every layout whose numbers divide is planned in chunks of arrays, first without recomputation and offloading. These
never make a layout faster, so such variants are planned only for layouts that are not certain to fit, and only while
the layout itself is faster than the best found (the others are counted). The first of the ranking is the best of the
space according to the model. Offloading is tried only if nothing fits without: no measured run backs its figures.

The memory of our own trainer comes from walking its program pass by pass, as in its plan. Closed formulas rule out
layouts that certainly do not fit (`memory.py`). The others wait and are walked in order of step seconds, until none of
the rest can change the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ironlaw.errors import UserError
from ironlaw.plan.cluster.candidates import Candidates, KnownBlocks
from ironlaw.plan.cluster.estimate import ClusterRequest, PlannedCandidates, plan_candidates
from ironlaw.plan.cluster.intervals import interval_factors
from ironlaw.plan.cluster.layout_space import MAX_TP, NO_SAVING, Saving, lacked, possible_layouts, saving, savings
from ironlaw.plan.cluster.layout_table import COLUMNS, Table, code, distinct_rows, layout_of
from ironlaw.plan.cluster.memory import peak_memory
from ironlaw.plan.cluster.system import ClusterSystem, under_pressure, usable_bytes
from ironlaw.plan.memory import highest_peak
from ironlaw.plan.recipe import not_trained_here
from ironlaw.workload.layout import SPLIT_BACKWARD, Layout

HIDING = 0.005
"""Largest share of the step that recomputation may gain where launches set the pace, because messages overlap with more
compute: 0.2% in thousands of layouts tried (tests/plan/test_sanity.py)."""

HIDING_IN_BUBBLE = 0.03
"""`HIDING` with sharded weights under a zero-bubble schedule, where a longer backward pass hides more transfers and
fills no less of the bubble: 1.7% in those layouts."""

NEAREST = 20  # layouts of our own trainer walked to find the one closest to fitting
CHUNK = 20_000  # candidates planned at once: bounds memory at a few hundred MiB


@dataclass(frozen=True)
class RankedLayout:
    """A planned layout of the ranking."""

    layout: Layout
    step_seconds: float
    peak_bytes: float
    why_slower: str = ""  # its extra time over the best layout, largest term first


@dataclass
class SearchResult:
    """The ranking, fastest first, and the number of layouts ruled out by each reason."""

    best: list[RankedLayout]
    planned: int
    fitting: int
    ruled_out: dict[str, int] = field(default_factory=dict)
    nearest_miss: RankedLayout | None = None  # the layout closest to fitting, if nothing fits
    safest: RankedLayout | None = None  # the fastest that fits even at the upper end of its memory interval


Entry = tuple[float, float, np.void, list[float]]
"""Step seconds, peak bytes, row of a table of layouts, seconds of `_TERMS`."""

BEATEN = "slower than what was found, before saving memory"
"""Reason that rules out recomputing and offloading variants of a layout."""

UNWALKED = "slower than what was found, whatever their memory"
"""Reason that rules out layouts of our own trainer whose program need not be walked."""


def search(request: ClusterRequest, *, keep: int = 20, hybrid: bool = True) -> SearchResult:
    """Plans every layout and keeps the fastest that fit; with `keep` 1, that one alone, without looking for the safest.
    Raises UserError if no layout can be formed.

    Layouts that the step excludes are counted under the reason it gives. Without `hybrid`, hybrid sharding is left
    out: a third of the work for hardly slower layouts.
    """
    model, cluster, refused = request.model, request.cluster, dict[str, int]()
    constraints: dict[str, int] = {}
    widest_tp = min(MAX_TP, max(cluster.node.scale_up_accelerators, cluster.node.accelerators))
    work = cluster.count, request.sequence, request.global_batch
    table = possible_layouts(model, *work, constraints, widest_tp, hybrid, request.system.engine.cp_kinds)
    if not len(table):
        reasons = "; ".join(f"{reason}: {n}" for reason, n in constraints.items())
        raise UserError(
            f"no layout of {model.name} uses {cluster.count} accelerators ({reasons}): change the batch or the number"
        )
    table = _runnable(table, request, refused)
    constraints |= refused
    if not len(table):
        reasons = "; or ".join(refused)
        raise UserError(f"no layout of {model.name} on {cluster.count} accelerators can be used: {reasons}")
    table = table[np.argsort(table["pp"], kind="stable")]  # neighbours then share shapes
    running = _Search(request, keep, constraints)
    bound = np.concatenate([running.plan(table[start : start + CHUNK]) for start in range(0, len(table), CHUNK)])
    running.plan_savings(table, bound, savings(model, offload=False))
    running.walk()
    if not running.best and request.system.host is not None and "offload" not in request.system.engine.lacks:
        running.plan_savings(table, np.zeros(len(table)), savings(model, offload=True))
        running.walk()
    return running.found()


def hiding(table: Table) -> np.ndarray:
    """Returns the largest share of each layout's step that recomputation may gain."""
    splits = table["schedule"] >= code("schedule", SPLIT_BACKWARD[0])
    return np.where((table["zero"] >= 2) & splits, HIDING_IN_BUBBLE, HIDING)


@dataclass
class _Search:
    """A search in progress: the step, the counts and the best layouts so far."""

    request: ClusterRequest
    keep: int
    constraints: dict[str, int]
    planned: int = 0
    fitting: int = 0
    passed: int = 0  # planned layouts that were neither ruled out by memory nor found to fit
    best: list[Entry] = field(default_factory=list)
    safest: Entry | None = None
    nearest: list[tuple[float, Entry]] = field(default_factory=list)
    waiting: list[Entry] = field(default_factory=list)  # to be walked, with a lower bound of their peak
    peaks: dict[tuple[Layout, float], float] = field(default_factory=dict)  # of the layouts walked
    known_blocks: KnownBlocks = field(default_factory=dict)
    settled: set[bytes] = field(default_factory=set)  # layouts certain to fit, which gain nothing by saving memory

    @property
    def where(self) -> ClusterSystem:
        return self.request.system

    @property
    def memory_upper(self) -> float:
        """Upper end of the memory interval over the planned peak."""
        return math.exp(interval_factors("memory", *self.request.compared)[1])

    def _candidates(self, part: Table) -> Candidates:
        return replace(self.request.candidates(part), known_blocks=self.known_blocks)

    def plan(self, part: Table) -> np.ndarray:
        """Plans these rows and keeps the best. Returns, per row, a lower bound of the seconds of its saving variants.

        The bound is infinite where the row is certain to fit without allocator pressure, so that saving memory gains
        nothing. Rows of our own trainer that may fit wait to be walked.
        """
        outcome = plan_candidates(self._candidates(part), self.where)
        fits, gain = outcome.fits, hiding(part)
        self.planned += len(part)
        if not fits.any() and not self.best:
            over = np.maximum(outcome.peak.total - outcome.limit_bytes, outcome.host_bytes - outcome.host_limit_bytes)
            nearest = int(over.argmin())
            self.nearest.append((float(over[nearest]), _entries(outcome, part, np.array([nearest]))[0]))
        if not self.where.engine.fused:
            self.waiting += _fastest(outcome, fits, part, len(part))
            return outcome.times.step_seconds * (1 - gain)
        self.fitting += int(fits.sum())
        sure = fits & (outcome.peak.total * self.memory_upper <= outcome.limit_bytes)
        self._rank(_fastest(outcome, fits, part, self.keep), _fastest(outcome, sure, part, 1))
        calm = outcome.step_seconds <= outcome.times.step_seconds
        settled = sure & calm & (gain < HIDING_IN_BUBBLE)
        return np.where(settled, np.inf, outcome.times.step_seconds * (1 - gain))

    def _rank(self, fitting: list[Entry], sure: list[Entry]) -> None:
        """Merges fitting layouts into the ranking, and those certain to fit into the safest."""
        self.best = sorted([*self.best, *fitting], key=lambda entry: entry[:2])[: self.keep]
        self.safest = min([*sure, *([self.safest] if self.safest else [])], key=lambda entry: entry[:2], default=None)

    def walk(self, until: float = math.inf) -> None:
        """Walks the waiting layouts, fastest first, while they may change the answer.

        Those of `until` seconds or more keep waiting, as layouts not planned yet may be faster.
        """
        self.waiting.sort(key=lambda entry: entry[:2], reverse=True)
        limit = usable_bytes(self.where)
        while self.waiting and self.waiting[-1][0] < min(until, self._slowest_useful()):
            seconds, least, row, terms = self.waiting.pop()
            ranked = len(self.best) < self.keep or seconds < self.best[-1][0]
            enough = limit if ranked else limit / self.memory_upper
            whole = saving(np.array([row]), NO_SAVING)
            passed = whole.tobytes() in self.settled or least > enough
            peak = least if passed else self._walked(row, enough)
            if passed or peak > enough:
                self.passed += passed or not ranked
                self.nearest.append((peak - limit, (seconds, peak, row, terms)))
                continue
            self.fitting += 1
            sure = peak * self.memory_upper <= limit
            entry = float(under_pressure(np.array(seconds), np.array(peak), self.where)), peak, row, terms
            self._rank([entry], [entry] * sure)
            if sure and entry[0] <= seconds and hiding(whole) < HIDING_IN_BUBBLE:
                self.settled.add(whole.tobytes())

    def _walked(self, row: np.void, enough: float = math.inf) -> float:
        """Returns the peak bytes of a layout, or any number above `enough` if the peak exceeds it."""
        layout = layout_of(row)
        if layout.zero == 2 and not self.where.engine.reduces_in_pieces(2, layout.pp):  # the same as ZeRO 1
            layout = replace(layout, zero=1)
        if (layout, enough) not in self.peaks:
            batch, recipe = self.request.run(layout)
            self.peaks[layout, enough] = highest_peak(self.request.model, batch, layout, recipe, enough)[1].total
        return self.peaks[layout, enough]

    def plan_savings(self, table: Table, bound: np.ndarray, variants: list[Saving]) -> None:
        """Plans the variants of all rows whose bound is below the worst wanted time, fastest rows first."""
        order = np.argsort(bound, kind="stable")
        order = order[np.isfinite(bound[order])]
        step = max(1, CHUNK // len(variants))
        for start in range(0, len(order), step):
            index = order[start : start + step]
            self.walk(until=bound[index[0]])
            index = index[bound[index] < self._slowest_useful()]
            beaten = len(order[start : start + step]) - len(index)
            if beaten:
                self.constraints[BEATEN] = self.constraints.get(BEATEN, 0) + beaten * len(variants)
            index = index[self._may_fit(table[index], variants)]
            if len(index):  # the variants of a layout are adjacent rows
                spread = np.stack([saving(table[index], variant) for variant in variants], axis=1).reshape(-1)
                spread = _runnable(spread, self.request, self.constraints)
                if len(spread):
                    self.plan(spread)

    def _may_fit(self, rows: Table, variants: list[Saving]) -> np.ndarray:
        """Returns a mask of the rows with a variant that fits, judged by the variants that save most.

        Recomputation needs the activations of one block: with one block in flight, keeping them is as good.
        """
        most = max(variant["offload"] for variant in variants)
        words = ("full", "selective", "none")
        extremes = [{"recompute": code("recompute", word), "every": 1, "offload": most} for word in words]
        tried = np.concatenate([saving(rows, variant) for variant in extremes if variant in variants])
        if not len(tried):
            return np.zeros(0, dtype=bool)
        over = peak_memory(self._candidates(tried), self.where.engine).total - usable_bytes(self.where)
        if not self.best and over.min() > 0:
            least = int(over.argmin())
            self.plan(tried[least : least + 1])
        return np.asarray((over <= 0).reshape(-1, len(rows)).any(axis=0))

    def _slowest_useful(self) -> float:
        """Returns the seconds beyond which a layout changes neither the ranking nor the safest one."""
        ranked = self.best[-1][0] if len(self.best) == self.keep else np.inf
        return ranked if self.keep == 1 else max(ranked, self.safest[0] if self.safest else np.inf)

    def found(self) -> SearchResult:
        found, passed = SearchResult([], self.planned, self.fitting, self.constraints), self.passed + len(self.waiting)
        counted = {"memory": self.planned - self.fitting - passed, UNWALKED: passed}
        found.ruled_out |= {reason: number for reason, number in counted.items() if number}
        if not self.best and self.nearest:  # of our own trainer, of the `NEAREST` that seem closest
            near = [entry for _, entry in sorted(self.nearest, key=lambda pair: pair[0])]
            if not self.where.engine.fused:
                walked = [(seconds, self._walked(row), row, terms) for seconds, _, row, terms in near[:NEAREST]]
                near = sorted(walked, key=lambda entry: entry[1])
            found.nearest_miss = _candidate(near[0], near[0])
        found.best = [_candidate(entry, self.best[0]) for entry in self.best]
        found.safest = _candidate(self.safest, self.best[0]) if self.safest else None
        return found


def _fastest(outcome: PlannedCandidates, among: np.ndarray, part: Table, keep: int) -> list[Entry]:
    """Returns the fastest of the marked layouts; among equally fast ones, those with the lowest peak."""
    index = np.flatnonzero(among)
    order = index[np.lexsort((outcome.peak.total[index], outcome.step_seconds[index]))][:keep]
    return _entries(outcome, part, order)


def _entries(outcome: PlannedCandidates, part: Table, index: np.ndarray) -> list[Entry]:
    names = {name for names in _TERMS.values() for name in names}
    times = {name: getattr(outcome.times, name)[index] for name in names}
    sums = np.stack([sum(times[name] for name in names) for names in _TERMS.values()], axis=1)
    columns = outcome.step_seconds[index].tolist(), outcome.peak.total[index].tolist(), part[index], sums.tolist()
    return list(zip(*columns, strict=True))


NEVER_REFUSED = ("micro_batch", "virtual_stages", "every")
"""Columns that do not affect whether our own trainer runs a layout."""


def _runnable(rows: Table, request: ClusterRequest, ruled_out: dict[str, int]) -> Table:
    """Returns the layouts that the software can run and the step does not exclude; count the others by reason."""
    engine = request.system.engine
    refused = {f"{engine.name} has no {what}": needed for what, needed in lacked(engine, rows).items()}
    if not engine.fused:
        why = lambda layout: not_trained_here(layout, request.model, request.precision, request.optimizer)  # noqa: E731
        refused |= _refused(rows, why, NEVER_REFUSED)
    rows = _remaining(rows, refused, ruled_out)
    return rows if request.excluded is None else _remaining(rows, _refused(rows, request.excluded), ruled_out)


def _refused(
    rows: Table, why: Callable[[Layout], str | None], ignored: Sequence[str] = ()
) -> dict[str, npt.NDArray[np.bool_]]:
    """Returns a mask of the refused rows by reason; reasons do not depend on the ignored columns."""
    first, sort = distinct_rows([rows[name].astype(float) for name in COLUMNS if name not in ignored], len(rows))
    reasons = np.array([why(layout_of(row)) or "" for row in rows[first]])
    return {str(reason): (reasons == reason)[sort] for reason in sorted(set(reasons) - {""})}


def _remaining(rows: Table, refused: Mapping[str, npt.NDArray[np.bool_]], ruled_out: dict[str, int]) -> Table:
    kept = np.ones(len(rows), dtype=bool)
    for reason, needed in refused.items():
        if count := int((kept & needed).sum()):
            ruled_out[reason] = ruled_out.get(reason, 0) + count
        kept &= ~needed
    return rows[kept]


_TERMS = {
    "compute": ("forward", "backward", "head_matmul", "loss", "embedding"),
    "pipeline bubble": ("bubble",),
    "tensor parallel communication": ("tp_exposed",),
    "context parallel communication": ("cp_exposed",),
    "expert parallel communication": ("ep_exposed",),
    "pipeline messages": ("pp_exposed",),
    "communication of sharded state": ("fsdp_exposed",),
    "data parallel communication": ("reduce_exposed", "gather_exposed"),
    "launch time": ("host_excess",),
    "optimizer": ("optimizer",),
    "transfers to the host": ("offload_exposed",),
}


def _candidate(entry: Entry, winner: Entry) -> RankedLayout:
    seconds, peak, row, terms = entry
    losses = sorted(zip(np.subtract(terms, winner[3]), _TERMS, strict=True), reverse=True)
    worse = [f"{word} +{1e3 * loss:.1f} ms" for loss, word in losses if loss > 1e-3 * seconds][:2]
    return RankedLayout(layout_of(row), seconds, peak, ", ".join(worse))
