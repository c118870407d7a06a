"""Times of our own engine's passes on this machine: operations of `workload/serving.py`, timed by measured curves.

    clock = MeasuredClock(model, load_profile(), "fp32", passes)
    clock.parts(decoding=8, length=300.0, new=0)      # seconds of a step by part
    replay(clock, requests, at_once=8, ...)           # of `simulate.py`: a whole load of this engine

The server times some passes when it starts (`serve/warmup.py`). A line through them gives the seconds of a pass by its
tokens; the curves scale them to other lengths of chunks or caches. The time of a cached token is the difference between
passes with short and long caches. Without timed passes the curves are used alone, and the host's work between passes is
not planned.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from operator import mul
from typing import Any

import numpy as np

from ironlaw.catalog.formats import number_format
from ironlaw.ledger import Kind, Phase
from ironlaw.machine import interference
from ironlaw.machine.profile import Profile
from ironlaw.machine.timing import MeasuredMachine, measured_precision
from ironlaw.model.config import ModelConfig
from ironlaw.plan.serving.demand import demand_of
from ironlaw.workload.serving import Chunk, forward_pass

LENGTHS = 64  # tokens to which cache lengths are rounded: passes of nearly the same length take the same time
ROWS_READ = 32  # products of fewer rows are bound by reading weights; with more rows, narrow weights save nothing


class MeasuredClock:
    """Times of passes on this machine. `weights`: their stored format. If the machine was not measured in it, products
    take the time of `precision`, and those of few rows less, in proportion to the bytes read. `passes`: as recorded
    by `serve/warmup.py`."""

    request_seconds = 0.0  # the server's one process computes them all

    def __init__(
        self, model: ModelConfig, profile: Profile, weights: str, passes: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self.model, self.precision = model, measured_precision(weights, profile)
        width = number_format(self.precision).bytes_per_element()
        self.read = min(1.0, number_format(weights).bytes_per_element(weight=True) / width)
        self.machine = MeasuredMachine(profile, interference.typical(profile), self.precision, whole_steps=False)
        self.known: dict[tuple[int, int, int, int], dict[str, float]] = {}
        self.passes = {phase: sorted((p for p in passes if p["phase"] == phase), key=lambda p: float(p["tokens"]))
                       for phase in ("decode", "prefill")}  # fmt: skip
        self.holds = demand_of(model).cached_tokens
        self.token_seconds = self._token_seconds()

    def _token_seconds(self) -> float | None:
        """Return the seconds per cached token of a decoding pass. None, so that curves give it, unless passes with
        different cache lengths and equally many requests were timed."""
        same = [(a, b) for a, b in combinations(self.passes["decode"], 2) if a["tokens"] == b["tokens"]]
        more = [a["tokens"] * float(self.holds(b["length"]) - self.holds(a["length"])) for a, b in same]
        longer = [b["model_seconds"] - a["model_seconds"] for a, b in same]
        squares = sum(m * m for m in more)  # least squares through 0
        return max(0.0, sum(map(mul, more, longer)) / squares) if squares > LENGTHS**2 else None

    def _took(self, p: Mapping[str, Any]) -> float:
        reading = (self.token_seconds or 0.0) * p["tokens"] * float(self.holds(p["length"]))
        return max(0.0, float(p["model_seconds"]) - (reading if p["phase"] == "decode" else 0.0))

    def _alike(self, p: Mapping[str, Any], tokens: int) -> float:
        """Return the curves' seconds of a pass like `p` over `tokens` tokens."""
        if p["phase"] == "decode":
            return self._seconds([Chunk(1, round(p["length"]) if self.token_seconds is None else 0)] * tokens)
        size = p["tokens"] // p["requests"]
        return self._seconds([Chunk(size)] * (tokens // size) + [Chunk(tokens % size)] * (tokens % size > 0))

    def _pass(self, phase: str, chunks: list[Chunk]) -> float:
        seconds, timed, tokens = self._seconds(chunks), self.passes[phase], sum(chunk.tokens for chunk in chunks)
        if not timed:
            return seconds
        line, most = self._at(phase, tokens, [self._took(p) for p in timed]), timed[-1]
        is_line = timed[0]["tokens"] < most["tokens"]  # else curves alone give the growth with the tokens
        return line * seconds / self._alike(most, tokens if is_line else most["tokens"])

    def _decode(self, decoding: int, length: float) -> float:
        behind = 0 if self.token_seconds is not None else round(length)
        reading = (self.token_seconds or 0.0) * decoding * self.holds(length)
        return self._pass("decode", [Chunk(1, behind)] * decoding) + reading

    def parts(self, decoding: int, length: float, new: int, cached: float = 0.0, prompts: int = 1) -> dict[str, float]:
        """Return the seconds of a step by part: a token for each of `decoding` sequences with `length` cached tokens,
        and `new` tokens of `prompts` prompts. Parts: decode, prompts and, if passes were timed, sample and host."""
        key = (decoding, round(length / LENGTHS), new, prompts)
        if key not in self.known:
            tokens, chunks = [Chunk(1, key[1] * LENGTHS)] * decoding, [Chunk(max(1, new // max(1, prompts)))] * prompts
            found = {"decode": self._decode(decoding, key[1] * LENGTHS) if decoding else 0.0, "prompts": 0.0}
            if new:  # their increase over decoding alone, which has the weights and launches already
                found["prompts"] = max(0.0, self._pass("prefill", [*tokens, *chunks]) - found["decode"])
            phase, count = ("decode", decoding) if decoding else ("prefill", new)
            for part in ("sample", "host"):
                if self.passes[phase]:
                    found[part] = self._at(phase, count, [p[f"{part}_seconds"] for p in self.passes[phase]])
            self.known[key] = found
        return self.known[key]

    def _at(self, phase: str, tokens: int, values: Sequence[float]) -> float:
        """Return the value on the line through the timed passes, beyond them with the slope of a fit to all."""
        by_tokens: dict[int, list[float]] = {}
        for one, value in zip(self.passes[phase], values, strict=True):
            by_tokens.setdefault(one["tokens"], []).append(value)
        at, means = [*by_tokens], [statistics.mean(found) for found in by_tokens.values()]
        if len(at) > 1 and tokens > at[-1]:
            slope = max(0.0, float(np.polyfit(at, means, 1)[0]))
            return means[-1] + slope * (tokens - at[-1])
        return float(np.interp(tokens, at, means))

    def _seconds(self, chunks: list[Chunk]) -> float:
        total, dispatch = 0.0, self.machine.dispatch_seconds(Phase.FORWARD, 1, 0.0)
        for op, times in forward_pass(self.model, chunks, precision=self.precision).operations():  # type: ignore[arg-type]
            seconds = self.machine.time(op).seconds
            if op.kind is Kind.MATMUL and op.matmul is not None and op.matmul[0] < ROWS_READ:
                seconds *= self.read
            total += (seconds + dispatch) * times
        return total
