"""The trivial baseline: a model that knows how often each token occurs and nothing else."""

from __future__ import annotations

import numpy as np

from ironlaw.data.shards import TokenArray

_CHUNK = 2**24  # tokens counted at a time: bincount needs a 64-bit copy of them


def token_counts(tokens: TokenArray, vocab: int) -> np.ndarray:
    """(vocab,) int64: how often each id occurs in `tokens` (any shape (n,), may be memory-mapped)."""
    counts = np.zeros(vocab, dtype=np.int64)
    for start in range(0, len(tokens), _CHUNK):
        counts += np.bincount(tokens[start : start + _CHUNK], minlength=vocab)
    return counts


def unigram_loss(train: TokenArray, validation: TokenArray, vocab: int) -> float | None:
    """Cross-entropy of the validation tokens in nats per token; None when there are none.

    Probabilities are train counts with one added to each id (Laplace), so an unseen id costs a finite loss.
    """
    return loss_of_counts(token_counts(train, vocab), token_counts(validation, vocab))


def loss_of_counts(train: np.ndarray, validation: np.ndarray) -> float | None:
    """The same from how often each id occurs."""
    total = int(validation.sum())
    if total == 0:
        return None
    seen = train + 1.0
    log_probability = np.log(seen) - np.log(seen.sum())
    return float(-(validation @ log_probability) / total)
