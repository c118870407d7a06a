"""Work ahead of whoever wants its results, which come in the order of the work; and processes to do it.

A process does not import the program's main module, leaves Ctrl-C to its parent and ends when that does.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

from ironlaw.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    items: Iterable[Item], submit: Callable[[Item], Future[Result]], ahead: int
) -> Iterator[tuple[Item, Result]]:
    """Every item with its result; while one is waited for, `ahead` more are under way."""
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    for item in items:
        waiting.append((item, submit(item)))
        if len(waiting) > ahead:
            first, future = waiting.popleft()
            yield first, future.result()
    for first, future in waiting:
        yield first, future.result()


class ProcessPool:
    """`processes` that call `start(*arguments)` before anything else. `setting` is the key that says how many."""

    def __init__(self, processes: int, setting: str, start: Callable[..., None], *arguments: Any) -> None:
        self.setting = setting
        # Not forked: the threads of PyTorch and of libraries do not survive it.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(start, arguments))

    def submit(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        with _without_main():  # a process may be started for it
            return self._pool.submit(function, *arguments)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around whatever waits for results. UserError where a process was killed."""
        try:
            yield
        except BrokenProcessPool:
            raise UserError(
                f"a process of {self.setting} ended by itself: if memory ran out lower {self.setting}; 0 needs no "
                "processes"
            ) from None

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def _begin(start: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    threading.Thread(target=_end_with_parent, daemon=True).start()
    start(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()  # also when it was killed
        os._exit(1)


@contextmanager
def _without_main() -> Iterator[None]:
    """Processes that are started here do not import the program's main module again, which they have no use for.

    It takes time, and a script without `if __name__ == "__main__":` would run a second time.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
