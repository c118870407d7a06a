"""Passes of our own engine on this machine: the operations of `workload/serving.py`, timed by the measured curves.

    clock = MeasuredClock(model, load_profile(), "fp32")
    clock.parts(decoding=8, length=300.0, new=0, cached=0.0)      # seconds by what they are spent on

What the host does between passes (scheduling, sampling, text) is not planned: nobody has measured it apart.
"""

from __future__ import annotations

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
    in `precision`, and those of few rows as much less as there are fewer bytes to read.

    UserError for models that `forward_pass` does not take.
    """

    def __init__(self, model: ModelConfig, profile: Profile, weights: str) -> None:
        self.model, self.precision = model, measured_precision(weights, profile)
        width = number_format(self.precision).bytes_per_element()
        self.read = min(1.0, number_format(weights).bytes_per_element(weight=True) / width)
        self.machine = MeasuredMachine(profile, interference.typical(profile), whole_steps=False)
        self.known: dict[tuple[int, int, int, int], dict[str, float]] = {}
        self._seconds([Chunk(1, 1)])

    def parts(self, decoding: int, length: float, new: int, cached: float) -> dict[str, float]:
        """As `timing.pass_parts`: a token of each of `decoding` sequences, and `new` prompt tokens beside them."""
        key = (decoding, round(length / LENGTHS), new, round(cached / LENGTHS))
        if key not in self.known:
            tokens = [Chunk(1, key[1] * LENGTHS)] * decoding
            alone = self._seconds(tokens) if decoding else dict.fromkeys(("weights", "cache", "launches"), 0.0)
            both = self._seconds([*tokens, Chunk(new, key[3] * LENGTHS)]) if new else alone
            prompts = sum(both.values()) - sum(alone.values())
            self.known[key] = alone | {"prompts": prompts, "collectives": 0.0, "host": 0.0}
        return self.known[key]

    def _seconds(self, chunks: list[Chunk]) -> dict[str, float]:
        found = {"weights": 0.0, "cache": 0.0, "launches": 0.0}
        for op, times in forward_pass(self.model, chunks, precision=self.precision).operations():  # type: ignore[arg-type]
            seconds = self.machine.time(op, self.precision).seconds * times
            if op.kind is Kind.MATMUL and op.matmul is not None and op.matmul[0] < ROWS_READ:
                seconds *= self.read
            part = {Kind.MATMUL: "weights", Kind.ATTENTION: "cache"}.get(op.kind, "launches")
            found[part] += seconds
            found["launches"] += self.machine.dispatch_seconds(Phase.FORWARD) * times
        return found
