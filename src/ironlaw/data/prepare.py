"""From a DataConfig to tokens on disk, once: later calls with the same corpus and settings reuse them."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ironlaw.data import corpus as corpora
from ironlaw.data import shards
from ironlaw.data import tokenizer as tokenizers
from ironlaw.data.config import DataConfig
from ironlaw.data.unigram import unigram_loss
from ironlaw.errors import UserError

_MOCK_TOKENS = 2**24


@dataclass(frozen=True)
class Statistics:
    """What preparation found and what each of its stages cost."""

    documents: dict[str, int]  # by split
    tokens: dict[str, int]  # by split, the end-of-text tokens included
    bytes: dict[str, int]  # of UTF-8 text, by split
    skipped: dict[str, int] = field(default_factory=dict)  # files by reason
    seconds: dict[str, float] = field(default_factory=dict)  # read, train_tokenizer, tokenise, write, unigram

    @property
    def slowest_stage(self) -> str | None:
        return max(self.seconds, key=lambda stage: self.seconds[stage]) if self.seconds else None

    @property
    def bytes_per_second(self) -> float | None:
        """Bytes of text per second through the whole preparation."""
        total = sum(self.seconds.values())
        return sum(self.bytes.values()) / total if total else None


@dataclass(frozen=True)
class Dataset:
    """Tokens ready to train on. `train` and `validation` are (tokens,) unsigned, memory-mapped, read-only."""

    train: np.ndarray
    validation: np.ndarray
    train_documents: np.ndarray  # (documents + 1,) int64: where each begins in `train`, and the end
    validation_documents: np.ndarray
    vocab: int  # entries of the tokenizer: every id is below
    end_of_text: int  # the id that closes each document
    end_of_text_token: str | None  # its name in the tokenizer; None for mock data
    tokenizer_path: Path | None  # None for mock data
    folder: Path | None  # None for mock data
    statistics: Statistics
    unigram_loss: float | None  # nats per validation token of the trivial baseline
    reused: bool  # True when nothing had to be done

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
            raise UserError("mock data has no tokenizer: set data.mock = false")
        return tokenizers.load(self.tokenizer_path, self.end_of_text_token)


def prepare(config: DataConfig, vocab: int, progress: shards.Progress | None = None) -> Dataset:
    """The dataset of `config` for a model of `vocab` entries, tokenised now or found in the cache.

    Safe to call from several processes at once; interrupted, it leaves nothing behind.
    """
    if config.mock:
        return _mock(config, vocab)
    if config.tokenizer is None:
        tokenizers.check_vocab(vocab)
        source = None
    else:
        source = tokenizers.load(config.tokenizer, config.end_of_text)
        tokenizers.check_fits(source, vocab)
    corpus = corpora.find(config.path, config.maximum_file_bytes)
    folder = config.cache_folder / _folder_name(config, vocab, corpus, source)
    reused = folder.exists()
    if not reused:
        with shards.new_folder(folder) as temporary:
            _build(config, vocab, corpus, source, temporary, progress)
    return open_dataset(folder, reused=reused)


def open_dataset(folder: Path, checksums: bool | None = None, reused: bool = True) -> Dataset:
    """A prepared folder. `checksums` reads every byte (True), sizes only (False), or what is quick (None)."""
    index = shards.read_index(folder, checksums)
    splits, dtype = index["splits"], np.dtype(index["dtype"])
    return Dataset(
        train=shards.open_tokens(folder, "train", dtype),
        validation=shards.open_tokens(folder, "validation", dtype),
        train_documents=np.load(folder / "train_documents.npy", mmap_mode="r"),
        validation_documents=np.load(folder / "validation_documents.npy", mmap_mode="r"),
        vocab=index["tokenizer"]["vocab"],
        end_of_text=index["tokenizer"]["end_of_text"],
        end_of_text_token=index["tokenizer"]["end_of_text_token"],
        tokenizer_path=folder / "tokenizer.json",
        folder=folder,
        statistics=Statistics(
            documents={name: splits[name]["documents"] for name in splits},
            tokens={name: splits[name]["tokens"] for name in splits},
            bytes={name: splits[name]["bytes"] for name in splits},
            skipped=index["skipped"],
            seconds=index["seconds"],
        ),
        unigram_loss=index["unigram_loss"],
        reused=reused,
    )


def _folder_name(config: DataConfig, vocab: int, corpus: corpora.Corpus, source: tokenizers.Tokenizer | None) -> str:
    """Readable, and different whenever any token could be."""
    key: dict[str, Any] = {
        "schema": shards.SCHEMA_VERSION,
        "corpus": corpus.fingerprint(),
        "fraction": config.validation_fraction,
        "seed": config.seed,
    }
    if source is None:
        # A new release of the library may break ties differently.
        from tokenizers import __version__

        key |= {"vocab": vocab, "trained_with": __version__, "sample_bytes": tokenizers.SAMPLE_BYTES}
    else:
        key |= {"tokenizer": tokenizers.file_sha256(source.path), "end_of_text": source.end_of_text}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    label = "stdlib" if config.path == "stdlib" else corpus.root.stem
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '_', label)[:40]}-{digest[:16]}"


def _build(
    config: DataConfig,
    vocab: int,
    corpus: corpora.Corpus,
    source: tokenizers.Tokenizer | None,
    folder: Path,
    progress: shards.Progress | None,
) -> None:
    """Fill `folder` with everything `open_dataset` reads."""
    clock = _Clock()
    corpus.scan()
    if not corpus.files:
        raise corpora.no_text(config.path, corpus)
    clock.lap("read")
    path = folder / "tokenizer.json"
    if source is None:
        tokenizer = tokenizers.train(_sample(corpus, config), vocab, path)
    else:
        tokenizer = source
        shutil.copyfile(source.path, path)
    clock.lap("train_tokenizer")

    encoder = shards.Encoder(tokenizer, folder, corpus.bytes, progress)
    for split, _, text in corpora.documents(corpus, config.validation_fraction, config.seed):
        encoder.add(split, text)
    splits = encoder.finish()
    clock.lap("read", less=sum(encoder.seconds.values()))

    train, validation = (shards.open_tokens(folder, split, encoder.dtype) for split in shards.SPLITS)
    baseline = unigram_loss(train, validation, tokenizer.vocab)
    clock.lap("unigram")
    shards.write_index(
        folder,
        {
            "path": config.path,
            "validation_fraction": config.validation_fraction,
            "seed": config.seed,
            "dtype": encoder.dtype.str,
            "tokenizer": {
                "sha256": tokenizers.file_sha256(path),
                "vocab": tokenizer.vocab,
                "end_of_text": tokenizer.end_of_text,
                "end_of_text_token": tokenizer.end_of_text_token,
            },
            "splits": splits,
            "unigram_loss": baseline,
            "skipped": corpus.skipped,
            "seconds": clock.seconds | encoder.seconds,
        },
    )


def _sample(corpus: corpora.Corpus, config: DataConfig) -> Iterator[str]:
    """Text to learn merges from: training documents in a fixed shuffled order, up to SAMPLE_BYTES characters.

    No document gives more than its share or 1 MB, so that one huge file does not stand for all.
    """
    names = [file.name for file in corpus.files]
    validation = corpora.held_out(names, config.validation_fraction, config.seed)
    files = [file for file in corpus.files if file.name not in validation]
    files.sort(key=lambda file: corpora.order(file.name, config.seed))
    share = max(tokenizers.SAMPLE_BYTES // len(files), 2**20)
    left = tokenizers.SAMPLE_BYTES
    for file in files:
        text = corpora.training_part(corpus, file, config.validation_fraction)[: min(share, left)]
        left -= len(text)
        yield text
        if left <= 0:
            return


class _Clock:
    """Adds the time since the last lap to a stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str, less: float = 0.0) -> None:
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last - less
        self._last = now


def _mock(config: DataConfig, vocab: int) -> Dataset:
    """Uniformly random tokens in memory: no files, no tokenizer, and ln(vocab) is the best loss there is."""
    generator = np.random.default_rng(config.seed)
    dtype = shards.token_dtype(vocab)
    tokens = generator.integers(0, vocab, _MOCK_TOKENS, dtype=dtype.newbyteorder("="))
    cut = int(len(tokens) * (1 - config.validation_fraction))
    train, validation = tokens[:cut], tokens[cut:]
    return Dataset(
        train=train,
        validation=validation,
        train_documents=np.array([0, len(train)], dtype=np.int64),
        validation_documents=np.array([0, len(validation)], dtype=np.int64),
        vocab=vocab,
        end_of_text=0,
        end_of_text_token=None,
        tokenizer_path=None,
        folder=None,
        statistics=Statistics(
            documents={"train": 1, "validation": 1},
            tokens={"train": len(train), "validation": len(validation)},
            bytes={"train": 0, "validation": 0},
        ),
        unigram_loss=math.log(vocab),
        reused=False,
    )
