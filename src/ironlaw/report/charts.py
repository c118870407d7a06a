"""Charts of a run: time above the hardware's ideal, roofline, timeline, curves over steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from markupsafe import Markup

from ironlaw import units
from ironlaw.report import svg
from ironlaw.report.document import Chart

Found = Mapping[str, Any]
MAX_POINTS = 60
MAX_SHOWN_RATIO = 2.5  # times the typical step, so that one slow step does not flatten the rest of the chart
DROPS = {
    "shape": "shapes", "memory": "memory-bound operations", "launch": "launch and host",
    "communication": "exposed communication", "bubble": "pipeline bubble", "data": "data",
    "recomputation": "recomputation", "overhead": "overhead", "unattributed": "unattributed",
}  # fmt: skip


def losses(steps: Sequence[Found], unigram: float | None = None) -> Chart | None:
    """Return training and validation loss over steps, from the records of `metrics.jsonl`."""
    steps = [m for m in steps if m.get("loss") is not None]
    evaluated = [m for m in steps if m.get("validation_loss") is not None]
    if not steps:
        return None
    series = [svg.Series([m["step"] for m in steps], [m["loss"] for m in steps], "measured")]
    legend = [("line-measured", "training")]
    described = f"Training loss from {steps[0]['loss']:.2f} to {steps[-1]['loss']:.2f} nats per token"
    if evaluated:
        xs, ys = [m["step"] for m in evaluated], [m["validation_loss"] for m in evaluated]
        series.append(svg.Series(xs, ys, "validation", dots=True))
        legend.append(("line-validation", "validation"))
        described += f", validation loss {ys[-1]:.2f} at the last evaluation"
    caption, levels = "Loss in nats per token.", []
    if unigram is not None:
        levels.append(svg.Level(unigram, "unigram"))
        legend.append(("line-unigram", "unigram model"))
        described += f", unigram model {unigram:.2f}"
        caption += " The unigram model knows only how often each token occurs."

    drawing = svg.line_chart("Loss over the run", described, series, levels, y_text="{:.4g}".format)
    return Chart(drawing, caption, legend)


def step_times(steps: Sequence[Found], step: Found) -> Chart | None:
    """Return the seconds of every unprofiled step beside the plan's. `step`: planned and measured seconds."""
    timed = [m for m in steps if m.get("seconds") is not None and not m.get("recorded")]
    if not timed:
        return None
    seconds = [m["seconds"] for m in timed]
    typical = statistics.median(seconds)
    top = MAX_SHOWN_RATIO * typical
    beyond = sum(s > top for s in seconds)
    series = [svg.Series([m["step"] for m in timed], seconds, "measured")]
    caption, legend, levels = "Step time.", [("line-measured", "measured")], []
    described = f"Typical step {units.seconds(step['measured'] or typical)}"
    if step["planned"] is not None:
        low, high = step.get("planned_interval") or (None, None)
        levels = [svg.Level(step["planned"], "planned", low, high)]
        described += f", planned {units.seconds(step['planned'])}"
        legend += [("line-planned", "planned"), ("band", "the plan's interval")]
        caption += " The band held 80% of comparable runs."
    if beyond:
        shown = f"{beyond} steps" if beyond != 1 else "1 step"
        caption += f" {shown} above {units.seconds(top)}, up to {units.seconds(max(seconds))}, drawn at the edge."
    if len(timed) < len(steps):
        caption += " Steps that were profiled are left out: the profiler slows them."

    drawing = svg.line_chart(
        "Step time over the run", described, series, levels, from_zero=True, top=top, y_text=units.seconds
    )
    return Chart(drawing, caption, legend)


def memory(curve: Sequence[Sequence[float]]) -> Markup:
    xs, ys = [1e3 * point[0] for point in curve], [point[1] for point in curve]
    return svg.line_chart(
        "Memory over the recorded steps", f"Highest {units.bytes_(max(ys))}", [svg.Series(xs, ys, "measured")],
        height=200, from_zero=True, y_text=units.bytes_, x_name="ms",
    )  # fmt: skip


