"""A thread of every rank that looks at its training thread: what it waits for, and since when.

    with Watcher(ranks, store, timeout_seconds, ...) as watcher:
        watcher.step = 17

Twenty times a second it looks whether the thread sleeps outside PyTorch (`straggler.py`), every few seconds it leaves a
note in the job's store (`hang.py`). When a collective has waited for `timeout_seconds`, one rank writes down who is
missing and all end themselves: torchrun starts the job again, if it may. Measured on a CPU: 14 us a sample and 3 ms a
note, 0.13% of a core with the default timeout.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ironlaw.observe.user_code import stacks
from ironlaw.train.parallel import communication, flight_recorder
from ironlaw.train.parallel.flight_recorder import RecordedCollective
from ironlaw.train.parallel.hang import NOTE_JSON, Note, report
from ironlaw.train.parallel.ranks import Ranks
from ironlaw.train.parallel.straggler import OwnTime

SAMPLE_SECONDS = 0.05
NOTE_SECONDS = 1.0
NOTES_PER_SECOND = 500  # of all ranks together: one store serves them
GRACE_SECONDS = 3.0  # for the notes of the others, and for the report to be written before they end
# What times PyTorch's calls belongs to them.
TORCH = str(Path(torch.__file__).parent), str(Path(communication.__file__))
SOURCE = str(Path(__file__).parents[2])
HUNG = "hung"


class Watcher:
    """Made by the thread that trains. `told(report, notes)` is called on the rank that reports a hang."""

    def __init__(
        self, ranks: Ranks, store: dist.Store, timeout_seconds: float, told: Callable[[str, list[Note]], None],
        end: Callable[[int], Any] = os._exit,
    ) -> None:  # fmt: skip
        self.ranks, self.timeout_seconds = ranks, timeout_seconds
        self.store: dist.Store = store.clone()  # type: ignore[attr-defined]
        self._told, self._end = told, end
        self.step = 0  # the one under way, from 1
        self.own = OwnTime(kernels=flight_recorder.kernel_seconds if ranks.device.type == "cuda" else None)
        self._main = threading.get_ident()
        self._state = f"/proc/self/task/{threading.get_native_id()}/stat"
        self._groups = flight_recorder.groups_of(ranks.process_groups())
        self._still_since = time.time()  # when the training thread was last seen to compute
        self._awake = 0.0
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
        """Of another rank, by its latest note."""
        key = f"note/{rank}"
        return NOTE_JSON.validate_json(self.store.get(key)).host if self.store.check([key]) else "its node"

    # -- in the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        before, noted = time.perf_counter(), 0.0
        while not self._stop.wait(SAMPLE_SECONDS):
            now = time.perf_counter()
            if self.own.inside and self._asleep() and not self._in_torch():
                self.own.outside_seconds += now - before
            if now - noted > self._every:
                noted = now
                # A store that is gone was rank 0's, and what is wrong with it shows in the next collective.
                with contextlib.suppress(RuntimeError):
                    self._look()
            before = now

    def _asleep(self) -> bool:
        try:
            with open(self._state, "rb") as file:
                return file.read().rpartition(b")")[2].split()[0] in (b"S", b"D", b"T")
        except OSError:
            return False

    def _in_torch(self) -> bool:
        with stacks() as frames:
            frame = frames.get(self._main)
            return frame is not None and frame.f_code.co_filename.startswith(TORCH)

    def _look(self) -> None:
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
        for operation in flight_recorder.operations(self._groups):
            latest[operation.members] = operation
            if not operation.done and waits is None:
                waits = operation
        where, message = self._place()
        if self.own.known:
            awake = self.own.awake_seconds()
            if awake - self._awake > 1e-3:
                self._awake, self._still_since = awake, now
        message = message and waits is None and self.own.known
        since = waits.started_seconds if waits is not None else self._still_since
        if waits is not None and self.ranks.device.type == "cpu" and self.own.known:
            # What overlaps with computing is not waited for; on CUDA the host may poll, which looks like work.
            since = max(since, self._still_since)
        waited = now - since if waits is not None or message else 0.0
        last = tuple(latest.values())
        return Note(self.ranks.rank, socket.gethostname(), self.step, where, now, last, waits, message, waited)

    def _place(self) -> tuple[str, bool]:
        """The innermost line outside PyTorch, and whether it waits for a message between pipeline stages."""
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
        self._stop.wait(2 * self._every)  # until the notes of the others are as old as this one
        notes = []
        for rank in range(self.ranks.size):
            if self.store.check([f"note/{rank}"]):
                notes.append(NOTE_JSON.validate_json(self.store.get(f"note/{rank}")))
        try:
            self._told(report(notes, time.time()), notes)
        finally:
            self.store.set(HUNG, "")
