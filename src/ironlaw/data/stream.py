"""Tokenising while training: nothing is prepared, and the order is still a function of (seed, step).

The source is read in blocks of some megabytes, its files in another order every epoch. A block's tokens are cut into
windows, and the windows of a block are shuffled; the tokens after its last window are dropped and counted. The cache
keeps notes of where each block begins and how many samples precede it, so that a resumed run tokenises one block again
instead of all blocks before it. Without the notes it gives the same batches, but later.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ironlaw.data import corpus as corpora
from ironlaw.data import splits as splitting
from ironlaw.data import tokenizer as tokenizers
from ironlaw.data.batch import Batch
from ironlaw.data.batches import empty, fill_window
from ironlaw.data.config import DataConfig
from ironlaw.data.dataset import Dataset, Stream
from ironlaw.data.order import mix, permuted
from ironlaw.data.sample import shared_tokenizer
from ironlaw.data.shards import TokenSplit, token_dtype
from ironlaw.data.tokenise import TextPiece, Tokeniser, pieces_of, worker_count
from ironlaw.errors import UserError
from ironlaw.files import append_json_line, digest_of, read_json_lines, sha256

BLOCK_BYTES = 2**23  # of text; windows are shuffled within a block
_VALIDATION_BYTES = 2**22  # of held-out text, at most


@dataclass(frozen=True, order=True)
class _Start:
    """The start of a block: everything that is needed to continue from there."""

    samples: int  # in all blocks before this one
    epoch: int
    file: int
    position: int


class _Joined:
    """Concatenated documents, with the end of text after each."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.bounds, self.length = [0], 0
        self._parts: list[np.ndarray] = []
        self._end = np.array([tokenizer.end_of_text], dtype=np.uintc)
        self._dtype = token_dtype(tokenizer.vocab).newbyteorder("=")

    def add(self, piece: TextPiece, ids: np.ndarray) -> None:
        self._parts += [ids, self._end] if piece.last else [ids]
        self.length += len(ids) + piece.last
        if piece.last:
            self.bounds.append(self.length)

    def tokens(self) -> np.ndarray:
        """Return all ids, (length,)."""
        return np.concatenate([np.empty(0, np.uintc), *self._parts]).astype(self._dtype)


