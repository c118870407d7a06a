"""What the main thread does while it waits for data: looked at a thousand times a second, in recorded steps only."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import torch

from ironlaw.ledger import Phase
from ironlaw.observe.partition import Partition

EVERY_SECONDS = 1e-3
_TORCH = str(Path(torch.__file__).parent)
_LIBRARY = str(Path(threading.__file__).parent)
_TOKENISE = ("token", "encode", "bpe")


class Sampler:
    """`stage()`: "workers" (waiting for a loader's processes), "tokenise", or "read"; `place()`: the user's line."""

    def __init__(self, partition: Partition) -> None:
        self._partition, self._thread_id = partition, threading.get_ident()
        self._stages: Counter[str] = Counter()
        self._places: Counter[str] = Counter()
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="ironlaw-sampler", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            if self._partition.running is Phase.DATA:
                frame = sys._current_frames().get(self._thread_id)
                if frame is not None:
                    stage, place = classify(frame)
                    self._stages[stage] += 1
                    self._places[place] += 1
            time.sleep(EVERY_SECONDS)

    def stage(self) -> str | None:
        return self._stages.most_common(1)[0][0] if self._stages else None

    def place(self) -> str | None:
        return self._places.most_common(1)[0][0] if self._places else None


def classify(frame: FrameType | None) -> tuple[str, str]:
    """By the names on the stack; the place is the innermost line that is neither torch's nor the standard library's."""
    stage, place = "read", "?"
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name.lower()
        if "multiprocessing" in file or "_try_get_data" in name:
            return "workers", place
        if place == "?" and not file.startswith((_TORCH, _LIBRARY)):
            place = f"{file}:{frame.f_lineno}"
        if any(word in name or word in Path(file).stem.lower() for word in _TOKENISE):
            stage = "tokenise"
        if "_BaseDataLoaderIter" in str(frame.f_locals.get("self").__class__) or name == "__next__":
            break
        frame = frame.f_back
    return stage, place
