"""A few recorded steps of any module: lines with the names that a plan by tracing gives, the peak, and a timeline."""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.autograd.profiler import record_function

from ironlaw.ledger import Key, Kind, Line, Origin, Phase
from ironlaw.observe.events import DEVICE, Allocation, Event
from ironlaw.observe.memory_peak import KnownStorages, MemoryPeak, find_peak
from ironlaw.observe.partition import Interval
from ironlaw.observe.sampler import StackSampler
from ironlaw.observe.spans import (
    BACKWARD_NODE,
    LEAF,
    MARK,
    Span,
    device_key,
    group_of,
    innermost,
    kind_of,
    nest,
    span_key,
)
from ironlaw.observe.timeline import Segment, operation_segments, timeline

MOST_LOSSES = 16  # operations of a loss in a step, forward and backward, of a few calls
WORKING = (Phase.TRANSFER, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.COMMUNICATION)


@dataclass
class ModuleProfile:
    """Seconds are per step: of each line, the quickest of the recorded steps."""

    lines: list[Line] = field(default_factory=list)
    memory: MemoryPeak | None = None
    timeline: dict[str, Any] | None = None
    launches: int = 0  # calls of kernels per step
    line_work: dict[str, list[tuple[str, float]]] = field(default_factory=dict)  # kind -> `StackSampler.busy_lines`
    recomputed_seconds: float | None = None  # wall time of forward passes within the backward pass, per step


def mark() -> None:
    """Leave a mark in the trace where a phase begins or ends."""
    with record_function(MARK):
        pass


def module_paths(model: nn.Module) -> dict[nn.Module, str]:
    """Every module's path, for `scopes_recorded`."""
    return {module: path + ("" if any(module.children()) else LEAF) for path, module in model.named_modules()}


Steps = Sequence[
    Sequence[Interval]
]  # the partition's intervals of each recorded step; each ends at a mark of the trace


def origins(spans: Sequence[Span], ends: Sequence[int], steps: Steps) -> Callable[[float], tuple[Kind, float | None]]:
    """Of a moment of `time.perf_counter`: what the main thread worked at (Python between operations is host), and for
    the backward pass the moment of the forward operation that it belongs to."""
    moments = [interval.end.seconds * 1e9 for step in steps for interval in step]
    offset = statistics.median(end - moment for end, moment in zip(ends, moments, strict=False))
    main = main_lane(spans)
    own = [span for span in spans if span.event.lane == main]
    around = innermost(own)
    called = {s.event.sequence: s.event.start for s in own if s.event.sequence >= 0 and not s.backward}

    def at(seconds: float) -> tuple[Kind, float | None]:
        span = around(seconds * 1e9 + offset)
        kind = Kind.HOST if span is None or span.kernel is None else kind_of(span.kernel.name)
        while span is not None and not span.name.startswith(BACKWARD_NODE):
            span = span.parent
        begun = called.get(span.event.sequence) if span is not None else None
        return kind, (begun - offset) / 1e9 if begun is not None else None

    return at


def main_lane(spans: Sequence[Span]) -> int | str:
    """The thread that does most."""
    busy: dict[int | str, int] = defaultdict(int)
    for span in spans:
        busy[span.event.lane] += span.self_ns
    return max(busy, key=lambda lane: busy[lane])


def line_work(
    spans: Sequence[Span], ends: Sequence[int], steps: Steps, sampler: StackSampler
) -> dict[str, list[tuple[str, float]]]:
    """Kind of work to the user's lines that spent most time in it. A loss that is cut into many is host's work."""
    losses = sum(span.kernel is span.event and kind_of(span.name) is Kind.LOSS for span in spans)
    many = {Kind.LOSS} if losses > MOST_LOSSES * len(steps) else set()
    origin = origins(spans, ends, steps)
    wanted = {Kind.HOST: {Kind.HOST} | many, Kind.ELEMENTWISE: {Kind.ELEMENTWISE}}
    return {str(kind): sampler.busy_lines(kinds, origin) for kind, kinds in wanted.items()}


def read_modules(
    events: Sequence[Event], allocations: Sequence[Allocation], recorded: Steps, held: KnownStorages,
    sampler: StackSampler | None = None,
) -> ModuleProfile:  # fmt: skip
    ends = [event.start for event in events if event.name == MARK]
    named = [(number, interval.phase) for number, step in enumerate(recorded) for interval in step]
    ends, named = ends[: len(named)], named[: len(ends)]
    if not ends:
        return ModuleProfile()

    def place(moment: int) -> tuple[int, Phase | None]:
        index = bisect.bisect_left(ends, moment)
        return named[index] if index < len(named) else (-1, None)

    spans = nest(events)
    steps = len(recorded)
    sums = _Sums(steps)
    on_device = any(event.where == DEVICE for event in events)
    if on_device:
        _device_lines(events, spans, place, sums)
    else:
        _processor_lines(spans, place, sums)
    _rest_is_dispatch(ends, named, sums)
    begin = min(spans[0].event.start, ends[0]) if spans else ends[0]
    return ModuleProfile(
        lines=sums.lines(),
        memory=find_peak(allocations, held, lambda moment: place(moment)[1], _groups(spans)),
        timeline=_timeline(spans, events, ends, named, begin, sums),
        line_work=line_work(spans, ends, recorded, sampler) if sampler is not None and spans else {},
        launches=round(sum(sums.counts.values()) / steps),
        recomputed_seconds=None if on_device else _recomputed(spans, place, steps),
    )


