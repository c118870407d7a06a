"""Pseudo-random orders as functions of a few numbers: each position is computed without those before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

_MASK = 2**64 - 1
Words = TypeVar("Words", int, np.ndarray)


def permuted(positions: np.ndarray, size: int, key: int) -> np.ndarray:
    """Return where a pseudo-random permutation of range(size) takes `positions`; int64, same shape.

    A Feistel network computes each position without the others, so that an epoch of any size needs no memory and a
    resumed run no replay. Unlike a library's shuffle, the order cannot change with a version of numpy.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = [np.uint64(mix(key, turn)) for turn in range(8)]
    values = positions.astype(np.uint64)
    outside = np.ones(values.shape, dtype=bool)
    # The network permutes the numbers below a power of four < 4 x `size`; it is repeated until the value is < `size`.
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for k in keys:
            left, right = right, left ^ (finalised(right ^ k) & mask)
        values[outside] = (left << half) | right
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


def permutations(first: int, number: int, size: int, key: Callable[[int], int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the epochs of the positions `first`, `first + 1`, ... in endless permutations of range(size), and where
    the permutation of each epoch, by its `key`, takes them; both (number,) int64."""
    epochs, positions = np.divmod(np.arange(first, first + number), size)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        positions[here] = permuted(positions[here], size, key(epoch))
    return epochs, positions


def finalised(x: Words) -> Words:
    """Apply the finaliser of splitmix64 (Steele, Lea, Flood 2014, doi 10.1145/2714064.2660195) to a number, or to an
    array of uint64: every input bit reaches every output bit. Arithmetic is modulo 2**64."""
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> shift)) * multiplier & _MASK
    return x ^ (x >> 31)


def mix(*numbers: int) -> int:
    """Return a 64-bit hash of a few integers."""
    x = 0
    for number in numbers:
        x = finalised((x + 0x9E3779B97F4A7C15 + number) & _MASK)
    return x
