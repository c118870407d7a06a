"""Statistics of prepared data: counts, lengths, vocabulary in use, losses of each packing, and the loss of a unigram
model, which only has the frequency of each token. Also the rows of a batch divided into their documents, as text where
there is a tokenizer."""

from __future__ import annotations

from typing import Any

import numpy as np

from ironlaw.data.batch import IGNORED, Batch
from ironlaw.data.dataset import Dataset
from ironlaw.data.packing import best_fit, concatenated
from ironlaw.data.shards import TokenArray, TokenSplit
from ironlaw.data.splits import SPLITS
from ironlaw.data.tokenizer import Tokenizer

SCHEMA_VERSION = 1
_CHUNK = 2**24  # tokens counted at a time: bincount needs a 64-bit copy of them
_QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}


def describe(dataset: Dataset, sequence: int) -> dict[str, Any]:
    """Return a document for `--json` and for printing. Packing is that of the training split at `sequence` tokens."""
    parts = dataset.sources or (dataset,)
    bounds = dataset.train.bounds
    return {
        "schema_version": SCHEMA_VERSION,
        "source": dataset.name,
        "folder": str(dataset.folder) if dataset.folder else None,
        "tokenizer": {
            "path": str(dataset.tokenizer_path) if dataset.tokenizer_path else None,
            "vocab": dataset.vocab,
            "end_of_text": dataset.end_of_text,
            "end_of_text_token": dataset.end_of_text_token,
        },
        "splits": {split: _split(getattr(dataset, split), dataset.vocab) for split in SPLITS},
        "skipped": dataset.skipped,
        "shards": dataset.shards,
        "disk_bytes": sum(file.stat().st_size for part in parts if part.folder for file in part.folder.iterdir()),
        "seconds": dataset.seconds,
        "stage_bytes_per_second": dataset.stage_bytes_per_second,
        "unigram_loss": dataset.unigram_loss,
        "unigram_bits_per_byte": None if dataset.unigram_loss is None else dataset.bits_per_byte(dataset.unigram_loss),
        "sequence": sequence,
        "packing": {"concat": concatenated(bounds, sequence), "best_fit": best_fit(bounds, sequence).report()},
        "sources": [
            {
                "source": part.name,
                "weight": weight,
                "folder": str(part.folder),
                "splits": {split: getattr(part, split).counts() for split in SPLITS},
            }
            for part, weight in zip(dataset.sources, dataset.weights, strict=True)
        ],
    }


def _split(split: TokenSplit, vocab: int) -> dict[str, Any]:
    lengths, counts = np.diff(split.bounds), split.counts()
    used = int(np.count_nonzero(token_counts(split.tokens, vocab)))
    sizes: dict[str, float] = {"mean": float(lengths.mean())} if len(lengths) else {}
    if len(lengths):
        found = np.quantile(lengths, list(_QUANTILES.values())).tolist()
        sizes |= dict(zip(_QUANTILES, found, strict=True)) | {"longest": int(lengths.max())}
    bytes_per_token = counts["bytes"] / counts["tokens"] if counts["bytes"] and counts["tokens"] else None
    return counts | {"bytes_per_token": bytes_per_token, "document_tokens": sizes, "vocabulary_used": used}


def describe_rows(batch: Batch[np.ndarray], tokenizer: Tokenizer | None, end_of_text: int) -> list[dict[str, Any]]:
    """Return one entry per row. Documents are the batch's own if it has any, otherwise those between separators."""
    rows = []
    for number, (inputs, targets) in enumerate(zip(batch.inputs, batch.targets, strict=True)):
        learned = targets != IGNORED
        used = np.flatnonzero(learned | (inputs != end_of_text))  # positions after the last of these are padding
        real = np.arange(len(inputs)) <= used.max(initial=-1)
        if batch.documents is not None:
            owner = batch.documents[number]
        else:
            owner = np.cumsum(inputs == end_of_text) - int(inputs[0] == end_of_text)
        documents = []
        for document in range(int(owner[real].max(initial=-1)) + 1):
            ids = inputs[(owner == document) & real].tolist()
            text = None if tokenizer is None else tokenizer.decode(ids)
            targeted = int(((owner == document) & learned).sum())
            documents.append({"document": document, "tokens": len(ids), "learned": targeted, "text": text, "ids": ids})
        entry = {"row": number, "tokens": int(real.sum()), "padding": int((~real).sum()), "documents": documents}
        rows.append(entry)
    return rows


def token_counts(tokens: TokenArray, vocab: int) -> np.ndarray:
    """Return (vocab,) int64: how often each id occurs in `tokens` (shape (n,), may be memory-mapped)."""
    counts = np.zeros(vocab, dtype=np.int64)
    for start in range(0, len(tokens), _CHUNK):
        counts += np.bincount(tokens[start : start + _CHUNK], minlength=vocab)
    return counts


def unigram_loss(train: TokenArray, validation: TokenArray, vocab: int) -> float | None:
    """Return the cross-entropy of the validation tokens in nats per token; None if there are none.

    Probabilities are train counts with one added to each id (Laplace), so an unseen id costs a finite loss.
    """
    seen, counts = token_counts(train, vocab), token_counts(validation, vocab)
    total = int(counts.sum())
    if total == 0:
        return None
    log_probability = np.log(seen + 1.0) - np.log((seen + 1.0).sum())
    return float(-(counts @ log_probability) / total)
