"""Users' files: read as text, TOML or JSON in one place, and written in one, so that every verb meets them alike.

What a file holds may be anything: a UserError says what is wrong with it. What the system refuses (no such file, no
permission, a full disk) stays an OSError, which the command line turns into one line.
"""

from __future__ import annotations

import codecs
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

from ironlaw.errors import UserError, as_given

TEXT_LIMIT_BYTES = 2**28
"""Of a file that is read whole: configs, profiles, tables of runs. The largest known are some megabytes."""

LINE_LIMIT_BYTES = 2**24
"""Of metrics and records; a longer line is none of ours."""


def as_path(given: object, what: str) -> Path:
    """The path that somebody gave from Python for `what`."""
    if isinstance(given, Path) or (isinstance(given, str) and given and "\0" not in given):
        return Path(given)
    raise UserError(f"{what} = {as_given(given)} is no path: give text or a pathlib.Path")


def at_home(path: str | Path) -> Path:
    """A path of the user's with `~` as the home directory that it stands for."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path}: nobody knows that home directory; write a path without ~") from None


def cache_folder() -> Path:
    """Ironlaw's folder in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return at_home(base) / "ironlaw"
    except UserError as error:
        raise UserError(f"{error}: set XDG_CACHE_HOME to a folder of yours") from None


def cache_problem() -> str | None:
    """Why nothing can be kept there, and what to do about it."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror}): set XDG_CACHE_HOME to a folder of yours"
    return None


def open_file(path: Path) -> IO[bytes]:
    """A file to read. A pipe is refused, whose writer may never come, and so is a device, which may never end."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise UserError(f"{path} is {'a folder' if stat.S_ISDIR(mode) else 'a pipe or a device'}, not a file")
    return os.fdopen(descriptor, "rb")


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def read_bytes(path: Path, what: str = "text") -> bytes:
    """All of a file that should be `what`, which is for the message where it is too large for that."""
    with open_file(path) as file:
        data = file.read(TEXT_LIMIT_BYTES + 1)
    if len(data) > TEXT_LIMIT_BYTES:
        raise UserError(f"{path} is larger than {TEXT_LIMIT_BYTES >> 20} MiB: that is no {what}")
    return data


def read_text(path: Path, what: str = "text") -> str:
    """A file's text, without a byte order mark."""
    data = read_bytes(path, what)
    try:
        return data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not valid {what}: byte {error.start + 1} is not UTF-8; save it as UTF-8") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds."""
    return parse_json(read_text(path, "JSON"), path)


def known_json(path: Path) -> dict[str, Any]:
    """The same; nothing where there is no such file, or none that can be read."""
    try:
        return read_json(path)
    except (OSError, UserError):
        return {}


def parse_json(text: str | bytes, path: Path | str) -> dict[str, Any]:
    """The object in a JSON text; `path` is where it came from."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {_problem(error)}") from None
    if not isinstance(document, dict):
        raise UserError(f"{path} holds no JSON object: it must begin with {{")
    return document


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of one JSON object per line; whatever else is in it is passed over, a half line too."""
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
    """One more object at the end of such a file, which may not be there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    text = read_text(path, "TOML")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {_problem(error)}") from None


def _problem(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes its place when all of it is on the disk: old content or new, never half of it.

    A link of that name is replaced, not followed: what it points to may be somebody else's.
    """
    partial = path.with_name(f".{path.name[:200]}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)  # of a process that is gone, with the same number
    try:
        with open(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:  # a name that the user knows
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def lock_file(path: Path, lock: Callable[[int], None]) -> Iterator[int]:
    """The descriptor of a file that is there while somebody holds it, once `lock` has taken the system's lock on it,
    which ends with its process, however that ends."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            lock(descriptor)
            if not _is_at(path, descriptor):  # removed by the holder before: nobody else can see this lock
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
    """Write a text file as a whole."""
    with replacing(path) as file:
        file.write(text.encode("utf-8", "surrogateescape"))


def write_json(path: Path, document: Any) -> None:
    write_text(path, json.dumps(document, indent=1) + "\n")


def as_name(text: str, at_most: int = 64) -> str:
    """`text` as one component of a path: no separators, no spaces, no leading dot or dash."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:at_most].strip(".-") or "unnamed"
