"""Documents to token ids on all cores: in this process by the library's threads, or by worker processes.

Threads cost no start, no copies between processes and share the library's memory of words. From some cores on, this
process's own part (reading, hashing, taking ids over, which one thread at a time can do) would hold them up.

The order of the results is the order of the documents, whatever the number of workers.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import numpy as np

from ironlaw.cores import usable_cores
from ironlaw.data import tokenizer as tokenizers
from ironlaw.data import worker
from ironlaw.data.corpus import START, Corpus, Cursor, pieces
from ironlaw.data.readers import Content
from ironlaw.data.splits import Split, Splitter
from ironlaw.errors import UserError

# Below this, starting processes would take longer than they save.
_WORTH_PROCESSES_BYTES = 2**25
# A core makes 0.75 million tokens per second (BPE of 32,000 entries, EPYC), this process's part takes about 70 ns each.
_WORTH_PROCESSES_CORES = 8
_BATCHES_AHEAD = 2  # given to the threads: one ends while the next keeps them busy
_CHUNK_BYTES = 2**19  # what a worker gets at a time: a fraction of a second of work


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A document, one of the pieces of a long one, or (`content` None) something left out, for `reason`."""

    split: Split
    content: Content | None
    bytes: int  # of UTF-8 text
    last: bool  # the document ends here
    next: Cursor | None  # where reading goes on; None in the middle of a file's document
    done_bytes: int
    reason: str = ""


def pieces_of(corpus: Corpus, splitter: Splitter, start: Cursor = START) -> Iterator[TextPiece]:
    """The corpus from `start` on, cut for the workers."""
    for document in corpus.documents(start):
        if document.content is None:
            yield TextPiece("train", None, 0, True, document.next, document.done_bytes, document.reason)
            continue
        parts = splitter.parts(document)
        for split, content in parts:
            cut: list[Content] = [content] if isinstance(content, np.ndarray) else list(pieces(content))
            for part in cut:
                size = 0 if isinstance(part, np.ndarray) else len(part.encode("utf-8"))
                last = part is cut[-1]
                done = last and content is parts[-1][1]
                yield TextPiece(split, part, size, last, document.next if done else None, document.done_bytes)


def worker_count(asked: int | None, corpus_bytes: int) -> int:
    """Processes to tokenise with; 0: this one's threads."""
    cores = usable_cores()
    if asked is not None:
        return asked
    return cores if cores > _WORTH_PROCESSES_CORES and corpus_bytes >= _WORTH_PROCESSES_BYTES else 0


class Tokeniser:
    """Encodes pieces in order. `seconds` is what the stage alone takes: busy time by the workers there are.

    A tokenizer of None passes token ids through: the source is tokenised already.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer | None,
        workers: int,
        chunk_bytes: int = _CHUNK_BYTES,
        by_block: bool = False,
    ):
        self.seconds = 0.0
        self.read_seconds = 0.0  # taken by the iterator of pieces: reading, hashing, cutting
        self._tokenizer = tokenizer
        self._chunk_bytes = chunk_bytes
        self._by_block = by_block  # a chunk ends where a piece says where to go on
        # Several cores share a chunk. What the library makes of a text takes some forty times its size.
        self._here_bytes = chunk_bytes * max(2, usable_cores())
        self._workers = workers if tokenizer is not None else 0

    def encode(self, source: Iterator[TextPiece]) -> Generator[list[tuple[TextPiece, np.ndarray]], None, None]:
        """Lists of pieces with their ids; whatever was begun is finished or dropped when the caller stops."""
        if self._workers == 0:
            yield from self._by_threads(source)
            return
        assert self._tokenizer is not None
        pool = ProcessPoolExecutor(
            self._workers,
            # Not forked: the library's threads and PyTorch's do not survive it.
            mp_context=multiprocessing.get_context("spawn"),
            initializer=worker.start,
            initargs=(self._tokenizer.path, self._tokenizer.end_of_text_token),
        )
        try:
            yield from self._in_order(pool, source)
        except BrokenProcessPool:
            raise UserError(
                "a tokenising process ended by itself: if memory ran out lower data.workers; 0 needs no processes"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _by_threads(self, source: Iterator[TextPiece]) -> Iterator[list[tuple[TextPiece, np.ndarray]]]:
        """The library lets go of the interpreter: two batches are under way while this thread reads and writes."""
        if self._tokenizer is None:
            for chunk in self._chunks(source, self._here_bytes):
                yield list(zip(chunk, self._here(chunk, []), strict=True))
            return
        waiting: deque[tuple[list[TextPiece], Future[tuple[list[np.ndarray], float]]]] = deque()
        chunks = self._chunks(source, self._here_bytes)
        pool = ThreadPoolExecutor(_BATCHES_AHEAD, "tokenise")
        try:
            more = True
            while more or waiting:
                while more and len(waiting) <= _BATCHES_AHEAD:
                    begun = next(chunks, None)
                    if begun is None:
                        more = False
                    else:
                        texts = [piece.content for piece in begun if isinstance(piece.content, str)]
                        waiting.append((begun, pool.submit(self._timed, texts)))
                if waiting:
                    chunk, future = waiting.popleft()
                    encoded, seconds = future.result()
                    self.seconds += seconds / _BATCHES_AHEAD
                    yield list(zip(chunk, self._here(chunk, encoded), strict=True))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _timed(self, texts: list[str]) -> tuple[list[np.ndarray], float]:
        assert self._tokenizer is not None
        start = time.perf_counter()
        return self._tokenizer.encode_many(texts) if texts else [], time.perf_counter() - start

    def _in_order(
        self, pool: ProcessPoolExecutor, source: Iterator[TextPiece]
    ) -> Iterator[list[tuple[TextPiece, np.ndarray]]]:
        waiting: deque[tuple[list[TextPiece], Future[Any]]] = deque()
        chunks = self._chunks(source, self._chunk_bytes)
        more = True
        while more or waiting:
            while more and len(waiting) < 2 * self._workers + 2:
                chunk = next(chunks, None)
                if chunk is None:
                    more = False
                else:
                    texts = [piece.content for piece in chunk if isinstance(piece.content, str)]
                    with worker.without_main():  # a submission may start a process
                        waiting.append((chunk, pool.submit(worker.encode, texts)))
            if waiting:
                chunk, future = waiting.popleft()
                ids, lengths, seconds = future.result()
                self.seconds += seconds / self._workers
                yield list(zip(chunk, _apart(chunk, ids, lengths), strict=True))

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

    def _here(self, chunk: list[TextPiece], encoded: list[np.ndarray]) -> Iterator[np.ndarray]:
        """The ids of each piece: those of its text, or those it holds already."""
        ids = iter(encoded)
        for piece in chunk:
            if isinstance(piece.content, np.ndarray):
                yield piece.content
            else:
                yield next(ids) if piece.content is not None else np.empty(0, np.int64)


def _apart(chunk: list[TextPiece], ids: np.ndarray, lengths: np.ndarray) -> Iterator[np.ndarray]:
    ends = iter(np.cumsum(lengths).tolist())
    begin = 0
    for piece in chunk:
        end = next(ends) if piece.content is not None else begin
        yield ids[begin:end]
        begin = end
