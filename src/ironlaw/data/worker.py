"""What runs in a tokenising process. Imports as little as it can: every worker waits for it before its first text."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from ironlaw.data import tokenizer as tokenizers

_tokenizer: tokenizers.Tokenizer | None = None


def start(path: Path, end_of_text: str) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the other cores have workers of their own
    _tokenizer = tokenizers.load(path, end_of_text)


def encode(texts: list[str]) -> tuple[np.ndarray, np.ndarray, float]:
    """All ids behind one another, how many each text has, and the seconds it took."""
    assert _tokenizer is not None
    began = time.perf_counter()
    encoded = _tokenizer.encode_many(texts)
    lengths = np.array([len(ids) for ids in encoded], dtype=np.int64)
    together = np.concatenate(encoded) if encoded else np.empty(0, np.uintc)
    return together, lengths, time.perf_counter() - began
