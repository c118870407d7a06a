"""Timed operations folded into the lines of a ledger: one per (phase, kind, operation)."""

from __future__ import annotations

from collections.abc import Iterable

from ironlaw.ledger import UNNAMED, Key, Kind, Line, Phase
from ironlaw.plan.machines import Machine
from ironlaw.workload.operations import Operation, line_name


def fold(operations: Iterable[tuple[Operation, int]], machine: Machine) -> list[Line]:
    """Operations with how often each runs; the costliest decides what bounds a line. What calling them costs the host
    is a line of each phase."""
    folded: dict[Key, Line] = {}
    costliest: dict[Key, float] = {}
    for op, count in operations:
        timing = machine.time(op)
        key = (op.phase, op.kind, line_name(op.name))
        seconds = timing.seconds * count
        before = folded.get(key, Line(*key, count=0, bytes_moved=0.0, seconds=0.0))
        bound = timing.bound if seconds >= costliest.get(key, 0.0) else before.bound
        costliest[key] = max(seconds, costliest.get(key, 0.0))
        folded[key] = Line(
            *key,
            count=(before.count or 0) + count,
            flops=before.flops if op.flops is None else (before.flops or 0) + op.flops * count,
            bytes_moved=(before.bytes_moved or 0.0) + op.bytes_moved * count,
            seconds=(before.seconds or 0.0) + seconds,
            bound=bound,
        )
    lines = list(folded.values())
    passes = (Phase.FORWARD, Phase.BACKWARD)
    lines += [_dispatch(phase, lines, machine) for phase in passes]
    return lines + [Line(phase, Kind.OTHER, UNNAMED, count=0, seconds=0.0) for phase in passes]


def _dispatch(phase: Phase, lines: list[Line], machine: Machine) -> Line:
    """What the host adds to the calls of a phase; an update is two calls, priced by its own curve."""
    here = [line for line in lines if line.phase is phase]
    calls, busy = sum(line.count or 0 for line in here), sum(line.seconds or 0.0 for line in here)
    seconds = machine.dispatch_seconds(phase, calls, busy)
    return Line(phase, Kind.HOST, "dispatch", count=calls, seconds=seconds, bound="overhead")
