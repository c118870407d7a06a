"""Times each line of the user's code by the interpreter's trace. A sampler cannot run while a line holds the
interpreter's lock, and then finds the next line."""

from __future__ import annotations

import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

from ironlaw.observe.partition import Interval
from ironlaw.observe.user_code import is_users, line_of, user_frames, user_line


class LineTrace:
    """Calls `report` with each line that begins in the user's functions: in those that are on the stack when it begins,
    and with `everywhere` in those that are called later, too. It does nothing if another trace function is set."""

    def __init__(self, report: Callable[[str], None], everywhere: bool = False) -> None:
        self.functions: set[CodeType] = set()
        self._report, self._everywhere = report, everywhere

    def begin(self) -> None:
        if sys.gettrace() is None:
            for frame in user_frames():
                self.functions.add(frame.f_code)
                frame.f_trace = self._line
            sys.settrace(self._called)

    def end(self) -> None:
        if sys.gettrace() == self._called:
            sys.settrace(None)
            for frame in user_frames():
                frame.f_trace = None

    def _called(self, frame: FrameType, event: str, _: Any) -> Any:
        wanted = frame.f_code in self.functions or (self._everywhere and is_users(frame.f_code.co_filename))
        return self._line(frame, event, None) if wanted else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        self._report(user_line(frame.f_back) if event == "return" else line_of(frame))
        return self._line


class LoopLines(LineTrace):
    """Records the moments when lines of the loop and of its callers begin."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, str]] = []
        super().__init__(lambda line: self._marks.append((time.perf_counter(), line)))

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
