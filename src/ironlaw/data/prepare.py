"""From a DataConfig to the data of a run: random tokens, one source, a mixture of several, or a stream."""

from __future__ import annotations

from pathlib import Path

from ironlaw.data import corpus as corpora
from ironlaw.data import tokenizer as tokenizers
from ironlaw.data.config import CHATS, DataConfig, SourceConfig
from ironlaw.data.dataset import Dataset
from ironlaw.data.mixture import prepare_mixture
from ironlaw.data.mock import mock
from ironlaw.data.shards import Progress
from ironlaw.data.shared_tokenizer import shared_tokenizer
from ironlaw.data.source import Say, folder_name, prepare_source
from ironlaw.data.stream import open_stream
from ironlaw.errors import UserError


def prepare(config: DataConfig, vocab: int, progress: Progress | None = None, say: Say | None = None) -> Dataset:
    """The dataset of `config` for a model of `vocab` entries, tokenised now or found in the cache.

    Safe to call from several processes at once. Interrupted, or out of space, it keeps its finished shards and goes
    on behind them next time; damaged shards are made again. `say` is told of both in a line.
    """
    say = say or (lambda message: None)
    if config.mock:
        return mock(config, vocab)
    given = None if config.tokenizer is None else tokenizers.load(config.tokenizer, config.end_of_text)
    if given is not None:
        tokenizers.check_fits(given, vocab)
    sources = _found(config, given)
    if given is None and not all(corpus.tokenised for _, corpus in sources):
        tokenizers.check_vocab(vocab)
    if config.streaming:
        return open_stream(config, vocab, sources[0][1], given)
    if len(sources) > 1:
        return prepare_mixture(config, vocab, sources, given, progress, say)
    return prepare_source(config, vocab, *sources[0], given, progress, say)


def folders_of(config: DataConfig, vocab: int) -> list[Path]:
    """Where the sources' tokens are or would be kept. A mixture's depend on its tokenizer, which must be there."""
    given = None if config.tokenizer is None else tokenizers.load(config.tokenizer, config.end_of_text)
    sources = _found(config, given)
    if given is None and len(sources) > 1:
        given = shared_tokenizer(config, vocab, sources)
    return [config.cache_folder / folder_name(config, vocab, source, corpus, given) for source, corpus in sources]


def _found(config: DataConfig, given: tokenizers.Tokenizer | None) -> list[tuple[SourceConfig, corpora.Corpus]]:
    """The sources with their files; conversations with what tokenises them."""
    sources = [(source, corpora.find(source, config.maximum_file_bytes)) for source in config.all_sources]
    chats = [corpus for source, corpus in sources if source.format in CHATS]
    if chats and given is None:
        raise UserError("conversations need the tokenizer of the model that learns: give data.tokenizer, or model.from")
    if chats and given is not None:
        from ironlaw.data.chat import text_for_training

        text = text_for_training(given.path, given.end_of_text_token, config.chat_template, config.pairs)
        for corpus in chats:
            corpus.chat = text
    return sources
