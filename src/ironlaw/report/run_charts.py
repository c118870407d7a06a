"""The drawings of an explained run besides bars and lines: waterfall, roofline, timeline, memory over the step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from markupsafe import Markup

from ironlaw import units
from ironlaw.report import svg
from ironlaw.report.scatter import ticks
from ironlaw.report.waterfall_view import DROPS

Document = Mapping[str, Any]
MOST_POINTS = 60


def waterfall_chart(fall: Document | None, width: int) -> Markup:
    """Bars that begin where the one before ends: from the ideal step to the measured one."""
    if not fall or not fall["step_seconds"]:
        return Markup("")
    drops = [d for d in fall["drops"] if d["seconds"] is not None]
    if not drops:
        return Markup("")
    rows: list[tuple[str, float, float, str]] = []
    now = fall["ideal_seconds"] or 0.0
    if fall["ideal_seconds"]:
        rows.append(("model FLOPs at peak", 0.0, now, "measured"))
    for drop in drops:
        rows.append((DROPS[drop["name"]], now, now + drop["seconds"], drop["name"]))
        now += drop["seconds"]
    rows.append(("measured step", 0.0, fall["step_seconds"], "total"))
    small = width < 500
    left, right, height = (8.0 if small else 190.0), width - 78.0, 34 if small else 26
    top = max(max(a, b) for _, a, b, _ in rows) or 1.0
    body = []
    for index, (name, a, b, style) in enumerate(rows):
        y = index * height
        bar_y, bar_height = (y + 15, 14) if small else (y + 4, height - 8)
        x0, x1 = (left + (right - left) * max(0.0, v) / top for v in (min(a, b), max(a, b)))
        text_x, text_y = (left, y + 11) if small else (left - 8, y + 17)
        anchor = "start" if small else "end"
        body.append(f'<text x="{text_x:.0f}" y="{text_y:.0f}" text-anchor="{anchor}">{escape(name)}</text>')
        body.append(
            f'<rect class="drop-{style}" x="{x0:.1f}" y="{bar_y}" width="{max(1.0, x1 - x0):.1f}" '
            f'height="{bar_height}"/>'
        )
        label = f"{units.seconds(abs(b - a))}" if b >= a else f"−{units.seconds(a - b)}"
        body.append(f'<text x="{x1 + 5:.1f}" y="{bar_y + 12}">{escape(label)}</text>')
    description = ", ".join(f"{name} {units.seconds(b - a)}" for name, a, b, _ in rows)
    title = "From the hardware's ceiling to the measured step"
    return svg.image(width, len(rows) * height + 4, title, description, "".join(body), 'class="chart"')


def roofline_chart(roof: Document | None, width: int, height: int = 320) -> Markup:
    """FLOP/s over FLOPs per byte, both logarithmic; a point's area grows with its share of the time."""
    if not roof:
        return Markup("")
    points = roof["points"][:MOST_POINTS]
    peak, copy = roof["peak_flops_per_second"], roof["copy_bytes_per_second"]
    xs = [p["intensity"] for p in points] + [roof["ridge"]]
    x0, x1 = math.log10(min(xs)) - 0.3, math.log10(max(xs)) + 0.3
    y_low = min([p["flops_per_second"] for p in points] + [peak / 100])
    y0, y1 = math.log10(y_low) - 0.1, math.log10(max([peak, *(p["flops_per_second"] for p in points)])) + 0.15
    left, right, upper, lower = 84.0, width - 14.0, 10.0, height - 42.0

    def x(value: float) -> float:
        return left + (right - left) * (math.log10(value) - x0) / (x1 - x0)

    def y(value: float) -> float:
        return lower - (lower - upper) * (math.log10(max(value, 10**y0)) - y0) / (y1 - y0)

    body = []
    for tick in ticks(10**y0, 10**y1, most=5):
        body.append(f'<path class="grid" d="M{left:.0f} {y(tick):.1f}H{right:.0f}"/>')
        body.append(f'<text x="{left - 6:.0f}" y="{y(tick) + 4:.1f}" text-anchor="end">'
                    f"{escape(_short(tick))}</text>")  # fmt: skip
    for tick in ticks(10**x0, 10**x1, most=5 if width < 500 else 8):
        body.append(f'<path class="grid" d="M{x(tick):.1f} {upper:.0f}V{lower:.0f}"/>')
        body.append(f'<text x="{x(tick):.1f}" y="{lower + 16:.0f}" text-anchor="middle">{tick:g}</text>')
    start = 10**x0
    roof_y = [start * copy, peak]
    body.append(
        f'<path class="roof" d="M{x(start):.1f} {y(roof_y[0]):.1f}L{x(roof["ridge"]):.1f} {y(peak):.1f}H{right:.1f}"/>'
    )
    longest = max(p["seconds"] for p in points)
    for p in points:
        radius = 3 + 7 * math.sqrt(p["seconds"] / longest)
        text = f"{p['name']} ({p['phase']}): {units.rate(p['flops_per_second'], 'FLOP')}, {units.seconds(p['seconds'])}"
        body.append(
            f'<circle class="point part-{escape(p["kind"])}" cx="{x(p["intensity"]):.1f}" '
            f'cy="{y(p["flops_per_second"]):.1f}" r="{radius:.1f}"><title>{escape(text)}</title></circle>'
        )
    middle = (left + right) / 2
    body.append(f'<text x="{middle:.0f}" y="{height - 8}" text-anchor="middle">FLOPs per byte</text>')
    description = "; ".join(
        f"{p['name']} {p['phase']}: {p['intensity']:.0f} FLOPs per byte at {units.rate(p['flops_per_second'], 'FLOP')}"
        for p in points[:8]
    )
    return svg.image(width, height, "Roofline of the run's operations", description, "".join(body), 'class="chart"')