def _recomputed(spans: Sequence[Span], place: Callable[[int], tuple[int, Phase | None]], steps: int) -> float:
    """Of the outermost modules that run again, with the Python between their calls; of the quickest step."""
    seconds = [0] * steps
    for span in spans:
        step, _ = place(span.event.start)
        if step >= 0 and span.again and not (span.parent is not None and span.parent.again):
            seconds[step] += span.event.end - span.event.start
    return min(seconds) / 1e9


class _Sums:
    """Nanoseconds by key and step."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.nanoseconds: dict[Key, list[int]] = defaultdict(lambda: [0] * steps)
        self.counts: dict[Key, int] = defaultdict(int)
        self.whole = [0] * steps

    def add(self, step: int, key: Key, nanoseconds: int, count: int = 0) -> None:
        self.nanoseconds[key][step] += nanoseconds
        self.counts[key] += count

    def lines(self) -> list[Line]:
        return [
            Line(*key, count=round(self.counts[key] / self.steps) or None, seconds=min(times) / 1e9,
                 origin=Origin.MEASURED)
            for key, times in sorted(self.nanoseconds.items()) if any(times)
        ]  # fmt: skip


def _processor_lines(spans: Sequence[Span], place: Callable[[int], tuple[int, Phase | None]], sums: _Sums) -> None:
    for span in spans:
        step, phase = place(span.event.start)
        behind = span.kernel is not None and kind_of(span.kernel.name) is Kind.COLLECTIVE  # by a thread of its own
        if phase not in WORKING or step < 0 or behind:
            continue
        waiting = phase is Phase.COMMUNICATION  # whatever calls it
        key = (phase, Kind.COLLECTIVE, "exchange") if waiting else span_key(span, phase)
        sums.add(step, key, span.self_ns, span.kernel is span.event)


def _device_lines(
    events: Sequence[Event], spans: Sequence[Span], place: Callable[[int], tuple[int, Phase | None]], sums: _Sums
) -> None:
    """Kernels count where they were launched: by the call they are linked to."""
    launchers = {span.event.link: span for span in spans if span.event.link}
    for event in events:
        if event.where != DEVICE:
            continue
        span = launchers.get(event.link)
        step, phase = place(span.event.start if span else event.start)
        if phase is None or step < 0:
            continue
        sums.add(step, device_key(event, span, phase), event.end - event.start, 1)


def _rest_is_dispatch(ends: Sequence[int], named: Sequence[tuple[int, Phase | None]], sums: _Sums) -> None:
    """What no call covers within a working phase is Python between calls."""
    by_phase: dict[tuple[int, Phase], int] = defaultdict(int)
    for index in range(1, len(named)):
        step, phase = named[index]
        sums.whole[step] += ends[index] - ends[index - 1]
        if phase in WORKING:
            by_phase[step, phase] += ends[index] - ends[index - 1]
    for (step, phase), whole in by_phase.items():
        covered = sum(times[step] for key, times in sums.nanoseconds.items() if key[0] is phase)
        if phase is Phase.OPTIMIZER:
            continue
        rest = (Kind.COLLECTIVE, "exchange") if phase is Phase.COMMUNICATION else (Kind.HOST, "dispatch")
        sums.add(step, (phase, *rest), max(0, whole - covered))


def _groups(spans: Sequence[Span]) -> Callable[[int], str]:
    """Which part of the model runs at a moment: the first two names of the path, layers together."""
    starts = [span.event.start for span in spans]
    names = [group_of(span.scope) for span in spans]

    def at(moment: int) -> str:
        index = bisect.bisect_right(starts, moment) - 1
        return names[index] if index >= 0 else "outside"

    return at


def _timeline(
    spans: Sequence[Span], events: Sequence[Event], ends: Sequence[int], named: Sequence[tuple[int, Phase | None]],
    begin: int, sums: _Sums,
) -> dict[str, Any] | None:  # fmt: skip
    """Of the quickest recorded step."""
    if not sums.whole or not any(sums.whole):
        return None
    quickest = min(range(sums.steps), key=lambda step: sums.whole[step] or float("inf"))
    own = [index for index, (step, _) in enumerate(named) if step == quickest]
    first, last = (ends[own[0] - 1] if own[0] else begin), ends[own[-1]]
    segments = [
        Segment("phases", str(named[i][1] or Phase.HOST), str(named[i][1] or Phase.HOST),
                ends[i - 1] if i else begin, ends[i])
        for i in own
    ]  # fmt: skip
    segments += operation_segments(spans, events, main_lane(spans), first, last)
    return timeline(segments, first, last)
