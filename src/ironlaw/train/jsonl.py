"""JSON Lines files that survive a kill and a full disk: lines are never partial and none is lost."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ironlaw.files import FULL, open_file, parse_json

PENDING_LIMIT = 100_000  # lines (some 50 MB) kept in memory while the disk is full; beyond that, errors are raised


class JsonLines:
    """Appends objects to a file. While the disk is full, lines wait in memory and `say` is called once.

    Writes are unbuffered: when `append` returns, the line is in the kernel's page cache and survives a kill.
    """

    def __init__(self, path: Path, say: Callable[[str], None] = lambda message: None) -> None:
        self.path = path
        self.pending: list[bytes] = []
        self._lock = threading.Lock()  # the checkpoint thread syncs while the training loop appends
        self._say = say
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644)
        self._end = os.lseek(self._descriptor, 0, os.SEEK_END)

    def append(self, entry: dict[str, Any]) -> None:
        """Append one line. Raises OSError for errors other than a full disk, or if too many lines are pending."""
        with self._lock:
            self.pending.append((json.dumps(_plain(entry), allow_nan=False) + "\n").encode())
            first = len(self.pending) == 1
        try:
            self.flush()
        except OSError as error:
            if error.errno not in FULL or len(self.pending) > PENDING_LIMIT:
                raise
            if first:
                self._say(f"the disk of {self.path} is full: what happens is kept in memory until there is room")

    def flush(self) -> None:
        """Write the pending lines. Raises OSError if the disk is still full."""
        with self._lock:
            while self.pending:
                line = self.pending[0]
                try:
                    written = os.pwrite(self._descriptor, line, self._end)
                    if written < len(line):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
                except OSError:
                    os.ftruncate(self._descriptor, self._end)  # readers would take a partial line for the end
                    raise
                self._end += len(line)
                del self.pending[0]

    def sync(self) -> None:
        """Flush all lines to disk."""
        self.flush()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file. Raises OSError if pending lines cannot be written."""
        if self._descriptor < 0:
            return
        try:
            self.flush()
        finally:
            os.close(self._descriptor)
            self._descriptor = -1


def append_line(path: Path, entry: dict[str, Any], sync: bool = False) -> None:
    """Append one line. With `sync`, it is on disk on return, or OSError is raised; else a full disk may lose it."""
    lines = JsonLines(path)
    try:
        lines.append(entry)
        if sync:
            lines.sync()
    finally:
        with contextlib.suppress(OSError):
            lines.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return all complete lines, or [] if there is no file. A killed process may leave a partial last line."""
    if not os.path.lexists(path):
        return []
    with open_file(path) as file:
        whole = (line for line in file if line.endswith(b"\n"))
        return [parse_json(line, f"line {number} of {path}") for number, line in enumerate(whole, 1)]


def _plain(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by text that `float` parses."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