def _short(rate: float) -> str:
    """A round tick of FLOP/s."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if rate >= size:
            return f"{rate / size:g} {prefix}FLOP/s"
    return f"{rate:g} FLOP/s"


def timeline_chart(line: Document | None, width: int) -> Markup:
    """A lane per row; a segment says what it is where there is room, and in its title where there is not."""
    if not line or not line["segments"]:
        return Markup("")
    lanes: Sequence[str] = sorted(line["lanes"], key=lambda lane: (lane != "phases", lane != "operations", lane))
    row, upper = 44.0, 4.0
    whole = line["seconds"]
    body = []
    for index, lane in enumerate(lanes):
        y = upper + index * row
        body.append(f'<text x="0" y="{y + 10:.0f}">{escape(lane)}</text>')
        for segment in (s for s in line["segments"] if s["lane"] == lane):
            x0, x1 = width * segment["start"] / whole, width * segment["end"] / whole
            text = f"{segment['label']}, {units.seconds(segment['end'] - segment['start'])}"
            body.append(
                f'<rect class="part-{escape(segment["style"])}" x="{x0:.1f}" y="{y + 14:.0f}" '
                f'width="{max(0.5, x1 - x0 - 0.4):.1f}" height="20"><title>{escape(text)}</title></rect>'
            )
            if x1 - x0 > 7.0 * len(segment["label"]) + 8:
                body.append(f'<text class="inside" x="{x0 + 5:.1f}" y="{y + 28:.0f}">{escape(segment["label"])}</text>')
    bottom = upper + len(lanes) * row
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        anchor = "start" if tick == 0 else "end" if tick == 1 else "middle"
        body.append(f'<text x="{width * tick:.0f}" y="{bottom + 10:.0f}" text-anchor="{anchor}">'
                    f"{escape(units.seconds(whole * tick))}</text>")  # fmt: skip
    longest = sorted((s for s in line["segments"] if s["lane"] != "phases"), key=lambda s: s["start"] - s["end"])[:6]
    description = f"{len(lanes)} lanes; the longest: " + ", ".join(
        f"{s['label']} {units.seconds(s['end'] - s['start'])}" for s in longest
    )
    return svg.image(width, bottom + 16, "One recorded step", description, "".join(body), 'class="chart"')


def memory_chart(curve: Sequence[Sequence[float]] | None, width: int, height: int = 200) -> Markup:
    if not curve:
        return Markup("")
    xs, ys = [1e3 * point[0] for point in curve], [point[1] for point in curve]
    return svg.line_chart(
        "Memory over the recorded steps", f"Highest {units.bytes_(max(ys))}", [svg.Series("alive", xs, ys, "measured")],
        width=width, height=height, from_zero=True, y_text=units.bytes_, x_name="ms",
    )  # fmt: skip
