"""From a dataset and its settings to batches: the samples, their order, and the threads and processes that make them.

A thread makes batches ready while the step runs, and measures what each stage of making them could deliver.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar, cast

import numpy as np

from ironlaw.data import batches
from ironlaw.data.batch import Batch
from ironlaw.data.batches import Batches, PackedRows, Samples, TokenWindows
from ironlaw.data.config import DataConfig
from ironlaw.data.dataset import Dataset, open_dataset
from ironlaw.data.mixture import Mixture, together
from ironlaw.data.packing import Packed, best_fit
from ironlaw.data.prepare import prepare
from ironlaw.data.processes import ProcessBatches, in_order
from ironlaw.data.shards import TokenSplit
from ironlaw.data.stream import StreamBatches
from ironlaw.errors import UserError


class BatchSource(Protocol):
    """A source of batches for a prefetcher. The batch of a step is a function of the step alone."""

    share: int  # sequences per batch on this rank
    sequence: int
    seconds: dict[str, float]  # spent so far, by stage: read, tokenise, pack

    def batch(self, step: int) -> Batch[np.ndarray]: ...


def _reopen(
    config: DataConfig, vocab: int, folders: list[Path], weights: tuple[float, ...], sequence: int,
    *batches_of: Any,
) -> BatchSource:  # fmt: skip
    """Open the batches in another process, from the tokens' folders; mock data has no `folders` and is made again."""
    if not folders:
        return Loader(prepare(config, vocab), config, sequence).training(*batches_of)
    parts = [open_dataset(folder, checksums=False) for folder in folders]
    return Loader(together(parts, weights) if weights else parts[0], config, sequence).training(*batches_of)


class Loader:
    """The batches of one run. The packing is computed once and kept."""

    def __init__(self, dataset: Dataset, config: DataConfig, sequence: int):
        self.dataset, self.config, self.sequence = dataset, config, sequence
        self._packed: dict[int, Packed] = {}
        self._samples: Samples | StreamBatches | None = None

    def training(self, global_batch: int, seed: int, rank: int = 0, world: int = 1) -> BatchSource:
        """Return this rank's batches. UserError if the text is too short for one batch."""
        dataset, masked = self.dataset, self.config.masks_documents
        if dataset.stream is not None:
            stream = StreamBatches(dataset.stream, self.sequence, global_batch, seed, rank, world, masked)
            self._samples = stream
            return stream
        self._samples = samples = self._all_samples(global_batch, seed)
        if self.config.loader_processes:
            folders = [part.folder for part in dataset.sources or (dataset,) if part.folder is not None]
            config = self.config.model_copy(update={"loader_processes": 0})
            opener = partial(
                _reopen, config, dataset.vocab, folders, dataset.weights, self.sequence, global_batch, seed, rank, world
            )  # fmt: skip
            share, processes = global_batch // world, self.config.loader_processes
            return ProcessBatches(opener, share, self.sequence, processes, self.config.prefetch)
        return Batches(samples, global_batch, rank, world, masked)

    def validation(self, sequences_per_batch: int, limit: int | None) -> Iterator[Batch[np.ndarray]]:
        """Yield held-out text, packed as the training text is; the sources of a mixture follow one another."""
        held_out = self.dataset.validation
        samples: PackedRows | TokenWindows = TokenWindows(held_out.tokens, self.sequence, 0, 0, held_out.bounds)
        if self.config.packing == "best_fit":
            samples = self._rows(held_out, 0)
        return batches.evaluation_batches(samples, sequences_per_batch, limit, self.config.masks_documents)

    def facts(self) -> dict[str, Any]:
        """Return how the text became rows, for the ledger: fractions of positions and documents."""
        config = self.config
        facts: dict[str, Any] = {"packing": config.packing, "document_mask": config.masks_documents}
        facts |= {"source": self.dataset.name, "streaming": config.streaming, "mock": config.mock}
        return facts if self._samples is None else facts | self._samples.report()

    def _all_samples(self, global_batch: int, seed: int) -> Samples:
        parts = self.dataset.sources
        if not parts:
            return self._samples_of(self.dataset, global_batch, seed)
        # Each source has its own order, so that two sources of one length do not run in parallel.
        samples = [self._samples_of(part, 1, seed + 2**32 * number) for number, part in enumerate(parts, 1)]
        return Mixture(samples, self.dataset.weights, seed)

    def _samples_of(self, dataset: Dataset, needed: int, seed: int) -> Samples:
        train = dataset.train
        if self.config.packing == "best_fit":
            rows = self._rows(train, seed)
            if rows.per_epoch < needed:
                raise UserError(
                    f"the training text packs into {rows.per_epoch:,} rows of {self.sequence} tokens but one batch "
                    f"needs {needed}: lower train.global_batch or model.context, or give more text in data.path"
                )
            return rows
        batches.check_fills_batch(train.tokens, self.sequence, needed)
        return TokenWindows(train.tokens, self.sequence, seed, needed, train.bounds)

    def _rows(self, split: TokenSplit, seed: int) -> PackedRows:
        bounds, pairs = split.bounds, self.config.pairs
        if id(bounds) not in self._packed:
            longest = int(np.diff(bounds).max(initial=0)) if pairs else 0
            if longest > self.sequence:
                raise UserError(
                    f"a pair of answers with their prompt has {longest:,} tokens, more than a sequence of "
                    f"{self.sequence:,}: raise train.sequence, or leave that pair out"
                )
            self._packed[id(bounds)] = best_fit(bounds, self.sequence)
        return PackedRows(split, self._packed[id(bounds)], seed, self.dataset.end_of_text, pairs)


