"""Passes that a server takes for itself when it starts: a processor compiles its products for every number of rows, and
how long they take is what the plan of this server starts from (`plan/serving/here.py`)."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from ironlaw.serve.engine import Engine
from ironlaw.serve.request import Sampling

PROMPT, ANSWER = 32, 8  # tokens
LONGEST_SECONDS = 2.0


def warm_up(engine: Engine, seconds: float = LONGEST_SECONDS) -> None:
    """Batches of 1, 2, 4, ... requests, each twice, until the time is over; `engine.passes` has the quicker of both."""
    config, began = engine.config, time.monotonic()
    prompt = min(PROMPT, engine.longest_prompt - ANSWER)
    if prompt < 1:
        return
    # An engine of its own on the same model: the pages, figures and shared beginnings of the other stay as they are.
    blocks = 1 + config.batch * -(-(prompt + ANSWER) // config.block)
    alone = {"speculation": "none", "share_prefixes": False, "blocks": blocks}
    beside, draws = Engine(engine.served, config.model_copy(update=alone)), random.Random(0)
    batch, vocab, took = 1, engine.model_config.vocab, 0.0
    while batch <= config.batch and time.monotonic() - began + 3 * took < seconds:
        start = time.monotonic()
        rounds = []
        for _ in range(2):
            first = beside.trace.count
            prompts = [[draws.randrange(vocab) for _ in range(prompt)] for _ in range(batch)]
            beside.generate(prompts, Sampling(max_tokens=ANSWER, temperature=0, ignore_end=True))
            rounds.append([step.to_json() for step in beside.trace.since(first)])
        took = time.monotonic() - start
        for phase, tokens in (("decode", "decode_tokens"), ("prefill", "prefill_tokens")):
            steps = [step for steps in rounds for step in steps if step["phase"] == phase]
            most = max((step[tokens] for step in steps), default=0)
            engine.passes += _typical(phase, [step for step in steps if step[tokens] == most])
        batch *= 2


def _typical(phase: str, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not steps:
        return []
    middle = min if phase == "prefill" else statistics.median
    model, sampling = (float(middle([s[f"{part}_seconds"] for s in steps])) for part in ("model", "sample"))
    host = float(middle([s["seconds"] - s["model_seconds"] - s["sample_seconds"] for s in steps]))
    length = statistics.mean(s["kv_tokens"] / s["requests"] for s in steps)
    return [{"phase": phase, "requests": steps[0]["requests"], "tokens": steps[0][f"{phase}_tokens"], "length": length,
             "model_seconds": model, "sample_seconds": sampling, "host_seconds": host}]  # fmt: skip
