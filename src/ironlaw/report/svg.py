"""Small inline SVG drawings: bars, line charts and scatter plots, in colours of the page's style sheet.

Each drawing is an image with a title and a description for screen readers, without scripts, fonts or links.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape

from markupsafe import Markup

WIDTH = 760.0  # of a chart; a narrow window scrolls it
SIDE = 560.0  # of a scatter plot
MAX_POINTS = 320  # fewer than a chart's pixels; longer series are averaged in bins
BAND = 0.10  # relative error of the band around a scatter plot's diagonal
GOLDEN_ANGLE = 137.508  # degrees of hue between groups, so that neighbouring groups differ
MARKERS = 3
_ids = itertools.count(1)


@dataclass(frozen=True)
class Series:
    """A line, or single points with `dots`, drawn in the style sheet's class `style`."""

    xs: Sequence[float]
    ys: Sequence[float]
    style: str
    dots: bool = False
    label: str = ""  # beside each dot


@dataclass(frozen=True)
class Level:
    """A horizontal line across the chart, with a band around it if it has bounds."""

    y: float
    style: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Cloud:
    """The points of a group, (measured, planned, title). `index` selects colour and marker, the same in every plot."""

    index: int
    points: Sequence[tuple[float, float, str]]


@dataclass(frozen=True)
class Frame:
    """A mapping from values to coordinates, and the grid of its axes. It is linear unless a `scale` is given."""

    x0: float
    x1: float
    y0: float
    y1: float
    left: float
    right: float
    upper: float
    lower: float
    scale: Callable[[float], float] = float

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * self._part(value, self.x0, self.x1)

    def y(self, value: float) -> float:
        inside = min(max(value, self.y0), self.y1)
        return self.lower - (self.lower - self.upper) * self._part(inside, self.y0, self.y1)

    def _part(self, value: float, low: float, high: float) -> float:
        return (self.scale(value) - self.scale(low)) / (self.scale(high) - self.scale(low))

    def grid(
        self, xs: Sequence[float], x_text: Callable[[float], str], ys: Sequence[float], y_text: Callable[[float], str],
        rules: bool = True,
    ) -> list[str]:  # fmt: skip
        """Return grid lines and tick labels. Without `rules`, ticks of x are only marks below the axis."""
        parts = []
        for tick in ys:
            y = self.y(tick)
            parts.append(f'<path class="grid" d="M{self.left:.1f} {y:.1f}H{self.right:.1f}"/>')
            parts.append(text(self.left - 6, y + 4, y_text(tick), "end"))
        for number, tick in enumerate(xs):
            x = self.x(tick)
            parts.append(
                f'<path class="grid" d="M{x:.1f} {self.upper if rules else self.lower + 4:.1f}V{self.lower}"/>'
            )
            anchor = "end" if x > self.right - 18 else "middle"
            parts.append(text(x, self.lower + 17, x_text(tick), anchor, "odd" if number % 2 else ""))
        return parts


def line_chart(
    title: str, description: str, series: Sequence[Series], levels: Sequence[Level] = (), *,
    height: int = 260, from_zero: bool = False, top: float | None = None, y_text: Callable[[float], str] = str,
    x_name: str = "step",
) -> Markup:  # fmt: skip
    """Draw lines over steps with axes, ticks and levels. Values above `top` are drawn at `top`."""
    thinned = [_thin(s) for s in series if len(s.xs)]
    ys = [y for s in thinned for y in s.ys] + [b for v in levels for b in (v.y, v.low, v.high) if b is not None]
    xs = [x for s in thinned for x in s.xs]
    if not xs:
        return Markup("")
    low, high = _range(ys, from_zero, top)
    y_ticks = _round_ticks(low, high, 4)
    left = 14 + 7.2 * max(len(y_text(t)) for t in y_ticks)
    frame = Frame(min(xs), max(max(xs), min(xs) + 1), low, high, left, WIDTH - 12.0, 12.0, height - 34.0)
    x_ticks = _round_ticks(frame.x0, frame.x1, 7)
    body = frame.grid(x_ticks, lambda x: f"{x:,.1f}".removesuffix(".0"), y_ticks, y_text, rules=False)
    body.append(text((frame.left + frame.right) / 2, height - 3, x_name, "middle"))
    body += [_level(frame, level) for level in levels]
    body += [_series(frame, s) for s in thinned]
    return image(WIDTH, height, title, description, body)


def scatter(
    title: str, description: str, clouds: Sequence[Cloud], y_text: Callable[[float], str], base: int = 10
) -> Markup:
    """Draw planned over measured values on logarithmic axes: exact plans lie on the diagonal, too slow or large ones
    above it. Ticks are round numbers in `base` 10 or 2.
    """
    values = [v for cloud in clouds for measured, planned, _ in cloud.points for v in (measured, planned)]
    if not values:
        return Markup("")
    a, b = min(values) / 1.12, max(values) * 1.12
    frame = Frame(a, b, a, b, 74.0, SIDE - 8, 10.0, SIDE - 56, math.log10)
    corners = [(a, a * (1 - BAND)), (a, a * (1 + BAND)), (b / (1 + BAND), b), (b, b), (b, b * (1 - BAND))]
    body = [f'<polygon class="band" points="{" ".join(f"{frame.x(p):.1f},{frame.y(q):.1f}" for p, q in corners)}"/>']
    body += frame.grid(ticks(a, b, base), y_text, ticks(a, b, base), y_text)
    body.append(f'<path class="diagonal" d="M{frame.x(a):.1f} {frame.y(a):.1f}L{frame.x(b):.1f} {frame.y(b):.1f}"/>')
    body.append(text((frame.left + frame.right) / 2, SIDE - 10, "measured", "middle"))
    middle = (frame.upper + frame.lower) / 2
    body.append(f'<text transform="translate(13 {middle:.0f}) rotate(-90)" text-anchor="middle">planned</text>')
    for cloud in sorted(clouds, key=lambda c: -len(c.points)):  # small groups are drawn on top
        marks = "".join(_mark(cloud.index % MARKERS, frame.x(m), frame.y(p), name) for m, p, name in cloud.points)
        body.append(f'<g class="cloud" style="--h:{_hue(cloud.index)}">{marks}</g>')
    return image(SIDE, SIDE, title, description, body, 'class="scatter"')


