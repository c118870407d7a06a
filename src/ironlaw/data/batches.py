"""Batches of samples in an order that is a function of (seed, step), so that the step is the loader's whole state."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import numpy as np

from ironlaw.data.batch import IGNORED, Batch
from ironlaw.data.order import mix, permutations
from ironlaw.data.packing import Packed, concatenated
from ironlaw.data.shards import TokenArray, Tokens, TokenSplit
from ironlaw.errors import UserError

_AHEAD = 1024  # samples located at a time: locating one sample at a time would cost more than copying its tokens


class Samples(Protocol):
    """Rows of one length. Each epoch visits every row once, and the epochs follow one another without end."""

    sequence: int
    per_epoch: int

    def locate(self, first: int, number: int) -> np.ndarray:
        """Return (number,) int64: the keys of the samples `first`, `first + 1`, ... of the global order."""

    def fill(self, keys: np.ndarray, batch: Batch[np.ndarray]) -> None:
        """Write the rows with these keys into the batch's arrays."""

    def report(self) -> dict[str, Any]:
        """Return how the documents were packed: the padded, cropped and cut shares, as fractions."""


class TokenWindows:
    """Non-overlapping windows of `sequence` tokens of the concatenated text; their offset changes every epoch."""

    def __init__(self, tokens: TokenArray, sequence: int, seed: int, needed: int, bounds: np.ndarray | None = None):
        self._tokens = plain(tokens)
        self.sequence = sequence
        self.seed = seed
        self._bounds = None if bounds is None else np.asarray(bounds)
        # One window fewer than would fit leaves room for the epoch's offset; a text of one batch has none to spare.
        fitting = (len(tokens) - 1) // sequence
        self.per_epoch = fitting - 1 if fitting > needed else fitting
        self._slack = len(tokens) - 1 - self.per_epoch * sequence

    def offset(self, epoch: int) -> int:
        """Return the number of tokens skipped before the epoch's first window."""
        return mix(self.seed, epoch, 1) % (self._slack + 1)

    def locate(self, first: int, number: int) -> np.ndarray:
        """Return where each window begins in the tokens."""
        epochs, windows = permutations(first, number, self.per_epoch, partial(mix, self.seed))
        known, which = np.unique(epochs, return_inverse=True)
        return windows * self.sequence + np.array([self.offset(epoch) for epoch in known.tolist()])[which]

    def fill(self, keys: np.ndarray, batch: Batch[np.ndarray]) -> None:
        for row, start in enumerate(keys.tolist()):
            fill_row(batch, row, self._tokens[start : start + self.sequence + 1], self._bounds, start)

    def in_order(self) -> np.ndarray:
        """Return the keys of all windows in order, from the first token on, for held-out text."""
        fitting = (len(self._tokens) - 1) // self.sequence
        if fitting < 1:
            raise UserError(
                f"the validation text has {len(self._tokens):,} tokens, fewer than one sequence of {self.sequence} and "
                "its target: raise data.validation_fraction, lower model.context, or give more text in data.path"
            )
        return np.arange(fitting) * self.sequence

    def report(self) -> dict[str, Any]:
        if self._bounds is None:
            return {"rows": self.per_epoch, "padded_fraction": 0.0}
        return concatenated(self._bounds, self.sequence)


class PackedRows:
    """Rows of whole documents (`packing.best_fit`), in another order every epoch. Bit 0 of a token's mark excludes it
    from the targets (`TokenSplit`). With `pairs`, bit 1 selects the answer: documents 2 i and 2 i + 1."""

    def __init__(self, split: TokenSplit, packed: Packed, seed: int, end_of_text: int, pairs: bool = False):
        self._tokens = plain(split.tokens)
        self._marks = split.marks
        self._halves = 2 if pairs else 1
        self._packed = packed
        self._seed = seed
        self._end_of_text = end_of_text
        self.sequence = packed.sequence
        self.per_epoch = packed.number

    def locate(self, first: int, number: int) -> np.ndarray:
        """Return the row of each sample."""
        return permutations(first, number, self.per_epoch, partial(mix, self._seed))[1]

    def fill(self, keys: np.ndarray, batch: Batch[np.ndarray]) -> None:
        packed = self._packed
        for row, key in enumerate(keys.tolist()):
            at, document = 0, 0
            first, last = packed.rows[key : key + 2].tolist()
            pieces = zip(
                packed.starts[first:last].tolist(), packed.lengths[first:last].tolist(),
                packed.opens[first:last].tolist(), strict=True,
            )  # fmt: skip
            for document, (start, length, opens) in enumerate(pieces):
                end = at + length
                if opens:
                    batch.inputs[row, at] = self._end_of_text  # the separator before every document
                    batch.inputs[row, at + 1 : end] = self._tokens[start : start + length - 1]
                else:
                    batch.inputs[row, at:end] = self._tokens[start - 1 : start + length - 1]
                batch.targets[row, at:end] = self._tokens[start : start + length]
                if batch.documents is not None:
                    batch.documents[row, at:end] = document * self._halves
                if self._marks is not None:
                    marks = self._marks[start : start + length]
                    batch.targets[row, at:end][marks & 1 == 1] = IGNORED
                    if batch.documents is not None:
                        batch.documents[row, at:end] += marks >> 1
                at = end
            batch.inputs[row, at:] = self._end_of_text
            batch.targets[row, at:] = IGNORED
            if batch.documents is not None:
                batch.documents[row, at:] = (document + 1) * self._halves

    def in_order(self) -> np.ndarray:
        if not self.per_epoch:
            raise UserError("there is no validation text: raise data.validation_fraction or give more in data.path")
        return np.arange(self.per_epoch)

    def report(self) -> dict[str, Any]:
        return self._packed.report()


