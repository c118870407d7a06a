"""Samples the stack of the main thread: in recorded steps what it waits for or does, and in single steps now and then
what makes them longer and longer, as a metric does that is computed over all batches so far."""

from __future__ import annotations

import itertools
import queue
import statistics
import sys
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn

from ironlaw.ledger import Phase
from ironlaw.observe.partition import Interval, Partition
from ironlaw.observe.user_code import LoopLines, line_of, stacks, user_frames, user_line
from ironlaw.workload.trace_kernels import tensors

SAMPLE_SECONDS, GROWTH_SAMPLE_SECONDS, SWITCH_SECONDS = 1e-3, 2e-3, 1e-4
MAX_LINES = 12  # of a phase: more are not kept
MIN_BUSY = 0.1  # of a core: a thread that computes less holds nothing up
FIRST_LOOK, NEXT_LOOK = 4, 1.5  # steps done before it; each later one is after so many times as many
MIN_TIMES_LONGER, MIN_RISE = 1.2, 0.1  # of a step between two looks, and of a line's share of it
MIN_SAMPLES, WANTED_SAMPLES = 8, 20  # of a look, which lasts for as many steps as that takes
NOISE = 0.95  # of the quarter before
_WAITS = ("wait", "wait_for", "acquire", "__enter__", "get", "put", "join", "_wait_for_tstate_lock")
_TOKENISE = ("token", "encode", "bpe")
_LOGGERS = ("logging", "wandb", "mlflow", "tensorboard", "tensorboardX", "comet_ml", "neptune", "rich", "tqdm",
            "matplotlib", "seaborn", "plotly", "PIL")  # fmt: skip


class _Thread:
    """Gives the stacks of all threads to `look` every so many seconds, until it is ended."""

    def __init__(self, look: Callable[[dict[int, FrameType]], None], every_seconds: float) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(look, every_seconds), daemon=True)
        with suppress(RuntimeError):  # the system has no more threads: nothing is sampled, and the loop goes on
            self._thread.start()

    def _run(self, look: Callable[[dict[int, FrameType]], None], every_seconds: float) -> None:
        while not self._ended.wait(every_seconds):
            with stacks() as frames:
                look(frames)

    def end(self) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()


