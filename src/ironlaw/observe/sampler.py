"""What the main thread does while it waits for data or does something of its own: looked at a thousand times a second,
in recorded steps only."""

from __future__ import annotations

import bisect
import queue
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import torch

from ironlaw.ledger import Kind, Phase
from ironlaw.observe.partition import Interval, Partition
from ironlaw.observe.user_code import is_users, stacks, user_line

EVERY_SECONDS, SWITCH_SECONDS = 1e-3, 1e-4
BUSY = 0.1  # of a core: a thread that computes less holds nothing up
_MODULES = str(Path(torch.__file__).parent / "nn" / "modules")
_TOKENISE = ("token", "encode", "bpe")
_LOGGERS = ("logging", "wandb", "mlflow", "tensorboard", "tensorboardX", "comet_ml", "neptune", "rich", "tqdm",
            "matplotlib", "seaborn", "plotly", "PIL")  # fmt: skip


class StackSampler:
    """`stage()`: "workers" (waiting for a loader's processes), "lock" (for a thread of this process that is at work),
    "tokenise", or "read"; `place()`: the user's line; `logging_fraction()`: of the time in no phase, what logging took.
    """

    def __init__(self, partition: Partition, loop: CodeType | None = None, calls: Collection[str] = ()) -> None:
        """`loop`: the function whose lines stand for what they call, where that is the loop's own time. `calls`: lines
        that call the model, in which a model of library modules spends all its time."""
        self._partition, self._thread_id, self._loop = partition, threading.get_ident(), loop
        self._calls = calls
        self._stages: Counter[str] = Counter()
        self._places: Counter[str] = Counter()
        # Interval (whose phase the next one tells, where it is a gap), line, line of the loop, moment, and whether a
        # module of a library was at work there.
        self._lines: list[tuple[Interval, str, str, float, bool]] = []
        self._gaps: Counter[bool] = Counter()  # logging, or something else
        self._beside: dict[int, Counter[str]] = defaultdict(Counter)  # other thread -> its lines
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)  # or it looks only where something lets go of the interpreter's lock
        self._thread = threading.Thread(target=self._run, name="ironlaw-sampler", daemon=True)
        self._began = time.perf_counter(), _computed_seconds()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        ran, before = time.perf_counter() - self._began[0], self._began[1]
        parts = [((now - before.get(thread, 0.0)) / ran, thread) for thread, now in _computed_seconds().items()]
        self._busiest = max(((part, thread) for part, thread in parts if thread in self._beside), default=(0.0, 0))
        sys.setswitchinterval(self._interval)

    def _run(self) -> None:
        while not self._ended.is_set():
            with stacks() as frames:
                self._look(frames)
            del frames  # or tensors of a function that returns now are freed late, and by this thread
            time.sleep(EVERY_SECONDS)

    def _look(self, frames: dict[int, FrameType]) -> None:
        running = self._partition.running
        frame = frames.pop(self._thread_id, None)
        frames.pop(threading.get_ident(), None)
        if frame is None or not self._partition.intervals:
            return
        for other, its in frames.items():
            self._beside[other][user_line(its)] += 1
        inner, outer = user_line(frame), user_line(frame, self._loop)
        self._lines.append((self._partition.intervals[-1], inner, outer, time.perf_counter(), _in_library(frame)))
        if running in (None, Phase.HOST):
            self._gaps[logs(frame)] += 1
        elif running is Phase.DATA:
            stage, place = classify(frame, list(frames.values()))
            self._stages[stage] += 1
            self._places[place] += 1

    def lines(self) -> dict[str, list[tuple[str, float]]]:
        """Phase to the user's lines it spent most time in, each with its share of the phase; of the loop's own time the
        lines of the loop, with what was found most within them."""
        counts: dict[Phase, Counter[str]] = defaultdict(Counter)
        within: dict[str, Counter[str]] = defaultdict(Counter)
        for interval, inner, outer, *_ in self._lines:
            phase = interval.phase or Phase.HOST
            counts[phase][outer if phase is Phase.HOST else inner] += 1
            within[outer][inner] += phase is Phase.HOST

        def named(phase: Phase, place: str) -> str:
            most = within[place].most_common(1)[0][0] if phase is Phase.HOST else place
            return place if most == place else f"{place} (in {most})"

        return {
            str(phase): [(named(phase, place), count / here.total()) for place, count in here.most_common(3)]
            for phase, here in counts.items()
        }

    def busy_lines(
        self, kinds: Collection[Kind], origin: Callable[[float], tuple[Kind, float | None]]
    ) -> list[tuple[str, float]]:
        """The user's lines of the forward pass and the loss that spent most time in these kinds of work, their part of
        the backward pass included, each with its share of all recorded time. `origin`: of `module_profile.origins`.
        What a library's module computes is that module's doing, but for the Python around it."""
        moments = [seconds for *_, seconds, _ in self._lines]
        here: Counter[str] = Counter()
        for interval, place, _, seconds, library in self._lines:
            kind, begun = origin(seconds) if interval.phase in (Phase.FORWARD, Phase.BACKWARD) else (None, None)
            if kind not in kinds or (interval.phase is Phase.BACKWARD and begun is None):
                continue
            if begun is not None:  # the line that was seen last when the forward operation began
                _, place, _, _, library = self._lines[max(0, bisect.bisect_right(moments, begun) - 1)]
            here[place] += place not in self._calls and not (library and kind is Kind.ELEMENTWISE)
        return [(place, count / len(self._lines)) for place, count in here.most_common(3) if count]

    def busy_thread(self) -> dict[str, Any] | None:
        """The line of the thread beside the loop's that computed most, and the part of a core that it had."""
        part, thread = self._busiest
        places = [place for place, _ in self._beside[thread].most_common() if place != "?"]
        return {"place": places[0] if places else None, "part": part} if part >= BUSY else None

    def stage(self) -> str | None:
        return self._stages.most_common(1)[0][0] if self._stages else None

    def logging_fraction(self) -> float | None:
        seen = sum(self._gaps.values())
        return self._gaps[True] / seen if seen else None

    def place(self) -> str | None:
        return self._places.most_common(1)[0][0] if self._places else None


