"""Descends from the hardware's ceiling to what was attained: each second above the ideal step gets one name.

    ideal = model FLOPs / peak                      the whole step, were there nothing else: 100%
    + shape, memory, launch, communication, ...     seconds that a cause adds
    = the measured step                             MFU = ideal / step

Every operation is cut once: the time its FLOPs take at peak, what its shape costs on top (planned from measured
curves), and what it took beyond its plan. So the steps sum to the measured step exactly; the last one is what is left.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ironlaw.explain.gap import RECOMPUTED_SUFFIXES, Gap
from ironlaw.ledger import Kind, Ledger, Phase, summed

# name -> what it means; in the order of the descent.
STEPS = {
    "shape": "matrix products and attention, above their FLOPs at peak: what these shapes can attain",
    "memory": "operations that stream tensors: bandwidth, not arithmetic, sets their time",
    "launch": "dispatch, Python, and waiting within the loop",
    "communication": "waiting for other devices, not hidden behind compute",
    "bubble": "pipeline stages without work",
    "data": "waiting for batches, and copying them to the device",
    "recomputation": "forward operations done again in the backward pass",
    "overhead": "operations beyond their plan: a slower machine, colder caches, the allocator",
    "unattributed": "in the step, in none of its phases",
}
PRODUCTS = (Kind.MATMUL, Kind.ATTENTION)


@dataclass
class Drop:
    """One step of the descent. `measured`: read off a clock; else derived from the plan."""

    name: str
    seconds: float | None = None
    measured: bool = False
    operations: dict[str, float] = field(default_factory=dict)  # seconds of those behind it

    def to_json(self, before: float, ideal: float | None) -> dict[str, Any]:
        after = None if self.seconds is None else before + self.seconds
        largest = sorted(self.operations.items(), key=lambda item: -abs(item[1]))[:3]
        return {
            "name": self.name, "meaning": STEPS[self.name], "seconds": self.seconds, "measured": self.measured,
            "utilisation_after": ideal / after if ideal is not None and after else None,
            "operations": [{"name": name, "seconds": seconds} for name, seconds in largest],
        }  # fmt: skip


def waterfall(plan: Ledger, gap: Gap) -> dict[str, Any]:
    """`ideal_seconds` is None without a plan: then the descent starts at what the profile measured as compute.
    `complete`: operations were timed, so that the drops could be told apart."""
    step, peak = gap.step.measured, plan.facts.get("matmul_peak_flops_per_second")
    again = float(sum(line.flops or 0 for line in plan.lines if line.operation.endswith(RECOMPUTED_SUFFIXES)))
    flops = float(plan.flops() - again) or None  # of the model: what runs again is no progress
    ideal = flops / peak if flops and peak else None
    drops = {name: Drop(name) for name in STEPS}
    timed = any(row.measured is not None for row in gap.operations)
    if timed:
        _operations(plan, gap, peak, drops)
    _phases(gap, drops)
    _recomputation(gap, drops)
    if step is not None:
        named = sum(d.seconds or 0.0 for d in drops.values()) + (ideal or 0.0)
        rest = step - named - (gap.unattributed_seconds or 0.0)
        last = drops["overhead"]
        if timed or ideal is not None:
            last.seconds = (last.seconds or 0.0) + rest
        _add(drops["unattributed"], "unattributed", gap.unattributed_seconds, True)
    rows, now = [], ideal or 0.0
    for drop in drops.values():
        rows.append(drop.to_json(now, ideal))
        now += drop.seconds or 0.0
    mfu = ideal / step if ideal is not None and step else None
    return {
        "step_seconds": step, "ideal_seconds": ideal, "peak_flops_per_second": peak, "mfu": mfu,
        "hfu": None if mfu is None else mfu * (1 + (again / flops if flops else 0.0)), "drops": rows, "complete": timed,
    }  # fmt: skip


def _operations(plan: Ledger, gap: Gap, peak: float | None, drops: dict[str, Drop]) -> None:
    flops = summed(plan.lines, lambda line: line.key, "flops")
    for row in gap.operations:
        if row.measured is None or row.name.endswith(RECOMPUTED_SUFFIXES):
            continue
        at_peak = (flops.get((row.phase, row.kind, row.name)) or 0) / peak if peak else 0.0
        explained = row.measured if row.planned is None else min(row.measured, row.planned)
        name = f"{row.name} ({row.phase})"
        if row.kind is Kind.HOST:
            _add(drops["launch"], name, row.measured, True)
            continue
        if row.kind is Kind.COLLECTIVE:
            if row.phase is not Phase.COMMUNICATION:  # that one counts as a phase
                _add(drops["communication"], name, row.measured, True)
            continue
        where = "shape" if row.kind in PRODUCTS else "memory"
        _add(drops[where], name, explained - at_peak, row.planned is None)
        if row.measured > explained:
            _add(drops["overhead"], name, row.measured - explained, True)


def _phases(gap: Gap, drops: dict[str, Drop]) -> None:
    known = {row.name: row.measured for row in gap.phases}
    for phase, name in (
        (Phase.DATA, "data"), (Phase.TRANSFER, "data"), (Phase.HOST, "launch"), (Phase.IDLE, "launch"),
        (Phase.COMMUNICATION, "communication"),
    ):  # fmt: skip
        _add(drops[name], str(phase), known.get(str(phase)), True)


def _recomputation(gap: Gap, drops: dict[str, Drop]) -> None:
    for row in gap.operations:
        seconds = row.measured if row.measured is not None else row.planned
        if row.name.endswith(RECOMPUTED_SUFFIXES) and seconds:
            _add(drops["recomputation"], row.name, seconds, row.measured is not None)


def _add(drop: Drop, name: str, seconds: float | None, measured: bool) -> None:
    if seconds is None:
        return
    drop.measured = measured if drop.seconds is None else drop.measured and measured
    drop.seconds = (drop.seconds or 0.0) + seconds
    drop.operations[name] = drop.operations.get(name, 0.0) + seconds
