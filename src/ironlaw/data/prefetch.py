"""Batches made ready by a thread while the step runs, and what each stage of making them could deliver."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Self, TypeVar, cast

import numpy as np

from ironlaw.data.batch import Batch
from ironlaw.data.loader import BatchSource

Prepared = TypeVar("Prepared")


class Prefetcher(Generic[Prepared]):
    """Iterates over the batches of steps `start`, `start + 1`, ... before `stop` (None: without end).

    `step` is the step of the batch that comes next, which is all there is to save: batches waiting in the
    queue are made again on resume. `apply(batch)` runs in the thread, for example to copy into pinned memory.
    `number_of` a step says which of the batches it takes, where some are left out. An exception in the thread is
    raised by the consumer's next call.
    """

    def __init__(
        self,
        batches: BatchSource,
        start: int = 0,
        stop: int | None = None,
        depth: int = 4,
        apply: Callable[[Batch[np.ndarray]], Prepared] | None = None,
        number_of: Callable[[int], int] | None = None,
    ):
        self.step = start
        self.wait_seconds = 0.0  # the consumer waited for a batch, since the start
        self._batches = batches
        self._number_of = number_of or (lambda step: step)
        self._apply = apply or (lambda batch: cast(Prepared, batch))
        self._made = 0
        self._busy_seconds = 0.0
        self._copy_seconds = 0.0
        self._steps = itertools.count(start) if stop is None else iter(range(start, stop))
        self._thread = ThreadPoolExecutor(1, "prefetch")
        self._waiting: deque[Future[Prepared]] = deque()
        self._send_for(depth + 1)

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

    def _send_for(self, batches: int) -> None:
        for step in itertools.islice(self._steps, batches):
            self._waiting.append(self._thread.submit(self._make, step))

    def _make(self, step: int) -> Prepared:
        start = time.perf_counter()
        made = self._batches.batch(self._number_of(step))
        copying = time.perf_counter()
        batch = self._apply(made)
        end = time.perf_counter()
        self._busy_seconds += end - start
        self._copy_seconds += end - copying
        self._made += 1
        return batch

    def __iter__(self) -> Iterator[Prepared]:
        return self

    def __next__(self) -> Prepared:
        if not self._waiting:
            raise StopIteration
        start = time.perf_counter()
        batch = self._waiting[0].result()  # one that failed stays: whoever asks again is told again
        self.wait_seconds += time.perf_counter() - start
        self._waiting.popleft()
        self.step += 1
        self._send_for(1)
        return batch

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        self._waiting.clear()
        self._thread.shutdown(cancel_futures=True)
        end = getattr(self._batches, "close", None)  # processes and pools that the batches come from
        if end is not None:
            end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
