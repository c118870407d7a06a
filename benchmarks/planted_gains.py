"""What curing a planted fault gains: the script with the defect and the one without, a few steps of each in turn.

Both are started at once and take turns of some steps, unobserved, so that whatever slows the machine for seconds slows
both alike. A gain is the median over neighbouring turns; its spread is half of what lies between their quartiles.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TURNS = 7  # the first warms up
PATIENCE_SECONDS = 120.0


@dataclass
class Blocks:
    """A side's turns, asked before every step; the first steps of a turn are not timed: caches, batches made ahead."""

    go: Any
    done: Any
    steps: int
    skip: int
    out: Path | None

    def __post_init__(self) -> None:
        self.taken, self.mark, self.seconds = 0, 0.0, list[float]()

    def another(self) -> bool:
        turn, step = divmod(self.taken, self.steps)
        if step == 0:
            if turn:
                self.seconds.append((time.perf_counter() - self.mark) / (self.steps - self.skip))
                self.done.release()
            if turn == TURNS:
                if self.out is not None:
                    self.out.write_text(json.dumps(self.seconds[1:]))
                return False
            self.go.acquire()
        if step == self.skip:
            self.mark = time.perf_counter()
        self.taken += 1
        return True


def in_turns(
    start: Callable[[str, int, Blocks], int], sides: dict[str, str], ranks: int, steps: int, skip: int, folder: Path
) -> dict[str, list[float]]:
    """Seconds of a step by side and turn. `start(script, rank, blocks)` forks a process and returns its number."""
    context = multiprocessing.get_context("fork")
    gates = {side: (context.Semaphore(0), context.Semaphore(0)) for side in sides}
    files = {side: folder / f"{side}.json" for side in sides}
    children = [
        start(script, rank, Blocks(*gates[side], steps, skip, files[side] if rank == 0 else None))
        for side, script in sides.items()
        for rank in range(ranks)
    ]
    for _ in range(TURNS):
        for go, done in gates.values():
            for _ in range(ranks):
                go.release()
            for _ in range(ranks):
                if not done.acquire(timeout=PATIENCE_SECONDS):
                    raise SystemExit(f"{sides} do not take their turn")
    if any(os.waitpid(child, 0)[1] for child in children):
        raise SystemExit(f"{sides} failed")
    return {side: json.loads(file.read_text()) for side, file in files.items()}


def gain(slow: Sequence[float], quick: Sequence[float], scale: float = 1.0) -> tuple[float, float, float]:
    """Seconds of the slow step, the share of it gained, its spread; a quick step does `scale` times the work."""
    shares = [1 - b / scale / a for a, b in zip(slow, quick, strict=True)]
    first, middle, third = statistics.quantiles(shares, n=4)
    return statistics.median(slow), middle, (third - first) / 2
