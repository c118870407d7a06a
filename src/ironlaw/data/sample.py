"""Text to learn a tokenizer from: training documents only, from all over the source, the same ones every time."""

from __future__ import annotations

from collections.abc import Iterator

from ironlaw.data import readers
from ironlaw.data.corpus import Corpus, Document, File
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
    for file, start in places:
        room = min(share, left)
        for text in _training_texts(corpus, splitter, file, start):
            text = text[:room]
            room -= len(text)
            left -= len(text)
            yield text
            if room <= 0:
                break
        if left <= 0:
            return


def _name(file: File, start: int) -> bytes:
    return f"{file.name}{start or ''}".encode("utf-8", "surrogateescape")


def _places(corpus: Corpus) -> Iterator[tuple[File, int]]:
    records = sum(file.kind != "text" for file in corpus.files)
    for file in corpus.files:
        if file.kind == "text":
            yield file, 0
        else:
            for start in readers.spots(file.kind, file.path, max(1, _SPOTS // records)):
                yield file, start


def _training_texts(corpus: Corpus, splitter: Splitter, file: File, start: int) -> Iterator[str]:
    if file.kind == "text":
        text = corpus.text(file)
        found = [] if text is None else [text]
        contents: Iterator[readers.Content | None] = iter(found)
    else:
        contents = (record.content for record in readers.read(file.kind, file.path, corpus.field, start))
    for content in contents:
        if content is not None:
            for split, part in splitter.parts(Document(content, file, (0, 0), 0)):
                if split == "train" and isinstance(part, str):
                    yield part
