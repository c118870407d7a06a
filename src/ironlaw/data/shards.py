"""Token files: what tokenising a corpus leaves on disk, and how it is read back.

A folder holds, for each split, `SPLIT.bin` (token ids, little-endian, nothing else) and `SPLIT_documents.npy`
(int64, one more than documents: where each begins, and the end), beside `tokenizer.json` and `index.json`.
The folder appears under its name complete or not at all.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ironlaw.data.corpus import Split, pieces
from ironlaw.data.tokenizer import Tokenizer, file_sha256
from ironlaw.errors import UserError

SCHEMA_VERSION = 1
INDEX = "index.json"
Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
SPLITS: tuple[Split, ...] = ("train", "validation")
# Checked whole at every start up to here (about a second); beyond, the sizes are, and the rest on request.
CHECKSUM_LIMIT_BYTES = 2**30


def token_dtype(vocab: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds every id of a vocabulary."""
    return np.dtype("<u2") if vocab <= 65_536 else np.dtype("<u4")


@dataclass(frozen=True)
class _Piece:
    """A document, or one of the pieces of a long one."""

    split: Split
    text: str
    bytes: int
    last: bool


class SplitWriter:
    """Appends documents to one split's files in `folder`."""

    def __init__(self, folder: Path, split: Split, dtype: np.dtype[Any]):
        self.split = split
        self._folder = folder
        self._dtype = dtype
        self._file: BinaryIO = open(folder / f"{split}.bin", "wb")  # noqa: SIM115 closed by `finish`
        self._digest = hashlib.sha256()
        self._ends = [0]
        self.tokens = 0
        self.bytes = 0

    def write(self, ids: np.ndarray, text_bytes: int) -> None:
        data = ids.astype(self._dtype).tobytes()
        # Written, not mapped: a full disk is then an error, where a mapping would kill the process.
        self._file.write(data)
        self._digest.update(data)
        self.tokens += len(ids)
        self.bytes += text_bytes

    def end_document(self) -> None:
        self._ends.append(self.tokens)

    def finish(self) -> dict[str, Any]:
        """Close the files and describe them for the index."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        boundaries = self._folder / f"{self.split}_documents.npy"
        np.save(boundaries, np.array(self._ends, dtype=np.int64))
        return {
            "documents": len(self._ends) - 1,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "sha256": self._digest.hexdigest(),
            "documents_sha256": file_sha256(boundaries),
        }


class Encoder:
    """Tokenises documents into the files of `folder`, in batches large enough for all cores.

    `seconds` keeps account of the stages; `progress(done_bytes, total_bytes)` is called after each batch.
    """

    def __init__(self, tokenizer: Tokenizer, folder: Path, total_bytes: int, progress: Progress | None = None):
        self.dtype = token_dtype(tokenizer.vocab)
        self.seconds = {"tokenise": 0.0, "write": 0.0}
        self._tokenizer = tokenizer
        self._writers = {split: SplitWriter(folder, split, self.dtype) for split in SPLITS}
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._progress = progress
        self._batch_bytes = 2**19 * max(2, os.cpu_count() or 1)
        self._pending: list[_Piece] = []
        self._pending_bytes = 0

    def add(self, split: Split, text: str) -> None:
        """Queue one document."""
        parts = list(pieces(text))
        for part in parts:
            size = len(part.encode("utf-8"))
            self._pending.append(_Piece(split, part, size, last=part is parts[-1]))
            self._pending_bytes += size
            if self._pending_bytes >= self._batch_bytes:
                self._flush()

    def finish(self) -> dict[str, dict[str, Any]]:
        """Write what is queued, close the files and describe each split for the index."""
        self._flush()
        return {split: writer.finish() for split, writer in self._writers.items()}

    def _flush(self) -> None:
        start = time.perf_counter()
        encoded = self._tokenizer.encode_many([piece.text for piece in self._pending])
        tokenised = time.perf_counter()
        end_of_text = np.array([self._tokenizer.end_of_text])
        for piece, ids in zip(self._pending, encoded, strict=True):
            writer = self._writers[piece.split]
            writer.write(ids, piece.bytes)
            if piece.last:
                writer.write(end_of_text, 0)
                writer.end_document()
        self.seconds["tokenise"] += tokenised - start
        self.seconds["write"] += time.perf_counter() - tokenised
        self._done_bytes += self._pending_bytes
        self._pending, self._pending_bytes = [], 0
        if self._progress is not None:
            self._progress(min(self._done_bytes, self._total_bytes), self._total_bytes)


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A temporary folder beside `final` that takes its name when the block ends well, and vanishes otherwise.

    Of two processes preparing the same thing one wins; the other's work is dropped for the winner's.
    """
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(final.parent)
        owner = f"{socket.gethostname()}-{os.getpid()}"
        temporary = final.parent / f".partial-{owner}-{uuid.uuid4().hex[:8]}"
        temporary.mkdir()
    except OSError as error:
        raise _cannot_write(final.parent, error) from None
    try:
        yield temporary
        try:
            temporary.rename(final)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
    except OSError as error:
        raise _cannot_write(final.parent, error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _cannot_write(folder: Path, error: OSError) -> UserError:
    reason = error.strerror or str(error)
    return UserError(f"cannot write token files to {folder} ({reason}): free space or set data.cache to another folder")


def _remove_abandoned(parent: Path) -> None:
    """Temporary folders of processes of this machine that were killed."""
    prefix = f".partial-{socket.gethostname()}-"
    for folder in parent.glob(f"{prefix}*"):
        process = folder.name.removeprefix(prefix).split("-")[0]
        if process.isdigit() and not _is_alive(int(process)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # alive, and somebody else's
        return True
    return True


def write_index(folder: Path, index: dict[str, Any]) -> None:
    (folder / INDEX).write_text(json.dumps({"schema": SCHEMA_VERSION} | index, indent=1) + "\n", encoding="utf-8")


def read_index(folder: Path, checksums: bool | None = None) -> dict[str, Any]:
    """The index of a prepared folder, its files checked: sizes always, checksums where asked or quick."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        width = np.dtype(index["dtype"]).itemsize
        expected = {f"{split}.bin": index["splits"][split]["tokens"] * width for split in SPLITS}
        digests = {f"{split}.bin": index["splits"][split]["sha256"] for split in SPLITS}
        digests |= {f"{split}_documents.npy": index["splits"][split]["documents_sha256"] for split in SPLITS}
        digests["tokenizer.json"] = index["tokenizer"]["sha256"]
        schema = index["schema"]
    except (OSError, ValueError, KeyError, TypeError):
        raise _damaged(folder, f"{INDEX} is missing or unreadable") from None
    if schema != SCHEMA_VERSION:
        raise _damaged(folder, f"its schema is {schema}, not {SCHEMA_VERSION}")
    for name in digests:
        file = folder / name
        if not file.is_file():
            raise _damaged(folder, f"{name} is missing")
        size = file.stat().st_size
        if name in expected and size != expected[name]:
            raise _damaged(folder, f"{name} has {size:,} bytes instead of {expected[name]:,}")
    if checksums is None:
        checksums = sum(expected.values()) <= CHECKSUM_LIMIT_BYTES
    for name, digest in digests.items():
        if (checksums or name not in expected) and file_sha256(folder / name) != digest:
            raise _damaged(folder, f"{name} does not have the checksum it was written with")
    return dict(index)


def _damaged(folder: Path, what: str) -> UserError:
    return UserError(f"the prepared tokens in {folder} are damaged ({what}): delete that folder and run again")


def open_tokens(folder: Path, split: Split, dtype: np.dtype[Any]) -> np.ndarray:
    """(tokens,) memory-mapped, read-only."""
    file = folder / f"{split}.bin"
    if file.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype=dtype)
    return np.memmap(file, dtype=dtype, mode="r")
