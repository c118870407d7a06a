"""Measures where each step's time goes, by two readings of the clock per phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ironlaw.ledger import STEP_PHASES, Phase


@dataclass
class StepTimes:
    """Wall seconds of one step, and seconds by phase. The rest is unattributed."""

    wall_seconds: float = 0.0
    phase_seconds: dict[Phase, float] = field(default_factory=dict)
    data_cpu_seconds: float = 0.0  # of the wait for data, how long this thread computed instead
    delayed_seconds: float = 0.0  # in which this thread waited for a core
    delayed_gap_seconds: float = 0.0  # of those, in no phase
    paused_seconds: float = 0.0  # in which it neither computed nor waited for a core, nor for data
    waited_seconds: dict[str, float] = field(default_factory=dict)  # for other ranks, by what was waited for

    @property
    def unattributed_seconds(self) -> float:
        return self.wall_seconds - sum(s for phase, s in self.phase_seconds.items() if phase in STEP_PHASES)


class StepClock:
    """`with clock.step():` around a step, `with clock.phase(Phase.FORWARD):` inside it.

    On CUDA kernels run behind the host's back: phases are timed by events on the stream and read at the end of
    the step, where the loop waits for the loss anyway.
    """

    def __init__(self, cuda: bool = False) -> None:
        self._cuda = cuda
        self._events: list[tuple[Phase, torch.cuda.Event, torch.cuda.Event]] = []
        self._inside = 0.0  # seconds that belong to phases within phases
        self.times = StepTimes()

    @contextmanager
    def step(self) -> Iterator[StepTimes]:
        self.times = StepTimes()
        self._events.clear()
        start = time.perf_counter()
        yield self.times
        if self._cuda:
            torch.cuda.synchronize()  # an update that nothing was read from may still be running
        self.times.wall_seconds = time.perf_counter() - start
        for phase, begin, end in self._events:
            self._add(phase, begin.elapsed_time(end) / 1e3)

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        if self._cuda and phase not in (Phase.DATA, Phase.HOST):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((phase, begin, end))
            return
        start, inside = time.perf_counter(), self._inside
        yield
        elapsed = time.perf_counter() - start
        self._add(phase, elapsed - (self._inside - inside))
        self._inside = inside + elapsed

    def waited(self, what: str, seconds: float) -> None:
        """Count seconds of the running phase as waiting for other ranks: exposed communication."""
        self._add(Phase.COMMUNICATION, seconds)
        self.times.waited_seconds[what] = self.times.waited_seconds.get(what, 0.0) + seconds
        self._inside += seconds

    def _add(self, phase: Phase, seconds: float) -> None:
        self.times.phase_seconds[phase] = self.times.phase_seconds.get(phase, 0.0) + seconds
