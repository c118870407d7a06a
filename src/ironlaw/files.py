"""Reading and writing of users' files as text, TOML or JSON, so that every verb treats them alike.

Invalid content raises a UserError that describes the problem. Errors of the operating system (no such file, no
permission, a full disk) stay OSErrors, which the command line prints in one line.
"""

from __future__ import annotations

import codecs
import errno
import hashlib
import json
import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ironlaw.errors import UserError, shortened_repr

TEXT_LIMIT_BYTES = 2**28
"""Largest file that is read whole (configs, profiles, tables of runs); real ones have a few megabytes at most."""

FULL = (errno.ENOSPC, errno.EDQUOT)  # error numbers of a full disk

LINE_LIMIT_BYTES = 2**24
"""Longest line of a JSON Lines file (metrics, records) that is parsed; Ironlaw writes no longer ones."""


def as_path(given: object, what: str) -> Path:
    """Return a path given as a Python argument named `what`; UserError if it is not a path."""
    if isinstance(given, Path) or (isinstance(given, str) and given and "\0" not in given):
        return Path(given)
    raise UserError(f"{what} = {shortened_repr(given)} is no path: give text or a pathlib.Path")


def check_can_be_folder(path: Path, option: str) -> None:
    """UserError, which names the option that gave `path`, if the path or one above it is a file."""
    for there in (path, *path.parents):
        if there.exists() and not there.is_dir():
            raise UserError(f"{there} is a file: give {option} a directory")


def at_home(path: str | Path) -> Path:
    """Expand `~` in a user's path; UserError if that home directory is unknown."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path}: nobody knows that home directory; write a path without ~") from None


def cache_folder() -> Path:
    """Return Ironlaw's folder in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return at_home(base) / "ironlaw"
    except UserError as error:
        raise UserError(f"{error}: set XDG_CACHE_HOME to a folder of yours") from None


def cache_problem() -> str | None:
    """Return why the cache folder cannot be written and the remedy, or None if it can."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror}): set XDG_CACHE_HOME to a folder of yours"
    return None


def open_file(path: Path) -> IO[bytes]:
    """Open a regular file for reading. Pipes and devices are refused: reading them may never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise UserError(f"{path} is {'a folder' if stat.S_ISDIR(mode) else 'a pipe or a device'}, not a file")
    return os.fdopen(descriptor, "rb")


def sha256(path: Path) -> str:
    """Return the hex digest of a file's content."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def digest_of(document: Any) -> str:
    """Return the hex digest of a JSON document; the order of its keys does not matter."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


SEAL = "index_sha256"


def seal(document: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON document with a checksum of itself, by which `is_sealed` sees that it is as it was written."""
    return document | {SEAL: digest_of(document)}


def is_sealed(document: dict[str, Any]) -> bool:
    return document == seal({key: value for key, value in document.items() if key != SEAL})


def read_bytes(path: Path, what: str = "text") -> bytes:
    """Read a whole file. UserError above `TEXT_LIMIT_BYTES`; `what` names the expected content in its message."""
    with open_file(path) as file:
        data = file.read(TEXT_LIMIT_BYTES + 1)
    if len(data) > TEXT_LIMIT_BYTES:
        raise UserError(f"{path} is larger than {TEXT_LIMIT_BYTES >> 20} MiB: that is no {what}")
    return data


def read_text(path: Path, what: str = "text") -> str:
    """Read a UTF-8 file, without its byte order mark. UserError if it is not UTF-8."""
    data = read_bytes(path, what)
    try:
        return data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not valid {what}: byte {error.start + 1} is not UTF-8; save it as UTF-8") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file."""
    return parse_json(read_text(path, "JSON"), path)


def read_json_or_empty(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; an empty one if the file is missing or unreadable."""
    try:
        return read_json(path)
    except (OSError, UserError):
        return {}


def parse_json(text: str | bytes, path: Path | str) -> dict[str, Any]:
    """Parse a JSON object; `path` names its source in error messages."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {_problem(error)}") from None
    if not isinstance(document, dict):
        raise UserError(f"{path} holds no JSON object: it must begin with {{")
    return document


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of one JSON object per line. Any other line, such as one cut off, is skipped."""
    found = []
    try:
        with open_file(path) as file:
            while line := file.readline(LINE_LIMIT_BYTES):
                with suppress(UserError):
                    found.append(parse_json(line, path))
    except (OSError, UserError):
        return []
    return found


def append_json_line(path: Path, entry: dict[str, Any]) -> None:
    """Append one object to a JSON Lines file, which is created if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def read_toml(path: Path) -> dict[str, Any]:
    """Read the tables of a TOML file."""
    text = read_text(path, "TOML")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {_problem(error)}") from None


def _problem(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` once it is complete on disk: readers see old or new content, no mix.

    A symbolic link at `path` is replaced, not followed: its target may belong to another user.
    """
    partial = path.with_name(f".{path.name[:200]}.{os.getpid()}.partial")
    try:
        partial.unlink(missing_ok=True)  # left by an earlier process with the same id
        with open(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:  # name the user's file, not the temporary one
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


@contextmanager
def lock_file(path: Path, lock: Callable[[int], None]) -> Iterator[int]:
    """Create a file, take the system's lock on it with `lock`, yield its descriptor, and remove the file at the end.
    The system releases the lock when the process ends, however it ends."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            lock(descriptor)
            if not _is_at(path, descriptor):  # removed by the previous holder: no other process can see this lock
                continue
            try:
                yield descriptor
            finally:
                with suppress(OSError):
                    path.unlink()
            return
        finally:
            os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as file:
        file.write(text.encode("utf-8", "surrogateescape"))


def write_json(path: Path, document: Any) -> None:
    write_text(path, json.dumps(document, indent=1) + "\n")


def copy_file(source: Path, path: Path) -> None:
    """Copy a file atomically."""
    with replacing(path) as file:
        file.write(source.read_bytes())


def is_taken(path: Path) -> bool:
    """Whether something is at `path` that is not an empty directory."""
    return path.exists() and (not path.is_dir() or any(path.iterdir()))


def as_name(text: str, at_most: int = 64) -> str:
    """Return `text` as one component of a path: no separators, no spaces, no leading dot or dash."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:at_most].strip(".-") or "unnamed"
