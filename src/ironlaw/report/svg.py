"""Small inline SVG drawings: bars and line charts, in colours that the page's style sheet sets.

Every drawing is an image with a title and a description for screen readers, and no script, font or link.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

MOST_POINTS = 320  # more than a chart is wide: longer series are averaged in bins
_ids = itertools.count(1)


@dataclass(frozen=True)
class Series:
    """A line (or with `dots` single points) in the style sheet's class `style`."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    style: str
    dots: bool = False


@dataclass(frozen=True)
class Level:
    """A horizontal line across the chart, with a band around it when bounds are given."""

    name: str
    y: float
    style: str
    low: float | None = None
    high: float | None = None


def bar_pair(planned: float | None, measured: float | None, largest: float, title: str) -> Markup:
    """Two bars on one scale, planned above measured. An absent side has no bar."""
    bars = []
    for value, y, style in ((planned, 0, "planned"), (measured, 6, "measured")):
        if value is not None and value > 0 and largest > 0:
            width = max(0.4, 100 * value / largest)
            bars.append(f'<rect class="fill-{style}" x="0" y="{y}" width="{width:.2f}" height="5"/>')
    return image(100, 11, title, "", "".join(bars), 'class="bars" preserveAspectRatio="none"')


def stacked(parts: Sequence[tuple[str, float]], whole: float, title: str, describe: Callable[[float], str]) -> Markup:
    """One bar of parts side by side on a scale where `whole` fills it."""
    drawn, x = [], 0.0
    for name, value in parts:
        width = 100 * value / whole if whole else 0.0
        drawn.append(
            f'<rect class="part-{escape(name)}" x="{x:.3f}" y="0" width="{width:.3f}" height="10">'
            f"<title>{escape(name)}: {escape(describe(value))}</title></rect>"
        )
        x += width
    description = ", ".join(f"{name} {describe(value)}" for name, value in parts)
    return image(100, 10, title, description, "".join(drawn), 'class="stacked" preserveAspectRatio="none"')


def line_chart(
    title: str,
    description: str,
    series: Sequence[Series],
    levels: Sequence[Level] = (),
    *,
    width: int = 760,
    height: int = 260,
    from_zero: bool = False,
    top: float | None = None,
    y_text: Callable[[float], str] = str,
    x_name: str = "step",
) -> Markup:
    """Lines over steps with axes, ticks and levels. Values above `top` are drawn at it."""
    thinned = [_thin(s) for s in series if len(s.xs)]
    ys = [y for s in thinned for y in s.ys] + [b for v in levels for b in (v.y, v.low, v.high) if b is not None]
    xs = [x for s in thinned for x in s.xs]
    if not xs:
        return Markup("")
    low, high = _range(ys, from_zero, top)
    y_ticks = _ticks(low, high, 4)
    left = 14 + 7.2 * max(len(y_text(t)) for t in y_ticks)
    frame = _Frame(min(xs), max(max(xs), min(xs) + 1), low, high, left, width - 12.0, 12.0, height - 34.0)
    body = [_grid(frame, y_ticks, y_text, x_name)]
    body += [_level(frame, level) for level in levels]
    body += [_series(frame, s) for s in thinned]
    return image(width, height, title, description, "".join(body), 'class="chart"')


@dataclass(frozen=True)
class _Frame:
    x0: float
    x1: float
    y0: float
    y1: float
    left: float
    right: float
    upper: float
    lower: float

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * (value - self.x0) / (self.x1 - self.x0)

    def y(self, value: float) -> float:
        inside = min(max(value, self.y0), self.y1)
        return self.lower - (self.lower - self.upper) * (inside - self.y0) / (self.y1 - self.y0)


def _grid(frame: _Frame, y_ticks: Sequence[float], y_text: Callable[[float], str], x_name: str) -> str:
    parts = []
    for tick in y_ticks:
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{frame.left:.1f}" x2="{frame.right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{frame.left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{escape(y_text(tick))}</text>')
    for tick in _ticks(frame.x0, frame.x1, 4 if frame.right < 500 else 7):
        x = frame.x(tick)
        anchor = "end" if x > frame.right - 16 else "middle"
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.lower}" y2="{frame.lower + 4}"/>')
        parts.append(f'<text x="{x:.1f}" y="{frame.lower + 16:.1f}" text-anchor="{anchor}">{tick:,.0f}</text>')
    middle = (frame.left + frame.right) / 2
    parts.append(f'<text x="{middle:.1f}" y="{frame.lower + 31:.1f}" text-anchor="middle">{escape(x_name)}</text>')
    return "".join(parts)


def _level(frame: _Frame, level: Level) -> str:
    band = ""
    if level.low is not None and level.high is not None:
        y, bottom = frame.y(level.high), frame.y(level.low)
        band = (
            f'<rect class="band" x="{frame.left:.1f}" width="{frame.right - frame.left:.1f}" '
            f'y="{y:.1f}" height="{bottom - y:.1f}"/>'
        )
    y = frame.y(level.y)
    return band + (
        f'<line class="line-{level.style}" x1="{frame.left:.1f}" x2="{frame.right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
    )


def _series(frame: _Frame, series: Series) -> str:
    points = [(frame.x(x), frame.y(y)) for x, y in zip(series.xs, series.ys, strict=True)]
    dots = "".join(f'<circle class="dot-{series.style}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in points)
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    line = f'<polyline class="line-{series.style}" points="{path}"/>'
    return line + dots if series.dots else line


def _thin(series: Series) -> Series:
    """Means over bins of neighbouring points, so that a long run stays a readable line and a small file."""
    finite = [(x, y) for x, y in zip(series.xs, series.ys, strict=True) if math.isfinite(y)]
    per_bin = math.ceil(len(finite) / MOST_POINTS) if not series.dots else 1
    bins = [finite[i : i + per_bin] for i in range(0, len(finite), max(1, per_bin))]
    xs = [sum(x for x, _ in b) / len(b) for b in bins]
    ys = [sum(y for _, y in b) / len(b) for b in bins]
    return Series(series.name, xs, ys, series.style, series.dots)


def _range(ys: Sequence[float], from_zero: bool, top: float | None) -> tuple[float, float]:
    low, high = (0.0 if from_zero else min(ys)), max(ys)
    high = min(high, top) if top is not None else high
    margin = 0.06 * ((high - low) or abs(high) or 1.0)
    return (low if from_zero else low - margin), high + margin


def _ticks(low: float, high: float, wanted: int) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten) within the range."""
    raw = (high - low) / max(1, wanted)
    magnitude = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def image(width: float, height: float, title: str, description: str, body: str, attributes: str) -> Markup:
    key = next(_ids)
    labels = f"t{key}" + (f" d{key}" if description else "")
    desc = f'<desc id="d{key}">{escape(description)}</desc>' if description else ""
    return Markup(
        f'<svg {attributes} viewBox="0 0 {width:g} {height:g}" role="img" aria-labelledby="{labels}">'
        f'<title id="t{key}">{escape(title)}</title>{desc}{body}</svg>'
    )
