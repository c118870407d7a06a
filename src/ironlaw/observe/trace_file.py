"""Reads trace files of the PyTorch profiler (chrome format, plain or gzipped) piece by piece: they reach gigabytes."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ironlaw.errors import UserError
from ironlaw.files import open_file
from ironlaw.observe.events import CPU, DEVICE, RUNTIME, Event

_CHUNK = 1 << 20
_MAX_EVENT_BYTES = 64 * _CHUNK
_WHERE = {
    "cpu_op": CPU, "user_annotation": CPU, "python_function": CPU, "operator": CPU,
    "kernel": DEVICE, "gpu_memcpy": DEVICE, "gpu_memset": DEVICE, "privateuse1_runtime": RUNTIME,
    "cuda_runtime": RUNTIME, "cuda_driver": RUNTIME, "hip_runtime": RUNTIME, "xpu_runtime": RUNTIME,
}  # fmt: skip
_KEPT = ("Input Dims", "Input type", "Group size", "correlation")  # of an event's arguments


@dataclass
class TraceFile:
    """Events in order of time, nanoseconds from the first; `header` is what the file says besides (devices, ranks)."""

    events: list[Event]
    header: dict[str, Any] = field(default_factory=dict)


def read_trace(path: Path) -> TraceFile:
    """Raises UserError if it is not a trace of the profiler."""
    result = TraceFile([])
    try:
        with open_file(path) as raw_file:
            stream: Any = gzip.GzipFile(fileobj=raw_file) if path.suffix == ".gz" else raw_file
            file = io.TextIOWrapper(stream, encoding="utf-8", errors="replace")
            read = map(_event, _raw_events(file, result.header))
            result.events = [event for event in read if event is not None]
    except UserError:
        raise
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise UserError(f"{path} cannot be read as a trace ({error}): export it with export_chrome_trace") from None
    if not result.events:
        raise UserError(
            f"{path} has no events of the PyTorch profiler: give a file that prof.export_chrome_trace wrote, "
            "or a run directory"
        )
    result.events.sort(key=lambda event: (event.start, -event.end))
    first = result.events[0].start
    for event in result.events:
        event.start -= first
        event.end -= first
    return result


def _raw_events(file: IO[str], header: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the objects of `traceEvents` (or of a bare list), without the whole text in memory."""
    decoder, buffer = json.JSONDecoder(), file.read(_CHUNK)
    begin = _list_begin(buffer)
    while begin is None:
        more = file.read(_CHUNK)
        if not more or len(buffer) > 64 * _CHUNK:
            return
        buffer += more
        begin = _list_begin(buffer)
    _read_header(buffer[:begin], header)
    position = begin
    while True:
        while position < len(buffer) and buffer[position] in " \t\r\n,":
            position += 1
        if position < len(buffer) and buffer[position] == "]":
            return
        try:
            value, position = decoder.raw_decode(buffer, position)
        except json.JSONDecodeError:
            if len(buffer) - position > _MAX_EVENT_BYTES:
                raise UserError(f"it is no trace: it has an event of over {_MAX_EVENT_BYTES >> 20} MiB") from None
            more = file.read(max(_CHUNK, len(buffer) - position))
            if not more:  # a trace that was cut off: what came before it counts
                return
            buffer, position = buffer[position:] + more, 0
            continue
        if isinstance(value, dict):
            yield value


def _list_begin(text: str) -> int | None:
    found = re.search(r'"traceEvents"\s*:\s*\[', text)
    if found:
        return found.end()
    bare = re.match(r"\s*\[", text)
    return bare.end() if bare else None


def _read_header(text: str, header: dict[str, Any]) -> None:
    """Read what stands before the events: `{"schemaVersion": 1, "deviceProperties": [...], ... "traceEvents": [`."""
    complete = re.sub(r',?\s*"traceEvents"\s*:\s*\[$', "}", text)
    try:
        found = json.loads(complete)
    except json.JSONDecodeError:
        return
    if isinstance(found, dict):
        header.update(found)


def _event(raw: dict[str, Any]) -> Event | None:
    where = _WHERE.get(str(raw.get("cat", "")).lower())
    if raw.get("ph") != "X" or where is None or "dur" not in raw:
        return None
    try:
        args = raw.get("args") or {}
        start = round(float(raw["ts"]) * 1e3)
        lane = args.get("stream", raw.get("tid", 0)) if where == DEVICE else raw.get("tid", 0)
        hash(lane)
        return Event(
            str(raw.get("name", "")), start, start + round(float(raw["dur"]) * 1e3), where, lane,
            int(args.get("Sequence number", -1)), int(args.get("External id", args.get("correlation", 0)) or 0),
            {name: args[name] for name in _KEPT if name in args},
        )  # fmt: skip
    except (TypeError, ValueError, OverflowError, AttributeError, KeyError):  # no number where one belongs
        return None
