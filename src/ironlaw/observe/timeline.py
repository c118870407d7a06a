"""One step as a person can read it: a lane of phases, a lane of operations per thread or stream, neighbours merged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

SHORTEST = 0.002  # of the step: what is shorter joins its neighbour
MOST_SEGMENTS = 400


@dataclass
class Segment:
    """Nanoseconds from anywhere; `label` is what is written, `style` the phase or kind that colours it."""

    lane: str
    label: str
    style: str
    start: int
    end: int
    calls: int = 1


def timeline(segments: Iterable[Segment], begin: int, end: int) -> dict[str, Any]:
    """The document that `ledger.facts["timeline"]` holds: seconds from the beginning of the step."""
    whole = end - begin
    inside = sorted((s for s in segments if s.end > begin and s.start < end), key=lambda s: (s.lane, s.start))
    shortest = SHORTEST * whole
    merged = _merge(inside, shortest)
    while len(merged) > MOST_SEGMENTS:
        shortest *= 2
        merged = _merge(merged, shortest)
    shown = []
    for s in merged:
        entry = asdict(s) | {"start": (max(s.start, begin) - begin) / 1e9, "end": (min(s.end, end) - begin) / 1e9}
        shown.append(entry)
    return {"seconds": whole / 1e9, "lanes": list(dict.fromkeys(s.lane for s in merged)), "segments": shown}


def _merge(segments: list[Segment], shortest: float) -> list[Segment]:
    """Neighbours of one label become one; a sliver joins what is before it, unless a gap lies between."""
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
