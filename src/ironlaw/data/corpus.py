"""The documents of a corpus: which files count as text, in which order, and which are held out."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from ironlaw.errors import UserError

Split = Literal["train", "validation"]

# The same files on every machine: Debian ships neither `test` nor ctypes.macholib, and idlelib,
# lib2to3, tkinter and ensurepip in packages of their own; Docker's Python images delete tests;
# distutils left in 3.12.
# `encodings` and `pydoc_data` are generated tables and prose, which a model would learn instead of Python.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_NOT_EVERYWHERE = frozenset({"idlelib", "tkinter", "turtledemo", "lib2to3", "distutils", "ensurepip", "macholib"})
_GENERATED = frozenset({"encodings", "pydoc_data"})
_STDLIB_SKIPPED_FOLDERS = _NOT_LIBRARY | _NOT_EVERYWHERE | _GENERATED
_STDLIB_SKIPPED_FILES = (
    "_sysconfigdata*",
    "_sysconfig_vars*",
    "sitecustomize.py",
    "usercustomize.py",
    "_distutils_system_mod.py",
)


@dataclass(frozen=True)
class File:
    """One file of a corpus. `name` is its path below the root, with forward slashes; `size` is in bytes."""

    name: str
    path: Path
    size: int
    modified_ns: int


@dataclass
class Corpus:
    """Files in a fixed order, and why each file that is not among them was left out."""

    root: Path
    files: list[File]
    maximum_file_bytes: int
    reasons: dict[str, str] = field(default_factory=dict)  # name of a skipped file: why

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def skipped(self) -> dict[str, int]:
        """Skipped files by reason."""
        return dict(sorted(Counter(self.reasons.values()).items()))

    def scan(self) -> None:
        """Read every file once and keep those that hold text.

        The split needs to know which they are: held-out files that turn out to be pictures hold nothing out.
        Reading costs little beside tokenising.
        """
        self.files = [file for file in self.files if self.text(file) is not None]

    def fingerprint(self) -> str:
        """Hex digest of place, names, sizes and modification times: changes when the documents could have."""
        digest = hashlib.sha256(str(self.root).encode("utf-8", "surrogateescape"))
        for file in self.files:
            line = f"\0{file.name}\0{file.size}\0{file.modified_ns}"
            digest.update(line.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def text(self, file: File) -> str | None:
        """The file's text, or None (and a reason in `reasons`) when it holds none."""
        try:
            data = file.path.read_bytes()
        except OSError:
            self.reasons[file.name] = "unreadable"
            return None
        if b"\0" in data:
            self.reasons[file.name] = "binary"
            return None
        try:
            # No newline translation: the tokens must not depend on the platform that made them.
            text = data.decode("utf-8").removeprefix("\ufeff")
        except UnicodeDecodeError:
            self.reasons[file.name] = "not UTF-8"
            return None
        if not text.strip():
            self.reasons[file.name] = "empty"
            return None
        return text


def find(path: str, maximum_file_bytes: int = 2**30) -> Corpus:
    """List the files of `data.path`. Contents are not read yet."""
    if path == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        corpus = Corpus(root, [], maximum_file_bytes)
        _walk(corpus, root, stdlib=True)
        if not corpus.files:
            raise UserError(f"there are no standard library sources in {root}: give a directory of text in data.path")
        return corpus
    root = Path(path).expanduser()
    if not root.exists():
        raise UserError(f'data.path = "{path}" does not exist: write a directory or file of text, or "stdlib"')
    root = root.resolve()
    corpus = Corpus(root, [], maximum_file_bytes)
    if root.is_file():
        _add(corpus, root, root.name)
    else:
        _walk(corpus, root, stdlib=False)
    if not corpus.files:
        raise no_text(path, corpus)
    return corpus


def no_text(path: str, corpus: Corpus) -> UserError:
    """The error of a corpus from which nothing readable came."""
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in corpus.skipped.items())
    found = f"skipped: {reasons}" if reasons else "it is empty"
    remedy = "data.maximum_file_bytes can be raised" if "too large" in corpus.skipped else "give UTF-8 text files"
    return UserError(f'data.path = "{path}" has no text ({found}): {remedy}')


