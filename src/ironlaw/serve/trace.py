"""Records of engine steps, from which the measured ledger is made."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class StepRecord:
    """One engine step. The seconds of its parts add up to `seconds`, except for what lies between them."""

    number: int
    start: float  # seconds, of time.monotonic
    phase: str  # "prefill", "decode", or "mixed" (both)
    requests: int
    prefill_tokens: int
    decode_tokens: int  # drafted ones included
    decode_requests: int
    accepted: int  # drafted tokens that were accepted
    produced: int  # tokens given to clients
    kv_tokens: int  # cached before the step, of the requests in it
    kv_usage: float  # fraction of all pages
    waiting: int
    seconds: float = 0.0
    schedule_seconds: float = 0.0
    model_seconds: float = 0.0
    sample_seconds: float = 0.0
    output_seconds: float = 0.0  # text, stop strings, delivery

    def to_json(self) -> dict[str, Any]:
        return {name: round(v, 7) if isinstance(v, float) else v for name, v in asdict(self).items()}


class Trace:
    """The newest steps, and sums over all steps."""

    def __init__(self, keep: int) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=keep)
        self.count = self.produced = 0

    def add(self, record: StepRecord) -> None:
        self.steps.append(record)
        self.count += 1
        self.produced += record.produced

    def since(self, number: int) -> list[StepRecord]:
        return [step for step in list(self.steps) if step.number >= number]


def bucket(batch: int) -> int:
    """Return the smallest power of two that is not below `batch`."""
    return 1 << max(0, batch - 1).bit_length()
