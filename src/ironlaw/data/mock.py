"""Random tokens in place of text: what a run costs without data that could matter."""

from __future__ import annotations

import math

import numpy as np

from ironlaw.data import shards
from ironlaw.data.config import DataConfig
from ironlaw.data.dataset import Dataset, Statistics

_TOKENS = 2**24
_DOCUMENT = 512  # tokens, on average: where documents are masked, so is mock data


def mock(config: DataConfig, vocab: int) -> Dataset:
    """Uniformly random tokens in memory: no files, no tokenizer, and ln(vocab) is the best loss there is."""
    generator = np.random.default_rng(config.seed)
    dtype = shards.token_dtype(vocab)
    tokens = generator.integers(0, vocab, _TOKENS, dtype=dtype.newbyteorder("="))
    cut = int(len(tokens) * (1 - config.validation_fraction))
    train, validation = tokens[:cut], tokens[cut:]
    bounds = [_documents(generator, len(part)) for part in (train, validation)]
    return Dataset(
        train=train,
        validation=validation,
        train_documents=bounds[0],
        validation_documents=bounds[1],
        vocab=vocab,
        end_of_text=0,
        end_of_text_token=None,
        tokenizer_path=None,
        statistics=Statistics(
            documents={"train": len(bounds[0]) - 1, "validation": len(bounds[1]) - 1},
            tokens={"train": len(train), "validation": len(validation)},
            bytes={"train": 0, "validation": 0},
        ),
        unigram_loss=math.log(vocab),
        name="mock",
    )


def _documents(generator: np.random.Generator, tokens: int) -> np.ndarray:
    """Boundaries of documents whose lengths are spread as widely as those of text are: exponentially."""
    lengths = 1 + generator.exponential(_DOCUMENT, max(1, 2 * tokens // _DOCUMENT)).astype(np.int64)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    return np.concatenate([bounds[bounds < tokens], [tokens]])
