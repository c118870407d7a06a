"""Packing of documents into rows of one length: best-fit packing (arXiv 2404.10830), and what each packing loses.

A row holds whole documents wherever they fit; only a document longer than a row is cut. A document takes one position
per token: its inputs are the separator before it and all its tokens but the last, its targets are its tokens. So every
token is learned once, and no target belongs to another document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Packed:
    """Which piece of which document lies in which row. Pieces are sorted by row."""

    starts: np.ndarray  # (pieces,) int64: where the piece's targets begin in the tokens
    lengths: np.ndarray  # (pieces,) int64
    opens: np.ndarray  # (pieces,) bool: the piece begins its document
    rows: np.ndarray  # (rows + 1,) int64: the first piece of each row, and the end
    sequence: int
    documents_cut: int
    documents: int

    @property
    def number(self) -> int:
        return len(self.rows) - 1

    def report(self) -> dict[str, Any]:
        """Return the number of rows, and the fractions of positions padded, of tokens cropped, and of documents cut."""
        positions = max(1, self.number * self.sequence)
        return {
            "rows": self.number,
            "padded_fraction": 1 - float(self.lengths.sum()) / positions,
            "cropped_fraction": 0.0,
            "documents_cut_fraction": self.documents_cut / max(1, self.documents),
        }


def best_fit(bounds: np.ndarray, sequence: int) -> Packed:
    """Pack the documents that `bounds` separates (documents + 1,) into rows of `sequence` positions.

    Pieces are placed from the longest to the shortest, each into the fullest row that has room (best-fit decreasing).
    """
    starts, lengths, opens, cut = _pieces(np.asarray(bounds), sequence)
    row_of = np.empty(len(lengths), dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    number = _assign(lengths[order], sequence, row_of, order)
    by_row = np.argsort(row_of, kind="stable")
    rows = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=number))]).astype(np.int64)
    return Packed(starts[by_row], lengths[by_row], opens[by_row], rows, sequence, cut, len(bounds) - 1)


def _pieces(bounds: np.ndarray, sequence: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Cut documents to at most `sequence` tokens: full pieces and a remainder."""
    sizes = np.diff(bounds)
    counts = -(-sizes // sequence)
    document = np.repeat(np.arange(len(sizes)), counts)
    within = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = bounds[:-1][document] + within * sequence
    lengths = np.minimum(sequence, bounds[1:][document] - starts)
    return starts.astype(np.int64), lengths.astype(np.int64), within == 0, int((counts > 1).sum())


def _assign(lengths: np.ndarray, sequence: int, row_of: np.ndarray, order: np.ndarray) -> int:
    """Fill `row_of[order]` for lengths in descending order, and return the number of rows.

    Pieces of one length are alike, and so are rows with the same room, so they are placed in groups. A row that takes a
    piece is then the best fit for the next one, so it takes as many as it has room for.
    """
    room: list[list[np.ndarray]] = [[] for _ in range(sequence + 1)]  # by free positions: groups of rows
    number = 0
    edges = np.flatnonzero(np.diff(lengths)) + 1
    for begin, end in zip([0, *edges.tolist()], [*edges.tolist(), len(lengths)], strict=True):
        if begin == end:
            continue
        length, waiting = int(lengths[begin]), order[begin:end]
        for free in range(length, sequence + 1):
            fits = free // length
            while room[free] and len(waiting):
                group = room[free].pop()
                full = min(len(group), len(waiting) // fits)
                if full:
                    row_of[waiting[: full * fits]] = np.repeat(group[:full], fits)
                    waiting = waiting[full * fits :]
                    _give_back(room, free - fits * length, group[:full])
                if full < len(group):
                    if len(waiting):  # fewer pieces than one row holds
                        row_of[waiting] = group[full]
                        _give_back(room, free - len(waiting) * length, group[full : full + 1])
                        waiting, full = waiting[:0], full + 1
                    _give_back(room, free, group[full:])
            if not len(waiting):
                break
        if len(waiting):
            fits = sequence // length
            rows = -(-len(waiting) // fits)
            row_of[waiting] = number + np.arange(len(waiting)) // fits
            last = len(waiting) - (rows - 1) * fits
            _give_back(room, sequence - fits * length, np.arange(number, number + rows - 1))
            _give_back(room, sequence - last * length, np.array([number + rows - 1]))
            number += rows
    return number


def _give_back(room: list[list[np.ndarray]], free: int, rows: np.ndarray) -> None:
    if len(rows) and free > 0:
        room[free].append(rows)


def concatenated(bounds: np.ndarray, sequence: int) -> dict[str, Any]:
    """Return what windows of `sequence` tokens crop and cut, with the first window at the first token."""
    bounds = np.asarray(bounds)
    tokens = int(bounds[-1])
    windows = max(0, (tokens - 1) // sequence)
    kept = windows * sequence
    # A document whose first and last tokens are in different windows was cut.
    cut = int(((bounds[:-1] // sequence) != ((bounds[1:] - 1) // sequence)).sum())
    return {
        "rows": windows,
        "padded_fraction": 0.0,
        "cropped_fraction": (tokens - kept) / tokens if tokens else 0.0,
        "documents_cut_fraction": cut / max(1, len(bounds) - 1),
    }