class Batches:
    """Random access to the training batches.

    Each epoch visits every sample once, in its own permutation; a batch may span the end of an epoch.
    `sequences_per_batch` is the global batch. Each of the `world` ranks gets a slice of it, so that the global order
    does not depend on the number of ranks.
    """

    def __init__(
        self, samples: Samples, sequences_per_batch: int, rank: int = 0, world: int = 1, documents: bool = False
    ):
        self.samples, self.sequence = samples, samples.sequence
        self.sequences_per_batch, self.documents = sequences_per_batch, documents
        self.seconds = {"read": 0.0, "pack": 0.0}  # since the start, by stage
        self._first = rank * sequences_per_batch // world
        self.share = sequences_per_batch // world  # sequences of this rank
        self._ahead: tuple[int, np.ndarray] = (0, np.empty(0, dtype=np.int64))

    def keys(self, step: int) -> np.ndarray:
        """Return (sequences of this rank,) int64: the keys of this step's samples; for windows, their first tokens."""
        first = step * self.sequences_per_batch + self._first
        begin, ahead = self._ahead
        if not begin <= first <= begin + len(ahead) - self.share:
            located = self.samples.locate(first, max(self.share, _AHEAD))
            begin, ahead = self._ahead = (first, located)
        return ahead[first - begin : first - begin + self.share]

    def batch(self, step: int) -> Batch[np.ndarray]:
        """Return this rank's share of step `step`. Each target is the token after its input."""
        start = time.perf_counter()
        keys = self.keys(step)
        located = time.perf_counter()
        batch = empty(self.share, self.sequence, self.documents)
        self.samples.fill(keys, batch)
        self.seconds["pack"] += located - start
        self.seconds["read"] += time.perf_counter() - located
        return batch


def fill_row(batch: Batch[np.ndarray], row: int, window: np.ndarray, bounds: np.ndarray | None, start: int) -> None:
    """Fill a row with `window` (sequence + 1,): tokens from `start` on of a text with documents at `bounds`."""
    batch.inputs[row], batch.targets[row] = window[:-1], window[1:]
    if batch.documents is not None:
        assert bounds is not None
        batch.documents[row] = number_documents(bounds, start, len(window) - 1)


def empty(rows: int, sequence: int, documents: bool) -> Batch[np.ndarray]:
    inputs = np.empty((rows, sequence), dtype=np.int64)
    return Batch(inputs, np.empty_like(inputs), np.empty((rows, sequence), dtype=np.int32) if documents else None)


def check_fills_batch(tokens: TokenArray, sequence: int, sequences_per_batch: int) -> None:
    needed = sequence * sequences_per_batch + 1
    if len(tokens) < needed:
        raise UserError(
            f"the training text has {len(tokens):,} tokens but one batch of {sequences_per_batch} "
            f"sequences of {sequence} needs {needed:,}: lower train.global_batch or model.context, or "
            "give more text in data.path"
        )


def evaluation_batches(
    samples: TokenWindows | PackedRows, sequences_per_batch: int, limit: int | None, documents: bool
) -> Iterator[Batch[np.ndarray]]:
    """Yield held-out text in order, each sample once. The last batch may be smaller.

    At most `limit` sequences, spread over the whole split so that a few batches represent more than its beginning.
    """
    keys = samples.in_order()
    wanted = len(keys) if limit is None else min(len(keys), limit)
    chosen = keys[np.arange(wanted) * len(keys) // wanted]
    for first in range(0, wanted, sequences_per_batch):
        some = chosen[first : first + sequences_per_batch]
        batch = empty(len(some), samples.sequence, documents)
        samples.fill(some, batch)
        yield batch


def number_documents(bounds: np.ndarray, start: int, length: int) -> np.ndarray:
    """Return (length,) int32: the document of each position's target, counted from the row's first.

    A separator counts as part of the document after it, so that an input and its target are in one document.
    """
    first = int(np.searchsorted(bounds, start + 1, side="right"))
    last = int(np.searchsorted(bounds, start + length, side="right"))
    steps = np.zeros(length, dtype=np.int32)
    if last > first:
        inner = np.asarray(bounds[first:last]) - (start + 1)
        np.add.at(steps, inner, 1)
    return np.cumsum(steps, dtype=np.int32)


def plain(tokens: TokenArray) -> TokenArray:
    """Return the tokens without the memory map's class: slicing a plain array is several times cheaper."""
    return tokens if isinstance(tokens, Tokens) else np.asarray(tokens)
