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

LOCK = ".lock"
_held: set[Path] = set()  # by this process: the system's locks do not stand between its own threads


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder`, which exists, for this process. UserError when another holds it.

    The lock is the system's, on an open file: it ends with the process, however that ends, and worker processes do
    not inherit it. The file's content only names the holder.
    """
    path = folder.absolute() / LOCK
    if path in _held:
        raise UserError(f"{folder} is in use by this process: give another --out")
    descriptor = _acquire(path, folder)
    _held.add(path)
    try:
        yield
    finally:
        _held.discard(path)
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _acquire(path: Path, folder: Path) -> int:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error.strerror}; give --out a directory of yours") from None
        if not _try_lock(descriptor):
            holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise UserError(f"{folder} is in use by {holder}: wait for it to end, or give another --out")
        # The holder before may have removed the file between our open and our lock: then nobody else can see ours.
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                break
        os.close(descriptor)
    started = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    with contextlib.suppress(OSError):  # a full disk: locked all the same, without a name
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {started}\n".encode(), 0)
    return descriptor


def _try_lock(descriptor: int) -> bool:
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