def _computed_seconds() -> dict[int, float]:
    """Processor time of every thread of Python's, where the system tells (Linux)."""
    found = {}
    for thread in threading.enumerate():
        with suppress(OSError, ValueError):  # one that has ended since
            text = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text(encoding="ascii")
            found[thread.ident or 0] = int(text.split()[0]) / 1e9
    return found


def classify(frame: FrameType | None, others: Sequence[FrameType] = ()) -> tuple[str, str]:
    """By the names on the stack; the place is the user's line.

    `others`: the stacks of the other threads. Where the loop waits for one that is at work in Python, the two take
    turns under the interpreter's lock, and that thread's line is the place.
    """
    stage, place = "read", user_line(frame)
    if frame is not None and _waits(frame):
        busy = [other for other in others if not _waits(other)]
        if busy:
            return "lock", user_line(busy[0])
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name.lower()
        if "multiprocessing" in file or "_try_get_data" in name:
            return "workers", place
        if any(word in name or word in Path(file).stem.lower() for word in _TOKENISE):
            stage = "tokenise"
        if "_BaseDataLoaderIter" in str(frame.f_locals.get("self").__class__) or name == "__next__":
            break
        frame = frame.f_back
    return stage, place


def logs(frame: FrameType | None) -> bool:
    """Whether a logger is anywhere on the stack."""
    while frame is not None:
        if _is_loggers(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


@cache  # a look must end before it has to let go of the interpreter's lock: see `_run`
def _is_loggers(file: str) -> bool:
    return any(name in Path(file).parts for name in _LOGGERS)


def _in_library(frame: FrameType | None) -> bool:
    """Whether the innermost line of the user's calls a module of PyTorch's own."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        file = frame.f_code.co_filename
        if file.startswith(_MODULES) and not file.endswith("module.py"):  # which calls everybody's
            return True
        frame = frame.f_back
    return False


def _waits(frame: FrameType) -> bool:
    """For another thread, at a lock, a queue or an event; the wait for a worker process looks through a pipe."""
    return frame.f_code.co_filename in (threading.__file__, queue.__file__)
