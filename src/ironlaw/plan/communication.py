"""Seconds of a program's collectives over the links of measured ranks: gloo's, on one machine or on several alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ironlaw.ledger import Kind, Line, Phase
from ironlaw.machine.links import RankFabric
from ironlaw.workload.collectives import Collective
from ironlaw.workload.layout import Layout
from ironlaw.workload.mesh import group_of
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

    def line(self, aliases: dict[str, str]) -> Line:
        name = f"{aliases.get(self.dimension, self.dimension)} {self.kind}"
        return Line(
            Phase.COMMUNICATION, Kind.COLLECTIVE, name, self.count, None, float(self.bytes), self.exposed_seconds,
            bound="network",
        )  # fmt: skip


@dataclass(frozen=True)
class Links:
    """The links that a layout's ranks have to each other."""

    fabric: RankFabric
    layout: Layout

    @property
    def ranks(self) -> int:
        return self.layout.accelerators

    @property
    def local(self) -> int:
        """Ranks on one host."""
        return self.fabric.local_ranks(self.ranks)

    def seconds(self, dimension: str, kind: str, size: float) -> float:
        """Of one collective with a buffer of `size` bytes, all groups of the dimension at it together."""
        group, stride = group_of(self.layout, dimension)
        if kind == "send":
            inside = 2 if self.local >= stride * group else 1
            return self.fabric.collective_seconds("send", size, 2, inside=inside, job=self.ranks)
        inside = max(1, min(group, self.local // stride))
        return self.fabric.collective_seconds(kind, size, group, inside=inside, job=self.ranks)

    def costs(self, program: Program, collectives: Iterable[Collective]) -> list[CollectiveCost]:
        """Everything a rank sends in a step, each at its own buffer sizes, taken as waited for."""
        found: dict[tuple[str, str], CollectiveCost] = {}
        for dimension, kind, calls, size in collectives:
            # PowerSGD's are not counted, which sends of each of DDP's buckets what it makes of it.
            count = calls or len(bucket_bytes(list(program.stages[0].parameters)))
            if not size:
                continue
            seconds = count * self.seconds(dimension, kind, size / count)
            known = found.get((dimension, kind), CollectiveCost(dimension, kind, 0, 0, 0.0, 0.0))
            seconds += known.seconds
            found[dimension, kind] = CollectiveCost(
                dimension, kind, known.count + count, known.bytes + size, seconds, seconds
            )
        return list(found.values())

    def tied_seconds(self, program: Program) -> float:
        """The gradients of a tied weight, sent both ways at once between the first stage and the last."""
        layout = self.layout
        assert program.model is not None
        if program.recipe.adapters is not None or not program.model.tied or program.last_stage in program.stages_at(0):
            return 0.0
        weight = next(p for p in program.stages[0].parameters if p.name == EMBEDDING)
        return self.seconds("pp", "send", weight.elements * 4 / layout.sharing)
