"""Batches of token windows in an order that is a function of (seed, step): the whole state is the step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ironlaw.data.batch import Batch
from ironlaw.errors import UserError

_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_AHEAD = 1024  # samples located at a time: one at a time would cost more than copying its tokens


class Batches:
    """Random access to the training batches.

    An epoch visits every window of `sequence` tokens once, in a permutation of its own; the windows do not
    overlap, and their edges move from epoch to epoch. Batches run on across the end of an epoch.
    `sequences_per_batch` is the global batch: rank r of `world` gets its slice of it, and the global order is
    the same for any number of ranks.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        sequence: int,
        sequences_per_batch: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
    ):
        if sequences_per_batch % world:
            raise UserError(
                f"train.global_batch = {sequences_per_batch} sequences cannot be shared by {world} "
                f"data-parallel ranks: use a multiple of {world}"
            )
        assert 0 <= rank < world
        needed = sequence * sequences_per_batch + 1
        if len(tokens) < needed:
            raise UserError(
                f"the training text has {len(tokens):,} tokens but one batch of {sequences_per_batch} "
                f"sequences of {sequence} needs {needed:,}: lower train.global_batch or model.context, or "
                "give more text in data.path"
            )
        self._tokens = np.asarray(tokens)  # slicing a plain array is several times cheaper than slicing a memmap
        self.sequence = sequence
        self.sequences_per_batch = sequences_per_batch
        self.seed = seed
        self._first = rank * sequences_per_batch // world
        self._share = sequences_per_batch // world
        # One window fewer than fit leaves room for the epoch's offset; one batch of text has none to spare.
        fitting = (len(tokens) - 1) // sequence
        self.windows_per_epoch = fitting - 1 if fitting > sequences_per_batch else fitting
        self._ahead: tuple[int, np.ndarray] = (0, np.empty(0, dtype=np.int64))
        self._slack = len(tokens) - 1 - self.windows_per_epoch * sequence

    @property
    def steps_per_epoch(self) -> float:
        return self.windows_per_epoch / self.sequences_per_batch

    def starts(self, step: int) -> np.ndarray:
        """(sequences of this rank,) int64: where in the tokens each window of this step begins."""
        first = step * self.sequences_per_batch + self._first
        begin, ahead = self._ahead
        if not begin <= first <= begin + len(ahead) - self._share:
            begin, ahead = self._ahead = (first, self._locate(first, max(self._share, _AHEAD)))
        return ahead[first - begin : first - begin + self._share]

    def _locate(self, first: int, number: int) -> np.ndarray:
        """Where the windows of samples `first`, `first + 1`, ... of the global order begin."""
        epochs, positions = np.divmod(np.arange(first, first + number), self.windows_per_epoch)
        result = np.empty(number, dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            windows = permuted(positions[here], self.windows_per_epoch, _mix(self.seed, epoch))
            result[here] = windows * self.sequence + self.offset(epoch)
        return result

    def offset(self, epoch: int) -> int:
        """Tokens skipped before the epoch's first window."""
        return _mix(self.seed, epoch, 1) % (self._slack + 1)

    def batch(self, step: int) -> Batch[np.ndarray]:
        """This rank's share of step `step`; targets are one token ahead."""
        inputs = np.empty((self._share, self.sequence), dtype=np.int64)
        targets = np.empty_like(inputs)
        for row, start in enumerate(self.starts(step).tolist()):
            window = self._tokens[start : start + self.sequence + 1]
            inputs[row] = window[:-1]
            targets[row] = window[1:]
        return Batch(inputs, targets)


def evaluation_batches(
    tokens: np.ndarray, sequence: int, sequences_per_batch: int, limit: int | None = None
) -> Iterator[Batch[np.ndarray]]:
    """The validation windows in order, each once, the last batch perhaps smaller; at most `limit` batches.

    Spread over the whole split when limited, so that a few batches do not stand for its first documents only.
    """
    windows = (len(tokens) - 1) // sequence
    if windows < 1:
        raise UserError(
            f"the validation text has {len(tokens):,} tokens, fewer than one sequence of {sequence} and its "
            "target: raise data.validation_fraction, lower model.context, or give more text in data.path"
        )
    wanted = windows if limit is None else min(windows, limit * sequences_per_batch)
    chosen = np.arange(wanted) * windows // wanted
    plain = np.asarray(tokens)
    for first in range(0, wanted, sequences_per_batch):
        starts = chosen[first : first + sequences_per_batch, None] * sequence
        block = plain[starts + np.arange(sequence + 1)].astype(np.int64)
        yield Batch(np.ascontiguousarray(block[:, :-1]), np.ascontiguousarray(block[:, 1:]))


def permuted(positions: np.ndarray, size: int, key: int) -> np.ndarray:
    """Where a pseudo-random permutation of range(size) takes `positions`; int64, same shape.

    A Feistel network: any position without the others, so an epoch of any size needs no memory and a resumed
    run no replay, and, unlike a library's shuffle, the order cannot change with a version of numpy.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = [np.uint64(_mix(key, turn)) for turn in range(8)]
    values = positions.astype(np.uint64)
    outside = np.ones(values.shape, dtype=bool)
    # The network permutes a power of four below 4 x `size`: from a value outside, walk on to one inside.
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for k in keys:
            left, right = right, left ^ (_mix_array(right ^ k) & mask)
        values[outside] = (left << half) | right
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


def _mix_array(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every input bit reaches every output bit. Arithmetic is modulo 2**64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MULTIPLIERS[0])
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MULTIPLIERS[1])
    result: np.ndarray = x ^ (x >> np.uint64(31))
    return result


def _mix(*numbers: int) -> int:
    """A 64-bit hash of a few integers: the same finaliser, on Python's integers, quicker for single ones."""
    x = 0
    for number in numbers:
        x = (x + 0x9E3779B97F4A7C15 + number) % 2**64
        x = (x ^ (x >> 30)) * _MULTIPLIERS[0] % 2**64
        x = (x ^ (x >> 27)) * _MULTIPLIERS[1] % 2**64
        x ^= x >> 31
    return x