Prepared = TypeVar("Prepared")


class Prefetcher(Generic[Prepared]):
    """Iterates over the batches with the given `numbers`.

    It has no state to save: batches that are made but not taken are made again on resume. `apply(batch)` runs in the
    thread, for example to copy into pinned memory. An exception in the thread is raised by the consumer's call for its
    batch.
    """

    def __init__(
        self,
        batches: BatchSource,
        numbers: Iterable[int],
        depth: int = 4,
        apply: Callable[[Batch[np.ndarray]], Prepared] | None = None,
    ):
        self.wait_seconds = 0.0  # that the consumer waited for batches, since the start
        self._batches = batches
        self._apply = apply or (lambda batch: cast(Prepared, batch))
        self._made_tokens = 0
        self._busy_seconds = 0.0
        self._copy_seconds = 0.0
        self._thread = ThreadPoolExecutor(1, "prefetch")
        self._made = in_order(numbers, lambda number: self._thread.submit(self._make, number), depth + 1)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of this rank per second that the thread makes while it is busy; None before the first batch."""
        return self._made_tokens / self._busy_seconds if self._busy_seconds else None

    def facts(self) -> dict[str, Any]:
        """Return for the ledger the loader's rate, that of each stage (read, tokenise, pack, copy) alone, the slowest
        stage, and the seconds that the consumer waited."""
        spent = self._batches.seconds | {"copy": self._copy_seconds}
        stages = {stage: self._made_tokens / seconds for stage, seconds in spent.items() if seconds > 0}
        stages = stages if self._made_tokens else {}
        return {
            "tokens_per_second": self.tokens_per_second,
            "stage_tokens_per_second": stages,
            "slowest_stage": min(stages, key=stages.__getitem__, default=None),
            "wait_seconds": self.wait_seconds,
        }

    def _make(self, number: int) -> Prepared:
        start = time.perf_counter()
        made = self._batches.batch(number)
        copying = time.perf_counter()
        batch = self._apply(made)
        end = time.perf_counter()
        self._busy_seconds += end - start
        self._copy_seconds += end - copying
        self._made_tokens += self._batches.share * self._batches.sequence
        return batch

    def __iter__(self) -> Iterator[Prepared]:
        return self

    def __next__(self) -> Prepared:
        start = time.perf_counter()
        _, batch = next(self._made)
        self.wait_seconds += time.perf_counter() - start
        return batch

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        self._made.close()
        self._thread.shutdown(cancel_futures=True)
        end = getattr(self._batches, "close", None)  # worker processes and pools
        if end is not None:
            end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
