"""Parsing and printing quantities for people. Everything inside Ironlaw is SI: seconds, bytes, FLOPs, joules."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_DECIMAL = ((1e24, "Y"), (1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_SHORT = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
NOT_KNOWN = "–"


def parse_number(text: str) -> float:
    """Parse "1,536", "1_000", "2e12" or "0.5". ValueError for other text, and for a comma that is no separator of
    thousands: a decimal one would be lost."""
    if "," in text and not re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?", text):
        raise ValueError(f"{text!r} has a comma that does not separate thousands")
    return float(text.replace(",", ""))


def parse_bytes(text: str) -> int:
    """Parse "20GiB", "1.5 GB" or "4096" into bytes. ValueError with an example if `text` is none of these."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kKMGTPEZY]?)(i?)(B?)\s*", text)
    try:
        assert match is not None
        prefix, power = match[2].upper(), 0
        power = " KMGTPEZY".index(prefix) if prefix else 0
        return round(float(match[1]) * (1024 if match[3] else 1000) ** power)
    except (AssertionError, ValueError, OverflowError):
        raise ValueError(f"{text!r} is not a number of bytes: write for example 20GiB") from None


def parse_seconds(text: str) -> float:
    """Parse "90s", "15min", "1.5h" or "7d" into seconds. ValueError with an example if `text` is none of these."""
    match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,12})?)\s*(s|sec|min|m|h|d|days?|w|weeks?)?\s*", text)
    if match is None or not float(match[1]):
        raise ValueError(f"{text!r} is no time: write for example 90s, 15min, 1h or 7d")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}[(match[2] or "s")[0]]


def _rounded(value: float) -> float:
    """Round to the printed digits. Units are chosen after rounding, so that 999.7 k prints as 1.00 M, not 1,000 k."""
    return float(f"{value:.3g}")


def _significant(value: float) -> str:
    """Format with three significant digits and no exponent: 0.0123, 1.23, 12.3, 123, 1,234."""
    magnitude = abs(_rounded(value))
    if magnitude == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    decimals = max(0, 2 - math.floor(math.log10(magnitude)))
    return f"{value:,.{decimals}f}"


def _scaled(value: float, factors: Sequence[tuple[float, str]]) -> tuple[str, str]:
    """Return the digits in the largest unit that the printed value reaches, and its name; "" if it reaches none."""
    factor, name = next((pair for pair in factors if abs(_rounded(value)) >= pair[0]), (1.0, ""))
    return _significant(value / factor), name


def si(value: float | None, unit: str = "") -> str:
    """`si(3.2e12, "FLOP")` is "3.20 TFLOP"."""
    if value is None:
        return NOT_KNOWN
    digits, prefix = _scaled(value, _DECIMAL)
    return f"{digits} {prefix}{unit}".rstrip()


def bytes_(value: float | None) -> str:
    """Format with binary multiples, in which memory is sold and allocators report."""
    if value is None:
        return NOT_KNOWN
    for factor, prefix in _BINARY:
        if abs(value) >= factor * (1 - 0.5 / 1024):  # from here it would print as 1,024 of the smaller unit
            return f"{_significant(value / factor)} {prefix}"
    return f"{value:.0f} B"


def rate(value: float | None, unit: str) -> str:
    return NOT_KNOWN if value is None else f"{si(value, unit)}/s"


def seconds(value: float | None) -> str:
    """Format a duration, from nanoseconds to years."""
    if value is None:
        return NOT_KNOWN
    if value == 0:
        return "0 s"
    magnitude = abs(_rounded(value))
    for limit, factor, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (120.0, 1.0, "s")):
        if magnitude < limit:
            return f"{_significant(value * factor)} {unit}"
    for limit, factor, unit in ((7200.0, 60.0, "min"), (172800.0, 3600.0, "h"), (2 * 31557600.0, 86400.0, "days")):
        if magnitude < limit:
            return f"{_significant(value / factor)} {unit}"
    return f"{_significant(value / 31557600.0)} years"


def energy(joules: float | None) -> str:
    """Format in watt-hours, so that both ends of an interval have the same unit."""
    return NOT_KNOWN if joules is None else si(joules / 3600, "Wh")


def count(value: float | None) -> str:
    return NOT_KNOWN if value is None else f"{value:,.0f}"


def token_rate(value: float | None) -> str:
    return NOT_KNOWN if value is None else f"{tokens(value)} tokens/s"


def percent(fraction: float | None, digits: int = 1) -> str:
    return NOT_KNOWN if fraction is None else f"{100 * fraction:.{digits}f}%"


def signed_percent(fraction: float | None, digits: int = 1) -> str:
    return NOT_KNOWN if fraction is None else f"{100 * fraction:+.{digits}f}%"


def dollars(value: float | None) -> str:
    """Format US dollars: with cents from 1 to 1,000, else with three significant digits and k, M or B."""
    if value is None:
        return NOT_KNOWN
    digits, suffix = _scaled(value, _SHORT)
    return f"${digits}{suffix}" if suffix or abs(value) < 1 else f"${value:.2f}"


def mass(kilograms: float | None) -> str:
    """Format in grams below 1 kg, in tonnes from 1,000 kg."""
    if kilograms is None:
        return NOT_KNOWN
    digits, unit = _scaled(1000 * kilograms, ((1e6, "t"), (1e3, "kg")))
    return f"{digits} {unit or 'g'}"


def tokens(value: float | None) -> str:
    """Format a token count as in the literature: 1.00T, 500B."""
    if value is None:
        return NOT_KNOWN
    digits, suffix = _scaled(value, _SHORT)
    return digits + suffix if suffix else f"{value:.0f}"
