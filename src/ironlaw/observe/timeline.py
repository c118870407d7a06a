"""Makes a readable timeline of one step: a lane of phases, and one of merged operations per thread or stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ironlaw.ledger import Phase
from ironlaw.observe.events import DEVICE, Event
from ironlaw.observe.spans import Span, device_kind, group_of, kind_of

MIN_SHARE = 0.002  # of the step: what is shorter joins its neighbour
MAX_SEGMENTS = 400


@dataclass
class Segment:
    """Nanoseconds from anywhere; `label` is what is written, `style` the phase or kind that colours it."""

    lane: str
    label: str
    style: str
    start: int
    end: int
    calls: int = 1


def phase_segment(phase: Phase, start: int, end: int) -> Segment:
    return Segment("phases", str(phase), str(phase), start, end)


def operation_segments(
    spans: Sequence[Span], events: Sequence[Event], main: int | str, begin: int, end: int
) -> list[Segment]:
    """Returns what threads and streams run within a step; `main`: the thread of the loop."""
    segments = []
    for span in spans:
        if span.kernel is span.event and begin <= span.event.start < end:
            lane = "operations" if span.event.lane == main else f"thread {span.event.lane}"
            kind = str(kind_of(span.event.name))
            label = f"{group_of(span.scope)}: {kind}" if span.scope else kind
            segments.append(Segment(lane, label, kind, span.event.start, span.event.end))
    for event in events:
        if event.where == DEVICE and begin <= event.start < end:
            kind = str(device_kind(event.name))
            segments.append(Segment(f"stream {event.lane}", kind, kind, event.start, event.end))
    return segments


def timeline(segments: Iterable[Segment], begin: int, end: int) -> dict[str, Any]:
    """Returns the document of `ledger.facts["timeline"]`, in seconds from the beginning of the step."""
    whole = end - begin
    inside = sorted((s for s in segments if s.end > begin and s.start < end), key=lambda s: (s.lane, s.start))
    shortest = MIN_SHARE * whole
    merged = _merge(inside, shortest)
    while len(merged) > MAX_SEGMENTS:
        shortest *= 2
        merged = _merge(merged, shortest)
    shown = [
        asdict(s) | {"start": (max(s.start, begin) - begin) / 1e9, "end": (min(s.end, end) - begin) / 1e9}
        for s in merged
    ]
    return {"seconds": whole / 1e9, "lanes": list(dict.fromkeys(s.lane for s in merged)), "segments": shown}


def _merge(segments: list[Segment], shortest: float) -> list[Segment]:
    """Merge neighbours of one label, and slivers with what is before them unless a gap lies between."""
    result: list[Segment] = []
    for segment in segments:
        last = result[-1] if result and result[-1].lane == segment.lane else None
        if last is None or segment.start - last.end >= shortest:
            result.append(Segment(**asdict(segment)))
            continue
        same = (last.label, last.style) == (segment.label, segment.style)
        end, calls = max(last.end, segment.end), last.calls + segment.calls
        if same or segment.end - segment.start < shortest:
            last.end, last.calls = end, calls
        elif last.end - last.start < shortest:
            result[-1] = Segment(segment.lane, segment.label, segment.style, last.start, end, calls)
        else:
            result.append(Segment(**asdict(segment)))
    return result
