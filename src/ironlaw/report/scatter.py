"""A scatter plot of planned against measured on logarithmic axes, as inline SVG; colours come from the style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from ironlaw.report.svg import image

SIZE = 560.0  # of the square drawing, in its own units
BAND = 0.10  # relative error of the band around the diagonal
GOLDEN_ANGLE = 137.508  # degrees of hue from one group to the next: neighbours never look alike
MARKERS = 3


@dataclass(frozen=True)
class Point:
    measured: float
    planned: float
    title: str


@dataclass(frozen=True)
class Cloud:
    """The points of one group; `index` sets its colour and marker, the same in every plot."""

    name: str
    index: int
    points: Sequence[Point]


def hue(index: int) -> float:
    return round((215 + GOLDEN_ANGLE * index) % 360, 1)


def scatter(
    title: str, description: str, clouds: Sequence[Cloud], text: Callable[[float], str], base: int = 10
) -> Markup:
    """Measured to the right, planned upwards: a perfect plan lies on the diagonal, a slow or large one above it.

    `text` prints a tick; ticks are round numbers in `base` 10 or 2.
    """
    values = [v for cloud in clouds for p in cloud.points for v in (p.measured, p.planned)]
    if not values:
        return Markup("")
    low, high = math.log10(min(values)) - 0.05, math.log10(max(values)) + 0.05
    left, right, upper, lower = 74.0, SIZE - 8, 10.0, SIZE - 56

    def x(value: float) -> float:
        return left + (right - left) * (math.log10(value) - low) / (high - low)

    def y(value: float) -> float:
        inside = min(max(math.log10(value), low), high)
        return lower - (lower - upper) * (inside - low) / (high - low)

    a, b = 10**low, 10**high
    corners = [(a, a * (1 - BAND)), (a, a * (1 + BAND)), (b / (1 + BAND), b), (b, b), (b, b * (1 - BAND))]
    body = ['<polygon class="band" points="' + " ".join(f"{x(p):.1f},{y(q):.1f}" for p, q in corners) + '"/>']
    for number, tick in enumerate(ticks(a, b, base)):
        body.append(
            f'<path class="grid" d="M{left:.0f} {y(tick):.1f}H{right:.0f}M{x(tick):.1f} {upper:.0f}V{lower:.0f}"/>'
        )
        body.append(f'<text x="{left - 6:.0f}" y="{y(tick) + 4:.1f}" text-anchor="end">{escape(text(tick))}</text>')
        odd = ' class="odd"' if number % 2 else ""  # left out where the drawing is small
        anchor = "end" if x(tick) > right - 20 else "middle"
        place = f'x="{x(tick):.1f}" y="{lower + 18:.0f}" text-anchor="{anchor}"{odd}'
        body.append(f"<text {place}>{escape(text(tick))}</text>")
    body.append(f'<path class="diagonal" d="M{x(a):.1f} {y(a):.1f}L{x(b):.1f} {y(b):.1f}"/>')
    body.append(f'<text x="{(left + right) / 2:.0f}" y="{SIZE - 10:.0f}" text-anchor="middle">measured</text>')
    middle = (upper + lower) / 2
    body.append(f'<text transform="translate(13 {middle:.0f}) rotate(-90)" text-anchor="middle">planned</text>')
    for cloud in sorted(clouds, key=lambda c: -len(c.points)):  # the small groups on top
        marks = "".join(_mark(cloud.index % MARKERS, x(p.measured), y(p.planned), p.title) for p in cloud.points)
        body.append(f'<g class="cloud" style="--h:{hue(cloud.index)}">{marks}</g>')
    return image(SIZE, SIZE, title, description, "".join(body), 'class="scatter"')


def legend_mark(index: int) -> Markup:
    """The same marker and colour for a legend or a table."""
    drawn = _mark(index % MARKERS, 6, 6, "")
    return Markup(
        f'<svg class="key cloud" style="--h:{hue(index)}" viewBox="0 0 12 12" aria-hidden="true">{drawn}</svg>'
    )


def _mark(kind: int, x: float, y: float, title: str) -> str:
    label = f"<title>{escape(title)}</title>" if title else ""
    if kind == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4">{label}</circle>'
    if kind == 1:
        return f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6">{label}</rect>'
    return f'<path d="M{x:.1f} {y - 4.2:.1f}l4 7h-8z">{label}</path>'


def ticks(low: float, high: float, base: int = 10, most: int = 8) -> list[float]:
    """1, 2 and 5 times powers of the base within a range, thinned until there are few enough."""
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
    """A round tick in seconds."""
    return f"{value:g} s" if value >= 1 else f"{1000 * value:g} ms" if value >= 1e-3 else f"{1e6 * value:g} µs"


def short_bytes(value: float) -> str:
    """A tick that is a power of two."""
    for size, unit in ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g} B"
