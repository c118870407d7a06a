"""Batches made ready by a thread while the step runs, and what each stage of making them could deliver."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

import numpy as np

from ironlaw.data.batch import Batch
from ironlaw.data.loader import BatchSource

Prepared = TypeVar("Prepared")


class Prefetcher(Generic[Prepared]):
    """Iterates over the batches of steps `start`, `start + 1`, ... before `stop` (None: without end).

    `step` is the step of the batch that comes next, which is all there is to save: batches waiting in the
    queue are made again on resume. `apply(batch)` runs in the thread, for example to copy into pinned memory.
    An exception in the thread is raised by the consumer's next call.
    """

    def __init__(
        self,
        batches: BatchSource,
        start: int = 0,
        stop: int | None = None,
        depth: int = 4,
        apply: Callable[[Batch[np.ndarray]], Prepared] | None = None,
    ):
        self.step = start
        self.wait_seconds = 0.0  # the consumer waited for a batch, since the start
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
        self._copy_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    @property
    def batches_per_second(self) -> float | None:
        """What the thread could deliver if nobody slowed it; None before the first batch."""
        return self._made / self._busy_seconds if self._busy_seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """The same in tokens of this rank."""
        rate = self.batches_per_second
        return None if rate is None else rate * self._batches.share * self._batches.sequence

    @property
    def stage_tokens_per_second(self) -> dict[str, float]:
        """What each stage (read, tokenise, pack, copy) could deliver by itself: the lowest is the bottleneck."""
        tokens = self._made * self._batches.share * self._batches.sequence
        stages = self._batches.seconds | {"copy": self._copy_seconds}
        return {stage: tokens / seconds for stage, seconds in stages.items() if seconds > 0 and tokens}

    def facts(self) -> dict[str, Any]:
        """For the ledger: what the loader could deliver, where it is slowest, and what was waited for."""
        stages = self.stage_tokens_per_second
        return {
            "tokens_per_second": self.tokens_per_second,
            "stage_tokens_per_second": stages,
            "slowest_stage": min(stages, key=lambda stage: stages[stage]) if stages else None,
            "wait_seconds": self.wait_seconds,
        }

    def _run(self) -> None:
        step = self.step
        try:
            while self._stop is None or step < self._stop:
                start = time.perf_counter()
                made = self._batches.batch(step)
                copying = time.perf_counter()
                batch = self._apply(made)
                end = time.perf_counter()
                self._busy_seconds += end - start
                self._copy_seconds += end - copying
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
            self.wait_seconds += time.perf_counter() - start
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
        end = getattr(self._batches, "close", None)  # processes and pools that the batches come from
        if end is not None:
            end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
