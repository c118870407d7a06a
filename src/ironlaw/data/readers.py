"""One reader per kind of file: text, JSONL (plain, gzip, zstandard), Parquet, Arrow streams, Megatron's `.bin/.idx`.

A reader yields documents in the file's order, each with the position from which to continue: uncompressed bytes of
JSONL, rows of Parquet and Arrow, documents of Megatron. Starting there yields the remaining documents.
"""

from __future__ import annotations

import gzip
import importlib
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from ironlaw.data import megatron
from ironlaw.errors import UserError, reported

Content = str | np.ndarray
"""Text, or token ids of a source that is tokenised already; ids of conversations carry marks in their high bits."""
MARKS = 40
UNLEARNED, REJECTED, IDS = 1 << MARKS, 2 << MARKS, (1 << MARKS) - 1
Talk = dict[str, Any]  # a conversation before it is tokenised (messages, tools), or a prompt with two answers
Raw = Content | Talk


@dataclass(frozen=True, slots=True)
class Record:
    """One document of a file, or (`content` is None) one that was left out for `reason`."""

    content: Raw | None
    next: int  # where the next document begins
    done_bytes: int  # of the file, on disk, read so far
    reason: str = ""


LINE_LIMIT_BYTES = 2**26
"""Limit of one line of JSONL, which is read whole and takes some forty times its size while it is tokenised."""

TEXTS = ("string", "large_string", "string_view", "binary", "large_binary")  # types of columns, as pyarrow names them

_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"  # without it, Arrow takes a stream that was cut between two batches as whole
_JSONL = {".jsonl", ".ndjson"}
_COMPRESSED = {".gz", ".zst"}


