"""Passes of our own engine on this machine: the operations of `workload/serving.py`, timed by the measured curves.

    clock = MeasuredClock(model, load_profile(), "fp32", passes)
    clock.parts(decoding=8, length=300.0, new=0, cached=0.0)      # seconds by what they are spent on

The server times some passes when it starts (`serve/warmup.py`). Curves say how a pass grows with batch and length, the
nearest such passes how long it takes: what they take over their own plan is interpolated over the logarithm of tokens.
Without them the curves stand alone, and what the host does between passes is not planned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ironlaw.catalog.formats import number_format
from ironlaw.ledger import Kind, Phase
from ironlaw.machine import interference
from ironlaw.machine.profile import Profile
from ironlaw.model.config import ModelConfig
from ironlaw.plan.machines import MeasuredMachine, measured_precision
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
        self.over = {
            "decode": [p["model_seconds"] / self._seconds([Chunk(1, round(p["length"]))] * p["tokens"])
                       for p in self.passes["decode"]],
            "prefill": [p["model_seconds"] / self._seconds([Chunk(p["tokens"] // p["requests"])] * p["requests"])
                        for p in self.passes["prefill"]],
        }  # fmt: skip

    def parts(self, decoding: int, length: float, new: int, cached: float) -> dict[str, float]:
        """Seconds of a token of each of `decoding` sequences behind `length` others, and of `new` prompt tokens beside
        them behind `cached`: decode, prompts, and, where passes were timed, sampling and host."""
        key = (decoding, round(length / LENGTHS), new, round(cached / LENGTHS))
        if key not in self.known:
            tokens = [Chunk(1, key[1] * LENGTHS)] * decoding
            alone = self._seconds(tokens) if decoding else 0.0
            both = self._seconds([*tokens, Chunk(new, key[3] * LENGTHS)]) if new else alone
            found = {"decode": alone * self._at("decode", decoding, self.over["decode"]),
                     "prompts": (both - alone) * self._at("prefill", new, self.over["prefill"])}  # fmt: skip
            for part in ("sample", "host"):
                if self.passes["decode"]:
                    found[part] = self._at("decode", decoding, [p[f"{part}_seconds"] for p in self.passes["decode"]])
            self.known[key] = found
        return self.known[key]

    def _at(self, phase: str, tokens: int, values: Sequence[float]) -> float:
        """Between the timed passes, over the logarithm of their tokens; 1 where there are none."""
        at = [math.log(p["tokens"]) for p in self.passes[phase]]
        return float(np.interp(math.log(max(tokens, 1)), at, values)) if at else 1.0

    def _seconds(self, chunks: list[Chunk]) -> float:
        total, dispatch = 0.0, self.machine.dispatch_seconds(Phase.FORWARD)
        for op, times in forward_pass(self.model, chunks, precision=self.precision).operations():  # type: ignore[arg-type]
            seconds = self.machine.time(op, self.precision).seconds
            if op.kind is Kind.MATMUL and op.matmul is not None and op.matmul[0] < ROWS_READ:
                seconds *= self.read
            total += (seconds + dispatch) * times
        return total
