"""A batch taken apart again: each row's documents, as text where there is a tokenizer."""

from __future__ import annotations

from typing import Any

import numpy as np

from ironlaw.data.batch import IGNORED, Batch
from ironlaw.data.tokenizer import Tokenizer


def rows_of(batch: Batch[np.ndarray], tokenizer: Tokenizer | None, end_of_text: int) -> list[dict[str, Any]]:
    """One entry per row. Documents are the batch's own where it says them, and parted by the separator otherwise."""
    rows = []
    for number, (inputs, targets) in enumerate(zip(batch.inputs, batch.targets, strict=True)):
        learned = targets != IGNORED
        used = np.flatnonzero(learned | (inputs != end_of_text))  # what follows is padding
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
