"""Batches made by processes of their own, for when the training process has no time for it.

Whichever process is free makes the next batch: the order is a function of the step, so who makes one changes nothing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ironlaw.data.batch import Batch
from ironlaw.data.pool import ProcessPool, in_order

Made = tuple[Batch[np.ndarray], dict[str, float]]  # and the seconds of its stages
Open = Callable[[], Any]  # gives a BatchSource; pickled, so a function of a module or a partial of one


class ProcessBatches:
    """The batches of `opener()`, made `depth` ahead by each of `processes`, so many at a time: handing over a few costs
    hardly more than handing over one. Steps are asked for in order."""

    def __init__(self, opener: Open, share: int, sequence: int, processes: int, depth: int):
        self.share, self.sequence = share, sequence
        self.seconds = {"read": 0.0, "pack": 0.0}  # of all processes, by how many there are
        self._opener, self._processes, self._depth = opener, processes, depth
        self._pool: ProcessPool | None = None
        self._next = -1

    def batch(self, step: int) -> Batch[np.ndarray]:
        if self._pool is None or step != self._next:
            self.close()
            self._pool = ProcessPool(self._processes, "data.loader_processes", _start, self._opener)
            self._made = self._from(step, self._pool)
        self._next = step + 1
        with self._pool.working():
            batch, seconds = next(self._made)
        for stage, spent in seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + spent / self._processes
        return Batch(batch.inputs.astype(np.int64), batch.targets.astype(np.int64), batch.documents)

    def _from(self, step: int, pool: ProcessPool) -> Iterator[Made]:
        firsts = itertools.count(step, self._depth)
        for _, made in in_order(firsts, lambda first: pool.submit(_make, first, self._depth), self._processes):
            yield from made

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None


_opener: Open
_batches: Any = None  # what this process makes batches of, from the first one on


def _start(opener: Open) -> None:
    global _opener
    _opener = opener


def _make(first: int, number: int) -> list[Made]:
    """The batches of `number` steps from `first` on."""
    global _batches
    _batches = _batches or _opener()  # not in `_start`: what goes wrong here is raised by whoever wants the batch
    made = []
    for step in range(first, first + number):
        start, before = time.perf_counter(), dict(_batches.seconds)
        batch = _batches.batch(step)
        seconds = {stage: spent - before[stage] for stage, spent in _batches.seconds.items()}
        seconds["read"] += time.perf_counter() - start - sum(seconds.values())
        made.append((batch.map(lambda array: array.astype(np.int32)), seconds))  # half of what is sent
    return made
