"""Documents to token ids on all cores: in this process by the library's threads, or by worker processes.

Threads need no start and no copies between processes, and share the library's cache of words. With many cores, however,
they would wait for this process's own part (reading, hashing, receiving ids), which runs on one thread at a time.

The order of the results is the order of the documents, whatever the number of workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from ironlaw.cores import usable_cores
from ironlaw.data import tokenizer as tokenizers
from ironlaw.data.corpus import START, Corpus, Cursor, cut_text
from ironlaw.data.processes import ProcessPool, in_order
from ironlaw.data.readers import Content
from ironlaw.data.splits import Split, Splitter

# Below this size, starting processes would take longer than they save.
_WORTH_PROCESSES_BYTES = 2**25
# A core makes 0.75 million tokens per second (BPE of 32,000 entries, EPYC); this process needs about 70 ns per token.
_WORTH_PROCESSES_CORES = 8
_CHUNK_BYTES = 2**19  # sent to a worker at a time: a fraction of a second of work


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A document, a piece of a long document, or (`content` is None) one that was left out for `reason`."""

    split: Split
    content: Content | None
    bytes: int  # of UTF-8 text
    last: bool  # the document ends here
    next: tuple[int, ...] | None  # where reading continues, a Cursor; None in the middle of a file's document
    done_bytes: int
    reason: str = ""


Chunk = list[tuple[TextPiece, np.ndarray]]


def read_pieces(corpus: Corpus, splitter: Splitter, start: Cursor = START) -> Iterator[TextPiece]:
    """Yield the corpus from `start` on, cut into pieces for the workers."""
    for document in corpus.documents(start):
        if document.content is None:
            yield TextPiece("train", None, 0, True, document.next, document.done_bytes, document.reason)
            continue
        parts = splitter.parts(document.file, document.content)
        for split, content in parts:
            cut: list[Content] = [content] if isinstance(content, np.ndarray) else list(cut_text(content))
            for part in cut:
                size = 0 if isinstance(part, np.ndarray) else len(part.encode("utf-8"))
                last = part is cut[-1]
                done = last and content is parts[-1][1]
                yield TextPiece(split, part, size, last, document.next if done else None, document.done_bytes)


def worker_count(asked: int | None, corpus_bytes: int) -> int:
    """Return the number of processes to tokenise with; 0: the threads of this process."""
    cores = usable_cores()
    if asked is not None:
        return asked
    return cores if cores > _WORTH_PROCESSES_CORES and corpus_bytes >= _WORTH_PROCESSES_BYTES else 0


class Tokeniser:
    """Encodes pieces in order. `seconds` is the time of this stage alone: busy time divided by the number of workers.

    Without a tokenizer, token ids pass through unchanged: the source is tokenised already.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer | None,
        workers: int,
        chunk_bytes: int = _CHUNK_BYTES,
        by_block: bool = False,
    ):
        self.seconds = 0.0
        self.read_seconds = 0.0  # in the iterator of pieces: reading, hashing, cutting
        self._tokenizer = tokenizer
        self._chunk_bytes = chunk_bytes
        self._by_block = by_block  # a chunk ends at each piece whose `next` is set
        # All cores share a chunk. It stays small because encoding takes some forty times a text's size in memory.
        self._here_bytes = chunk_bytes * max(2, usable_cores())
        self._workers = workers if tokenizer is not None else 0

    def encode(self, source: Iterator[TextPiece]) -> Generator[Chunk, None, None]:
        """Yield lists of pieces with their ids. When the caller stops, work in progress is finished or dropped."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            for chunk in self._chunks(source, self._here_bytes):
                yield list(zip(chunk, _ids_of(chunk, []), strict=True))
        elif self._workers:
            make = partial(tokenizers.load_in_worker, tokenizer.path, tokenizer.end_of_text_token)
            with ProcessPool(self._workers, "data.workers", make) as pool:
                submit = partial(pool.submit, tokenizers.Tokenizer.encode_timed)
                yield from self._encode(source, submit, self._chunk_bytes, self._workers, 2 * self._workers + 1)
        else:  # the library releases the interpreter's lock: two batches run while this thread reads
            with ThreadPoolExecutor(2, "tokenise") as threads:
                encode = tokenizer.encode_timed
                yield from self._encode(source, lambda texts: threads.submit(encode, texts), self._here_bytes, 2, 2)

    def _encode(
        self, source: Iterator[TextPiece], submit: Callable[[list[str]], Future[tuple[list[np.ndarray], float]]],
        size: int, parallel: int, ahead: int,
    ) -> Iterator[Chunk]:  # fmt: skip
        """Encode chunks of `size` bytes, `parallel` at once, with `ahead` more in progress than are waited for."""
        texts_of = lambda chunk: [p.content for p in chunk if isinstance(p.content, str)]  # noqa: E731
        for chunk, (encoded, seconds) in in_order(self._chunks(source, size), lambda c: submit(texts_of(c)), ahead):
            self.seconds += seconds / parallel
            yield list(zip(chunk, _ids_of(chunk, encoded), strict=True))

    def _chunks(self, source: Iterator[TextPiece], size: int) -> Iterator[list[TextPiece]]:
        chunk: list[TextPiece] = []
        held = 0
        while True:
            start = time.perf_counter()
            piece = next(source, None)
            self.read_seconds += time.perf_counter() - start
            if piece is None:
                break
            chunk.append(piece)
            held += piece.bytes or (len(piece.content) if piece.content is not None else 1)
            if held >= size or (self._by_block and piece.next is not None):
                yield chunk
                chunk, held = [], 0
        if chunk:
            yield chunk


def _ids_of(chunk: list[TextPiece], encoded: list[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the ids of each piece: those of its text, or those that it already holds."""
    ids = iter(encoded)
    for piece in chunk:
        if isinstance(piece.content, np.ndarray):
            yield piece.content
        else:
            yield next(ids) if piece.content is not None else np.empty(0, np.int64)
