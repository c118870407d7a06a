"""Token files that tokenising a source leaves on disk: writing, checking and reading them.

A folder holds `index.json`, `tokenizer.json` and, for shard NNNNN and each split, `SPLIT-NNNNN.bin` (token ids,
little-endian, nothing else) and `SPLIT-NNNNN_documents.npy` (int64, one more than documents: where each begins in the
shard, and the end). For conversations, `SPLIT-NNNNN_marks.bin` has a byte per token (`TokenSplit.marks`). Schema 1
had a single shard, `SPLIT.bin` and `SPLIT_documents.npy`; it can still be read.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ironlaw.cores import usable_cores
from ironlaw.data.corpus import START
from ironlaw.data.readers import IDS, MARKS, UNLEARNED
from ironlaw.data.splits import SPLITS, Split
from ironlaw.data.tokenise import TextPiece
from ironlaw.errors import UserError
from ironlaw.files import SEAL, is_sealed, read_json, replacing, sha256

SCHEMA_VERSION = 2
INDEX = "index.json"
Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
# Up to this size all checksums are compared at every start (about a second); above it, only sizes unless requested.
CHECKSUM_LIMIT_BYTES = 2**30


def token_dtype(vocab: int) -> np.dtype[Any]:
    """Return the type of token ids in files: 16 bits if they hold every id of the vocabulary, otherwise 32."""
    return np.dtype("<u2") if vocab <= 65_536 else np.dtype("<u4")


def list_files(entry: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, checksum) of each file that a split has in a shard, the token file first."""
    return [(entry[f"{what}file"], entry[f"{what}sha256"]) for what in ("", "documents_", "marks_")
            if f"{what}file" in entry]  # fmt: skip


