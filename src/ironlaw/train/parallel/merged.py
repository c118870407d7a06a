"""The measured ledger of a job: what every rank saw, put together by rank 0 at the end of a run.

mine = seen(observed, chosen, waits, peak_bytes, rank, position)     # on every rank
merge(ledger, everybodys)                                            # on rank 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ironlaw.ledger import STEP_PHASES, Estimate, Kind, Ledger, Line, Origin, Phase
from ironlaw.observe.measured import Observations, typical
from ironlaw.train.parallel.waiting import Waits

OTHER = "between collectives"
"""Exposed communication that no collective was seen in: what is done for them while the step is in that phase."""


def typical_steps(observed: Observations) -> list[int]:
    """Which of the steps count: rank 0 says so for all, so that their phases are those of the same steps."""
    chosen = {id(step) for step in typical(observed.steps)}
    return [index for index, step in enumerate(observed.steps) if id(step) in chosen]


def seen(
    observed: Observations, chosen: Sequence[int], waits: Waits, peak_bytes: int | None, rank: int, position: int
) -> dict[str, Any]:
    """One rank's part, as plain data: seconds per step of the chosen ones, counts and bytes per step."""
    steps = [observed.steps[index] for index in chosen if index < len(observed.steps)]
    phases: dict[str, float] = {}
    exposed: dict[str, float] = {}
    if steps:
        for phase in {p for s in steps for p in s.phase_seconds}:
            phases[str(phase)] = float(np.mean([s.phase_seconds.get(phase, 0.0) for s in steps]))
        for what in {w for s in steps for w in s.waited_seconds}:
            exposed[what] = float(np.mean([s.waited_seconds.get(what, 0.0) for s in steps]))
    communication = [
        {
            "dimension": dimension, "kind": kind, "count": found.count / max(1, waits.steps),
            "bytes": found.bytes / max(1, waits.steps),
            "seconds": None if found.seconds is None else found.seconds / max(1, waits.steps),
            "exposed_seconds": exposed.get(f"{dimension} {kind}", 0.0),
        }
        for (dimension, kind), found in sorted(waits.found.items())
    ]  # fmt: skip
    step = float(np.mean([s.wall_seconds for s in steps])) if steps else None
    return {
        "rank": rank, "position": position, "step_seconds": step, "phase_seconds": phases,
        "communication": communication, "peak_bytes": peak_bytes,
    }  # fmt: skip


def merge(ledger: Ledger, everybodys: Sequence[dict[str, Any]]) -> None:
    """Phases become those of a mean rank; each collective a line of the communication phase, as the plan has it."""
    count = len(everybodys)
    found = {Phase(name) for one in everybodys for name in one["phase_seconds"]}
    if found:
        ledger.phase_seconds = {
            phase: sum(one["phase_seconds"].get(str(phase), 0.0) for one in everybodys) / count
            for phase in Phase
            if phase in found
        }
    sums: dict[str, Line] = {}
    for one in everybodys:
        for talk in one["communication"]:
            name = f"{talk['dimension']} {talk['kind']}"
            known = sums.get(
                name, Line(Phase.COMMUNICATION, Kind.COLLECTIVE, name, bytes_moved=0.0, seconds=0.0,
                           origin=Origin.MEASURED)
            )  # fmt: skip
            sums[name] = replace(
                known, bytes_moved=(known.bytes_moved or 0.0) + talk["bytes"] / count,
                seconds=(known.seconds or 0.0) + talk["exposed_seconds"] / count,
                count=max(known.count or 0, round(talk["count"])),
            )  # fmt: skip
    waited = ledger.phase_seconds.get(Phase.COMMUNICATION)
    lines = list(sums.values())
    if waited is not None:
        rest = waited - sum(line.seconds or 0.0 for line in lines)
        if rest > 1e-6:
            lines.append(Line(Phase.COMMUNICATION, Kind.COLLECTIVE, OTHER, seconds=rest, origin=Origin.MEASURED))
    ledger.lines = [line for line in ledger.lines if line.phase is not Phase.COMMUNICATION] + lines
    peaks = [one["peak_bytes"] for one in everybodys if one["peak_bytes"] is not None]
    if peaks:
        ledger.totals["peak_bytes"] = Estimate(
            max(peaks), Origin.MEASURED, "tensors held by the rank that held most, in one step of its own"
        )
    ledger.facts["ranks"] = count
    ledger.facts["by_rank"] = list(everybodys)
    ledger.facts["spread"] = spread(everybodys)


def spread(everybodys: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per phase, which rank took least and which most."""
    result = []
    for phase in STEP_PHASES:
        times = [(one["phase_seconds"][str(phase)], one["rank"]) for one in everybodys
                 if str(phase) in one["phase_seconds"]]  # fmt: skip
        if times:
            (least, fastest), (most, slowest) = min(times), max(times)
            result.append({
                "phase": str(phase), "fastest_rank": fastest, "fastest_seconds": least, "slowest_rank": slowest,
                "slowest_seconds": most,
            })  # fmt: skip
    return result