def find_kind(path: Path) -> str:
    """Return the kind of reader for a file's name: text unless the name is that of another kind."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    last = suffixes[-1] if suffixes else ""
    if last in _JSONL or (last in _COMPRESSED and suffixes[0] in _JSONL | {".json"}):
        return "jsonl"
    if last in (".parquet", ".arrow"):
        return last[1:]
    if last == ".idx" and path.with_suffix(".bin").is_file():
        return "megatron"
    return "text"


def read(kind: str, path: Path, field: str, start: int = 0) -> Iterator[Record]:
    """Yield the documents of a file from position `start` on; a text file is one document."""
    readers: dict[str, Callable[[Path, str, int], Iterator[Record]]] = {
        "text": _read_text,
        "jsonl": _read_jsonl,
        "chat": partial(_read_jsonl, take=_conversation),
        "pairs": partial(_read_jsonl, take=_preference),
        "parquet": partial(_read_rows, "parquet"),
        "arrow": partial(_read_rows, "arrow"),
        "megatron": _read_megatron,
    }
    return readers[kind](path, field, start)


def find_positions(kind: str, path: Path, number: int) -> list[int]:
    """Return up to `number` positions spread over a file, to sample it without reading all of it."""
    if kind == "text":
        return [0]
    if kind in ("jsonl", "chat", "pairs"):
        if path.suffix.lower() in _COMPRESSED:
            return [0]  # cannot be entered in the middle
        size = path.stat().st_size
        starts = {0}
        with path.open("rb") as file:
            for position in (size * i // number for i in range(1, number)):
                file.seek(position)
                starts.add(position + _rest_of_line(file))
        return sorted(start for start in starts if start < size)
    rows = _rows(kind, path)
    return sorted({rows * i // number for i in range(number)})


def replace_surrogates(text: str) -> str:
    """Return `text` with unpaired surrogates replaced: JSON can contain them, UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def map_texts(function: Callable[[str], str], value: Any) -> Any:
    """Return a value of JSON with `function` applied to each text in it, but not to the names of fields."""
    if isinstance(value, dict):
        return {key: map_texts(function, inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(function, inner) for inner in value]
    return function(value) if isinstance(value, str) else value


def _read_text(path: Path, field: str, start: int) -> Iterator[Record]:
    text, size = None, 0
    try:
        data = path.read_bytes()
        # No newline translation: the tokens must not depend on the platform that made them.
        text, size = data.decode("utf-8").removeprefix("\ufeff"), len(data)
        reason = "binary" if "\0" in text else "" if text.strip() else "empty"
    except OSError:
        reason = "unreadable"
    except UnicodeDecodeError as error:
        reason = "binary" if b"\0" in error.object else "not UTF-8"
    yield Record(None if reason else text, 1, size, reason)


# -- JSONL -----------------------------------------------------------------------------------------------------------


Take = Callable[[dict[str, Any], str], tuple[Raw | None, str]]
"""(fields of a line, field) -> (content, ""), (None, what the field lacks), or (None, "") if the field is empty."""


def _text(fields: dict[str, Any], field: str) -> tuple[Raw | None, str]:
    found = fields.get(field, 0)
    if not isinstance(found, str | None):
        return None, "text"
    return (replace_surrogates(found) if found and found.strip() else None), ""


def _conversation(fields: dict[str, Any], field: str) -> tuple[Raw | None, str]:
    return _talk({"messages": fields.get(field), "tools": fields.get("tools")})


def _preference(fields: dict[str, Any], field: str) -> tuple[Raw | None, str]:
    """Return a prompt and two answers to it, all as text or all as messages."""
    return _talk({name: fields.get(name) for name in ("prompt", "chosen", "rejected", "tools")})


def _talk(parts: Talk) -> tuple[Raw | None, str]:
    tools, pair = parts["tools"], "prompt" in parts
    for name, part in parts.items():
        if name == "tools":
            is_list = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
            lacks = "" if tools is None or is_list else "a list of objects"
        elif pair and not isinstance(parts["prompt"], list):
            lacks = "" if isinstance(part, str) and part.strip() else "text"
        else:
            lacks = _lacks_of(part, answers=name != "prompt")
        if lacks:
            return None, f'{lacks} as "{name}"' if pair or name == "tools" else lacks
    return map_texts(replace_surrogates, parts), ""


def _lacks_of(messages: Any, answers: bool) -> str:
    """Return what `messages` lack to be a conversation, with an answer if `answers`. A tool call needs no text."""
    if not isinstance(messages, list) or not messages:
        return "a list of messages"
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        return 'a "role" in every message'
    said = [m.get("content") or "" if m.get("tool_calls") else m.get("content") for m in messages]
    if not all(isinstance(text, str) for text in said):
        return 'text as "content" of every message'
    spoken = (m for m, text in zip(messages, said, strict=True) if text.strip() or m.get("tool_calls"))
    return "" if not answers or any(m["role"] == "assistant" for m in spoken) else "an answer of the assistant"


def _read_jsonl(path: Path, field: str, start: int, take: Take = _text) -> Iterator[Record]:
    position = start
    with _intact(path), path.open("rb") as raw, _decompressed(raw, path) as lines:
        _skip(lines, start, seek=lines is raw)
        while line := lines.readline(LINE_LIMIT_BYTES):
            position += len(line)
            content, reason = None, f"lines over {LINE_LIMIT_BYTES >> 20} MiB"
            if len(line) == LINE_LIMIT_BYTES and not line.endswith(b"\n"):
                position += _rest_of_line(lines)
            elif line.strip():
                content, reason = _from_line(line, path, field, take, first=position == len(line))
            else:
                continue
            yield Record(content, position, raw.tell(), reason)


def _from_line(line: bytes, path: Path, field: str, take: Take, first: bool) -> tuple[Raw | None, str]:
    """Return the content of a line, or None with the reason. What is wrong with the `first` line is an error: the whole
    file is something else. Later, one bad line among millions is only counted."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        fields = None
    if first and not isinstance(fields, dict):
        raise UserError(f"{path} is not JSONL: its first line is no JSON object")
    if fields is None:
        return None, "not JSON"
    fields = fields if isinstance(fields, dict) else {}
    content, lacks = take(fields, field)
    if content is not None:
        return content, ""
    if first and lacks and take is _preference:
        raise UserError(f"{path} is without {lacks} in its first line: write prompt, chosen and rejected")
    if first and lacks:
        there = f'the field "{field}" of {path} is without {lacks}'
        what = there if field in fields else f'{path} has no field "{field}"'
        others = ", ".join(name for name in fields if name != field)
        raise UserError(f"{what}{f': set data.field to one of {others}' if others else ', and no other: write one'}")
    return None, f'without {lacks} in "{field}"' if lacks else "empty"


def _decompressed(raw: IO[bytes], path: Path) -> IO[bytes]:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if suffix == ".zst":
        return io.BufferedReader(_extra("pyarrow", path).CompressedInputStream(raw, "zstd"), 2**20)
    return raw


def _skip(lines: IO[bytes], start: int, seek: bool) -> None:
    if seek:
        lines.seek(start)
        return
    while start > 0 and (block := lines.read(min(start, 2**20))):
        start -= len(block)


def _rest_of_line(lines: IO[bytes]) -> int:
    """Read past the rest of a line in blocks and return its number of bytes."""
    passed = 0
    while piece := lines.readline(2**20):
        passed += len(piece)
        if piece.endswith(b"\n"):
            break
    return passed


@contextmanager
def _intact(path: Path) -> Iterator[None]:
    """Turn errors of gzip and pyarrow about a damaged file into a UserError of one line."""
    try:
        yield
    except Exception as error:
        too_short = isinstance(error, OSError) and error.errno is None
        if too_short or isinstance(error, EOFError | zlib.error) or type(error).__module__.split(".")[0] == "pyarrow":
            reason = " ".join(str(error).split())
            raise UserError(f"{path} is damaged ({reason}): fetch it again or take it out of data.path") from None
        raise


# -- Parquet and Arrow -----------------------------------------------------------------------------------------------


def _read_rows(kind: str, path: Path, field: str, start: int) -> Iterator[Record]:
    """Read the texts of a column of a Parquet or Arrow file. UserError for bytes that are not UTF-8."""
    size, rows = path.stat().st_size, max(1, _rows(kind, path))
    batches = _parquet_batches if kind == "parquet" else _arrow_batches
    with _intact(path):
        for first, column in batches(path, field, start):
            for row, value in enumerate(column, first):
                if row < start:
                    continue
                told = (
                    f'{path} has bytes that are not UTF-8 text in column "{field}", row {row + 1:,}: write the column '
                    "as UTF-8, or set data.field to another"
                )
                with reported(told, UnicodeDecodeError):
                    text = value.as_py()
                    text = text.decode() if isinstance(text, bytes) else text
                is_empty = text is None or not text.strip()
                done = size * (row + 1) // rows
                yield Record(None if is_empty else text, row + 1, done, "empty" if is_empty else "")


def _parquet_batches(path: Path, field: str, start: int) -> Iterator[tuple[int, Any]]:
    """Yield batches of a column, each with the number of its first row. Row groups before `start` are not read."""
    with _extra("pyarrow.parquet", path).ParquetFile(path) as file:
        _check_column(path, field, file.schema_arrow)
        ends = np.cumsum([file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)], dtype=int)
        passed = int(np.searchsorted(ends, start, side="right"))
        row = int(ends[passed - 1]) if passed else 0
        for batch in file.iter_batches(1024, row_groups=range(passed, len(ends)), columns=[field]):
            yield row, batch.column(0)
            row += len(batch)


def _arrow_batches(path: Path, field: str, start: int) -> Iterator[tuple[int, Any]]:
    with _open_arrow(path) as batches:
        row = 0
        for batch in batches:
            if row == 0:
                _check_column(path, field, batch.schema)
            if row + len(batch) > start:
                yield row, batch.column(field)
            row += len(batch)


@contextmanager
def _open_arrow(path: Path) -> Iterator[Iterator[Any]]:
    """Open the batches of a stream, as `save_to_disk` writes it, or of a Feather file, which begins with ARROW1."""
    pyarrow = _extra("pyarrow", path)
    with pyarrow.memory_map(str(path)) as file:
        if file.read(6) == b"ARROW1":
            reader = pyarrow.ipc.open_file(file)
            yield (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            file.seek(max(0, file.size() - len(_STREAM_END)))
            complete = file.read() == _STREAM_END
            file.seek(0)
            # Streams of before Arrow 0.15 begin with a length and end otherwise.
            if file.read(4) == _STREAM_END[:4] and not complete:
                raise EOFError("it ends before its end mark")
            file.seek(0)
            yield iter(pyarrow.ipc.open_stream(file))


def _check_column(path: Path, field: str, schema: Any) -> None:
    types = {column.name: str(column.type).removeprefix("dictionary<values=").partition(",")[0] for column in schema}
    texts = [name for name, kind in types.items() if kind in TEXTS]
    if field not in schema.names:
        found = ", ".join(f"{column.name} ({column.type})" for column in schema)
        raise UserError(f'{path} has no column "{field}": set data.field to one of {found}')
    if field not in texts:
        others = f": set data.field to one of {', '.join(texts)}" if texts else ", and no column is: write one of text"
        raise UserError(f'the column "{field}" of {path} is {schema.field(field).type}, not text{others}')


def _rows(kind: str, path: Path) -> int:
    if kind == "megatron":
        return megatron.open_indexed(path).documents
    with _intact(path):
        if kind == "parquet":
            return int(_extra("pyarrow.parquet", path).read_metadata(path).num_rows)
        with _open_arrow(path) as batches:
            return sum(map(len, batches))


def _extra(module: str, path: Path) -> Any:
    """Import an optional library, or raise a UserError that says how to install it."""
    name = module.split(".")[0]
    with reported(f"{path} needs {name}, which is not installed: pip install 'ironlaw[data]'", ImportError):
        return importlib.import_module(module)


# -- Megatron --------------------------------------------------------------------------------------------------------


def _read_megatron(path: Path, field: str, start: int) -> Iterator[Record]:
    indexed = megatron.open_indexed(path)
    for number in range(start, indexed.documents):
        ids = indexed.document(number)
        done = indexed.bytes * (number + 1) // indexed.documents
        yield Record(ids if len(ids) else None, number + 1, done, "" if len(ids) else "empty")
