"""A program on a machine as lines of a ledger: its operations, what calling them costs, its collectives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ironlaw.ledger import UNNAMED, Kind, Line, Phase, merged
from ironlaw.machine.timing import Machine
from ironlaw.workload.collectives import Collective, group_of
from ironlaw.workload.operations import Operation, line_name
from ironlaw.workload.program import EMBEDDING, Program
from ironlaw.workload.sharding import bucket_bytes


@dataclass(frozen=True)
class CollectiveCost:
    """One kind of collective of a mesh dimension, in a step of one rank. Exposed: the rank only waits for it."""

    dimension: str
    kind: str
    count: int
    bytes: int
    seconds: float
    exposed_seconds: float

    @property
    def name(self) -> str:
        return f"{self.dimension} {self.kind}"

    def line(self, aliases: Mapping[str, str] | None = None) -> Line:
        name = f"{(aliases or {}).get(self.dimension, self.dimension)} {self.kind}"
        return Line(
            Phase.COMMUNICATION, Kind.COLLECTIVE, name, self.count, None, float(self.bytes), self.exposed_seconds,
            bound="network",
        )  # fmt: skip


def seconds_over(program: Program, machine: Machine, dimension: str, kind: str, size: float) -> float:
    """Of one collective over a dimension of the program's mesh."""
    return machine.collective_seconds(kind, size, *group_of(program.layout, dimension))


def collective_costs(program: Program, collectives: Iterable[Collective], machine: Machine) -> list[CollectiveCost]:
    """Everything a rank sends in a step, each at its own buffer sizes, taken as waited for."""
    found: dict[tuple[str, str], CollectiveCost] = {}
    for dimension, kind, calls, size in collectives:
        # PowerSGD's are not counted, which sends of each of DDP's buckets what it makes of it.
        count = calls or len(bucket_bytes(list(program.stages[0].parameters)))
        if not size:
            continue
        known = found.get((dimension, kind), CollectiveCost(dimension, kind, 0, 0, 0.0, 0.0))
        seconds = known.seconds + count * seconds_over(program, machine, dimension, kind, size / count)
        found[dimension, kind] = CollectiveCost(
            dimension, kind, known.count + count, known.bytes + size, seconds, seconds
        )
    return list(found.values())


def tied_seconds(program: Program, machine: Machine) -> float:
    """The gradients of a tied weight, sent both ways at once between the first stage and the last."""
    assert program.model is not None
    if program.recipe.adapters is not None or not program.model.tied or program.last_stage in program.stages_at(0):
        return 0.0
    weight = next(p for p in program.stages[0].parameters if p.name == EMBEDDING)
    return seconds_over(program, machine, "pp", "send", weight.elements * 4 / program.layout.sharing)


def fold(operations: Iterable[tuple[Operation, int]], machine: Machine) -> list[Line]:
    """Operations with how often each runs; the costliest decides what bounds a line. What calling them costs the host
    is a line of each phase."""

    def line(op: Operation, count: int) -> Line:
        timing, flops = machine.time(op), None if op.flops is None else op.flops * count
        seconds, moved = timing.seconds * count, float(op.bytes_moved * count)
        return Line(op.phase, op.kind, line_name(op.name), count, flops, moved, seconds, bound=timing.bound)

    calls: dict[int, tuple[Operation, int]] = {}
    for op, count in operations:  # a loop over tokens lists the same objects again and again
        calls[id(op)] = op, count + calls.get(id(op), (op, 0))[1]
    lines = merged(line(op, count) for op, count in calls.values())
    passes = (Phase.FORWARD, Phase.BACKWARD)
    lines += [_dispatch(phase, lines, machine) for phase in passes]
    return lines + [Line(phase, Kind.OTHER, UNNAMED, count=0, seconds=0.0) for phase in passes]


def _dispatch(phase: Phase, lines: list[Line], machine: Machine) -> Line:
    """What the host adds to the calls of a phase; an update is two calls, priced by its own curve."""
    here = [line for line in lines if line.phase is phase]
    calls, busy = sum(line.count or 0 for line in here), sum(line.seconds or 0.0 for line in here)
    seconds = machine.dispatch_seconds(phase, calls, busy)
    return Line(phase, Kind.HOST, "dispatch", count=calls, seconds=seconds, bound="overhead")
