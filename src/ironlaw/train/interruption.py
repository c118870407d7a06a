"""What ends a run early: a signal, here or on another rank."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable
from types import FrameType

ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Interruption:
    """The first signal ends the run after the current step, with a checkpoint; the second ends it at once.

    `name` is the signal's, None as long as nothing ends the run.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.name: str | None = None
        self._say = say

    def __enter__(self) -> Interruption:
        heard = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores one
        self._previous = {number: signal.signal(number, self._on_signal) for number in heard}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
        if self.name == "SIGHUP":
            _forget_terminal()
        self._say(f"{self.name}: finishing the step and saving; once more to stop without saving")


def _forget_terminal() -> None:
    """After its end a terminal fails whoever writes to it, and that must not be the one who saves."""
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
