"""What preparation gives: tokens of two splits or a source to make them from, and what is known about them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ironlaw.data import corpus as corpora
from ironlaw.data import splits as splitting
from ironlaw.data import tokenizer as tokenizers
from ironlaw.data.order import mix, permuted
from ironlaw.data.shards import TokenArray, open_documents, open_marks, open_tokens, read_index
from ironlaw.data.splits import SPLITS
from ironlaw.errors import UserError


@dataclass(frozen=True)
class Statistics:
    """What preparation found and what each of its stages cost."""

    documents: dict[str, int]  # by split
    tokens: dict[str, int]  # by split, the end-of-text tokens included
    bytes: dict[str, int]  # of UTF-8 text, by split; 0: the source held tokens, not text
    skipped: dict[str, int] = field(default_factory=dict)  # files and records by reason
    # read, train_tokenizer, tokenise, write, unigram: what each takes by itself; with worker processes they overlap
    seconds: dict[str, float] = field(default_factory=dict)
    shards: int = 1

    @property
    def bytes_per_second(self) -> float | None:
        """Bytes of text per second through the whole preparation, had nothing overlapped."""
        total = sum(self.seconds.values())
        return sum(self.bytes.values()) / total if total else None

    @property
    def stage_bytes_per_second(self) -> dict[str, float]:
        """What reading, tokenising and writing could each deliver."""
        total = sum(self.bytes.values())
        stages = {stage: self.seconds.get(stage, 0.0) for stage in ("read", "tokenise", "write")}
        return {stage: total / seconds for stage, seconds in stages.items() if seconds > 0 and total}


@dataclass(frozen=True)
class Stream:
    """A source that is tokenised as it is read."""

    corpus: corpora.Corpus
    splitter: splitting.Splitter
    tokenizer: tokenizers.Tokenizer
    workers: int
    folder: Path  # of the notes

    def files(self, seed: int, epoch: int) -> corpora.Corpus:
        """The corpus with its files in the order of an epoch."""
        files = self.corpus.files
        order = permuted(np.arange(len(files)), len(files), mix(seed, epoch, 3)).tolist()
        return dataclasses.replace(self.corpus, files=[files[i] for i in order], reasons={})


@dataclass(frozen=True)
class Dataset:
    """Tokens ready to train on. `train` and `validation` are (tokens,) unsigned, memory-mapped, read-only."""

    train: TokenArray
    validation: TokenArray
    train_documents: np.ndarray  # (documents + 1,) int64: where each begins in `train`, and the end
    validation_documents: np.ndarray
    vocab: int  # entries of the tokenizer: every id is below
    end_of_text: int  # the id that closes each document
    end_of_text_token: str | None  # its name in the tokenizer; None for mock data and tokens made elsewhere
    tokenizer_path: Path | None  # None for mock data and tokens made elsewhere
    statistics: Statistics
    folder: Path | None = None  # None for mock data, mixtures and streams
    unigram_loss: float | None = None  # nats per validation token of the trivial baseline
    reused: bool = False  # True when nothing had to be done
    name: str = ""  # the source's path
    sources: tuple[Dataset, ...] = ()  # of a mixture, whose `train` and `validation` are theirs behind one another
    weights: tuple[float, ...] = ()  # of the sources, as given
    train_marks: TokenArray | None = None  # (tokens,) uint8, `shards.open_marks`; None: all are learned
    validation_marks: TokenArray | None = None
    stream: Stream | None = None  # tokenised while training: `train` is empty

    @property
    def validation_bytes(self) -> int:
        return self.statistics.bytes["validation"]

    def bits_per_byte(self, loss: float) -> float | None:
        """A validation loss in nats per token as bits per byte of text, which no tokenizer can flatter."""
        if not self.validation_bytes:
            return None
        return loss * len(self.validation) / (self.validation_bytes * math.log(2))

    def tokenizer(self) -> tokenizers.Tokenizer:
        if self.tokenizer_path is None:
            raise UserError("this data has no tokenizer: mock data has none, tokens made elsewhere need data.tokenizer")
        return tokenizers.load(self.tokenizer_path, self.end_of_text_token)


def open_dataset(folder: Path, checksums: bool | None = None, reused: bool = True) -> Dataset:
    """A prepared folder. `checksums` reads every byte (True), sizes only (False), or what is quick (None)."""
    index = read_index(folder, checksums)
    return Dataset(
        train=open_tokens(folder, index, "train"),
        validation=open_tokens(folder, index, "validation"),
        train_marks=open_marks(folder, index, "train"),
        validation_marks=open_marks(folder, index, "validation"),
        train_documents=open_documents(folder, index, "train"),
        validation_documents=open_documents(folder, index, "validation"),
        vocab=index["tokenizer"]["vocab"],
        end_of_text=index["tokenizer"]["end_of_text"],
        end_of_text_token=index["tokenizer"]["end_of_text_token"],
        tokenizer_path=folder / "tokenizer.json" if index["tokenizer"]["sha256"] else None,
        folder=folder,
        statistics=statistics(index),
        unigram_loss=index["unigram_loss"],
        reused=reused,
        name=index["path"],
    )


def statistics(index: dict[str, Any]) -> Statistics:
    def total(what: str) -> dict[str, int]:
        return {split: sum(shard[split][what] for shard in index["shards"]) for split in SPLITS}

    return Statistics(
        documents=total("documents"),
        tokens=total("tokens"),
        bytes=total("bytes"),
        skipped=index["skipped"],
        seconds=index["seconds"],
        shards=len(index["shards"]),
    )
