"""Batches made ready by a thread while the step runs."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

import numpy as np

from ironlaw.data.batch import Batch
from ironlaw.data.batches import Batches

Prepared = TypeVar("Prepared")


class Prefetcher(Generic[Prepared]):
    """Iterates over the batches of steps `start`, `start + 1`, ... before `stop` (None: without end).

    `step` is the step of the batch that comes next, which is all there is to save: batches waiting in the
    queue are made again on resume. `apply(batch)` runs in the thread, for example to copy into
    pinned memory.
    An exception in the thread is raised by the consumer's next call.
    """

    def __init__(
        self,
        batches: Batches,
        start: int = 0,
        stop: int | None = None,
        depth: int = 4,
        apply: Callable[[Batch[np.ndarray]], Prepared] | None = None,
    ):
        self.step = start
        self.wait_seconds = 0.0  # the consumer waited for a batch, since the start
        self.last_wait_seconds = 0.0  # the same for the last batch
        self._batches = batches
        self._stop = stop
        self._depth = depth
        self._apply = apply or (lambda batch: cast(Prepared, batch))
        self._ready: deque[Any] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._ended = False
        self._failure: BaseException | None = None
        self._made = 0
        self._busy_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    @property
    def batches_per_second(self) -> float | None:
        """What the thread could deliver if nobody slowed it; None before the first batch."""
        return self._made / self._busy_seconds if self._busy_seconds else None

    def _run(self) -> None:
        step = self.step
        try:
            while self._stop is None or step < self._stop:
                start = time.perf_counter()
                batch = self._apply(self._batches.batch(step))
                self._busy_seconds += time.perf_counter() - start
                self._made += 1
                step += 1
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
                    if self._closed:
                        return
                    self._ready.append(batch)
                    self._changed.notify_all()
        except BaseException as error:  # handed over: a thread's own traceback would only be printed
            self._failure = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def __iter__(self) -> Iterator[Prepared]:
        return self

    def __next__(self) -> Prepared:
        start = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended or self._closed)
            self.last_wait_seconds = time.perf_counter() - start
            self.wait_seconds += self.last_wait_seconds
            if self._ready and not self._closed:
                batch = self._ready.popleft()
                self.step += 1
                self._changed.notify_all()
                return cast(Prepared, batch)
        if self._failure is not None:
            raise self._failure
        raise StopIteration

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