def waterfall(fall: Found) -> Markup:
    """Draw bars from the ideal step to the measured one; each begins where the one before ends."""
    rows: list[tuple[str, float, float, str]] = []
    now = fall["ideal_seconds"] or 0.0
    if fall["ideal_seconds"]:
        rows.append(("model FLOPs at peak", 0.0, now, "measured"))
    for drop in (d for d in fall["drops"] if d["seconds"] is not None):
        rows.append((DROPS[drop["name"]], now, now + drop["seconds"], drop["name"]))
        now += drop["seconds"]
    rows.append(("measured step", 0.0, fall["step_seconds"], "total"))
    left, right, tall = 190.0, svg.WIDTH - 78.0, 26
    top = max(max(a, b) for _, a, b, _ in rows) or 1.0
    body = []
    for index, (name, a, b, style) in enumerate(rows):
        y = index * tall
        x0, x1 = (left + (right - left) * max(0.0, v) / top for v in (min(a, b), max(a, b)))
        body.append(svg.text(left - 8, y + 17, name, "end"))
        body.append(svg.rect(x0, y + 4, max(1.0, x1 - x0), tall - 8, f"drop-{style}"))
        size = units.seconds(abs(b - a))
        body.append(svg.text(x1 + 5, y + 16, size if b >= a else f"−{size}", "start"))
    described = ", ".join(f"{name} {units.seconds(b - a)}" for name, a, b, _ in rows)
    return svg.image(
        svg.WIDTH, len(rows) * tall + 4, "From the hardware's ceiling to the measured step", described, body
    )


def roofline(roof: Found) -> Markup:
    """Draw FLOP/s over FLOPs per byte, both logarithmic. A point's area grows with its time."""
    width, height = svg.WIDTH, 320
    points = roof["points"][:MAX_POINTS]
    peak, copy = roof["peak_flops_per_second"], roof["copy_bytes_per_second"]
    xs, ys = [p["intensity"] for p in points] + [roof["ridge"]], [p["flops_per_second"] for p in points]
    frame = svg.Frame(
        min(xs) / 2, max(xs) * 2, min([*ys, peak / 100]) / 1.26, max([peak, *ys]) * 1.4,
        84.0, width - 14.0, 10.0, height - 42.0, math.log10,
    )  # fmt: skip
    body = frame.grid(
        svg.ticks(frame.x0, frame.x1), lambda x: f"{x:g}",
        svg.ticks(frame.y0, frame.y1, most=5), lambda y: svg.short(units.si(y, "FLOP/s")),
    )  # fmt: skip
    body.append(
        f'<path class="roof" d="M{frame.x(frame.x0):.1f} {frame.y(frame.x0 * copy):.1f}'
        f'L{frame.x(roof["ridge"]):.1f} {frame.y(peak):.1f}H{frame.right:.1f}"/>'
    )
    longest = max(p["seconds"] for p in points)
    for p in points:
        radius = 3 + 7 * math.sqrt(p["seconds"] / longest)
        words = (
            f"{p['name']} ({p['phase']}): {units.rate(p['flops_per_second'], 'FLOP')}, {units.seconds(p['seconds'])}"
        )
        body.append(
            f'<circle class="point part-{escape(p["kind"])}" cx="{frame.x(p["intensity"]):.1f}" '
            f'cy="{frame.y(p["flops_per_second"]):.1f}" r="{radius:.1f}"><title>{escape(words)}</title></circle>'
        )
    body.append(svg.text((frame.left + frame.right) / 2, height - 8, "FLOPs per byte", "middle"))
    described = "; ".join(
        f"{p['name']} {p['phase']}: {p['intensity']:.0f} FLOPs per byte at {units.rate(p['flops_per_second'], 'FLOP')}"
        for p in points[:8]
    )
    return svg.image(width, height, "Roofline of the run's operations", described, body)


def timeline(line: Found) -> Markup:
    """Draw one row per lane. A segment shows its label if there is room, and always as its title."""
    lanes: Sequence[str] = sorted(line["lanes"], key=lambda lane: (lane != "phases", lane != "operations", lane))
    width, row, upper, whole = svg.WIDTH, 44.0, 4.0, line["seconds"]
    body = []
    for index, lane in enumerate(lanes):
        y = upper + index * row
        body.append(svg.text(0, y + 10, lane, "start"))
        for segment in (s for s in line["segments"] if s["lane"] == lane):
            x0, x1 = width * segment["start"] / whole, width * segment["end"] / whole
            title = f"{segment['label']}, {units.seconds(segment['end'] - segment['start'])}"
            body.append(svg.rect(x0, y + 14, max(0.5, x1 - x0 - 0.4), 20, f"part-{segment['style']}", title))
            if x1 - x0 > 7.0 * len(segment["label"]) + 8:
                body.append(svg.text(x0 + 5, y + 28, segment["label"], "start", "inside"))
    bottom = upper + len(lanes) * row
    for tick, anchor in ((0.0, "start"), (0.25, "middle"), (0.5, "middle"), (0.75, "middle"), (1.0, "end")):
        body.append(svg.text(width * tick, bottom + 10, units.seconds(whole * tick), anchor))
    longest = sorted((s for s in line["segments"] if s["lane"] != "phases"), key=lambda s: s["start"] - s["end"])[:6]
    described = f"{len(lanes)} lanes; the longest: " + ", ".join(
        f"{s['label']} {units.seconds(s['end'] - s['start'])}" for s in longest
    )
    return svg.image(width, bottom + 16, "One recorded step", described, body)