class SplitWriter:
    """Appends documents to one split's files of one shard. `marked`: also writes the marks of the tokens."""

    def __init__(self, folder: Path, split: Split, number: int, dtype: np.dtype[Any], marked: bool = False):
        self._folder, self._dtype, self._name = folder, dtype, f"{split}-{number:05d}"
        self._file: BinaryIO = open(folder / f"{self._name}.bin", "wb")  # noqa: SIM115 closed by `finish` and `close`
        self._ends = [0]
        self._marks = [np.empty(0, np.uint8)] if marked else None
        self.tokens = self.bytes = 0

    def write(self, ids: np.ndarray, text_bytes: int) -> None:
        if self._marks is not None:
            self._marks.append((ids >> MARKS).astype(np.uint8))
            ids = ids & IDS
        # Written, not memory-mapped: a full disk then raises an error instead of killing the process.
        self._file.write(ids.astype(self._dtype).tobytes())
        self.tokens += len(ids)
        self.bytes += text_bytes

    def end_document(self) -> None:
        self._ends.append(self.tokens)

    def finish(self) -> dict[str, Any]:
        """Close the files and return their entry of the index."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        files = {"": f"{self._name}.bin", "documents_": f"{self._name}_documents.npy"}
        with replacing(self._folder / files["documents_"]) as file:
            np.save(file, np.array(self._ends, dtype=np.int64))
        if self._marks is not None:
            files["marks_"] = f"{self._name}_marks.bin"
            (self._folder / files["marks_"]).write_bytes(np.concatenate(self._marks).tobytes())
        entry: dict[str, Any] = {"documents": len(self._ends) - 1, "tokens": self.tokens, "bytes": self.bytes}
        for what, name in files.items():
            entry |= {f"{what}file": name, f"{what}sha256": sha256(self._folder / name)}
        return entry

    def close(self) -> None:
        self._file.close()


class ShardWriter:
    """Writes one shard of both splits. `finish` returns its entry of the index."""

    def __init__(self, folder: Path, number: int, dtype: np.dtype[Any], end_of_text: int, marked: bool = False):
        self.number, self._end_of_text, self._marked = number, end_of_text, marked
        self._writers = {split: SplitWriter(folder, split, number, dtype, marked) for split in SPLITS}
        self._skipped: Counter[str] = Counter()
        self._last = -1
        self.next: tuple[int, ...] = START  # where the documents of the next shard begin

    @property
    def tokens(self) -> int:
        return sum(writer.tokens for writer in self._writers.values())

    def write(self, piece: TextPiece, ids: np.ndarray) -> None:
        if piece.content is None:
            self._skipped[piece.reason] += 1
        else:
            writer = self._writers[piece.split]
            writer.write(ids, piece.bytes)
            if len(ids):
                self._last = int(ids[-1])
            if piece.last:
                # Text never ends in the separator; documents tokenised elsewhere usually do.
                if isinstance(piece.content, str) or self._last & IDS != self._end_of_text:
                    # In a conversation it is not learned: the template decides what ends an answer.
                    writer.write(np.array([self._end_of_text | self._marked * UNLEARNED]), 0)
                writer.end_document()
        if piece.next is not None:
            self.next = piece.next

    def finish(self) -> dict[str, Any]:
        described = {split: writer.finish() for split, writer in self._writers.items()}
        return {"next": list(self.next), "skipped": dict(self._skipped)} | described

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class Tokens:
    """Several token arrays read as one, without copying them into one."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self._arrays = [np.asarray(array) for array in arrays]  # slicing a memmap costs several times as much
        self._ends = np.cumsum([len(array) for array in arrays])
        self._starts = self._ends - [len(array) for array in arrays]
        self.dtype: np.dtype[Any] = arrays[0].dtype

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, where: slice) -> np.ndarray:
        """Return a slice of step 1: a view inside a shard, a copy across shards."""
        start, stop, step = where.indices(len(self))
        assert step == 1
        shard = int(np.searchsorted(self._ends, start, side="right"))
        if shard < len(self._ends) and stop <= self._ends[shard]:
            return self._arrays[shard][start - self._starts[shard] : stop - self._starts[shard]]
        parts = []
        while start < stop:
            end = min(stop, int(self._ends[shard]))
            parts.append(self._arrays[shard][start - self._starts[shard] : end - self._starts[shard]])
            start, shard = end, shard + 1
        return np.concatenate(parts) if parts else np.empty(0, self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.concatenate(self._arrays).astype(dtype or self.dtype, copy=False)


TokenArray = np.ndarray | Tokens


def join(arrays: Sequence[TokenArray]) -> TokenArray:
    """Return several arrays as one; a single array is returned as it is."""
    flat = [part for array in arrays for part in (array._arrays if isinstance(array, Tokens) else [array])]
    full = [array for array in flat if len(array)] or flat[:1]
    return full[0] if len(full) == 1 else Tokens(full)


def read_index(folder: Path, checksums: bool | None = None) -> dict[str, Any]:
    """Return the index of a prepared folder after checking its files: always sizes, checksums if requested or quick.

    Raises DamagedShards if only shards are damaged; preparation then makes these shards again.
    """
    try:
        index = read_json(folder / INDEX)
        schema = index["schema"]
        if SEAL in index and not is_sealed(index):  # earlier versions did not write it
            raise ValueError("changed")
        if schema == 1:
            index = _from_schema_1(index)
        width = np.dtype(index["dtype"]).itemsize
        shards, tokenizer_sha256 = index["shards"], index["tokenizer"]["sha256"]
        size = sum(shard[split]["tokens"] for shard in shards for split in SPLITS) * width
    except (OSError, ValueError, KeyError, TypeError):
        raise _damaged(folder, f"{INDEX} is missing or unreadable") from None
    if schema not in (1, SCHEMA_VERSION):
        raise _damaged(folder, f"its schema is {schema}, this version reads 1 to {SCHEMA_VERSION}")
    if tokenizer_sha256 is not None:
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise _damaged(folder, "tokenizer.json is missing")
        if sha256(file) != tokenizer_sha256:
            raise _damaged(folder, "tokenizer.json does not have the checksum it was written with")
    if checksums is None:
        checksums = size <= CHECKSUM_LIMIT_BYTES
    with ThreadPoolExecutor(min(8, usable_cores())) as pool:  # hashing releases the interpreter's lock
        found = list(pool.map(lambda shard: damage(folder, shard, width, checksums), shards))
    wrong = {number: what for number, what in enumerate(found) if what is not None}
    if wrong:
        raise DamagedShards(folder, wrong, index)
    return dict(index)


def damage(folder: Path, shard: dict[str, Any], width: int, checksums: bool) -> str | None:
    """Return what is wrong with a shard's files, or None. Document bounds are small and always checked whole."""
    for split in SPLITS:
        entry = shard[split]
        for name, digest in list_files(entry):
            file, tokens = folder / name, name == entry["file"]
            if not file.is_file():
                return f"{name} is missing"
            size = file.stat().st_size
            if tokens and size != entry["tokens"] * width:
                return f"{name} has {size:,} bytes instead of {entry['tokens'] * width:,}"
            if (checksums or not tokens) and sha256(file) != digest:
                return f"{name} does not have the checksum it was written with"
    return None


def _from_schema_1(index: dict[str, Any]) -> dict[str, Any]:
    """Convert the first release's index, which had one shard without a number."""
    names = {split: {"file": f"{split}.bin", "documents_file": f"{split}_documents.npy"} for split in SPLITS}
    shard: dict[str, Any] = {split: index["splits"][split] | names[split] for split in SPLITS}
    return index | {"shards": [shard | {"next": None, "skipped": {}}]}


def _damaged(folder: Path, what: str) -> UserError:
    return UserError(f"the prepared tokens in {folder} are damaged ({what}): delete that folder and run again")


class DamagedShards(UserError):
    """Damage to the files of some shards; the rest of the folder is intact."""

    def __init__(self, folder: Path, wrong: dict[int, str], index: dict[str, Any]):
        first = next(iter(wrong.values()))
        more = f" and {len(wrong) - 1} more shards" if len(wrong) > 1 else ""
        super().__init__(
            f"the prepared tokens in {folder} are damaged ({first}{more}): `ironlaw data prepare` makes these shards "
            "again from the text, or delete that folder and run again"
        )
        self.wrong, self.index = wrong, index


@dataclass(frozen=True)
class TokenSplit:
    """The concatenated documents of a split."""

    tokens: TokenArray  # (tokens,) unsigned, memory-mapped, read-only; the end-of-text tokens included
    bounds: np.ndarray  # (documents + 1,) int64: where each document begins in `tokens`, and the end
    bytes: int = 0  # of UTF-8 text; 0: the source held tokens, not text
    # (tokens,) uint8: bit 0: not learned; bit 1: part of the rejected answer; None: all are 0
    marks: TokenArray | None = None

    @property
    def documents(self) -> int:
        return len(self.bounds) - 1

    @property
    def learned(self) -> TokenArray:
        """The tokens without those that are not learned, or part of a rejected answer."""
        return self.tokens if self.marks is None else np.asarray(self.tokens)[np.asarray(self.marks) == 0]

    def counts(self) -> dict[str, int]:
        return {"documents": self.documents, "tokens": len(self.tokens), "bytes": self.bytes}


def open_split(folder: Path, index: dict[str, Any], split: Split) -> TokenSplit:
    """Open a split of a folder with this index; its shards are read as one."""
    dtype, parts = np.dtype(index["dtype"]), []
    for entry in (shard[split] for shard in index["shards"]):
        marks = _map(folder / entry["marks_file"], np.dtype(np.uint8)) if "marks_file" in entry else None
        bounds = np.load(folder / entry["documents_file"], mmap_mode="r")
        parts.append(TokenSplit(_map(folder / entry["file"], dtype), bounds, entry["bytes"], marks))
    return join_splits(parts)


def join_splits(parts: Sequence[TokenSplit]) -> TokenSplit:
    """Concatenate splits without copying their tokens."""
    if len(parts) == 1:
        return parts[0]
    before = np.cumsum([0] + [int(part.bounds[-1]) for part in parts])
    bounds = np.concatenate([[0], *(p.bounds[1:] + start for p, start in zip(parts, before, strict=False))])
    marks = None
    if any(part.marks is not None for part in parts):
        marks = join([np.broadcast_to(np.uint8(0), len(p.tokens)) if p.marks is None else p.marks for p in parts])
    known = all(part.bytes or not len(part.tokens) for part in parts)
    return TokenSplit(join([p.tokens for p in parts]), bounds, sum(p.bytes for p in parts) if known else 0, marks)


def _map(file: Path, dtype: np.dtype[Any]) -> np.ndarray:
    if file.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype=dtype)
    return np.memmap(file, dtype=dtype, mode="r")
