"""Cuts a step into phases. At every moment exactly one phase runs, so that no second counts twice and none is lost.

Phases begin and end where something of PyTorch is called. What lies between two phases is named by its neighbours
(from the end of the forward pass to the beginning of the backward pass runs the loss), else by what the thread did:
it computed (host) or it waited (idle).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ironlaw.ledger import STEP_PHASES, Phase
from ironlaw.machine.host import ThreadClock
from ironlaw.observe.clock import StepTimes

# Between the phase that ended and the phase that begins: the loss, clipping, clearing gradients, the next batch of an
# evaluation.
BRIDGES: dict[tuple[Phase, Phase], Phase] = {
    (Phase.FORWARD, Phase.BACKWARD): Phase.FORWARD,
    (Phase.FORWARD, Phase.OPTIMIZER): Phase.FORWARD,  # where gradients are cleared right before the backward pass
    (Phase.BACKWARD, Phase.OPTIMIZER): Phase.OPTIMIZER,
    (Phase.OPTIMIZER, Phase.OPTIMIZER): Phase.OPTIMIZER,
    (Phase.EVALUATION, Phase.EVALUATION): Phase.EVALUATION,
    (Phase.CHECKPOINT, Phase.CHECKPOINT): Phase.CHECKPOINT,
}


@dataclass
class ClockReading:
    seconds: float
    cpu_seconds: float  # processor time of this thread
    delay_seconds: float  # that it has waited for a core
    event: Any = None  # on the device's own timeline

    def until(self, end: ClockReading) -> float:
        """Seconds, of the device where it has a timeline."""
        return end.seconds - self.seconds if self.event is None else float(self.event.elapsed_time(end.event)) / 1e3


@dataclass
class Interval:
    """From one mark to the next. `phase` is None until the next phase begins and names it; `end` is the beginning until
    it ends."""

    begin: ClockReading
    end: ClockReading
    phase: Phase | None = None
    after: Phase | None = None  # the phase that ended where a gap begins


@dataclass
class Partition:
    """`begin(phase)`, `end()` around calls; `cut()` at the end of a step. `done` has the steps that are complete.

    With `cuda`, moments are events on the current stream: a phase is as long as the device took to get from its
    begin to its end, whatever the host did meanwhile, and nothing waits for the device.
    """

    cuda: bool = False
    on_mark: Callable[[], None] | None = None  # called at every mark, for a trace to align with
    done: list[StepTimes] = field(default_factory=list)
    intervals: list[Interval] = field(default_factory=list)  # of the running step
    _clock: ThreadClock = field(default_factory=ThreadClock)
    _stack: list[Phase | None] = field(default_factory=list)
    _waiting: list[list[Interval]] = field(default_factory=list)  # steps whose events the device has not reached

    def start(self) -> None:
        self._stack.clear()
        now = self._now()
        self.intervals = [Interval(now, now)]

    def begin(self, phase: Phase | None, like: Phase | None = None) -> None:
        """`like`: the gap before it is named as one before this phase. Within a phase None is the loop's own again."""
        if not self.intervals:
            return
        self._close(like or phase)
        self._stack.append(phase)
        self.intervals[-1].phase = phase

    def end(self, bridged: bool = True) -> None:
        """End the running phase. If `bridged`, the next phase may name the gap between the two."""
        if not self.intervals or not self._stack:
            return
        ended = self._stack.pop() if bridged else self._stack.pop() and None
        self._close(None)
        self.intervals[-1].phase = self.running
        if self.running is None:
            self.intervals[-1].after = ended

    @contextmanager
    def within(self, phase: Phase | None, like: Phase | None = None) -> Iterator[None]:
        """The phase lasts as long as the block."""
        self.begin(phase, like)
        try:
            yield
        finally:
            self.end()

    def cut(self) -> None:
        """The step ends here. It is `done` once its times are known: at once, or on CUDA some steps later."""
        if not self.intervals:
            return
        self._close(None)
        last = self.intervals.pop()
        self._waiting.append(self.intervals)
        self.resolve(wait=False)
        self.intervals = [Interval(last.begin, last.begin, self.running)]

    @property
    def running(self) -> Phase | None:
        return self._stack[-1] if self._stack else None

    def resolve(self, wait: bool) -> None:
        """Time the steps that the device has finished; with `wait`, wait for all of them."""
        while self._waiting:
            reached = self._waiting[0][-1].end.event
            if reached is not None and wait:
                reached.synchronize()
            elif reached is not None and not reached.query():
                break
            self.done.append(_times(self._waiting.pop(0)))

    def _close(self, before: Phase | None) -> None:
        """End the running interval now, and begin the next. `before`: the phase that begins."""
        now = self._now()
        running = self.intervals[-1]
        running.end = now
        if running.phase is None and before is not None and running.after is not None:
            running.phase = BRIDGES.get((running.after, before))
        self.intervals.append(Interval(now, now, after=running.after))
        if self.on_mark is not None:
            self.on_mark()

    def _now(self) -> ClockReading:
        event = None
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return ClockReading(*self._clock.read(), event)


def _times(intervals: list[Interval]) -> StepTimes:
    """Evaluation and checkpoints lie between steps: they are kept, and not part of the step's wall time."""
    phases: dict[Phase, float] = {}
    data_cpu = delayed = delayed_gaps = paused = 0.0
    for interval in intervals:
        seconds = interval.begin.until(interval.end)
        computed = interval.end.cpu_seconds - interval.begin.cpu_seconds
        delay = min(seconds, interval.end.delay_seconds - interval.begin.delay_seconds)
        delayed += delay if interval.phase in (None, *STEP_PHASES) else 0.0
        if interval.phase is Phase.DATA:
            data_cpu += computed
        elif interval.phase in (None, *STEP_PHASES):
            paused += max(0.0, seconds - computed - delay)
        if interval.phase is not None:
            phases[interval.phase] = phases.get(interval.phase, 0.0) + seconds
            continue
        delayed_gaps += delay
        busy = seconds if interval.begin.event else min(seconds, computed)
        phases[Phase.HOST] = phases.get(Phase.HOST, 0.0) + busy
        phases[Phase.IDLE] = phases.get(Phase.IDLE, 0.0) + seconds - busy
    between = sum(seconds for phase, seconds in phases.items() if phase not in STEP_PHASES)
    wall = intervals[0].begin.until(intervals[-1].end) - between
    return StepTimes(wall, phases, data_cpu, delayed, delayed_gaps, paused)
