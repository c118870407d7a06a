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

from ironlaw.ledger import Phase
from ironlaw.machine import interference
from ironlaw.machine.profile import Profile
from ironlaw.model.config import ModelConfig
from ironlaw.plan.machines import MeasuredMachine, measured_precision
from ironlaw.workload.serving import Chunk, forward_pass

LENGTHS = 64  # tokens: passes behind caches of nearly the same length take the same time


class MeasuredClock:
    """`precision`: of the products; `passes`: as `serve/warmup.py` notes them."""

    def __init__(
        self, model: ModelConfig, profile: Profile, precision: str, passes: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self.model, self.precision = model, measured_precision(precision, profile)
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
        operations = forward_pass(self.model, chunks, precision=self.precision).operations()  # type: ignore[arg-type]
        dispatch = self.machine.dispatch_seconds(Phase.FORWARD)
        return sum((self.machine.time(op, self.precision).seconds + dispatch) * times for op, times in operations)
