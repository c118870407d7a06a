"""From a DataConfig to the data of a run: random tokens, one source, a mixture of sources, or a stream."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from ironlaw.data import tokenizer as tokenizers
from ironlaw.data.config import CHATS, DataConfig
from ironlaw.data.corpus import Corpus, find
from ironlaw.data.dataset import Dataset
from ironlaw.data.mixture import prepare_mixture
from ironlaw.data.sample import shared_tokenizer
from ironlaw.data.shards import Progress, TokenSplit, token_dtype
from ironlaw.data.source import Say, folder_name, prepare_source
from ironlaw.data.stream import open_stream
from ironlaw.errors import UserError

_MOCK_TOKENS = 2**24
_MOCK_DOCUMENT = 512  # mean tokens of a document, so that mock data can be masked as text is


def prepare(config: DataConfig, vocab: int, progress: Progress | None = None, say: Say | None = None) -> Dataset:
    """Return the dataset of `config` for a model of `vocab` entries, tokenised now or found in the cache.

    Safe to call from several processes at once. An interruption or a full disk leaves the finished shards, and the next
    call continues after them. Damaged shards are made again. `say` gets a line about both.
    """
    say = say or (lambda message: None)
    if config.mock:
        return _mock(config, vocab)
    given, sources = _found(config)
    if given is not None:
        tokenizers.check_fits(given, vocab)
    if given is None and not all(corpus.tokenised for corpus in sources):
        tokenizers.check_vocab(vocab)
    if config.streaming:
        return open_stream(config, vocab, sources[0], given)
    if len(sources) > 1:
        return prepare_mixture(config, vocab, sources, given, progress, say)
    return prepare_source(config, vocab, sources[0], given, progress, say)


def folders_of(config: DataConfig, vocab: int) -> list[Path]:
    """Return the folders of the sources' tokens. A mixture's folders depend on its tokenizer, trained if missing."""
    given, sources = _found(config)
    if given is None and len(sources) > 1:
        given = shared_tokenizer(config, vocab, sources)
    return [config.cache_folder / folder_name(config, vocab, corpus, given) for corpus in sources]


def _found(config: DataConfig) -> tuple[tokenizers.Tokenizer | None, list[Corpus]]:
    """Return the given tokenizer, and the sources with their files; those of conversations with their template."""
    given = None if config.tokenizer is None else tokenizers.load(config.tokenizer, config.end_of_text)
    sources = [find(source, config.maximum_file_bytes) for source in config.all_sources]
    chats = [corpus for corpus in sources if corpus.source.format in CHATS]
    if chats and given is None:
        raise UserError("conversations need the tokenizer of the model that learns: give data.tokenizer, or model.from")
    if chats and given is not None:
        from ironlaw.data.chat import text_for_training

        text = text_for_training(given, config.chat_template, config.pairs)
        for corpus in chats:
            corpus.chat = text
    return given, sources


def _mock(config: DataConfig, vocab: int) -> Dataset:
    """Return uniformly random tokens in memory: no files, no tokenizer, and ln(vocab) is the lowest possible loss."""
    generator = np.random.default_rng(config.seed)
    dtype = token_dtype(vocab)
    tokens = generator.integers(0, vocab, _MOCK_TOKENS, dtype=dtype.newbyteorder("="))
    cut = int(len(tokens) * (1 - config.validation_fraction))
    parts = (tokens[:cut], tokens[cut:])
    train, validation = (TokenSplit(part, _mock_documents(generator, len(part))) for part in parts)
    return Dataset(
        train=train,
        validation=validation,
        vocab=vocab,
        end_of_text=0,
        unigram_loss=math.log(vocab),
        name="mock",
    )


def _mock_documents(generator: np.random.Generator, tokens: int) -> np.ndarray:
    """Return bounds of documents with exponentially distributed lengths, which spread as widely as those of text."""
    lengths = 1 + generator.exponential(_MOCK_DOCUMENT, max(1, 2 * tokens // _MOCK_DOCUMENT)).astype(np.int64)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    return np.concatenate([bounds[bounds < tokens], [tokens]])
