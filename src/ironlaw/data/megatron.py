"""Megatron-LM's indexed data sets: `NAME.bin` holds token ids only, `NAME.idx` where each sequence begins.

Layout of the index, little-endian (Megatron-LM, `megatron/core/datasets/indexed_dataset.py`): nine bytes MMIDIDX and
two zeros, uint64 version 1, uint8 code of the ids' type, uint64 sequences, uint64 entries of the document table, then
int32 tokens of each sequence, int64 byte offset of each, int64 document table: the first sequence of each document and
the end.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ironlaw.errors import UserError
from ironlaw.files import replacing

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floating-point: no tokens


@dataclass(frozen=True)
class Indexed:
    """An open data set with memory-mapped tokens."""

    tokens: np.ndarray  # (bytes / width,) of the file's own type
    bounds: np.ndarray  # (documents + 1,) int64: where each document begins in `tokens`, and the end

    @property
    def documents(self) -> int:
        return len(self.bounds) - 1

    @property
    def bytes(self) -> int:
        return int(self.tokens.nbytes)

    def document(self, number: int) -> np.ndarray:
        """Return the ids of a document, (tokens,) int64."""
        return np.asarray(self.tokens[self.bounds[number] : self.bounds[number + 1]]).astype(np.int64)


def open_indexed(path: Path) -> Indexed:
    """Open a data set. `path` is the .bin, the .idx, or their common prefix. UserError if one is missing or damaged."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    index_file, token_file = (prefix.with_name(prefix.name + suffix) for suffix in (".idx", ".bin"))
    for file in (index_file, token_file):
        if not file.is_file():
            raise UserError(f"{file} is missing: a Megatron data set is a .bin and an .idx of the same name")
    size = index_file.stat().st_size
    header = index_file.open("rb").read(_HEADER.size)
    if len(header) < _HEADER.size or header[:9] != _MAGIC:
        raise UserError(f"{index_file} is not a Megatron index: it does not begin with {_MAGIC[:7].decode()}")
    _, version, code, sequences, entries = _HEADER.unpack(header)
    if version != 1 or code not in _TYPES:
        raise UserError(f"{index_file} has version {version} and type {code}: only version 1 with integer ids is known")
    needed = _HEADER.size + 12 * sequences + 8 * entries
    if size < needed or not sequences:
        raise UserError(
            f"{index_file} has {size:,} bytes instead of {needed:,} for {sequences:,} sequences: copy it again"
        )
    lengths = np.fromfile(index_file, "<i4", sequences, offset=_HEADER.size).astype(np.int64)
    table = np.fromfile(index_file, "<i8", entries, offset=_HEADER.size + 12 * sequences)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    expected, found = int(ends[-1]) * np.dtype(_TYPES[code]).itemsize, token_file.stat().st_size
    if found != expected:
        raise UserError(f"{token_file} has {found:,} bytes, its index says {expected:,}: copy both again")
    if lengths.min() < 0 or not entries or table[0] or table[-1] != sequences or (np.diff(table) < 0).any():
        raise UserError(f"{index_file} has a damaged document table: copy it again")
    tokens = np.memmap(token_file, dtype=_TYPES[code], mode="r") if found else np.empty(0, _TYPES[code])
    return Indexed(tokens, ends[table])


def write_indexed(prefix: Path, documents: Iterable[np.ndarray], dtype: np.dtype[Any]) -> int:
    """Write PREFIX.bin (uint16 if `dtype` has two bytes, else int32) and PREFIX.idx; return the number of documents."""
    kind = np.dtype("<u2") if dtype.itemsize == 2 else np.dtype("<i4")
    lengths = []
    with replacing(Path(f"{prefix}.bin")) as file:
        for ids in documents:
            file.write(ids.astype(kind).tobytes())
            lengths.append(len(ids))
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * kind.itemsize
    code = next(code for code, name in _TYPES.items() if np.dtype(name) == kind)
    with replacing(Path(f"{prefix}.idx")) as file:
        file.write(_HEADER.pack(_MAGIC, 1, code, len(lengths), len(lengths) + 1))
        file.write(np.array(lengths, "<i4").tobytes() + starts.astype("<i8").tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
    return len(lengths)
