"""Memory over a sequence of operations: bytes allocated and freed by component, and the peak.

    walk = Walk()
    walk.run(layer.forward)
    walk.peak.total, walk.peak.where

Repeated parts (operations that layers share, or a whole pass) are walked once; their effect is then applied again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
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
    """The peak memory of a rank's step, in bytes by component, and the operation where it occurs."""

    where: str
    components: dict[str, float]
    total: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", sum(self.components.values()))

    def lines(self, notes: dict[str, str]) -> list[MemoryLine]:
        """Returns memory lines for the ledger: the components always shown, then the other nonzero ones."""
        order = [*ALWAYS_SHOWN, *(name for name in self.components if name not in ALWAYS_SHOWN)]
        return [
            MemoryLine(name, self.components.get(name, 0), note=notes.get(name, NOTES.get(name, "")))
            for name in order
            if name in ALWAYS_SHOWN or self.components.get(name)
        ]


@dataclass(frozen=True)
class MemoryDelta:
    """The effect of a sequence of operations, in bytes by component above its start: what remains, and the peak."""

    left: dict[str, float]
    highest: Peak

    @classmethod
    def of(cls, operations: Iterable[Operation], keeps_gradients: bool) -> MemoryDelta:
        """With `keeps_gradients`, new gradients stay; otherwise they are added to existing ones and freed."""
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
    """Bytes held now by component, and the peak so far."""

    now: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COMPONENTS, 0))
    peak: Peak = Peak("start", {})
    known: dict[Hashable, MemoryDelta] = field(default_factory=dict)
    operations: list[Sequence[Operation]] = field(default_factory=list)  # kept alive: their ids are keys of `known`

    def add(self, component: str, size: float, where: str) -> None:
        self.now[component] += size
        if size > 0:
            self.look(where)

    def passing(self, component: str, size: float, where: str) -> None:
        """Adds `size` bytes that are freed right away: only the peak can change."""
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

    def repeat(self, key: Hashable, walk: Callable[[], None]) -> None:
        """Calls `walk` the first time; for a known key, applies the effect recorded then."""
        if key in self.known:
            return self._take(self.known[key])
        before, highest = dict(self.now), self.peak
        self.peak = Peak("", {"": -math.inf})
        walk()
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
