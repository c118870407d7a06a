"""Operations walked in order: bytes allocated and freed by component, and the highest moment.

    walk = Walk()
    walk.run(layer.forward)
    walk.peak.total, walk.peak.where

What comes again, operations that layers share or a whole pass, is walked once: after that it rises and falls as then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

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

    @cached_property
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
    """Something in a row, in bytes by component above where it starts: what it leaves, and its highest moment."""

    left: dict[str, float]
    highest: Peak

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
        names = ("activations", "temporaries", "gradients")
        left = (saved, temporary, gradients)
        return cls(dict(zip(names, left, strict=True)), Peak(where, dict(zip(names, highest, strict=True))))


@dataclass
class Walk:
    """What is held now, and the highest moment so far."""

    now: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COMPONENTS, 0))
    peak: Peak = Peak("start", {})
    known: dict[Hashable, MemoryDelta] = field(default_factory=dict)
    operations: list[Sequence[Operation]] = field(default_factory=list)  # known by their identity, which they keep

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
        key = id(operations), keeps_gradients
        if key not in self.known:
            self.operations.append(operations)
            self.known[key] = MemoryDelta.of(operations, keeps_gradients)
        self._take(self.known[key])

    def repeat(self, key: Hashable, walked: Callable[[int], None], stage: int) -> None:
        """What `walked` does to a stage, which is the same whenever the key is."""
        if key in self.known:
            return self._take(self.known[key])
        before, highest = dict(self.now), self.peak
        self.peak = Peak("", {"": -math.inf})
        walked(stage)
        left = {name: size - before[name] for name, size in self.now.items() if size != before[name]}
        here = {name: size - before.get(name, 0) for name, size in self.peak.components.items()}
        self.known[key] = MemoryDelta(left, Peak(self.peak.where, here))
        self.peak = max(highest, self.peak, key=lambda peak: peak.total)

    def _take(self, rise: MemoryDelta) -> None:
        now = self.now
        if sum(now.values()) + rise.highest.total > self.peak.total:
            more = rise.highest.components
            self.peak = Peak(rise.highest.where, {name: size + more.get(name, 0) for name, size in now.items()})
        for name, size in rise.left.items():
            now[name] += size