def legend_mark(index: int) -> Markup:
    """Draw the marker of a cloud in its colour, for a legend or a table."""
    drawn = _mark(index % MARKERS, 6, 6, "")
    return Markup(
        f'<svg class="key cloud" style="--h:{_hue(index)}" viewBox="0 0 12 12" aria-hidden="true">{drawn}</svg>'
    )


def _hue(index: int) -> float:
    return round((215 + GOLDEN_ANGLE * index) % 360, 1)


def _mark(kind: int, x: float, y: float, title: str) -> str:
    label = f"<title>{escape(title)}</title>" if title else ""
    if kind == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4">{label}</circle>'
    if kind == 1:
        return f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6">{label}</rect>'
    return f'<path d="M{x:.1f} {y - 4.2:.1f}l4 7h-8z">{label}</path>'


def _level(frame: Frame, level: Level) -> str:
    y, band = frame.y(level.y), ""
    if level.low is not None and level.high is not None:
        upper = frame.y(level.high)
        band = rect(frame.left, upper, frame.right - frame.left, frame.y(level.low) - upper, "band")
    return band + f'<path class="line-{level.style}" d="M{frame.left:.1f} {y:.1f}H{frame.right:.1f}"/>'


def _series(frame: Frame, series: Series) -> str:
    points = [(frame.x(x), frame.y(y)) for x, y in zip(series.xs, series.ys, strict=True)]
    dots = "".join(f'<circle class="dot-{series.style}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in points)
    dots += "".join(text(x + 5, y - 4, series.label, "start") for x, y in points if series.label)
    line = f'<polyline class="line-{series.style}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'
    return line + dots if series.dots else line


def _thin(series: Series) -> Series:
    """Average bins of neighbouring points, so that a long run gives a readable line and a small file."""
    finite = [(x, y) for x, y in zip(series.xs, series.ys, strict=True) if math.isfinite(y)]
    per_bin = math.ceil(len(finite) / MAX_POINTS) if not series.dots else 1
    bins = [finite[i : i + per_bin] for i in range(0, len(finite), max(1, per_bin))]
    xs = [sum(x for x, _ in b) / len(b) for b in bins]
    ys = [sum(y for _, y in b) / len(b) for b in bins]
    return replace(series, xs=xs, ys=ys)


def _range(ys: Sequence[float], from_zero: bool, top: float | None) -> tuple[float, float]:
    low, high = (0.0 if from_zero else min(ys)), max(ys)
    high = min(high, top) if top is not None else high
    margin = 0.06 * ((high - low) or abs(high) or 1.0)
    return (low if from_zero else low - margin), high + margin


def _round_ticks(low: float, high: float, wanted: int) -> list[float]:
    """Return round numbers (1, 2, 2.5 or 5 times a power of ten) within the range."""
    raw = (high - low) / max(1, wanted)
    magnitude = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def ticks(low: float, high: float, base: int = 10, most: int = 8) -> list[float]:
    """Return 1, 2 and 5 times powers of the base within a range, or fewer of them until there are at most `most`."""
    powers = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    finest = (((1, 2, 5), 1), ((1, 3), 1)) if base == 10 else ()
    found: list[float] = []
    for factors, every in (*finest, *(((1,), every) for every in range(1, 20))):
        found = [f * float(base) ** p for p in powers if p % every == 0 for f in factors]
        found = [tick for tick in found if low <= tick <= high]
        if len(found) <= most:
            break
    return found


def short_seconds(value: float) -> str:
    """Format a round tick in seconds."""
    return f"{value:g} s" if value >= 1 else f"{1000 * value:g} ms" if value >= 1e-3 else f"{1e6 * value:g} µs"


def short(figure: str) -> str:
    """Return a round figure without its decimals: "8 GiB" for "8.00 GiB"."""
    return re.sub(r"\.0+ ", " ", figure)


def text(x: float, y: float, words: str, anchor: str, style: str = "") -> str:
    attribute = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{attribute}>{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, style: str, title: str = "") -> str:
    label = f"<title>{escape(title)}</title>" if title else ""
    size = f'width="{width:.2f}" height="{height:.1f}"'
    return f'<rect class="{escape(style)}" x="{x:.2f}" y="{y:.1f}" {size}>{label}</rect>'


def image(
    width: float, height: float, title: str, description: str, body: Sequence[str], attributes: str = 'class="chart"'
) -> Markup:
    key = next(_ids)
    labels = f"t{key}" + (f" d{key}" if description else "")
    desc = f'<desc id="d{key}">{escape(description)}</desc>' if description else ""
    return Markup(
        f'<svg {attributes} viewBox="0 0 {width:g} {height:g}" role="img" aria-labelledby="{labels}">'
        f'<title id="t{key}">{escape(title)}</title>{desc}{"".join(body)}</svg>'
    )
