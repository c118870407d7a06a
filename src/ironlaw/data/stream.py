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
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ironlaw.data import corpus as corpora
from ironlaw.data import splits as splitting
from ironlaw.data import tokenizer as tokenizers
from ironlaw.data.batch import Batch
from ironlaw.data.batches import empty, fill_row
from ironlaw.data.config import DataConfig
from ironlaw.data.dataset import Dataset, Stream
from ironlaw.data.order import mix, permuted
from ironlaw.data.sample import shared_tokenizer
from ironlaw.data.shards import TokenSplit, token_dtype
from ironlaw.data.tokenise import TextPiece, Tokeniser, read_pieces, worker_count
from ironlaw.errors import UserError
from ironlaw.files import SEAL, append_json_line, digest_of, is_sealed, read_json_lines, seal, sha256

BLOCK_BYTES = 2**23  # of text; windows are shuffled within a block
_VALIDATION_BYTES = 2**22  # of held-out text, at most


@dataclass(frozen=True, order=True)
class _Start:
    """The start of a block: everything that is needed to continue from there."""

    samples: int  # in all blocks before this one
    epoch: int
    file: int
    position: int


@dataclass(frozen=True)
class _Block:
    """The tokens of a block (length,), its document bounds (documents + 1,), and its number of windows."""

    start: _Start
    tokens: np.ndarray
    bounds: np.ndarray
    samples: int

    @property
    def end(self) -> int:
        """The number of the first sample after the block."""
        return self.start.samples + self.samples


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
        notes = (note for note in read_json_lines(self._notes) if is_sealed(note))  # a changed one is another order
        places = (_Start(**{key: value for key, value in note.items() if key != SEAL}) for note in notes)
        self._starts = sorted({_Start(0, 0, *corpora.START), *places})
        self._blocks: Generator[_Block, None, None] | None = None
        self._kept: deque[_Block] = deque()
        self._dropped = self._seen = 0

    def batch(self, step: int) -> Batch[np.ndarray]:
        """Return this rank's share of step `step`."""
        batch = empty(self.share, self.sequence, self.documents)
        first = step * self.sequences_per_batch + self._rank * self.share
        for row in range(self.share):
            block = self._block_of(first + row)
            began = time.perf_counter()
            start, within = block.start, np.array([first + row - block.start.samples])
            key = mix(self.seed, start.epoch, start.file, start.position)
            at = int(permuted(within, block.samples, key)[0]) * self.sequence
            fill_row(batch, row, block.tokens[at : at + self.sequence + 1], block.bounds, at)
            self.seconds["pack"] += time.perf_counter() - began
        # Each rank keeps the blocks of the whole global batch: the next global batch begins after it.
        while len(self._kept) > 1 and self._kept[0].end <= (step + 1) * self.sequences_per_batch:
            self._kept.popleft()
        return batch

    def report(self) -> dict[str, Any]:
        return {"padded_fraction": 0.0, "cropped_fraction": self._dropped / max(1, self._seen)}

    def close(self) -> None:
        if self._blocks is not None:
            self._blocks.close()
        self._blocks = None
        self._kept.clear()

    def _block_of(self, sample: int) -> _Block:
        for block in self._kept:
            if block.start.samples <= sample < block.end:
                return block
        nearest = self._starts[bisect.bisect_right(self._starts, sample, key=lambda start: start.samples) - 1]
        is_ahead = bool(self._kept) and self._kept[0].start.samples <= sample and nearest.samples <= self._kept[-1].end
        if self._blocks is None or not is_ahead:  # before the blocks read now, or behind one that the notes skip
            self.close()
            self._blocks = self._read(nearest)
        for block in self._blocks:
            self._kept.append(block)
            if sample < block.end:
                return block
        raise AssertionError("a stream has no end")

    def _read(self, start: _Start) -> Generator[_Block, None, None]:
        """Yield the blocks from `start` on, epoch after epoch."""
        tokeniser = Tokeniser(self._stream.tokenizer, self._stream.workers, min(2**19, BLOCK_BYTES // 8), by_block=True)
        joined = _Joined(self._stream.tokenizer)
        with closing(tokeniser.encode(self._pieces(start))) as chunks:
            for chunk in chunks:
                self.seconds["read"], self.seconds["tokenise"] = tokeniser.read_seconds, tokeniser.seconds
                for piece, ids in chunk:
                    if piece.content is not None:
                        joined.add(piece, ids)
                    if piece.next is None:
                        continue
                    samples = max(0, (joined.length - 1) // self.sequence)
                    self._seen += joined.length
                    self._dropped += joined.length - samples * self.sequence
                    following = _Start(start.samples + samples, *piece.next)
                    self._note(following)
                    if following.epoch != start.epoch and not following.samples:
                        raise UserError(
                            f"the training text is shorter than one sequence of {self.sequence} tokens: lower "
                            "model.context, or give more text in data.path"
                        )
                    if samples:
                        yield _Block(start, joined.tokens(), np.array(joined.bounds), samples)
                    start, joined = following, _Joined(self._stream.tokenizer)

    def _pieces(self, start: _Start) -> Iterator[TextPiece]:
        """Yield training text without end. Only the last piece of a block has a `next`: (epoch, file, position)."""
        epoch, cursor = start.epoch, (start.file, start.position)
        while True:
            size, found = 0, False
            for piece in read_pieces(self._stream.files(self.seed, epoch), self._stream.splitter, cursor):
                if wanted := piece.content is not None and piece.split == "train":
                    found = True
                    size += piece.bytes
                full = piece.next is not None and size >= BLOCK_BYTES
                if full:
                    size = 0
                if full or wanted:
                    following = (epoch, *piece.next) if full and piece.next is not None else None
                    yield dataclasses.replace(piece, content=piece.content if wanted else None, next=following)
            if not found and cursor == corpora.START:
                raise UserError(f"{self._stream.corpus.root} has no training text: give more in data.path")
            epoch, cursor = epoch + 1, corpora.START
            yield TextPiece("train", None, 0, True, (epoch, *cursor), 0)  # a block never spans two epochs

    def _note(self, start: _Start) -> None:
        if start in self._starts:
            return
        bisect.insort(self._starts, start)
        with suppress(OSError):  # the notes only save time
            append_json_line(self._notes, seal(dataclasses.asdict(start)))


def open_stream(config: DataConfig, vocab: int, corpus: corpora.Corpus, given: tokenizers.Tokenizer | None) -> Dataset:
    """Return a dataset whose training tokens are made on request; held-out text is tokenised now."""
    if corpus.tokenised:
        raise UserError(f"{corpus.root} is tokenised already: leave data.streaming out, preparing it only copies it")
    source = corpus.source
    splitter = splitting.split(corpus, config.validation_fraction, config.seed, all_text=False)
    tokenizer = given or shared_tokenizer(config, vocab, [corpus], all_text=False)
    validation = _held_out(corpus, splitter, tokenizer)
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


def _held_out(corpus: corpora.Corpus, splitter: splitting.Splitter, tokenizer: tokenizers.Tokenizer) -> TokenSplit:
    """Return the first held-out documents, tokenised: about `_VALIDATION_BYTES` of text."""
    chosen: list[TextPiece] = []
    size = 0
    for piece in read_pieces(corpus, splitter):
        if piece.content is not None and piece.split == "validation":
            chosen.append(piece)
            size += piece.bytes
            if size >= _VALIDATION_BYTES and piece.last:
                break
    if not chosen:
        raise splitting.no_held_out_error(corpus.source.path)
    joined = _Joined(tokenizer)
    for piece, ids in zip(chosen, tokenizer.encode_many([str(piece.content) for piece in chosen]), strict=True):
        joined.add(piece, ids)
    return TokenSplit(joined.tokens(), np.array(joined.bounds), size)