class StackSampler:
    """Samples stacks while active.

    The wait for data has a stage: "workers" (a loader's processes), "lock" (for a thread of this process that is at
    work), "tokenise", or "read". Fractions are of the time in no phase.
    """

    def __init__(self, partition: Partition) -> None:
        self._partition, self._thread_id, self._loop = partition, threading.get_ident(), LoopLines()
        self._stages: Counter[str] = Counter()
        self._places: Counter[str] = Counter()
        # Interval (whose phase the next one tells, where it is a gap), the user's lines, the loop's, and `activity_of`.
        self._samples: list[tuple[Interval, list[str], str, str]] = []
        self._other_threads: dict[int, Counter[str]] = defaultdict(Counter)  # other thread -> its lines
        # Module -> tensors and weights of its last call, with their versions.
        self._last_inputs: dict[int, list[tuple[weakref.ref[Tensor], int]]] = {}
        self._again: dict[str, list[bool]] = defaultdict(list)  # line -> whether its modules were given the same again
        self._depth = 0  # of calls of modules within each other

    def __enter__(self) -> Self:
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)  # or it looks only where something lets go of the interpreter's lock
        self._began = time.perf_counter(), _computed_seconds()
        hooks = nn.modules.module
        self._handles = [
            hooks.register_module_forward_pre_hook(self._module_called),
            hooks.register_module_forward_hook(self._module_left, always_call=True),
        ]
        self._loop.begin()
        self._thread = _Thread(self._sample, SAMPLE_SECONDS)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.end()
        for handle in self._handles:
            handle.remove()
        self._thread.end()
        ran, before = time.perf_counter() - self._began[0], self._began[1]
        parts = [((now - before.get(thread, 0.0)) / ran, thread) for thread, now in _computed_seconds().items()]
        self._busiest = max((one for one in parts if one[1] in self._other_threads), default=(0.0, 0))
        sys.setswitchinterval(self._interval)

    def _sample(self, frames: dict[int, FrameType]) -> None:
        running = self._partition.running
        frame = frames.pop(self._thread_id, None)
        frames.pop(threading.get_ident(), None)
        if frame is None or not self._partition.intervals:
            return
        for other, its in frames.items():
            self._other_threads[other]["?" if _is_waiting(its) else user_line(its)] += 1
        lines = [line_of(its) for its in user_frames(frame)] or ["?"]
        outer = user_line(frame, self._loop.functions)
        self._samples.append((self._partition.intervals[-1], lines, outer, activity_of(frame)))
        if running is Phase.DATA:
            stage, place = data_stage_of(frame, list(frames.values()))
            self._stages[stage] += 1
            self._places[place] += 1

    def _module_called(self, module: nn.Module, args: Any) -> None:
        """Look whether a module beside the observed model is called with the same tensors and weights as the last time:
        the result is the same, so that one call would do."""
        self._depth += 1
        if self._depth > 1 or torch.is_grad_enabled() or self._partition.running is not None:
            return
        given, before = [*tensors(args), *module.parameters()], self._last_inputs.get(id(module))
        if before is not None:
            alike = [ref() is t and version == t._version for t, (ref, version) in zip(given, before, strict=False)]
            self._again[user_line(None, self._loop.functions)].append(len(given) == len(before) and all(alike))
        self._last_inputs[id(module)] = [(weakref.ref(t), t._version) for t in given]

    def _module_left(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth = max(0, self._depth - 1)  # one may have begun before the recording

    def lines(self, steps: Sequence[Sequence[Interval]] = ()) -> dict[str, list[tuple[str, float]]]:
        """Returns the user's lines in which each phase spends most time, with their shares of it. For the loop's own
        time in these steps they are lines of the loop, with the line that was found most within each."""
        counts: dict[Phase, Counter[str]] = defaultdict(Counter)
        within: dict[str, Counter[str]] = defaultdict(Counter)
        for interval, (inner, *_), outer, _ in self._samples:
            phase = interval.phase or Phase.HOST
            counts[phase][outer if phase is Phase.HOST else inner] += 1
            within[outer][inner] += phase is Phase.HOST
        gaps = (interval for step in steps for interval in step if interval.phase is None)
        counts[Phase.HOST] = self._loop.within(gaps) or counts[Phase.HOST]

        def named(phase: Phase, place: str) -> str:
            most = within[place].most_common(1)[0][0] if phase is Phase.HOST and within[place] else place
            return place if most == place else f"{place} (in {most})"

        return {
            str(phase): [(named(phase, place), count / here.total()) for place, count in here.most_common(MAX_LINES)]
            for phase, here in counts.items()
            if here
        }

    def busy_thread(self) -> dict[str, Any] | None:
        """Returns the line of the busiest thread beside the loop's, and the part of a core that it used."""
        part, thread = self._busiest
        places = [place for place, _ in self._other_threads[thread].most_common() if place != "?"]
        return {"place": places[0] if places else None, "part": part} if part >= MIN_BUSY else None

    def fraction(self, wanted: str) -> float | None:
        gaps = [what for interval, _, _, what in self._samples if interval.phase in (None, Phase.HOST)]
        return gaps.count(wanted) / len(gaps) if gaps else None

    def module_again(self) -> dict[str, Any] | None:
        """Returns the line with most calls of modules that were given the same again, and the fraction that all of them
        take: of the calls of a line with their inputs before, as many as repeat them."""
        repeated = {line: sum(alike) / len(alike) for line, alike in self._again.items()}
        gaps = [(outer, what) for interval, _, outer, what in self._samples if interval.phase in (None, Phase.HOST)]
        part = sum(repeated.get(outer, 0.0) for outer, what in gaps if what == "module") / max(1, len(gaps))
        place = max(self._again, key=lambda line: sum(self._again[line]), default=None)
        return {"place": place, "part": part} if any(repeated.values()) else None

    def facts(self, steps: Sequence[Sequence[Interval]]) -> dict[str, Any]:
        return {
            "data_stage": _most(self._stages), "data_place": _most(self._places),
            "logging_fraction": self.fraction("logs"), "module_fraction": self.fraction("module"),
            "module_again": self.module_again(),
            "busy_thread": self.busy_thread(), "lines": self.lines(steps),
        }  # fmt: skip


def _most(counts: Counter[str]) -> str | None:
    return counts.most_common(1)[0][0] if counts else None


def _computed_seconds() -> dict[int, float]:
    """Returns processor time of every Python thread, if the system reports it (Linux)."""
    found = {}
    for thread in threading.enumerate():
        with suppress(OSError, ValueError):  # one that has ended since
            text = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text(encoding="ascii")
            found[thread.ident or 0] = int(text.split()[0]) / 1e9
    return found


def data_stage_of(frame: FrameType | None, others: Sequence[FrameType] = ()) -> tuple[str, str]:
    """Returns the stage of a wait for data, by the names on the stack, and the user's line.

    `others`: the stacks of the other threads. Where the loop waits for one that is at work in Python, the two take
    turns under the interpreter's lock, and that thread's line is the place.
    """
    stage, place = "read", user_line(frame)
    if frame is not None and _is_waiting(frame):
        busy = [other for other in others if not _is_waiting(other)]
        if busy:
            return "lock", user_line(busy[0])
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name.lower()
        if "multiprocessing" in file or "_try_get_data" in name:
            return "workers", place
        if any(word in name or word in Path(file).stem.lower() for word in _TOKENISE):
            stage = "tokenise"
        if "_BaseDataLoaderIter" in frame.f_code.co_qualname or name == "__next__":
            break
        frame = frame.f_back
    return stage, place


def activity_of(frame: FrameType | None) -> str:
    """Returns "logs" or "module" (it computes) if either is anywhere on the stack, else nothing."""
    while frame is not None:
        if _is_of_logger(frame.f_code.co_filename):
            return "logs"
        if frame.f_code is nn.Module._call_impl.__code__:
            return "module"
        frame = frame.f_back
    return ""


@cache  # a look must end before it has to let go of the interpreter's lock: see `_Thread`
def _is_of_logger(file: str) -> bool:
    return any(name in Path(file).parts for name in _LOGGERS)


def _is_waiting(frame: FrameType) -> bool:
    """Whether it waits for another thread, at a lock, a queue or an event; a wait for worker processes is at a pipe."""
    return frame.f_code.co_filename in (threading.__file__, queue.__file__) and frame.f_code.co_name in _WAITS


class StepGrowth:
    """Samples the user's line that runs, in one step and more (a look) after 4, 6, 9, 13, ... steps.

    A machine that becomes slower makes all lines slower, and leaves their shares.
    """

    def __init__(self) -> None:
        self._thread_id, self._lines = threading.get_ident(), Counter[str]()
        self._thread: _Thread | None = None
        self._looks: list[tuple[int, Counter[str]]] = []

    def step_ended(self, number: int, may_look: bool) -> None:
        """`number`: of steps done."""
        if self._lines.total() < WANTED_SAMPLES and self._thread is not None and may_look:
            return
        self.end()
        if number >= FIRST_LOOK * NEXT_LOOK ** len(self._looks) and may_look:
            self._lines = Counter()
            self._looks.append((number, self._lines))
            self._thread = _Thread(self._sample, GROWTH_SAMPLE_SECONDS)

    def end(self) -> None:
        if self._thread is not None:
            self._thread.end()
            self._thread = None

    def _sample(self, frames: dict[int, FrameType]) -> None:
        self._lines[user_line(frames.get(self._thread_id))] += 1

    def facts(self, seconds: Sequence[float]) -> dict[str, Any] | None:
        """Returns the line that has grown most and its part of the steps, whose `seconds` these are; None if steps do
        not become longer from quarter to quarter, or no line explains half of that."""
        size, looks = len(seconds) // 4, [look for look in self._looks if look[1].total() >= MIN_SAMPLES]
        quarters = [statistics.median(seconds[part * size : (part + 1) * size]) for part in range(4)] if size else []
        rises = all(after >= NOISE * before for before, after in itertools.pairwise(quarters))
        if len(looks) < 2 or not rises or quarters[-1] < MIN_TIMES_LONGER * quarters[0]:
            return None
        (early, before), (late, after) = looks[0], looks[-1]
        first, last = (statistics.median(seconds[max(0, at - 1) : at + 2]) for at in (early, late))
        shares = {line: (before[line] / before.total(), count / after.total()) for line, count in after.items()}
        place = max(shares, key=lambda line: shares[line][1] * last - shares[line][0] * first)
        was, now = shares[place]
        if now - was < MIN_RISE or now * last - was * first < 0.5 * (last - first):
            return None
        text = f"{was:.0%} of step {early + 1}, {now:.0%} of step {late + 1}"
        return {"part": (was * first + now * last) / (first + last), "place": place, "lines": [text]}
