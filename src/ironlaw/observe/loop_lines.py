"""The time of each line of a loop, from the interpreter's trace. A sampler cannot look while a line holds the
interpreter's lock, and then finds the next line."""

from __future__ import annotations

import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any, Self

from ironlaw.observe.partition import Interval
from ironlaw.observe.user_code import line_of, user_frame, user_frames


class LoopLines:
    """Records when lines begin, in the user's functions that are on the stack when it is entered: the loop and its
    callers. It records nothing if another trace function is set, as by a debugger."""

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()
        self._marks: list[tuple[float, str]] = []

    def __enter__(self) -> Self:
        if sys.gettrace() is None:
            for frame in user_frames():
                self.functions.add(frame.f_code)
                frame.f_trace = self._tells
            sys.settrace(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        if sys.gettrace() == self._called:
            sys.settrace(None)
        for frame in user_frames():
            frame.f_trace = None

    def _called(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._tells if frame.f_code in self.functions else None

    def _tells(self, frame: FrameType, event: str, _: Any) -> Any:
        at = user_frame(frame.f_back) if event == "return" else frame
        self._marks.append((time.perf_counter(), line_of(at) if at is not None else "?"))
        return self._tells

    def within(self, intervals: Iterable[Interval]) -> Counter[str]:
        """Return the microseconds of these intervals by line."""
        found: Counter[str] = Counter()
        begins = [at for at, _ in self._marks]
        for interval in intervals:
            at, end = interval.begin.seconds, interval.end.seconds
            index = bisect_right(begins, at)
            while at < end:
                until = min([end, *begins[index : index + 1]])
                found[self._marks[index - 1][1] if index else "?"] += round(1e6 * (until - at))
                at, index = until, index + 1
        return found
