"""Work that runs ahead of its consumer, with results in the order of the work; worker processes; and batches made in
processes, for when the training process has no time for them.

A worker process does not import the program's main module, leaves Ctrl-C to its parent and ends with its parent. Any
idle worker makes the next batch: the order is a function of the step, so the batches do not depend on the worker.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Self, TypeVar

import numpy as np

from ironlaw.data.batch import Batch
from ironlaw.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    items: Iterable[Item], submit: Callable[[Item], Future[Result]], ahead: int
) -> Generator[tuple[Item, Result], None, None]:
    """Yield every item with its result. While one result is waited for, `ahead` more are in progress."""
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    for item in items:
        waiting.append((item, submit(item)))
        if len(waiting) > ahead:
            first, future = waiting.popleft()
            yield first, future.result()
    for first, future in waiting:
        yield first, future.result()


class ProcessPool:
    """Context manager of `processes`. Each makes an object with `make` at its first call, and hands it to every call.

    `make` and the functions are pickled. `setting` is the config key of the number of processes. UserError at the end
    if a process was killed.
    """

    def __init__(self, processes: int, setting: str, make: Callable[[], Any]) -> None:
        self.setting = setting
        # Not forked: the threads of PyTorch and of libraries do not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(make,))

    def submit(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Call `function(made, *arguments)` in a process."""
        with _without_main():  # the call may start a process
            return self._pool.submit(_call, function, arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise UserError(
                f"a process of {self.setting} ended by itself: if memory ran out lower {self.setting}; 0 needs no "
                "processes"
            ) from None


_make: Callable[[], Any]
_made: Any = None  # this process's object, from its first call on


def _begin(make: Callable[[], Any]) -> None:
    global _make
    _make = make
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _call(function: Callable[..., Result], arguments: tuple[Any, ...]) -> Result:
    global _made
    _made = _made or _make()  # not in `_begin`: errors here are raised in the parent, as those of the call
    return function(_made, *arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()  # returns also when the parent was killed
        os._exit(1)


@contextmanager
def _without_main() -> Iterator[None]:
    """Context manager: processes started in it do not import the program's main module, which they do not need.

    The import takes time, and a script without `if __name__ == "__main__":` would run a second time.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


Made = tuple[Batch[np.ndarray], dict[str, float]]  # a batch and the seconds of its stages
Open = Callable[[], Any]  # returns a BatchSource


class ProcessBatches:
    """The batches of `opener()`, made by `processes`. Each makes `depth` batches at a time, because sending several
    costs hardly more than sending one. Steps are requested in order."""

    def __init__(self, opener: Open, share: int, sequence: int, processes: int, depth: int):
        self.share, self.sequence = share, sequence
        self.seconds = {"read": 0.0, "pack": 0.0}  # mean over all processes
        self._opener, self._processes, self._depth = opener, processes, depth
        self._next, self._made = -1, self._from(-1)

    def batch(self, step: int) -> Batch[np.ndarray]:
        if step != self._next:
            self.close()
            self._made = self._from(step)
        self._next = step + 1
        batch, seconds = next(self._made)
        for stage, spent in seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + spent / self._processes
        return Batch(batch.inputs.astype(np.int64), batch.targets.astype(np.int64), batch.documents)

    def _from(self, step: int) -> Generator[Made, None, None]:
        firsts = itertools.count(step, self._depth)
        with ProcessPool(self._processes, "data.loader_processes", self._opener) as pool:
            for _, made in in_order(
                firsts, lambda first: pool.submit(_make_batches, first, self._depth), self._processes
            ):
                yield from made

    def close(self) -> None:
        self._made.close()
        self._next = -1


def _make_batches(source: Any, first: int, number: int) -> list[Made]:
    """Return the batches of `number` steps from `first` on."""
    made = []
    for step in range(first, first + number):
        start, before = time.perf_counter(), dict(source.seconds)
        batch = source.batch(step)
        seconds = {stage: spent - before[stage] for stage, spent in source.seconds.items()}
        seconds["read"] += time.perf_counter() - start - sum(seconds.values())
        made.append((batch.map(lambda array: array.astype(np.int32)), seconds))  # halves the bytes to send
    return made
