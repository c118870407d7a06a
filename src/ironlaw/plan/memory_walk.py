"""Operations walked in order: bytes allocated and freed by component, and the highest moment.

    walk = Walk()
    walk.run(layer.forward)
    walk.peak.total, walk.peak.where

A layer is walked operation by operation once; layers that share its operations rise and fall as it does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ironlaw.ledger import MemoryLine
from ironlaw.workload.operations import Operation

COMPONENTS = (
    "weights", "gradients", "optimizer", "activations", "temporaries", "gathered", "reducing", "messages",
    "communication",
)  # fmt: skip
ALWAYS_SHOWN = ("weights", "gradients", "optimizer", "activations", "temporaries", "batch")
NOTES = {"activations": "saved for the backward pass"}


@dataclass(frozen=True)
class Peak:
    """The highest moment of a rank's step, in bytes by component."""

    where: str
    components: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.components.values())

    def lines(self, notes: dict[str, str]) -> list[MemoryLine]:
        """For the ledger: what there always is, and what else there is here."""
        order = [*ALWAYS_SHOWN, *(name for name in self.components if name not in ALWAYS_SHOWN)]
        return [
            MemoryLine(name, self.components.get(name, 0), note=notes.get(name, NOTES.get(name, "")))
            for name in order
            if name in ALWAYS_SHOWN or self.components.get(name)
        ]


@dataclass(frozen=True)
class MemoryDelta:
    """Operations in a row, in bytes above where they start: what they leave, and their highest moment."""

    saved: float
    temporary: float
    gradients: float
    highest: tuple[float, float, float]  # the same three at that moment
    where: str

    @classmethod
    def of(cls, operations: Iterable[Operation], keeps_gradients: bool) -> MemoryDelta:
        """`keeps_gradients`: new ones stay; else they are freed again, once added to those that are there."""
        saved = temporary = gradients = 0
        highest, most, where = (0, 0, 0), -math.inf, ""
        for op in operations:
            saved += op.saved_bytes
            temporary += op.temporary_bytes
            gradients += op.gradient_bytes if keeps_gradients else 0
            passing = 0 if keeps_gradients else op.gradient_bytes
            if (total := saved + temporary + gradients + passing) > most:
                highest, most, where = (saved, temporary + passing, gradients), total, f"{op.name}, {op.phase}"
            saved -= op.frees_saved_bytes
            temporary -= op.frees_temporary_bytes
        return cls(saved, temporary, gradients, highest, where)


@dataclass
class Walk:
    """What is held now, and the highest moment so far."""

    now: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COMPONENTS, 0))
    peak: Peak = Peak("start", {})
    known: dict[tuple[int, bool], tuple[Sequence[Operation], MemoryDelta]] = field(default_factory=dict)

    def add(self, component: str, size: float, where: str) -> None:
        self.now[component] += size
        if size > 0:
            self.look(where)

    def passing(self, component: str, size: float, where: str) -> None:
        """Bytes that are there for a moment."""
        self.add(component, size, where)
        self.now[component] -= size

    def look(self, where: str) -> None:
        if sum(self.now.values()) > self.peak.total:
            self.peak = Peak(where, dict(self.now))

    def run(self, operations: Sequence[Operation], keeps_gradients: bool = True) -> None:
        if not operations:
            return
        known = self.known.get((id(operations), keeps_gradients))
        if known is None:  # kept with the operations, whose identity is the key
            known = self.known[id(operations), keeps_gradients] = (
                operations,
                MemoryDelta.of(operations, keeps_gradients),
            )
        rise, now = known[1], self.now
        saved, temporary, gradients = rise.highest
        if sum(now.values()) + saved + temporary + gradients > self.peak.total:
            more = {"activations": saved, "temporaries": temporary, "gradients": gradients}
            self.peak = Peak(rise.where, {name: size + more.get(name, 0) for name, size in now.items()})
        now["activations"] += rise.saved
        now["temporaries"] += rise.temporary
        now["gradients"] += rise.gradients
