"""One tokenizer for several sources, or for a source that is read while training."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ironlaw.data import corpus as corpora
from ironlaw.data import splits as splitting
from ironlaw.data import tokenizer as tokenizers
from ironlaw.data.building import making
from ironlaw.data.config import DataConfig, SourceConfig
from ironlaw.data.sample import sample


def shared_tokenizer(
    config: DataConfig, vocab: int, sources: list[tuple[SourceConfig, corpora.Corpus]], all_text: bool = True
) -> tokenizers.Tokenizer:
    """Trained on text of every source by its weight, once."""
    from tokenizers import __version__

    key = [vocab, __version__, tokenizers.SAMPLE_BYTES, config.validation_fraction, config.seed]
    key += [(corpus.fingerprint(), source.field, source.weight) for source, corpus in sources]
    folder = config.cache_folder / f"tokenizer-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"
    if not folder.exists():
        with making(folder) as place:
            if place != folder:
                _train(config, vocab, sources, place, all_text)
    return tokenizers.load(folder / "tokenizer.json")


def _train(
    config: DataConfig, vocab: int, sources: list[tuple[SourceConfig, corpora.Corpus]], folder: Path, all_text: bool
) -> None:  # fmt: skip
    weights = sum(source.weight for source, _ in sources)

    def texts() -> Any:
        for source, corpus in sources:
            splitter = splitting.split(corpus, config.validation_fraction, config.seed, all_text)
            if not corpus.files:
                raise corpora.no_text(source.path, corpus)
            yield from sample(corpus, splitter, int(tokenizers.SAMPLE_BYTES * source.weight / weights))

    tokenizers.train(texts(), vocab, folder / "tokenizer.json")
