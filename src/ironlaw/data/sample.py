"""Text to learn a tokenizer from: training documents only, from all over the source, the same ones every time."""

from __future__ import annotations

from collections.abc import Iterator

from ironlaw.data import readers
from ironlaw.data.corpus import Corpus, CorpusDocument, File
from ironlaw.data.splits import Splitter, number

_SHARE = 2**20  # characters that any place may give
_SPOTS = 64  # places at which the files of records are entered


def sample(corpus: Corpus, splitter: Splitter, characters: int) -> Iterator[str]:
    """Up to `characters` of text in a fixed shuffled order.

    No place gives more than its share or 1 MB, so that one huge document does not stand for all.
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
    """(file, where to begin in it, where the next place begins)"""
    records = sum(file.kind != "text" for file in corpus.files)
    for file in corpus.files:
        if file.kind == "text":
            yield file, 0, None
        else:
            starts = readers.spots(file.kind, file.path, max(1, _SPOTS // records))
            for start, stop in zip(starts, [*starts[1:], None], strict=True):
                yield file, start, stop


def _training_texts(corpus: Corpus, splitter: Splitter, file: File, start: int, stop: int | None) -> Iterator[str]:
    contents: Iterator[readers.Content | None] = iter([corpus.text(file)] if file.kind == "text" else ())
    if file.kind != "text":
        contents = _between(readers.read(file.kind, file.path, corpus.field, start), stop)
    for content in contents:
        if content is not None:
            for split, part in splitter.parts(CorpusDocument(content, file, (0, 0), 0)):
                if split == "train" and isinstance(part, str):
                    yield part


def _between(records: Iterator[readers.Record], stop: int | None) -> Iterator[readers.Content | None]:
    for record in records:
        yield None if isinstance(record.content, list | dict) else record.content  # conversations come with a tokenizer
        if stop is not None and record.next >= stop:
            return
