"""Passes of our own engine on this machine: the operations of `workload/serving.py`, timed by the measured curves.

    clock = MeasuredClock(model, load_profile(), "fp32", passes)
    clock.parts(decoding=8, length=300.0, new=0)      # seconds by what they are spent on

The server times some passes when it starts (`serve/warmup.py`). Curves say how a pass grows with its tokens, the
nearest such passes how long it takes: what they take over their own plan is interpolated over the logarithm of tokens.
What a cached token adds is the difference between passes behind short and long caches.
Without them the curves stand alone, and what the host does between passes is not planned.
"""

from __future__ import annotations

import math
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
from ironlaw.model.config import ModelConfig
from ironlaw.plan.machines import MeasuredMachine, measured_precision
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
        self.machine = MeasuredMachine(profile, interference.typical(profile), whole_steps=False)
        self.known: dict[tuple[int, int, int, int], dict[str, float]] = {}
        self.passes = {phase: sorted((p for p in passes if p["phase"] == phase), key=lambda p: float(p["tokens"]))
                       for phase in ("decode", "prefill")}  # fmt: skip
        self.cached_tokens = demand_of(model).cached_tokens
        self.token_seconds = self._token_seconds()
        self.over = {
            "decode": [self._over(p) for p in self.passes["decode"]],
            "prefill": [p["model_seconds"] / self._seconds([Chunk(p["tokens"] // p["requests"])] * p["requests"])
                        for p in self.passes["prefill"]],
        }  # fmt: skip

    def _token_seconds(self) -> float | None:
        """Of a cached token in a decoding pass, where passes of as many requests behind caches of other lengths were
        timed; else curves say it."""
        same = [(a, b) for a, b in combinations(self.passes["decode"], 2) if a["tokens"] == b["tokens"]]
        more = [a["tokens"] * float(self.cached_tokens(b["length"]) - self.cached_tokens(a["length"])) for a, b in same]
        longer = [b["model_seconds"] - a["model_seconds"] for a, b in same]
        squares = sum(m * m for m in more)  # least squares through 0
        return max(0.0, sum(map(mul, more, longer)) / squares) if squares > LENGTHS**2 else None

    def _over(self, p: Mapping[str, Any]) -> float:
        """What a decoding pass took over its curves."""
        if self.token_seconds is None:
            return float(p["model_seconds"] / self._seconds([Chunk(1, round(p["length"]))] * p["tokens"]))
        reading = self.token_seconds * p["tokens"] * float(self.cached_tokens(p["length"]))
        return float(max(0.0, p["model_seconds"] - reading) / self._seconds([Chunk(1)] * p["tokens"]))

    def _decode(self, decoding: int, length: float) -> float:
        behind = 0 if self.token_seconds is not None else round(length)
        seconds = self._seconds([Chunk(1, behind)] * decoding) * self._at("decode", decoding, self.over["decode"])
        return seconds + (self.token_seconds or 0.0) * decoding * float(self.cached_tokens(length))

    def parts(self, decoding: int, length: float, new: int, prompts: int = 1) -> dict[str, float]:
        """Seconds of a token of each of `decoding` sequences behind `length` others, and of `new` tokens of so many
        prompts beside them: decode, prompts, and, where passes were timed, sampling and host."""
        key = (decoding, round(length / LENGTHS), new, prompts)
        if key not in self.known:
            tokens, chunks = [Chunk(1, key[1] * LENGTHS)] * decoding, [Chunk(max(1, new // prompts))] * prompts
            found = {"decode": self._decode(decoding, key[1] * LENGTHS) if decoding else 0.0, "prompts": 0.0}
            if new:  # what they add to a pass over all tokens, whose weights and launches decoding alone has too
                whole = self._seconds([*tokens, *chunks]) * self._at("prefill", decoding + new, self.over["prefill"])
                found["prompts"] = max(0.0, whole - found["decode"])
            phase, count = ("decode", decoding) if decoding else ("prefill", new)
            for part in ("sample", "host"):
                if self.passes[phase]:
                    found[part] = self._at(phase, count, [p[f"{part}_seconds"] for p in self.passes[phase]])
            self.known[key] = found
        return self.known[key]

    def _at(self, phase: str, tokens: int, values: Sequence[float]) -> float:
        """Between the timed passes, over the logarithm of their tokens; 1 where there are none."""
        by_tokens: dict[float, list[float]] = {}
        for one, value in zip(self.passes[phase], values, strict=True):
            by_tokens.setdefault(math.log(one["tokens"]), []).append(value)
        means = [statistics.mean(found) for found in by_tokens.values()]
        return float(np.interp(math.log(max(tokens, 1)), [*by_tokens], means)) if means else 1.0

    def _seconds(self, chunks: list[Chunk]) -> float:
        total, dispatch = 0.0, self.machine.dispatch_seconds(Phase.FORWARD)
        for op, times in forward_pass(self.model, chunks, precision=self.precision).operations():  # type: ignore[arg-type]
            seconds = self.machine.time(op, self.precision).seconds
            if op.kind is Kind.MATMUL and op.matmul is not None and op.matmul[0] < ROWS_READ:
                seconds *= self.read
            total += (seconds + dispatch) * times
        return total
