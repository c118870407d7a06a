"""Finds what makes steps longer and longer, as a metric does that is computed over all batches so far."""

from __future__ import annotations

import itertools
import statistics
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ironlaw.observe.user_code import stacks, user_line

FIRST_LOOK, NEXT_LOOK = 4, 1.5  # steps done before it; each later one is after so many times as many
SAMPLE_SECONDS = 2e-3
MIN_TIMES_LONGER, MIN_RISE = 1.2, 0.1  # of a step between two looks, and of a line's share of it
MIN_SAMPLES, WANTED_SAMPLES = 8, 20  # of a look, which lasts for as many steps as that takes
NOISE = 0.95  # of the quarter before


class StepGrowth:
    """Samples the user's line that runs, in one step and more (a look) after 4, 6, 9, 13, ... steps.

    A machine that becomes slower makes all lines slower, and leaves their shares.
    """

    def __init__(self) -> None:
        self._thread_id, self._thread = threading.get_ident(), threading.Thread()
        self._ended, self._lines = threading.Event(), Counter[str]()
        self._looks: list[tuple[int, Counter[str]]] = []

    def step_ended(self, number: int, may_look: bool) -> None:
        """`number`: of steps done."""
        if self._lines.total() < WANTED_SAMPLES and self._thread.is_alive() and may_look:
            return
        self.end()
        if number >= FIRST_LOOK * NEXT_LOOK ** len(self._looks) and may_look:
            self._ended, self._lines = threading.Event(), Counter()
            self._looks.append((number, self._lines))
            self._thread = threading.Thread(target=self._run, name="ironlaw-growth", daemon=True)
            self._thread.start()

    def end(self) -> None:
        if self._thread.is_alive():
            self._ended.set()
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            with stacks() as frames:
                self._lines[user_line(frames.get(self._thread_id))] += 1
            del frames  # or it keeps tensors of a function that has returned

    def facts(self, seconds: Sequence[float]) -> dict[str, Any] | None:
        """Returns the line that has grown most and its part of the steps, whose `seconds` these are; None if steps do
        not become longer from quarter to quarter, or no line explains half of that."""
        size, looks = len(seconds) // 4, [look for look in self._looks if look[1].total() >= MIN_SAMPLES]
        quarters = [statistics.median(seconds[part * size : (part + 1) * size]) for part in range(4)] if size else []
        rises = all(after >= NOISE * before for before, after in itertools.pairwise(quarters))
        if len(looks) < 2 or not rises or quarters[-1] < MIN_TIMES_LONGER * quarters[0]:
            return None
        (early, before), (late, after) = looks[0], looks[-1]
        first, last = (statistics.median(seconds[max(0, at - 1) : at + 2]) for at in (early, late))
        shares = {line: (before[line] / before.total(), count / after.total()) for line, count in after.items()}
        place = max(shares, key=lambda line: shares[line][1] * last - shares[line][0] * first)
        was, now = shares[place]
        if now - was < MIN_RISE or now * last - was * first < 0.5 * (last - first):
            return None
        text = f"{was:.0%} of step {early + 1}, {now:.0%} of step {late + 1}"
        return {"part": (was * first + now * last) / (first + last), "place": place, "lines": [text]}
