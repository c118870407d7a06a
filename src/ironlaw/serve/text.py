"""Between text and tokens while an answer grows: pieces of text, stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from ironlaw.data.chat import Text
from ironlaw.serve.request import Chosen


class Reader:
    """One answer's text as its tokens come. What may be the beginning of a stop string is held back."""

    def __init__(self, text: Text | None, stop: Sequence[str] = (), keeps_stop: bool = False) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = None if text is None else text.tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self.stop, self.keeps_stop = tuple(stop), keeps_stop
        self._held = ""
        self._ready: list[str] = []
        self.stopped_by: str | None = None

    def __call__(self, chosen: Sequence[Chosen]) -> bool:
        """True when a stop string is complete."""
        if self._tokenizer is None:
            return False
        for one in chosen:
            piece = self._stream.step(self._tokenizer, one.token)
            if piece and self._read(piece):
                return True
        return False

    def _read(self, piece: str) -> bool:
        self._held += piece
        ends = [(at, s) for s in self.stop if (at := self._held.find(s)) >= 0]
        if ends:
            at, self.stopped_by = min(ends)
            self._ready.append(self._held[: at + len(self.stopped_by) * self.keeps_stop])
            self._held = ""
            return True
        keep = max((_overlap(self._held, s) for s in self.stop), default=0)
        self._ready.append(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return False

    def take(self, ended: bool) -> str:
        """The text that may be shown, since the last time."""
        if ended:
            self._ready.append(self._held)
            self._held = ""
        ready, self._ready = "".join(self._ready), []
        return ready


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
