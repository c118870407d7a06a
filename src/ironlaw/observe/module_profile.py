"""Reads a few recorded steps of any module: lines with the names of a plan by tracing, the peak, and a timeline."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn
from torch.autograd.profiler import record_function

from ironlaw.ledger import Kind, Line, Phase
from ironlaw.observe.events import DEVICE, Allocation, Event
from ironlaw.observe.memory_peak import KnownStorages, MemoryPeak, find_peak
from ironlaw.observe.partition import Interval
from ironlaw.observe.spans import (
    LEAF,
    MARK,
    Span,
    StepSums,
    device_key,
    group_of,
    kind_of,
    main_lane,
    nest,
    span_key,
)
from ironlaw.observe.timeline import operation_segments, phase_segment, timeline

WORKING = (Phase.TRANSFER, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.COMMUNICATION)


@dataclass
class ModuleProfile:
    """Seconds are per step: of each line, the quickest of the recorded steps."""

    lines: list[Line] = field(default_factory=list)
    memory: MemoryPeak | None = None
    timeline: dict[str, Any] | None = None
    launches: int = 0  # calls of kernels per step
    recomputed_seconds: float | None = None  # wall time of forward passes within the backward pass, per step


def mark() -> None:
    """Leave a mark in the trace where a phase begins or ends."""
    with record_function(MARK):
        pass


def module_paths(model: nn.Module) -> dict[nn.Module, str]:
    """Returns every module's path, for `scopes_recorded`."""
    return {module: path + ("" if any(module.children()) else LEAF) for path, module in model.named_modules()}


def read_modules(
    events: Sequence[Event], allocations: Sequence[Allocation], recorded: Sequence[Sequence[Interval]],
    held: KnownStorages,
) -> ModuleProfile:  # fmt: skip
    """`recorded`: the intervals of each recorded step; each ends at a mark of the trace."""
    ends = [event.start for event in events if event.name == MARK]
    named = [(number, interval.phase) for number, step in enumerate(recorded) for interval in step]
    ends, named = ends[: len(named)], named[: len(ends)]
    if not ends:
        return ModuleProfile()

    def place(moment: int) -> tuple[int, Phase | None]:
        index = bisect.bisect_left(ends, moment)
        return named[index] if index < len(named) else (-1, None)

    spans = nest(events)
    for span in spans:
        span.step, span.phase = place(span.event.start)
    steps = len(recorded)
    sums = StepSums(steps)
    on_device = any(event.where == DEVICE for event in events)
    if on_device:
        _device_lines(events, spans, place, sums)
    else:
        _processor_lines(spans, sums)
    begins = [min(spans[0].event.start, ends[0]) if spans else ends[0], *ends]
    stretches = [Stretch(*one) for one in zip(begins, ends, *zip(*named, strict=True), strict=False)]
    _rest_is_dispatch(stretches, sums)
    return ModuleProfile(
        lines=sums.lines(),
        memory=find_peak(allocations, held, lambda moment: place(moment)[1], _groups(spans)),
        timeline=_timeline(stretches, spans, events, steps),
        launches=round(sum(sums.counts.values()) / steps),
        recomputed_seconds=None if on_device else _recomputed(spans, steps),
    )


class Stretch(NamedTuple):
    """Nanoseconds between two marks; the first begins where the trace does."""

    begin: int
    end: int
    step: int
    phase: Phase | None


def _recomputed(spans: Sequence[Span], steps: int) -> float:
    """Returns seconds of the outermost modules that run again, with the Python between calls, of the quickest step."""
    seconds = [0] * steps
    for span in spans:
        if span.step >= 0 and span.is_recomputed and not (span.parent is not None and span.parent.is_recomputed):
            seconds[span.step] += span.event.end - span.event.start
    return min(seconds) / 1e9


def _processor_lines(spans: Sequence[Span], sums: StepSums) -> None:
    for span in spans:
        behind = span.kernel is not None and kind_of(span.kernel.name) is Kind.COLLECTIVE  # by a thread of its own
        if span.phase is None or span.phase not in WORKING or span.step < 0 or behind:
            continue
        waiting = span.phase is Phase.COMMUNICATION  # whatever calls it
        key = (span.phase, Kind.COLLECTIVE, "exchange") if waiting else span_key(span, span.phase)
        sums.add(span.step, key, span.self_ns, span.kernel is span.event)


def _device_lines(
    events: Sequence[Event], spans: Sequence[Span], place: Callable[[int], tuple[int, Phase | None]], sums: StepSums
) -> None:
    """Kernels count where they were launched: by the call they are linked to."""
    launchers = {span.event.link: span for span in spans if span.event.link}
    for event in events:
        if event.where != DEVICE:
            continue
        span = launchers.get(event.link)
        step, phase = (span.step, span.phase) if span is not None else place(event.start)
        if phase is not None and step >= 0:
            sums.add(step, device_key(event, span, phase), event.end - event.start, 1)


def _rest_is_dispatch(stretches: Sequence[Stretch], sums: StepSums) -> None:
    """Count what no call covers within a working phase as dispatch: Python between calls."""
    by_phase: dict[tuple[int, Phase], int] = defaultdict(int)
    for begin, end, step, phase in stretches[1:]:
        if phase in WORKING and phase is not Phase.OPTIMIZER:
            by_phase[step, phase] += end - begin
    for (step, phase), whole in by_phase.items():
        covered = sum(times[step] for key, times in sums.nanoseconds.items() if key[0] is phase)
        rest = (Kind.COLLECTIVE, "exchange") if phase is Phase.COMMUNICATION else (Kind.HOST, "dispatch")
        sums.add(step, (phase, *rest), max(0, whole - covered))


def _groups(spans: Sequence[Span]) -> Callable[[int], str]:
    """Returns a function from a moment to the part of the model that runs: first names of its path, layers together."""
    starts = [span.event.start for span in spans]
    names = [group_of(span.scope) for span in spans]

    def at(moment: int) -> str:
        index = bisect.bisect_right(starts, moment) - 1
        return names[index] if index >= 0 else "outside"

    return at


def _timeline(
    stretches: Sequence[Stretch], spans: Sequence[Span], events: Sequence[Event], steps: int
) -> dict[str, Any] | None:
    """Of the quickest recorded step."""
    whole = [sum(s.end - s.begin for s in stretches[1:] if s.step == step) for step in range(steps)]
    if not any(whole):
        return None
    quickest = min(range(steps), key=lambda step: whole[step] or float("inf"))
    own = [stretch for stretch in stretches if stretch.step == quickest]
    first, last = own[0].begin, own[-1].end
    segments = [phase_segment(s.phase or Phase.HOST, s.begin, s.end) for s in own]
    segments += operation_segments(spans, events, main_lane(spans), first, last)
    return timeline(segments, first, last)