class StreamBatches:
    """The batches of a stream. Steps may be requested in any order; ascending order is quick."""

    def __init__(
        self, stream: Stream, sequence: int, sequences_per_batch: int, seed: int, rank: int = 0, world: int = 1,
        documents: bool = False,
    ):  # fmt: skip
        self.sequence, self.sequences_per_batch, self.seed = sequence, sequences_per_batch, seed
        self.share = sequences_per_batch // world
        self.documents = documents
        self.seconds = {"read": 0.0, "tokenise": 0.0, "pack": 0.0}
        self._stream = stream
        self._rank = rank
        self._notes = stream.folder / f"positions-{seed}-{sequence}.jsonl"
        notes = (_Start(**note) for note in read_json_lines(self._notes))
        self._starts = sorted({_Start(0, 0, *corpora.START), *notes})
        self._blocks: Generator[tuple[_Start, np.ndarray, np.ndarray], None, None] | None = None
        self._held: deque[tuple[_Start, np.ndarray, np.ndarray]] = deque()
        self._dropped = self._seen = 0

    def batch(self, step: int) -> Batch[np.ndarray]:
        """Return this rank's share of step `step`."""
        batch = empty(self.share, self.sequence, self.documents)
        first = step * self.sequences_per_batch + self._rank * self.share
        # Each rank keeps the blocks of the whole global batch: the next global batch begins after it.
        for row in range(self.share):
            self._fill(first + row, row, batch)
        while len(self._held) > 1 and self._held[1][0].samples <= (step + 1) * self.sequences_per_batch:
            self._held.popleft()
        return batch

    def report(self) -> dict[str, Any]:
        return {"padded_fraction": 0.0, "cropped_fraction": self._dropped / max(1, self._seen)}

    def close(self) -> None:
        if self._blocks is not None:
            self._blocks.close()
        self._blocks = None
        self._held.clear()

    def _fill(self, sample: int, row: int, batch: Batch[np.ndarray]) -> None:
        start, tokens, bounds = self._block_of(sample)
        began = time.perf_counter()
        count = (len(tokens) - 1) // self.sequence
        within = np.array([sample - start.samples])
        at = int(permuted(within, count, mix(self.seed, start.epoch, start.file, start.position))[0]) * self.sequence
        fill_window(batch, row, tokens[at : at + self.sequence + 1], bounds, at)
        self.seconds["pack"] += time.perf_counter() - began

    def _block_of(self, sample: int) -> tuple[_Start, np.ndarray, np.ndarray]:
        for held in self._held:
            if held[0].samples <= sample < held[0].samples + (len(held[1]) - 1) // self.sequence:
                return held
        nearest = self._starts[bisect.bisect_right(self._starts, sample, key=lambda start: start.samples) - 1]
        if self._blocks is None or sample < self._held[0][0].samples or self._ends_before(nearest):
            self.close()
            self._blocks = self._read(nearest)
        while True:
            block = next(self._blocks)
            self._held.append(block)
            if sample < block[0].samples + (len(block[1]) - 1) // self.sequence:
                return block

    def _ends_before(self, start: _Start) -> bool:
        """Return whether the notes have a block that starts after the last block held."""
        return start.samples > self._held[-1][0].samples + len(self._held[-1][1]) // self.sequence

    def _read(self, start: _Start) -> Generator[tuple[_Start, np.ndarray, np.ndarray], None, None]:
        """Yield the blocks from `start` on, epoch after epoch: start, tokens and document bounds of each."""
        tokeniser = Tokeniser(self._stream.tokenizer, self._stream.workers, min(2**19, BLOCK_BYTES // 8), by_block=True)
        ends: deque[tuple[int, int, int]] = deque()  # (epoch, file, position) after each block that was read
        joined, whole = _Joined(self._stream.tokenizer), 0
        chunks = tokeniser.encode(self._pieces(start, ends))
        try:
            for chunk in chunks:
                self.seconds["read"], self.seconds["tokenise"] = tokeniser.read_seconds, tokeniser.seconds
                for piece, ids in chunk:
                    if piece.content is not None:
                        joined.add(piece, ids)
                    if piece.next is not None:  # the block ends
                        samples = max(0, (joined.length - 1) // self.sequence)
                        self._seen += joined.length
                        self._dropped += joined.length - samples * self.sequence
                        following = _Start(start.samples + samples, *ends.popleft())
                        self._note(following)
                        whole += samples
                        if following.epoch != start.epoch and start.samples == 0 and not whole:
                            raise UserError(
                                f"the training text is shorter than one sequence of {self.sequence} tokens: lower "
                                "model.context, or give more text in data.path"
                            )
                        if samples:
                            yield start, joined.tokens(), np.array(joined.bounds)
                        start, joined = following, _Joined(self._stream.tokenizer)
        finally:
            chunks.close()

    def _pieces(self, start: _Start, ends: deque[tuple[int, int, int]]) -> Iterator[TextPiece]:
        """Yield training text without end. Only the last piece of a block has a `next`; `ends` gets its position."""
        epoch, cursor = start.epoch, (start.file, start.position)
        while True:
            held, found = 0, 0
            corpus = self._stream.files(self.seed, epoch)
            for piece in pieces_of(corpus, self._stream.splitter, cursor):
                wanted = piece.content is not None and piece.split == "train"
                found += wanted
                held += piece.bytes if wanted else 0
                full = piece.next is not None and held >= BLOCK_BYTES
                if full:
                    assert piece.next is not None
                    ends.append((epoch, *piece.next))
                    held = 0
                if full or wanted:
                    content = piece.content if wanted else None
                    yield dataclasses.replace(piece, content=content, next=piece.next if full else None)
            if not found and cursor == corpora.START:
                raise UserError(f"{self._stream.corpus.root} has no training text: give more in data.path")
            epoch, cursor = epoch + 1, corpora.START
            ends.append((epoch, *cursor))
            yield TextPiece("train", None, 0, True, cursor, 0)  # a block never spans two epochs

    def _note(self, start: _Start) -> None:
        if start in self._starts:
            return
        bisect.insort(self._starts, start)
        with suppress(OSError):  # the notes only save time
            append_json_line(self._notes, dataclasses.asdict(start))


def open_stream(config: DataConfig, vocab: int, corpus: corpora.Corpus, given: tokenizers.Tokenizer | None) -> Dataset:
    """Return a dataset whose training tokens are made on request; held-out text is tokenised now."""
    if corpus.tokenised:
        raise UserError(f"{corpus.root} is tokenised already: leave data.streaming out, preparing it only copies it")
    source = corpus.source
    splitter = splitting.split(corpus, config.validation_fraction, config.seed, all_text=False)
    tokenizer = given or shared_tokenizer(config, vocab, [corpus], all_text=False)
    validation = _held_out(corpus, splitter, tokenizer, source.path)
    key = [corpus.fingerprint(), source.field, config.seed, config.validation_fraction, splitter.threshold]
    key += [sha256(tokenizer.path), tokenizer.end_of_text, BLOCK_BYTES]
    folder = config.cache_folder / f"stream-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"
    nothing = np.empty(0, dtype=token_dtype(tokenizer.vocab))
    return Dataset(
        train=TokenSplit(nothing, np.zeros(1, dtype=np.int64)),
        validation=validation,
        vocab=tokenizer.vocab,
        end_of_text=tokenizer.end_of_text,
        end_of_text_token=tokenizer.end_of_text_token,
        tokenizer_path=tokenizer.path,
        skipped=corpus.skipped,
        name=source.path,
        stream=Stream(corpus, splitter, tokenizer, worker_count(config.workers, corpus.bytes), folder),
        digest=digest_of([sha256(tokenizer.path), [(file.name, file.size) for file in corpus.files]]),
    )


def _held_out(
    corpus: corpora.Corpus, splitter: splitting.Splitter, tokenizer: tokenizers.Tokenizer, path: str
) -> TokenSplit:
    """Return the first held-out documents, tokenised: about `_VALIDATION_BYTES` of text."""
    chosen: list[TextPiece] = []
    held = 0
    for piece in pieces_of(corpus, splitter):
        if piece.content is not None and piece.split == "validation":
            chosen.append(piece)
            held += piece.bytes
            if held >= _VALIDATION_BYTES and piece.last:
                break
    if not chosen:
        raise splitting.nothing_held_out(path)
    joined = _Joined(tokenizer)
    for piece, ids in zip(chosen, tokenizer.encode_many([str(piece.content) for piece in chosen]), strict=True):
        joined.add(piece, ids)
    return TokenSplit(joined.tokens(), np.array(joined.bounds), held)
