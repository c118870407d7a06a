"""One process per run directory: the second one gets a line that names the first."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from ironlaw.errors import UserError
from ironlaw.files import lock_file

LOCK = ".lock"
_held: set[Path] = set()  # by this process: the system's locks do not stand between its own threads


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder`, which exists, for this process, whose workers do not inherit the lock. UserError when another
    holds it. The file's content only names the holder."""
    path = folder.absolute() / LOCK
    if path in _held:
        raise UserError(f"{folder} is in use by this process: give another --out")

    def lock(descriptor: int) -> None:
        if not _try_lock(descriptor):
            holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
            raise UserError(f"{folder} is in use by {holder}: wait for it to end, or give another --out")

    with contextlib.ExitStack() as held:
        try:
            descriptor = held.enter_context(lock_file(path, lock))
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error.strerror}; give --out a directory of yours") from None
        _held.add(path)
        held.callback(_held.discard, path)
        started = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        with contextlib.suppress(OSError):  # a full disk: locked all the same, without a name
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {started}\n".encode(), 0)
        yield


def _try_lock(descriptor: int) -> bool:
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
