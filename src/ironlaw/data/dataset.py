"""The result of preparation: the tokens of two splits, or a source to tokenise while training, and their statistics."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ironlaw.data import corpus as corpora
from ironlaw.data import splits as splitting
from ironlaw.data import tokenizer as tokenizers
from ironlaw.data.order import mix, permuted
from ironlaw.data.shards import TokenSplit, list_files, open_split, read_index
from ironlaw.data.splits import SPLITS
from ironlaw.errors import UserError
from ironlaw.files import digest_of


@dataclass(frozen=True)
class Stream:
    """A source that is tokenised while it is read."""

    corpus: corpora.Corpus
    splitter: splitting.Splitter
    tokenizer: tokenizers.Tokenizer
    workers: int
    folder: Path  # holds the positions of its blocks

    def files(self, seed: int, epoch: int) -> corpora.Corpus:
        """Return the corpus with its files in the order of an epoch."""
        files = self.corpus.files
        order = permuted(np.arange(len(files)), len(files), mix(seed, epoch, 3)).tolist()
        return dataclasses.replace(self.corpus, files=[files[i] for i in order], reasons={})


@dataclass(frozen=True)
class Dataset:
    """Tokens ready for training, and what preparation found and cost."""

    train: TokenSplit
    validation: TokenSplit
    vocab: int  # size of the vocabulary: every id is smaller
    end_of_text: int  # the id that closes each document
    end_of_text_token: str | None = None  # its name in the tokenizer; None for mock data and tokens made elsewhere
    tokenizer_path: Path | None = None  # None for mock data and tokens made elsewhere
    skipped: dict[str, int] = field(default_factory=dict)  # files and records by reason
    # Seconds of read, train_tokenizer, tokenise, write and unigram, each alone; with worker processes they overlap.
    seconds: dict[str, float] = field(default_factory=dict)
    shards: int = 1
    folder: Path | None = None  # None for mock data, mixtures and streams
    unigram_loss: float | None = None  # nats per validation token of the trivial baseline
    reused: bool = False  # found in the cache: nothing had to be done
    name: str = ""  # the source's path
    sources: tuple[Dataset, ...] = ()  # of a mixture, whose `train` and `validation` concatenate theirs
    weights: tuple[float, ...] = ()  # of the sources, as given
    stream: Stream | None = None  # tokenised while training: `train` is empty
    digest: str = ""  # another one when any token is another; of a stream when the names or sizes of its files are

    @property
    def stage_bytes_per_second(self) -> dict[str, float]:
        """Bytes of text per second that reading, tokenising and writing could each reach alone."""
        total = self.train.bytes + self.validation.bytes
        stages = {stage: self.seconds.get(stage, 0.0) for stage in ("read", "tokenise", "write")}
        return {stage: total / seconds for stage, seconds in stages.items() if seconds > 0 and total}

    def bits_per_byte(self, loss: float) -> float | None:
        """Convert a validation loss from nats per token to bits per byte of text, which no tokenizer can flatter."""
        if not self.validation.bytes:
            return None
        return loss * len(self.validation.tokens) / (self.validation.bytes * math.log(2))

    def tokenizer(self) -> tokenizers.Tokenizer:
        if self.tokenizer_path is None:
            raise UserError("this data has no tokenizer: mock data has none, tokens made elsewhere need data.tokenizer")
        return tokenizers.load(self.tokenizer_path, self.end_of_text_token)


def open_dataset(folder: Path, checksums: bool | None = None, reused: bool = True) -> Dataset:
    """Open a prepared folder. `checksums`: hash all files (True), compare sizes only (False), hash if quick (None)."""
    index = read_index(folder, checksums)
    return Dataset(
        train=open_split(folder, index, "train"),
        validation=open_split(folder, index, "validation"),
        vocab=index["tokenizer"]["vocab"],
        end_of_text=index["tokenizer"]["end_of_text"],
        end_of_text_token=index["tokenizer"]["end_of_text_token"],
        tokenizer_path=folder / "tokenizer.json" if index["tokenizer"]["sha256"] else None,
        skipped=index["skipped"],
        seconds=index["seconds"],
        shards=len(index["shards"]),
        folder=folder,
        unigram_loss=index["unigram_loss"],
        reused=reused,
        name=index["path"],
        digest=digest_of([[list_files(shard[split]) for split in SPLITS] for shard in index["shards"]]),
    )
