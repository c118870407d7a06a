"""A step cut into phases: at every moment exactly one phase runs, so that no second counts twice and none is lost.

Phases begin and end where something of PyTorch is called. What lies between two phases is named by its neighbours
(from the end of the forward pass to the beginning of the backward pass runs the loss), else by what the thread did:
it computed (host) or it waited (idle).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ironlaw.ledger import STEP_PHASES, Phase
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
class Interval:
    """From one mark to the next. `phase` is None until the next phase begins and names it."""

    begin: ClockReading
    phase: Phase | None = None
    after: Phase | None = None  # the phase that ended where a gap begins
    end: ClockReading | None = None


@dataclass
class ClockReading:
    seconds: float
    cpu_seconds: float  # processor time of this thread
    event: Any = None  # on the device's own timeline


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
    _stack: list[Phase] = field(default_factory=list)
    _waiting: list[list[Interval]] = field(default_factory=list)  # steps whose events the device has not reached

    def start(self) -> None:
        self._stack.clear()
        self.intervals = [Interval(self._now())]

    def begin(self, phase: Phase) -> None:
        if not self.intervals:
            return
        self._close(phase)
        self._stack.append(phase)
        self.intervals[-1].phase = phase

    def end(self) -> None:
        if not self.intervals or not self._stack:
            return
        ended = self._stack.pop()
        self._close(None)
        if self._stack:
            self.intervals[-1].phase = self._stack[-1]
        else:
            self.intervals[-1].after = ended

    def cut(self) -> StepTimes | None:
        """The step ends here. Its times are returned once they are known: at once, or on CUDA some steps later."""
        if not self.intervals:
            return None
        self._close(None)
        last = self.intervals.pop()
        if last.begin.event is None:
            known = _times(self.intervals)
            self.done.append(known)
            times: StepTimes | None = known
        else:
            self._waiting.append(self.intervals)
            times = self._resolve(wait=False)
        self.intervals = [Interval(last.begin, phase=self._stack[-1] if self._stack else None)]
        return times

    @property
    def running(self) -> Phase | None:
        return self._stack[-1] if self._stack else None

    def finish(self) -> None:
        """Wait for what the device still owes."""
        self._resolve(wait=True)

    def _resolve(self, wait: bool) -> StepTimes | None:
        newest = None
        while self._waiting:
            last = self._waiting[0][-1].end
            assert last is not None
            if wait:
                last.event.synchronize()
            elif not last.event.query():
                break
            newest = _times(self._waiting.pop(0))
            self.done.append(newest)
        return newest

    def _close(self, before: Phase | None) -> None:
        """End the running interval now, and begin the next. `before`: the phase that begins."""
        now = self._now()
        running = self.intervals[-1]
        running.end = now
        if running.phase is None and before is not None and running.after is not None:
            running.phase = BRIDGES.get((running.after, before))
        self.intervals.append(Interval(now, after=running.after))
        if self.on_mark is not None:
            self.on_mark()

    def _now(self) -> ClockReading:
        event = None
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return ClockReading(time.perf_counter(), time.thread_time(), event)


def _seconds(interval: Interval) -> float:
    begin, end = interval.begin, interval.end
    assert end is not None
    if begin.event is not None:
        return float(begin.event.elapsed_time(end.event)) / 1e3
    return end.seconds - begin.seconds


def _times(intervals: list[Interval]) -> StepTimes:
    """Evaluation and checkpoints lie between steps: they are kept, and not part of the step's wall time."""
    phases: dict[Phase, float] = {}
    data_cpu = 0.0
    for interval in intervals:
        seconds = _seconds(interval)
        if interval.phase is Phase.DATA and interval.end is not None:
            data_cpu += interval.end.cpu_seconds - interval.begin.cpu_seconds
        if interval.phase is not None:
            phases[interval.phase] = phases.get(interval.phase, 0.0) + seconds
            continue
        assert interval.end is not None
        busy = seconds if interval.begin.event else min(seconds, interval.end.cpu_seconds - interval.begin.cpu_seconds)
        phases[Phase.HOST] = phases.get(Phase.HOST, 0.0) + busy
        phases[Phase.IDLE] = phases.get(Phase.IDLE, 0.0) + seconds - busy
    first, last = intervals[0].begin, intervals[-1].end
    assert last is not None
    whole = float(first.event.elapsed_time(last.event)) / 1e3 if first.event else last.seconds - first.seconds
    between = sum(seconds for phase, seconds in phases.items() if phase not in STEP_PHASES)
    return StepTimes(whole - between, phases, data_cpu)
