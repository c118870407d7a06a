"""Text to train a tokenizer on: training documents only, from all over the source, the same ones every time. And one
tokenizer for several sources, or for a source that is read while training."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from ironlaw.data import building, readers
from ironlaw.data import tokenizer as tokenizers
from ironlaw.data.config import DataConfig
from ironlaw.data.corpus import Corpus, File
from ironlaw.data.splits import Splitter, number, split

_SHARE = 2**20  # characters that any place may contribute
_SPOTS = 64  # places that are sampled in all files of records together


def sample(corpus: Corpus, splitter: Splitter, characters: int) -> Iterator[str]:
    """Yield up to `characters` of text in a fixed shuffled order.

    No place contributes more than its share or 1 MB, so that one huge document does not dominate the sample.
    """
    places = list(_places(corpus))
    places.sort(
        key=lambda place: number(f"{place[0].name}{place[1] or ''}".encode("utf-8", "surrogateescape"), splitter.seed)
    )
    share = max(characters // max(1, len(places)), _SHARE)
    left = characters
    for file, start, stop in places:
        room = min(share, left)
        for text in _training_texts(corpus, splitter, file, start, stop):
            text = text[:room]
            room -= len(text)
            left -= len(text)
            yield text
            if room <= 0:
                break
        if left <= 0:
            return


def _places(corpus: Corpus) -> Iterator[tuple[File, int, int | None]]:
    """Yield (file, position to begin at, position of the next place or None)."""
    spots = _SPOTS // max(1, sum(file.kind != "text" for file in corpus.files))
    for file in corpus.files:
        starts = readers.find_positions(file.kind, file.path, max(1, spots))
        for start, stop in zip(starts, [*starts[1:], None], strict=True):
            yield file, start, stop


def _training_texts(corpus: Corpus, splitter: Splitter, file: File, start: int, stop: int | None) -> Iterator[str]:
    for record in readers.read(file.kind, file.path, corpus.field, start):
        if isinstance(record.content, str):  # conversations and tokens bring a tokenizer
            for split, part in splitter.parts(file, record.content):
                if split == "train":
                    yield str(part)
        if stop is not None and record.next >= stop:
            return


def shared_tokenizer(
    config: DataConfig, vocab: int, sources: list[Corpus], all_text: bool = True
) -> tokenizers.Tokenizer:
    """Return a tokenizer trained once, on text of every source by its weight."""
    from tokenizers import __version__

    key = [vocab, __version__, tokenizers.SAMPLE_BYTES, config.validation_fraction, config.seed]
    key += [(corpus.fingerprint(), corpus.source.field, corpus.source.weight) for corpus in sources]
    folder = config.cache_folder / f"tokenizer-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"
    weights = sum(corpus.source.weight for corpus in sources)

    def texts() -> Iterator[str]:
        for corpus in sources:
            splitter = split(corpus, config.validation_fraction, config.seed, all_text)
            yield from sample(corpus, splitter, int(tokenizers.SAMPLE_BYTES * corpus.source.weight / weights))

    building.make(folder, lambda place: tokenizers.train(texts(), vocab, place / "tokenizer.json"))
    return tokenizers.load(folder / "tokenizer.json", made_here=True)
