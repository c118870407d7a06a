"""Finds the most bytes of tensors a process holds while something runs, from PyTorch's record of its allocator.

Only this thread's calls are recorded: a tensor that another thread lets go of seems to stay until its address is given
out again, which the count takes as its end. Gloo's threads do so with the copies that a collective makes for itself,
if they let go of them after this thread has. Those are gone when this thread goes on: a recording of ranks waits for
each collective where it is called (`Traffic.synchronous` in `train/parallel/communication.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ironlaw.observe.events import Allocation, recorded_allocations
from ironlaw.observe.profile import profiled


@dataclass
class Recorded:
    """`allocations` are in order of time, and complete when the block has ended."""

    allocations: list[Allocation] = field(default_factory=list)

    def peak_bytes(self, begin: int = 0, end: int | None = None) -> int:
        """Returns the peak between two times in nanoseconds, above what was held when the recording began."""
        live: dict[int, int] = {}
        of_collective: set[int] = set()
        held = most = 0
        for allocation in self.allocations:
            if not allocation.of_collective:
                held -= sum(live.pop(address, 0) for address in of_collective)
                of_collective.clear()
            held -= live.pop(allocation.address, 0)
            if allocation.bytes > 0:
                live[allocation.address] = allocation.bytes
                held += allocation.bytes
                if allocation.of_collective:
                    of_collective.add(allocation.address)
                if allocation.moment >= begin and (end is None or allocation.moment <= end):
                    most = max(most, held)
        return most


@contextmanager
def recording() -> Iterator[Recorded]:
    """Record this thread's allocations while the block runs."""
    result = Recorded()
    try:
        with profiled() as recorder:
            yield result
    finally:
        result.allocations = recorded_allocations(recorder)
