"""A thread on every rank that watches the training thread: what it waits for, and since when.

    with Watcher(ranks, store, timeout_seconds, ...) as watcher:
        watcher.step = 17

Every few seconds it writes a `Note` on the rank's activity to the job's store. The first rank whose collective has
waited for `timeout_seconds` reads all notes and reports in one line which ranks are missing, where they are, and which
ranks wait for them; the report is a function of the notes. Then all ranks exit, and torchrun restarts the job if it
may. Measured on a CPU: 3 ms per note, 0.1% of a core with the default timeout.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch._C import _distributed_c10d as c10d

from ironlaw.observe.user_code import stacks
from ironlaw.train.parallel import communication
from ironlaw.train.parallel.ranks import Ranks


@dataclass(frozen=True)
class RecordedCollective:
    """A collective as called by one rank: number `number` of the group of `members`, along a mesh dimension."""

    kind: str
    number: int
    dimension: str
    members: tuple[int, ...]
    started_seconds: float  # time.time()
    done: bool

    def __str__(self) -> str:
        return f"{self.kind} #{self.number} over {self.dimension}"


def groups_of(used: dict[str, dist.ProcessGroup]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dimension and ranks of the groups that a step uses (`Ranks.process_groups`), by PyTorch's name.

    Other groups may wait for any time: for the preparation of data, or for a checkpoint.
    """
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, group in used.items():
        if group.size() > 1:
            found.setdefault(group.group_name, (name, tuple(dist.get_process_group_ranks(group))))
    return found


def recorded_collectives(groups: dict[str, tuple[str, tuple[int, ...]]]) -> list[RecordedCollective]:
    """Return the latest collectives of this rank, oldest first."""
    found = []
    for entry in _entries():
        dimension, members = groups.get(entry["process_group"][0], ("", ()))
        if not members:
            continue
        kind = entry["profiling_name"].partition(":")[2]
        number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
        done = entry["retired"] or entry["state"] == "completed"
        found.append(RecordedCollective(kind, number, dimension, members, entry["time_created_ns"] / 1e9, done))
    return found


_counted = -1


def kernel_seconds() -> float:
    """Return the seconds of NCCL's collectives since the last call, if the buffer still holds them all."""
    global _counted
    entries = [entry for entry in _entries() if entry["record_id"] > _counted and "duration_ms" in entry]
    _counted = max((entry["record_id"] for entry in entries), default=_counted)
    return sum(float(entry["duration_ms"]) for entry in entries) / 1e3


def _entries() -> list[dict[str, Any]]:
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(c10d, name, None)
        entries = json.loads(dump(True, False)).get("entries", []) if dump is not None else []
        if entries:
            return list(entries)
    return []


STALE_SECONDS = 5.0
"""A process is stopped or gone if its note is older than the newest by this, and by 3 times the usual difference."""


@dataclass(frozen=True)
class Note:
    """The activity of one rank. `last`: its latest operation in each group; `waits`: the one it is in, if any."""

    rank: int
    host: str
    step: int  # in progress, from 1
    where: str  # innermost line of the training thread outside PyTorch
    written_seconds: float  # time.time()
    last: tuple[RecordedCollective, ...] = ()
    waits: RecordedCollective | None = None
    message: bool = False  # waits for a message of another pipeline stage, which the recorder does not list
    waited_seconds: float = 0.0

    @property
    def blocked(self) -> bool:
        return self.waits is not None or self.message

    def reached(self, operation: RecordedCollective) -> bool:
        """Whether this rank has called the same operation of the same group, or a later one."""
        there = [o.number for o in self.last if o.members == operation.members]
        return bool(there) and max(there) >= operation.number


NOTE_JSON = TypeAdapter(Note)


def find_stopped(notes: Sequence[Note]) -> list[Note]:
    """Return the ranks whose notes have stopped, whatever the last one contains."""
    newest = max((note.written_seconds for note in notes), default=0.0)
    ages = [newest - note.written_seconds for note in notes]
    limit = max(STALE_SECONDS, 3 * median_low(ages)) if ages else 0.0
    return [note for note, age in zip(notes, ages, strict=True) if age > limit]


def find_culprits(notes: Sequence[Note]) -> list[Note]:
    """Return the ranks that cause a hang: those whose notes have stopped; if none, those that others wait for and that
    do not wait; if none, those that others wait for while they wait in another collective; if all do, none."""
    stopped = find_stopped(notes)
    if stopped:
        return stopped
    by_rank = {note.rank: note for note in notes}
    missing = {
        member
        for note in notes if note.waits is not None
        for member in note.waits.members if member in by_rank and not by_rank[member].reached(note.waits)
    }  # fmt: skip
    silent = [note for note in notes if note.rank in missing and not note.blocked]
    if not silent and any(note.message for note in notes):  # messages between stages, whose senders are not recorded
        silent = [note for note in notes if not note.blocked]
    if silent:
        return silent
    behind = [by_rank[rank] for rank in sorted(missing)]
    return behind if len(behind) < len(notes) else []


def format_report(notes: Sequence[Note], now_seconds: float) -> str:
    """Return one line: "rank 3 on node7 is at step 17 in data/loader.py:88, its last operation ... #212 over ..." """
    waited = max((note.waited_seconds for note in notes), default=0.0)
    culprits, stopped = find_culprits(notes), find_stopped(notes)
    parts = [_describe(note, now_seconds - note.written_seconds if note in stopped else 0) for note in culprits[:4]]
    if len(culprits) > 4:
        parts.append(f"{len(culprits) - 4} more ranks are missing")
    places: dict[str, list[int]] = {}
    for note in notes:
        if note.blocked and note not in culprits:
            places.setdefault(f"{_format_operation(note)}, step {note.step}", []).append(note.rank)
    others = [f"{_format_ranks(r)} wait{'' if len(r) > 1 else 's'} in {place}" for place, r in places.items()]
    if not culprits:
        others.append("all have called it: look at the network between them")
    return f"nothing has moved for {waited:.0f} s: {'; '.join(parts + others)}"


