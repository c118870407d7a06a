"""The split into training and held-out documents. A document's own content decides, so the splits share no document.

The split compares a hash of the text (without surrounding blanks) and the seed with a threshold. Duplicates have the
same hash and are in the same split; new documents move no others; and workers need not coordinate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ironlaw.data.corpus import Corpus, File, check_has_text, tail_cut
from ironlaw.data.readers import Content
from ironlaw.errors import UserError

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
_ALL = 2**64
# Up to this size, records are read once beforehand, so that even a handful of them gives both splits some.
_SMALL_BYTES = 2**24


def number(key: bytes, seed: int) -> int:
    """Return a fixed pseudo-random number in [0, 2**64) for a document."""
    return int.from_bytes(hashlib.sha256(f"{seed}:".encode() + key).digest()[:8], "big")


def content_key(content: Content) -> bytes:
    """Return the bytes that identify a document's content: equal for duplicates."""
    if isinstance(content, np.ndarray):
        return content.astype("<i8").tobytes()
    return content.strip().encode("utf-8")


@dataclass(frozen=True)
class Splitter:
    """Assigns each document of a corpus to a split. Documents with numbers below `threshold` are held out."""

    seed: int
    threshold: int
    fraction: float
    tail: bool  # there is only one document: its tail is held out
    names: dict[str, int] | None = None  # numbers by file name, where the name decides instead of the text

    def parts(self, file: File, content: Content) -> list[tuple[Split, Content]]:
        """Return a document with its split; two parts where the tail is held out."""
        if self.tail:
            if isinstance(content, np.ndarray):
                cut = max(1, int(len(content) * (1 - self.fraction)))
            else:
                cut = tail_cut(content, self.fraction)
            both: list[tuple[Split, Content]] = [("train", content[:cut]), ("validation", content[cut:])]
            return [part for part in both if len(part[1])]
        return [("validation" if self.number(file, content) < self.threshold else "train", content)]

    def number(self, file: File, content: Content) -> int:
        if self.names is not None:
            return self.names[file.name]
        return number(content_key(content), self.seed)


def split(corpus: Corpus, fraction: float, seed: int, all_text: bool = True) -> Splitter:
    """Scan the corpus, removing files without text from it, and decide what to hold out. UserError if none has text.

    `all_text = False` skips the scan of a large corpus; its documents are then assigned as they are read.
    """
    if not all_text and corpus.bytes > _SMALL_BYTES and not corpus.stdlib:
        return Splitter(seed, int(fraction * _ALL), fraction, tail=False)
    seen: dict[bytes, str] = {}  # the standard library: hash of the text -> first file with it
    names: dict[str, int] = {}
    numbers: set[int] = set()

    def add(file: File, text: str) -> None:
        if corpus.stdlib:
            # By name, so that a new release of Python moves no file between the splits; duplicates stay together.
            digest = hashlib.sha256(content_key(text)).digest()
            names[file.name] = number(seen.setdefault(digest, file.name).encode("utf-8", "surrogateescape"), seed)
            numbers.add(names[file.name])
        else:
            numbers.add(number(content_key(text), seed))

    corpus.scan(add)
    check_has_text(corpus)
    records = [file for file in corpus.files if file.kind != "text"]
    complete = sum(file.size for file in records) <= _SMALL_BYTES
    if records and complete:
        for document in corpus.documents():
            if document.content is not None and document.file.kind != "text":
                numbers.add(number(content_key(document.content), seed))
    found = threshold(numbers, fraction) if complete else int(fraction * _ALL)
    tail = complete and len(numbers) == 1 and corpus.source.format != "pairs"  # half a pair is none
    return Splitter(seed, found, fraction, tail, names=names if corpus.stdlib else None)


def threshold(numbers: Iterable[int], fraction: float) -> int:
    """Return the number below which documents are held out: about `fraction`, at least one of two, never all."""
    ranked = sorted(set(numbers))
    if len(ranked) < 2:
        return 0
    limit = int(fraction * _ALL)
    return min(max(limit, ranked[0] + 1), ranked[-1])


def no_held_out_error(path: str) -> UserError:
    return UserError(
        f'none of the documents of data.path = "{path}" is held out: raise data.validation_fraction, set another '
        "data.seed or give more text"
    )
