"""Mixtures of several sources by weight. The source of a sample is a function of the sample's index.

The global order is cut into blocks of 4,096 samples. Each source has a fixed number of places in a block (its rounded
weight), and each block shuffles its places anew. Each source's samples follow one another in the source's own order,
epoch after epoch, at the source's own pace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ironlaw.data import tokenizer as tokenizers
from ironlaw.data.batch import Batch
from ironlaw.data.batches import Samples
from ironlaw.data.config import DataConfig
from ironlaw.data.corpus import Corpus
from ironlaw.data.dataset import Dataset
from ironlaw.data.order import mix, permutations
from ironlaw.data.sample import shared_tokenizer
from ironlaw.data.shards import Progress, join_splits
from ironlaw.data.source import Say, prepare_source
from ironlaw.data.stats import unigram_loss
from ironlaw.errors import UserError
from ironlaw.files import digest_of

BLOCK = 4096
_KEY = 2**48  # a sample's key is the source's number times this, plus the source's own key


class Mixture:
    """Samples of several sources, by weight."""

    def __init__(self, parts: Sequence[Samples], weights: Sequence[float], seed: int):
        assert len(parts) == len(weights) and parts
        self.parts = list(parts)
        self.sequence = parts[0].sequence
        self._seed = seed
        self.places = np.array(compute_places(weights))
        self._ends = np.cumsum(self.places)
        # An epoch ends when every source has been seen whole; shorter sources have been repeated by then.
        self.per_epoch = max(math.ceil(part.per_epoch * BLOCK / n) for part, n in zip(parts, self.places, strict=True))

    def locate(self, first: int, number: int) -> np.ndarray:
        blocks, slots = permutations(first, number, BLOCK, lambda block: mix(self._seed, block, 2))
        which = np.searchsorted(self._ends, slots, side="right")
        # The number of each sample within its source's order.
        numbers = blocks * self.places[which] + slots - (self._ends - self.places)[which]
        keys = np.empty(number, dtype=np.int64)
        for source, part in enumerate(self.parts):
            here = which == source
            if here.any():
                begin, end = int(numbers[here].min()), int(numbers[here].max()) + 1
                keys[here] = source * _KEY + part.locate(begin, end - begin)[numbers[here] - begin]
        return keys

    def fill(self, keys: np.ndarray, batch: Batch[np.ndarray]) -> None:
        for row, key in enumerate(keys.tolist()):
            source, own = divmod(key, _KEY)
            self.parts[source].fill(np.array([own]), batch.rows(slice(row, row + 1)))

    def report(self) -> dict[str, Any]:
        shares = (self.places / BLOCK).tolist()
        reports = [part.report() for part in self.parts]
        together = {
            key: sum(share * report[key] for share, report in zip(shares, reports, strict=True))
            for key in reports[0]
            if key != "rows" and all(key in report for report in reports)
        }
        return {"rows": self.per_epoch, "shares": shares} | together


def compute_places(weights: Sequence[float]) -> list[int]:
    """Return each source's places in a block: shares rounded by largest remainder, at least one each, to fill it."""
    exact = [BLOCK * weight / sum(weights) for weight in weights]
    if min(exact) < 0.5:
        raise UserError(
            f"a weight of data.sources is less than 1 part in {2 * BLOCK:,} of all: raise it or leave that source out"
        )
    whole = [max(1, math.floor(value)) for value in exact]
    rest = sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])
    for i in range(abs(BLOCK - sum(whole))):
        # Places that were added to round tiny weights up to one are taken from the largest.
        whole[rest[i % len(rest)] if sum(whole) < BLOCK else whole.index(max(whole))] += 1 if sum(whole) < BLOCK else -1
    return whole


def prepare_mixture(
    config: DataConfig, vocab: int, sources: list[Corpus], given: tokenizers.Tokenizer | None,
    progress: Progress | None, say: Say,
) -> Dataset:  # fmt: skip
    """Prepare each source in its own folder, all with one tokenizer."""
    tokenised = [corpus.source.path for corpus in sources if corpus.tokenised]
    if tokenised and given is None:
        raise UserError(f"{tokenised[0]} is tokenised already: name the tokenizer that made it in data.tokenizer")
    weights = tuple(corpus.source.weight for corpus in sources)
    compute_places(weights)  # raises before any work
    tokenizer = given or shared_tokenizer(config, vocab, sources)
    total, done = sum(corpus.bytes for corpus in sources), 0
    parts: list[Dataset] = []
    for corpus in sources:
        before = done

        def forward(now: int, _: int, before: int = before) -> None:
            if progress is not None:
                progress(before + now, total)

        parts.append(prepare_source(config, vocab, corpus, tokenizer, forward, say))
        done += corpus.bytes
    return together(parts, weights, baseline=True)


def together(parts: list[Dataset], weights: tuple[float, ...], baseline: bool = False) -> Dataset:
    """Return the dataset of several sources. `baseline` adds the unigram loss, which reads all their tokens."""
    train = join_splits([part.train for part in parts])
    validation = join_splits([part.validation for part in parts])
    vocab = max(part.vocab for part in parts)
    return Dataset(
        train=train,
        validation=validation,
        vocab=vocab,
        end_of_text=parts[0].end_of_text,
        end_of_text_token=parts[0].end_of_text_token,
        tokenizer_path=parts[0].tokenizer_path,
        skipped=_sums([part.skipped for part in parts]),
        seconds=_sums([part.seconds for part in parts]),
        shards=sum(part.shards for part in parts),
        # If only answers are learned, the loss over all tokens is no baseline.
        unigram_loss=unigram_loss(train.tokens, validation.tokens, vocab) if baseline and train.marks is None else None,
        reused=all(part.reused for part in parts),
        name=" + ".join(part.name for part in parts),
        sources=tuple(parts),
        weights=weights,
        digest=digest_of([part.digest for part in parts]),
    )


def _sums(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum the values of all parts by key."""
    return {key: sum(part.get(key, 0) for part in parts) for key in sorted({key for part in parts for key in part})}