def _describe(note: Note, silence_seconds: float) -> str:
    line = f"rank {note.rank} on {note.host} is at step {note.step}"
    if note.blocked:
        line += f", waiting in {_format_operation(note)}"
    else:
        line += f" in {note.where}"
        latest = max(note.last, key=lambda o: o.started_seconds, default=None)
        line += f", its last operation {latest}" if latest is not None else ", before its first operation"
    return line + (f", not heard of for {silence_seconds:.0f} s" if silence_seconds else "")


def _format_operation(note: Note) -> str:
    return str(note.waits) if note.waits is not None else f"a message between stages ({note.where})"


def _format_ranks(ranks: Sequence[int]) -> str:
    """Format [0, 1, 2, 5] as "ranks 0-2, 5"."""
    # Within a run, a rank's distance from its place in the list is the same.
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])]
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return ("rank " if len(ranks) == 1 else "ranks ") + text


NOTE_SECONDS = 1.0
NOTES_PER_SECOND = 500  # of all ranks together, which share one store
GRACE_SECONDS = 3.0  # to collect the other ranks' notes, and to write the report before they exit
# The module that times PyTorch's calls counts as a part of PyTorch.
TORCH = str(Path(torch.__file__).parent), str(Path(communication.__file__))
SOURCE = str(Path(__file__).parents[2])
HUNG = "hung"


class Watcher:
    """Watches the thread that creates it. `on_hang(report, notes)` is called on the rank that reports a hang."""

    def __init__(
        self, ranks: Ranks, store: dist.Store, timeout_seconds: float, on_hang: Callable[[str, list[Note]], None],
        end: Callable[[int], Any],
    ) -> None:  # fmt: skip
        self.ranks, self.timeout_seconds = ranks, timeout_seconds
        self.store: dist.Store = store.clone()  # type: ignore[attr-defined]
        self._on_hang, self._end = on_hang, end
        self.step = 0  # in progress, from 1
        self._main = threading.get_ident()
        # CPU time of the training thread; not on macOS
        self._cpu_clock = time.pthread_getcpuclockid(self._main) if hasattr(time, "pthread_getcpuclockid") else None
        self._groups = groups_of(ranks.process_groups())
        self._still_since = time.time()  # when the training thread was last seen computing
        self._cpu_seconds = 0.0
        self._every = max(NOTE_SECONDS, ranks.size / NOTES_PER_SECOND, timeout_seconds / 100)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(timeout=GRACE_SECONDS)

    def host(self, rank: int) -> str:
        """Return the host of another rank from its latest note."""
        key = f"note/{rank}"
        return NOTE_JSON.validate_json(self.store.get(key)).host if self.store.check([key]) else "its node"

    # -- in the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            # If rank 0, which serves the store, has ended, the next collective fails and shows it.
            with contextlib.suppress(RuntimeError):
                self._check()

    def _check(self) -> None:
        note = self.note()
        self.store.set(f"note/{self.ranks.rank}", NOTE_JSON.dump_json(note).decode())
        if self.step and note.blocked and note.waited_seconds > self.timeout_seconds:
            self._report()
        if self.store.check([HUNG]):
            self._stop.wait(GRACE_SECONDS)
            self._end(1)

    def note(self) -> Note:
        now = time.time()
        latest: dict[tuple[int, ...], RecordedCollective] = {}
        waits: RecordedCollective | None = None
        for operation in recorded_collectives(self._groups):
            latest[operation.members] = operation
            if not operation.done and waits is None:
                waits = operation
        where, message = self._innermost_line()
        known = self._cpu_clock is not None
        if self._cpu_clock is not None and (used := time.clock_gettime(self._cpu_clock)) - self._cpu_seconds > 1e-3:
            self._cpu_seconds, self._still_since = used, now
        message = message and waits is None and known
        since = waits.started_seconds if waits is not None else self._still_since
        if waits is not None and self.ranks.device.type == "cpu" and known:
            # Time that overlaps with computation is not waiting. Not on CUDA, where a host that polls looks busy.
            since = max(since, self._still_since)
        waited = now - since if waits is not None or message else 0.0
        last = tuple(latest.values())
        return Note(self.ranks.rank, socket.gethostname(), self.step, where, now, last, waits, message, waited)

    def _innermost_line(self) -> tuple[str, bool]:
        """Return the innermost line outside PyTorch, and whether it waits for a message between pipeline stages."""
        message = False
        with stacks() as frames:
            frame = frames.get(self._main)
            while frame is not None and frame.f_code.co_filename.startswith(TORCH):
                message = message or frame.f_code.co_name == "_wait_batch_p2p"
                frame = frame.f_back
            if frame is None:
                return "PyTorch", message
            name = frame.f_code.co_filename.removeprefix(SOURCE).lstrip("/")
            return f"{name}:{frame.f_lineno} ({frame.f_code.co_name})", message

    def _report(self) -> None:
        if self.store.add("reports", 1) != 1:
            return
        self._stop.wait(2 * self._every)  # until the other ranks' notes are as recent as this one's
        notes = []
        for rank in range(self.ranks.size):
            if self.store.check([f"note/{rank}"]):
                notes.append(NOTE_JSON.validate_json(self.store.get(f"note/{rank}")))
        try:
            self._on_hang(format_report(notes, time.time()), notes)
        finally:
            self.store.set(HUNG, "")
