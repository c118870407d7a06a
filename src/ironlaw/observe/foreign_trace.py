"""Makes a ledger of any trace. Steps and phases are inferred; every instant of a step is in one phase.

On a device the instant belongs to the first of: a kernel that computes, a collective, a copy from the host; and when
the device does nothing, to what the host does: wait for data, launch, or nothing that the trace shows. Without a device
it belongs to what the main thread runs. A trace does not say what Python did between two calls: that is `host`.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import flop_registry

from ironlaw.ledger import Estimate, Key, Kind, Ledger, Line, Origin, Phase
from ironlaw.observe.events import CPU, DEVICE, RUNTIME, Event, SyncPoints, describe_sync_points
from ironlaw.observe.partition import BRIDGES
from ironlaw.observe.spans import COLLECTIVE, Span, device_key, innermost, kind_of, main_lane, nest, span_key
from ironlaw.observe.timeline import Segment, operation_segments, phase_segment, timeline
from ironlaw.observe.trace_file import TraceFile

_SYNC = re.compile(r"(Stream|Device|Event)Synchronize")
_USER_LINE = re.compile(r"^(?!<|.*(?:site-packages|torch/|dist-packages)).*\.py\(\d+\)")
_OPERANDS = {"aten::mm": 2, "aten::bmm": 2, "aten::addmm": 3, "aten::baddbmm": 3}  # tensors that a product takes
MIN_STEP_SHARE = 0.2  # of the usual length: shorter steps were still running when the trace ended


@dataclass
class TracedStep:
    """`pieces`: every stretch of it in one phase."""

    begin: int
    end: int
    pieces: list[Segment] = field(default_factory=list)

    def seconds(self, phase: Phase) -> float:
        return sum((piece.end - piece.start) / 1e9 for piece in self.pieces if piece.style == str(phase))


class _Traced:
    """A trace with its spans in phases, its steps, and what launched each event of the device."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events, self.spans = events, nest(events)
        for span in self.spans:
            span.phase = _phase_of(span)
        self.main = main_lane(self.spans)
        self.on_device = any(event.where == DEVICE for event in events)
        self.steps, self.steps_inferred = _steps(events, self.spans)
        self.launchers = _launchers(events, self.spans)
        for step in self.steps:
            step.pieces = _device_pieces(step, self) if self.on_device else _thread_pieces(step, self)

    def inside(self, event: Event) -> bool:
        return self.steps[0].begin <= event.start < self.steps[-1].end

    def kernel_phase(self, event: Event) -> Phase:
        """Of what launched it."""
        span = self.launchers.get(id(event))
        while span is not None and span.phase is None:
            span = span.parent
        return Phase.FORWARD if span is None or span.phase is None else span.phase


