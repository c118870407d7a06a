"""Passes of our own engine on this machine: the operations of `workload/serving.py`, timed by the measured curves.

    clock = MeasuredClock(model, load_profile(), "fp32", passes)
    clock.parts(decoding=8, length=300.0, new=0)      # seconds by what they are spent on
    replay(clock, requests, at_once=8, ...)           # of `simulate.py`: a whole load of this engine

The server times some passes when it starts (`serve/warmup.py`): a line through them says how long a pass of so many
tokens takes, curves how much longer or shorter it is where chunks or caches have another length.
What a cached token adds is the difference between passes behind short and long caches.
Without them the curves stand alone, and what the host does between passes is not planned.
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

LENGTHS = 64  # tokens: passes behind caches of nearly the same length take the same time
ROWS_READ = 32  # products of fewer are bound by reading the weights; with more, few bits save nothing


class MeasuredClock:
    """`weights`: the format they are held in. Of one that this machine was not measured in, products take as long as
    in `precision`, and those of few rows as much less as there are fewer bytes to read. `passes`: as
    `serve/warmup.py` notes them."""

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
        """Of a cached token in a decoding pass, where passes of as many requests behind caches of other lengths were
        timed; else curves say it."""
        same = [(a, b) for a, b in combinations(self.passes["decode"], 2) if a["tokens"] == b["tokens"]]
        more = [a["tokens"] * float(self.holds(b["length"]) - self.holds(a["length"])) for a, b in same]
        longer = [b["model_seconds"] - a["model_seconds"] for a, b in same]
        squares = sum(m * m for m in more)  # least squares through 0
        return max(0.0, sum(map(mul, more, longer)) / squares) if squares > LENGTHS**2 else None

    def _took(self, p: Mapping[str, Any]) -> float:
        reading = (self.token_seconds or 0.0) * p["tokens"] * float(self.holds(p["length"]))
        return max(0.0, float(p["model_seconds"]) - (reading if p["phase"] == "decode" else 0.0))

    def _alike(self, p: Mapping[str, Any], tokens: int) -> float:
        """What curves say of a pass as `p` over so many tokens."""
        if p["phase"] == "decode":
            return self._seconds([Chunk(1, round(p["length"]) if self.token_seconds is None else 0)] * tokens)
        size = p["tokens"] // p["requests"]
        return self._seconds([Chunk(size)] * (tokens // size) + [Chunk(tokens % size)] * (tokens % size > 0))

    def _pass(self, phase: str, chunks: list[Chunk]) -> float:
        seconds, timed, tokens = self._seconds(chunks), self.passes[phase], sum(chunk.tokens for chunk in chunks)
        if not timed:
            return seconds
        line, most = self._at(phase, tokens, [self._took(p) for p in timed]), timed[-1]
        is_line = timed[0]["tokens"] < most["tokens"]  # else curves alone say how a pass grows with its tokens
        return line * seconds / self._alike(most, tokens if is_line else most["tokens"])

    def _decode(self, decoding: int, length: float) -> float:
        behind = 0 if self.token_seconds is not None else round(length)
        reading = (self.token_seconds or 0.0) * decoding * self.holds(length)
        return self._pass("decode", [Chunk(1, behind)] * decoding) + reading

    def parts(self, decoding: int, length: float, new: int, cached: float = 0.0, prompts: int = 1) -> dict[str, float]:
        """Seconds of a token of each of `decoding` sequences behind `length` others, and of `new` tokens of so many
        prompts beside them: decode, prompts, and, where passes were timed, sampling and host."""
        key = (decoding, round(length / LENGTHS), new, prompts)
        if key not in self.known:
            tokens, chunks = [Chunk(1, key[1] * LENGTHS)] * decoding, [Chunk(max(1, new // max(1, prompts)))] * prompts
            found = {"decode": self._decode(decoding, key[1] * LENGTHS) if decoding else 0.0, "prompts": 0.0}
            if new:  # what they add to a pass over all tokens, whose weights and launches decoding alone has too
                found["prompts"] = max(0.0, self._pass("prefill", [*tokens, *chunks]) - found["decode"])
            phase, count = ("decode", decoding) if decoding else ("prefill", new)
            for part in ("sample", "host"):
                if self.passes[phase]:
                    found[part] = self._at(phase, count, [p[f"{part}_seconds"] for p in self.passes[phase]])
            self.known[key] = found
        return self.known[key]

    def _at(self, phase: str, tokens: int, values: Sequence[float]) -> float:
        """On the line through what some passes were timed at, extended as steeply as all of them rise together."""
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