def _walk(corpus: Corpus, root: Path, stdlib: bool) -> None:
    """Fill `corpus.files`, by name. A folder reached twice through links counts once, so loops end."""
    pending, seen = [(root, "")], set()
    while pending:
        folder, prefix = pending.pop()
        try:
            status = folder.stat()
            # Sorted, so that of two links to one folder the same one wins on every run.
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            corpus.reasons[prefix] = "unreadable"
            continue
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        for entry in entries:
            name = prefix + entry.name
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                if not (stdlib and entry.name in _STDLIB_SKIPPED_FOLDERS):
                    pending.append((Path(entry.path), name + "/"))
            elif not stdlib or _is_stdlib_source(entry.name):
                _add(corpus, Path(entry.path), name)
    corpus.files.sort(key=lambda file: file.name)


def _is_stdlib_source(name: str) -> bool:
    return name.endswith(".py") and not any(fnmatch(name, pattern) for pattern in _STDLIB_SKIPPED_FILES)


def _add(corpus: Corpus, path: Path, name: str) -> None:
    try:
        status = path.stat()
    except OSError:  # a dangling link
        corpus.reasons[name] = "unreadable"
        return
    if not path.is_file():  # a pipe or a socket: reading it could wait for ever
        corpus.reasons[name] = "not a file"
    elif status.st_size > corpus.maximum_file_bytes:
        corpus.reasons[name] = "too large"
    elif status.st_size == 0:
        corpus.reasons[name] = "empty"
    else:
        corpus.files.append(File(name, path, status.st_size, status.st_mtime_ns))


def order(name: str, seed: int) -> int:
    """A fixed pseudo-random number in [0, 2**64) for a document's name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big")


def held_out(names: list[str], fraction: float, seed: int) -> set[str]:
    """The documents of the validation split: about `fraction` of them, at least one of two, never all.

    Each document's own hash decides, so adding files does not move the others between the splits.
    """
    if len(names) < 2:
        return set()
    ranked = sorted(names, key=lambda name: order(name, seed))
    chosen = [name for name in ranked if order(name, seed) < fraction * 2**64]
    chosen = chosen[: len(names) - 1] or ranked[:1]
    return set(chosen)


def documents(corpus: Corpus, fraction: float, seed: int) -> Iterator[tuple[Split, File, str]]:
    """Every document of a scanned corpus with its split, in order of name; read as it is asked for."""
    validation = held_out([file.name for file in corpus.files], fraction, seed)
    for file in corpus.files:
        text = corpus.text(file)
        if text is None:
            continue
        if len(corpus.files) == 1:
            cut = _tail_cut(text, fraction)
            yield "train", file, text[:cut]
            if text[cut:]:
                yield "validation", file, text[cut:]
        else:
            yield ("validation" if file.name in validation else "train"), file, text


def training_part(corpus: Corpus, file: File, fraction: float) -> str:
    """The text of a training document, without the tail that a corpus of one file holds out."""
    text = corpus.text(file) or ""
    return text[: _tail_cut(text, fraction)] if len(corpus.files) == 1 else text


def _tail_cut(text: str, fraction: float) -> int:
    """Where the held-out tail of a single file begins: at the next line, or right there if there is none."""
    cut = max(1, int(len(text) * (1 - fraction)))
    newline = text.find("\n", cut - 1)
    return cut if newline in (-1, len(text) - 1) else newline + 1


def pieces(text: str, characters: int = 2**18) -> Iterator[str]:
    """Cut a long document so that every core gets work.

    Only between a line's end and the next line's first character, both neighbours not blank: a byte-level
    BPE never merges across that place, so the tokens are those of the whole text.
    """
    start = 0
    while len(text) - start > characters:
        cut = text.find("\n", start + characters)
        while cut != -1 and cut + 1 < len(text) and (text[cut - 1].isspace() or text[cut + 1].isspace()):
            cut = text.find("\n", cut + 1)
        if cut == -1 or cut + 1 >= len(text):
            break
        yield text[start : cut + 1]
        start = cut + 1
    yield text[start:]
