"""Repeats a load under different settings, in this process: the measurements of `ironlaw tune --serve`.

A fixed number of requests is in progress: when one ends, the next begins. Answers are greedy and of one length, so that
all trials compute the same, except for the rounding of their formats.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ironlaw.cores import usable_cores
from ironlaw.data.loader import Loader
from ironlaw.errors import UserError
from ironlaw.serve.config import ServeConfig
from ironlaw.serve.engine import Engine
from ironlaw.serve.loading import load_served
from ironlaw.serve.request import SamplingParams
from ironlaw.train.compression import text_of
from ironlaw.train.run_directory import RunDirectory


@dataclass(frozen=True)
class TrialResult:
    seconds_per_token: float
    step_seconds: float  # median of decode-only steps
    loss: float  # nats per token of the prompts' second halves


@dataclass(frozen=True)
class Load:
    """A load: `prompts` (token ids, used in turn), `answer` tokens, `at_once` requests, least `seconds` per trial."""

    path: Path
    prompts: Sequence[Sequence[int]]
    answer: int
    at_once: int
    seconds: float = 4.0

    def __call__(self, settings: Mapping[str, Any]) -> TrialResult:
        """Run one trial. Raises UserError if `settings` are not possible."""
        # With shared prefixes, repeated prompts would cost nothing.
        config = ServeConfig(**dict(settings) | {"waiting": self.at_once, "share_prefixes": False})
        engine = Engine(load_served(self.path, config), config)
        sampling = SamplingParams(max_tokens=self.answer, temperature=0, ignore_eos=True)
        engine.generate(self.prompts[: self.at_once], sampling)  # warm-up
        rates: list[float] = []
        first, began = engine.trace.count, time.monotonic()
        while not rates or time.monotonic() - began < self.seconds * (1 if len(rates) > 2 else 3):
            start = time.monotonic()
            requests = engine.generate(self.prompts, sampling, self.at_once)
            rates.append((time.monotonic() - start) / sum(len(request.answer) for request in requests))
        decoding = [step.seconds for step in engine.trace.since(first) if step.phase == "decode"]
        return TrialResult(statistics.median(rates), statistics.median(decoding or [0.0]), self._loss(engine))

    def _loss(self, engine: Engine) -> float:
        scoring = SamplingParams(max_tokens=0, logprobs=0, scores_prompt=True)
        scored = [r.scored[r.prompt_length // 2 + 1 :] for r in engine.generate(self.prompts, scoring, self.at_once)]
        return statistics.mean([-(token.logprob or 0.0) for half in scored for token in half] or [0.0])


def read_prompts(
    path: Path, count: int, tokens: int, vocab: int, data: str | None, say: Any
) -> tuple[list[list[int]], bool]:
    """Cut the held-out text of a run, or of `data`, into prompts. Without text, return random tokens, and False."""
    if data is None and not RunDirectory(path).is_run:
        say("no --data: the prompts are random, so that neither formats nor speculation are tried")
        draws = random.Random(0)
        return [[draws.randrange(vocab) for _ in range(tokens)] for _ in range(count)], False
    config, dataset = text_of(path, data, say)
    stream: list[int] = []
    for batch in Loader(dataset, config.data, config.sequence).validation(1, None):
        stream += batch.inputs.flatten().tolist()
        if len(stream) >= count * tokens:
            break
    prompts = [stream[start : start + tokens] for start in range(0, len(stream) - tokens + 1, tokens)]
    if not prompts:
        raise UserError(f"the held-out text has {len(stream)} tokens, a prompt {tokens}: give more by --data")
    return [prompts[number % len(prompts)] for number in range(count)], True


def resolve_settings(path: Path, config: ServeConfig, say: Any) -> dict[str, Any]:
    """Return the settings with "auto" resolved for this model and machine, its `vocab`, and the usable `cores`."""
    served = load_served(path, config)
    for message in served.notes:
        say(message)
    model = served.model.config
    return config.model_dump() | {
        "weights": served.weights, "kv": served.kv, "threads": served.threads, "cores": usable_cores(),
        "context": min(config.context or model.context, model.context), "vocab": model.vocab,
    }  # fmt: skip