def trace_ledger(trace: TraceFile) -> Ledger:
    """The run's side of the table, from the whole steps of the trace."""
    traced = _Traced(trace.events)
    events, spans, steps = traced.events, traced.spans, traced.steps
    ledger = Ledger("run", lines=_lines(traced))
    seconds = sorted(steps, key=lambda s: s.end - s.begin)
    middle = seconds[len(seconds) // 2]
    step_seconds = sum(s.end - s.begin for s in steps) / len(steps) / 1e9
    low, high = (seconds[i].end - seconds[i].begin for i in (0, -1))
    how = f"mean of {len(steps)} steps under the profiler ({traced.steps_inferred})"
    ledger.totals["step_seconds"] = Estimate(step_seconds, Origin.MEASURED, how, low / 1e9, high / 1e9)
    for phase in Phase:
        mean = sum(step.seconds(phase) for step in steps) / len(steps)
        if mean:
            ledger.phase_seconds[phase] = mean
    segments = middle.pieces + operation_segments(spans, events, traced.main, middle.begin, middle.end)
    ledger.facts = {
        "source": "trace", "steps_done": len(steps), "steps_inferred": traced.steps_inferred,
        "device": "cuda" if traced.on_device else "cpu", "machine": _device_name(trace),
        "timeline": timeline(segments, middle.begin, middle.end), "launches_per_step": _launches(traced),
        "sync_points": _sync_points(traced), "model": {"name": "a traced training step"},
        "shapes_recorded": any("Input Dims" in event.details for event in events),
        "stacks_recorded": any(_USER_LINE.match(event.name) for event in events),
        "precision": _precision(events), "world_size": _world_size(trace, events),
        "unfused_attention": _has_unfused_attention(spans),
    }  # fmt: skip
    return ledger


# -- steps -------------------------------------------------------------------------------------------------------


def _steps(events: Sequence[Event], spans: Sequence[Span]) -> tuple[list[TracedStep], str]:
    marked = [e for e in events if e.name.startswith("ProfilerStep#") and e.where == CPU]
    if marked:
        usual = sorted(e.end - e.start for e in marked)[len(marked) // 2]
        whole = [e for e in marked if e.end - e.start > MIN_STEP_SHARE * usual]
        return [TracedStep(e.start, e.end) for e in whole], "marked by profiler.step()"
    ends = [s.event.end for s in spans if s.event.name.startswith("Optimizer.step#")]
    if len(ends) >= 2:
        return [TracedStep(a, b) for a, b in itertools.pairwise(ends)], "from one optimizer step to the next"
    whole_trace = TracedStep(min(e.start for e in events), max(e.end for e in events))
    return [whole_trace], "the whole trace, as it marks no steps"


def _phase_of(span: Span) -> Phase | None:
    """Returns None for spans of no phase (a step's own mark, a Python function)."""
    name = span.event.name
    if span.outer.startswith("Optimizer."):
        return Phase.OPTIMIZER
    if span.outer.startswith("enumerate(DataLoader)"):
        return Phase.DATA
    if span.kernel is not None and kind_of(span.kernel.name) is Kind.COLLECTIVE:
        return Phase.COMMUNICATION
    if span.backward:
        return Phase.BACKWARD
    if "clip_grad" in name:
        return Phase.OPTIMIZER
    return Phase.FORWARD if name.startswith("aten::") else None


# -- whose instant it is -----------------------------------------------------------------------------------------


def _thread_pieces(step: TracedStep, traced: _Traced) -> list[Segment]:
    """Returns the main thread's outermost spans with a phase, and what lies between them."""
    pieces: list[Segment] = []
    now, last = step.begin, None
    for span in traced.spans:
        phase, event = span.phase, span.event
        if phase is None or event.lane != traced.main or event.end <= now or event.start >= step.end:
            continue
        if span.parent is not None and span.parent.phase is phase:
            continue
        if event.start > now:
            between = BRIDGES.get((last, phase)) if last is not None else None
            pieces.append(phase_segment(between or (phase if last is phase else Phase.HOST), now, event.start))
        start, now = max(event.start, now), min(event.end, step.end)
        pieces.append(phase_segment(phase, start, now))
        last = phase
    if now < step.end:
        pieces.append(phase_segment(Phase.HOST, now, step.end))
    return pieces


def _device_pieces(step: TracedStep, traced: _Traced) -> list[Segment]:
    """Returns pieces by priority: compute, communication, copies from the host, then what the host does meanwhile."""
    layers: list[list[Segment]] = [[], [], [], [], []]

    def add(layer: int, phase: Phase, event: Event) -> None:
        if event.end > step.begin and event.start < step.end:
            layers[layer].append(phase_segment(phase, event.start, event.end))

    for event in traced.events:
        if event.where == DEVICE and COLLECTIVE.search(event.name):
            add(1, Phase.COMMUNICATION, event)
        elif event.where == DEVICE and "HtoD" in event.name:
            add(2, Phase.TRANSFER, event)
        elif event.where == DEVICE:
            add(0, traced.kernel_phase(event), event)
        elif event.where == RUNTIME:
            add(4, Phase.HOST, event)
    for span in traced.spans:
        if span.event.lane == traced.main and span.phase is Phase.DATA:
            add(3, Phase.DATA, span.event)
        elif span.event.lane == traced.main and span.event.name.startswith("aten::"):
            add(4, Phase.HOST, span.event)
    return _by_priority(layers, step.begin, step.end, Phase.IDLE)


def _launchers(events: Sequence[Event], spans: Sequence[Span]) -> dict[int, Span]:
    """Id of a device's event -> the call that launched it: by the driver's call with the same correlation, and the
    operation around that call on its thread.

    Old traces repeat the correlation as the external id, so that this way leads where ids do not; without driver
    calls in the trace the external id, shared by operation and kernel, has to do.
    """
    calls = {e.details["correlation"]: e for e in events if e.where == RUNTIME and "correlation" in e.details}
    by_lane: dict[int | str, list[Span]] = defaultdict(list)
    for span in spans:
        by_lane[span.event.lane].append(span)
    around = {lane: innermost(own) for lane, own in by_lane.items()}
    by_link = {span.event.link: span for span in spans if span.event.link}
    found: dict[int, Span] = {}
    for event in events:
        if event.where != DEVICE:
            continue
        call = calls.get(event.details.get("correlation"))
        launcher: Span | None = by_link.get(event.link) if call is None else None
        if call is not None and call.lane in around:
            launcher = around[call.lane](call.start)
        if launcher is not None:
            found[id(event)] = launcher
    return found


def _by_priority(layers: Sequence[list[Segment]], begin: int, end: int, rest: Phase) -> list[Segment]:
    """Cut [begin, end] so that each instant has the phase of the first layer that covers it, and there of the piece
    that begins first."""
    pieces = [piece for layer in layers for piece in sorted(layer, key=lambda piece: piece.start)]
    moments = [time for piece in pieces for time in (piece.start, piece.end)]
    cuts = np.unique(np.clip([begin, end, *moments], begin, end))
    owner = np.full(len(cuts) - 1, -1)
    for number in reversed(range(len(pieces))):
        first, last = np.searchsorted(cuts, (pieces[number].start, pieces[number].end))
        owner[first:last] = number
    turns = np.unique([0, *(np.flatnonzero(np.diff(owner)) + 1), len(owner)])
    pieces.append(phase_segment(rest, begin, end))  # the last, which is what -1 names
    return [
        replace(pieces[owner[first]], start=int(cuts[first]), end=int(cuts[last]))
        for first, last in itertools.pairwise(turns)
    ]


# -- lines and facts ---------------------------------------------------------------------------------------------


def _lines(traced: _Traced) -> list[Line]:
    seconds: dict[Key, float] = defaultdict(float)
    counts: dict[Key, int] = defaultdict(int)
    flops: dict[Key, int] = defaultdict(int)
    for span in traced.spans:
        if span.phase is None or span.phase is Phase.DATA or not traced.inside(span.event):
            continue
        key = span_key(span, span.phase)
        if span.kernel is span.event:
            flops[key] += _flops(span.event)
            counts[key] += 1
        if not traced.on_device:
            seconds[key] += span.self_ns / 1e9
    for event in traced.events if traced.on_device else ():
        if event.where == DEVICE and traced.inside(event):
            key = device_key(event, traced.launchers.get(id(event)), traced.kernel_phase(event))
            seconds[key] += (event.end - event.start) / 1e9
    n = len(traced.steps)
    return [
        Line(*key, count=round(counts[key] / n) or None, flops=round(flops[key] / n) or None, seconds=s / n,
             origin=Origin.MEASURED)
        for key, s in sorted(seconds.items())
    ]  # fmt: skip


def _flops(event: Event) -> int:
    """Returns FLOPs of a matrix product whose shapes were recorded, else 0."""
    shapes = event.details.get("Input Dims", [])[: _OPERANDS.get(event.name, 0)]
    try:
        return int(flop_registry[getattr(torch.ops.aten, event.name[6:])](*shapes)) if shapes else 0
    except (AssertionError, ValueError, TypeError):  # no shapes of a product
        return 0


def _launches(traced: _Traced) -> int:
    calls = [span.event for span in traced.spans if span.kernel is span.event]
    launched = [event for event in traced.events if event.where == DEVICE] if traced.on_device else calls
    return sum(map(traced.inside, launched)) // len(traced.steps)


def _sync_points(traced: _Traced) -> list[dict[str, Any]]:
    """Returns where the host waited for a value, with the line of the user's code if stacks were recorded."""
    found: SyncPoints = defaultdict(list)
    for span in traced.spans:
        if span.event.name in ("aten::item", "aten::is_nonzero") and traced.inside(span.event):
            found[_line_of(span), "item"].append(((span.event.end - span.event.start) / 1e9, None))
    if not found:
        for event in traced.events:
            if event.where == RUNTIME and _SYNC.search(event.name) and traced.inside(event):
                found[event.name, "item"].append(((event.end - event.start) / 1e9, None))
    return describe_sync_points(found, len(traced.steps))


def _line_of(span: Span) -> str:
    above: Span | None = span
    while above is not None:
        if _USER_LINE.match(above.event.name):
            return re.sub(r"\((\d+)\).*", r":\1", above.event.name)
        above = above.parent
    return "a line that the trace does not name (record with with_stack=True)"


def _precision(events: Iterable[Event]) -> str | None:
    """Returns the type of most matrix products' inputs, if shapes were recorded."""
    names = {"float": "fp32", "c10::BFloat16": "bf16", "c10::Half": "fp16"}
    products = (event for event in events if event.name in ("aten::mm", "aten::addmm", "aten::bmm"))
    types = ([t for t in event.details.get("Input type", []) if t in names] for event in products)
    most = Counter(names[known[-1]] for known in types if known).most_common(1)
    return most[0][0] if most else None


def _has_unfused_attention(spans: Sequence[Span]) -> bool:
    """Products and a softmax inside `scaled_dot_product_attention`, or between two batched products of a module."""
    inside = any(s.attention and s.event.name in ("aten::_softmax", "aten::_safe_softmax") for s in spans)
    batched = sum(s.event.name == "aten::bmm" for s in spans)
    softmax = sum(s.event.name == "aten::_softmax" for s in spans)
    return inside or (softmax > 0 and batched >= 2 * softmax)


def _device_name(trace: TraceFile) -> str | None:
    devices = trace.header.get("deviceProperties") or []
    return str(devices[0].get("name")) if devices and isinstance(devices[0], dict) else None


def _world_size(trace: TraceFile, events: Iterable[Event]) -> int:
    info = trace.header.get("distributedInfo") or {}
    sizes = [int(e.details["Group size"]) for e in events if str(e.details.get("Group size", "")).isdecimal()]
    return int(info.get("world_size") or max(sizes, default=1))
