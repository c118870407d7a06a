"""The load and limits of a server: `--serve "input=1024 output=256 rate=10/s ttft=0.5s tpot=40ms"`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any

from ironlaw.errors import UserError, parse_words

EXAMPLE = '--serve "input=1024 output=256 rate=10/s"'
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60.0}
_RATES = {"": 1.0, "/s": 1.0, "/min": 1 / 60, "/h": 1 / 3600}


@dataclass(frozen=True)
class ServeRequest:
    """A load: mean lengths in tokens, limits in seconds."""

    input: int  # of a prompt
    output: int  # of its output
    rate: float | None = None  # requests per second, arriving at random; None: not given
    concurrency: int | None = None  # requests at once, each followed by the next; None: not given
    ttft: float | None = None  # limit on the 90th percentile of the time to the first token
    tpot: float | None = None  # limit on the mean time per token
    prefix: int = 0  # leading tokens that all prompts share
    speculate: int = 0  # tokens drafted per pass
    accept: float = 0.0  # probability that a drafted token is accepted
    draft: str = ""  # the catalogued draft model; empty: n-grams, which cost nothing

    @property
    def length(self) -> int:
        return self.input + self.output


_WHOLE = ("input", "output", "concurrency", "prefix", "speculate")


def parse_request(text: str) -> ServeRequest:
    """Parse a `--serve` text. Raises UserError for unknown words, missing lengths and values that are no amounts."""
    words = parse_words(text, "--serve", [field.name for field in fields(ServeRequest)], EXAMPLE)
    draft = words.pop("draft", "")
    found = {key: _amount(key, value) for key, value in words.items()}
    for key in ("input", "output"):
        if key not in found:
            raise UserError(f"--serve: {key} is not given: write for example {EXAMPLE}")
    for key in _WHOLE:
        if key in found and (found[key] != int(found[key]) or found[key] > 1e8):
            raise UserError(
                f"--serve: {key} = {found[key]:g} is no number of {'requests' if key[0] == 'c' else 'tokens'}"
            )
    if "rate" in found and "concurrency" in found:
        raise UserError("--serve: rate and concurrency say the same thing twice: give one")
    if found.get("prefix", 0) > found["input"]:
        raise UserError(f"--serve: prefix = {found['prefix']:g} is longer than input = {found['input']:g}")
    if ("speculate" in found) != ("accept" in found) or (draft and "speculate" not in found):
        raise UserError('--serve: speculation is planned from both: write for example "speculate=4 accept=0.7"')
    if found.get("accept", 0.0) >= 1 or found.get("speculate", 0) > 64:
        raise UserError("--serve: accept is a share below 1 of the drafted tokens, speculate at most 64 of them")
    values: dict[str, Any] = {key: int(value) if key in _WHOLE else value for key, value in found.items()}
    return ServeRequest(**values, draft=draft)


def _amount(key: str, text: str) -> float:
    units = _SECONDS if key in ("ttft", "tpot") else _RATES if key == "rate" else {"": 1.0, "k": 1024.0}
    match = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]+)?)([a-zµ/]*)", text.lower())
    try:
        value = float(match.group(1)) * units[match.group(2)] if match else math.nan
    except (ValueError, KeyError):
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        shown = " or ".join(f"{key}=10{unit}" for unit in list(units)[:3])
        raise UserError(f"--serve: {key} = {text[:40]!r} is no amount above 0: write for example {shown}")
    return value
