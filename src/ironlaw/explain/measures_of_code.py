"""Measures of rules about how a loop is written: sizes, synchronisation, recomputation, what grows.

Most need facts that `ironlaw.observe` collects; a run without them lists these rules as not tested.
"""

from __future__ import annotations

from typing import Any

from ironlaw.explain.evidence import NOTICED, RunEvidence
from ironlaw.explain.gap import recomputed_seconds
from ironlaw.explain.rule import Figures, Measure, Reading
from ironlaw.ledger import STEP_PHASES, Phase
from ironlaw.units import bytes_, seconds

ROOM = 0.85  # of the memory
MAX_SYNCS = 1.5  # per step: one reading of the loss is how most loops log
PASSES = (Phase.FORWARD, Phase.BACKWARD)


def logging_share(e: RunEvidence) -> float | None:
    """Of the step: the loop's own time, as far as a logger was on the stack."""
    fraction = e.fact("logging_fraction")
    if fraction is None:
        return None
    return float(fraction) * sum(e.phase_share(phase) or 0.0 for phase in (Phase.HOST, Phase.IDLE))


def _syncs(e: RunEvidence) -> Reading | None:
    """Never less than a notice where there are any: what a synchronisation costs shows on an accelerator only. An agent
    has to read what it does."""
    points = e.fact("sync_points")
    if points is None or e.step is None:
        return None
    calls = [p for p in points if p["per_step"] > MAX_SYNCS]
    cost = sum(_sync_share(e, point) for point in calls)
    figures = [f"{p['place']} ({p['call']}): {p['per_step']:.0f} per step, {seconds(p['seconds'])}" for p in calls[:4]]
    times = f"{sum(p['per_step'] for p in calls):.0f}"
    return Reading(max(cost, NOTICED) if calls else 0.0, figures, {"times": times}, is_notice=e.acts)


def _sync_share(e: RunEvidence, point: dict[str, Any]) -> float:
    """Of the step. Points are timed in recorded steps, which are slower: there they have as large a part of a phase."""
    shares = {str(phase): e.phase_share(phase) or 0.0 for phase in STEP_PHASES}
    shares[Phase.HOST] += shares[Phase.IDLE]  # which a gap has both of
    known = sum(part * shares.get(phase, 0.0) for phase, part in (point.get("parts") or {}).items())
    return float(known or point["seconds"] / (e.fact("profiled_step_seconds") or e.step))


def recomputed_share(e: RunEvidence) -> float | None:
    """Of the step; 0 where memory needs it."""
    if not e.run.lines or not e.step:
        return None
    resident, have = e.run.totals.get("resident_bytes"), e.fact("memory_bytes")
    kept = e.plan.memory_bytes().get("activations") or 0.0
    if resident is not None and have and resident.value + kept > ROOM * have:
        return 0.0
    return recomputed_seconds(e.run) / e.step


def _align_figures(e: RunEvidence) -> list[str]:
    figures = [
        f"{one['module']}: {one['shape'][0]} × {one['shape'][1]} takes {seconds(one['seconds'])}, "
        f"{one['aligned'][0]} × {one['aligned'][1]} {seconds(one['aligned_seconds'])}"
        for one in e.fact("misaligned") or []
    ]
    odd = (e.fact("odd_sizes") or {}).items()
    return figures + [f"{name}: {size:,}, not a multiple of 8" for name, size in odd]


def _misaligned(e: RunEvidence) -> float | None:
    """In a loop that is not ours, sizes that are no weight's matter to accelerators only."""
    ours_or_device = e.fact("device") != "cpu" or not e.tolerance
    return e.gain("alignment", "odd_sizes" if ours_or_device and e.fact("odd_sizes") else "misaligned")


def _growth(e: RunEvidence) -> Reading | None:
    if "memory_grows" not in e.run.facts:
        return None
    found = e.fact("memory_grows")
    if not found:
        return Reading(0.0)
    holder, grown = found["holder"], found["bytes_per_step"]
    have, resident = e.fact("memory_bytes"), e.run.totals.get("resident_bytes")
    figures = [f"{bytes_(grown)} more after every step, evenly to the end of the loop"]
    if have and resident is not None and grown:
        figures.append(f"full after {max(0.0, have - resident.value) / grown:,.0f} more steps")
    return Reading(1.0, figures, {"keeps": f": `{holder}` keeps something of every step" if holder else ""})


def _recompiles(e: RunEvidence) -> float | None:
    """Wall time of steps, after the first few, in which the compiler ran, above that of a typical step."""
    spent, wall = e.fact("recompile_seconds"), e.fact("wall_seconds") or {}
    return None if spent is None or not wall.get("training") else float(spent) / float(wall["training"])


def _by_hand(e: RunEvidence) -> float | None:
    """Time between the backward pass and the end of the update that lines other than calls of optimizers take, and
    other than PyTorch's own clipping: where that is long, the batch is small."""
    lines, updates = e.lines(Phase.OPTIMIZER), e.fact("update_lines")
    if not lines or not updates:
        return None
    usual = {*updates, (e.fact("places") or {}).get("clipping")}
    return sum(share for line, share in lines if line not in usual) * (e.phase_share(Phase.OPTIMIZER) or 0.0)


def _untouched(e: RunEvidence) -> float | None:
    """The update by the part of all gradients, and the backward pass by what the making of such rows takes of it."""
    found = e.fact("rows_untouched")
    if not found:
        return None
    parts = ((Phase.OPTIMIZER, found["part"]), (Phase.BACKWARD, found.get("of_backward", 0.0)))
    return float(sum(part * (e.phase_share(phase) or 0.0) for phase, part in parts))


MEASURES: dict[str, Measure] = {
    "rows_untouched": _untouched,
    "memory_grows": _growth,
    "recompiles": _recompiles,
    "update_by_hand": _by_hand,
    "misaligned": _misaligned,
    "recompute_needless": recomputed_share,
    "sync_points": _syncs,
    "logging_frequent": logging_share,
}
FIGURES: dict[str, Figures] = {
    "update_by_hand": lambda e: e.line_figures(Phase.OPTIMIZER),
    "misaligned": _align_figures,
}
