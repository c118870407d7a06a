"""Finds the peak of a recorded step's memory, and what was alive then."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ironlaw.ledger import Phase
from ironlaw.observe.events import Allocation

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "temporaries", "batch")


@dataclass
class KnownStorages:
    """Storages that exist when recording begins, and gradients seen while it runs: address -> bytes."""

    weights: dict[int, int] = field(default_factory=dict)
    gradients: dict[int, int] = field(default_factory=dict)
    optimizer: dict[int, int] = field(default_factory=dict)
    gradient_addresses: set[int] = field(default_factory=set)  # of all recorded steps, after the backward pass
    batch_bytes: int = 0


@dataclass
class MemoryPeak:
    """Bytes. `parts` sum to `bytes`; `groups` say which part of the model holds what was allocated in the step."""

    bytes: int
    parts: dict[str, int]
    groups: dict[str, int]
    curve: list[tuple[float, int]]  # seconds from the beginning of the recording, bytes alive


@dataclass
class _Alive:
    bytes: int
    category: str
    group: str


def find_peak(
    allocations: Sequence[Allocation],
    held: KnownStorages,
    phase_at: Callable[[int], Phase | None],
    group_at: Callable[[int], str],
) -> MemoryPeak | None:
    """Replay the recorded allocations.

    What was allocated in a forward pass and outlives it waits for the backward pass: activations. What a backward
    pass leaves at the address of a gradient is one. Everything else is temporary.
    """
    if not allocations:
        return None
    categories = _categories(allocations, held, phase_at)
    alive = {address: _Alive(size, "gradients", "gradients") for address, size in held.gradients.items()}
    now: dict[str, int] = defaultdict(int)
    now |= {"weights": sum(held.weights.values()), "optimizer": sum(held.optimizer.values())}
    now |= {"gradients": sum(held.gradients.values()), "batch": held.batch_bytes}
    groups: dict[str, int] = defaultdict(int)
    total = sum(now.values())
    peak = MemoryPeak(total, dict(now), {}, [])
    first = allocations[0].moment
    for index, allocation in enumerate(allocations):
        changes = []
        # What is at an address that is given out has been freed, by another thread if not by this one.
        if (gone := alive.pop(allocation.address, None)) is not None:
            changes.append((-1, gone))
        if allocation.bytes > 0:
            alive[allocation.address] = entry = _Alive(allocation.bytes, categories[index], group_at(allocation.moment))
            changes.append((1, entry))
        for sign, entry in changes:
            now[entry.category] += sign * entry.bytes
            groups[entry.group] += sign * entry.bytes
            total += sign * entry.bytes
        peak.curve.append(((allocation.moment - first) / 1e9, total))
        if total > peak.bytes:
            peak.bytes, peak.parts, peak.groups = total, dict(now), dict(groups)
    peak.parts = {name: peak.parts.get(name, 0) for name in CATEGORIES}
    peak.groups = {name: size for name, size in sorted(peak.groups.items(), key=lambda g: -g[1]) if size > 0}
    peak.curve = _thin(peak.curve)
    return peak


def _categories(
    allocations: Sequence[Allocation], held: KnownStorages, phase_at: Callable[[int], Phase | None]
) -> list[str]:
    """Returns the category of each allocation, which is known when it is freed."""
    result = ["temporaries"] * len(allocations)
    live: dict[int, tuple[int, Phase | None]] = {}  # address -> index and phase of its allocation
    for index, allocation in enumerate(allocations):
        phase = phase_at(allocation.moment)
        if allocation.bytes > 0:
            live[allocation.address] = index, phase
            continue
        born = live.pop(allocation.address, None)
        if born is not None:
            result[born[0]] = _category(born[1], phase, allocation.address in held.gradient_addresses)
    for address, (index, phase) in live.items():  # never freed while recording
        result[index] = _category(phase, None, address in held.gradient_addresses)
    return result


def _category(born: Phase | None, died: Phase | None, at_gradient: bool) -> str:
    if born is Phase.FORWARD and died is Phase.BACKWARD:
        return "activations"
    if born is Phase.BACKWARD and died is not Phase.BACKWARD and at_gradient:
        return "gradients"
    return "temporaries"


def _thin(curve: list[tuple[float, int]], most: int = 300) -> list[tuple[float, int]]:
    """Returns the highest point of each of `most` equal stretches, so that the peak stays."""
    if len(curve) <= most:
        return curve
    size = -(-len(curve) // most)
    return [max(curve[i : i + size], key=lambda point: point[1]) for i in range(0, len(curve), size)]
