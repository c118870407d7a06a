"""What runs in a tokenising process. Imports as little as it can: every worker waits for it before its first text."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np

from ironlaw.data import tokenizer as tokenizers

_tokenizer: tokenizers.Tokenizer | None = None


def start(path: Path, end_of_text: str) -> None:
    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the other cores have workers of their own
    _tokenizer = tokenizers.load(path, end_of_text)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()  # also when it was killed
        os._exit(1)


def encode(texts: list[str]) -> tuple[np.ndarray, np.ndarray, float]:
    """All ids behind one another, how many each text has, and the seconds it took."""
    assert _tokenizer is not None
    began = time.perf_counter()
    encoded = _tokenizer.encode_many(texts)
    lengths = np.array([len(ids) for ids in encoded], dtype=np.int64)
    together = np.concatenate(encoded) if encoded else np.empty(0, np.uintc)
    return together, lengths, time.perf_counter() - began


@contextmanager
def without_main() -> Iterator[None]:
    """Processes that are started here do not import the program's main module again, which they have no use for.

    It takes time, and a script without `if __name__ == "__main__":` would run a second time.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
