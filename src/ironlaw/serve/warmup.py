"""Passes that a server takes for itself when it starts: a processor compiles its products for every number of rows, and
how long they take is what the plan of this server starts from (`plan/serving/here.py`).

They are requests to the whole server but for its socket: text, events and the event loop take their share of the
interpreter beside the engine's thread, as they will under load.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from typing import Any

from ironlaw.serve.api import create_app
from ironlaw.serve.engine import Engine
from ironlaw.serve.measured import gaps

PROMPT, LONG_PROMPT, ANSWER = 32, 128, 8  # tokens
LONG_BATCH = 16  # up to so many requests with long prompts as well: what a cached token costs is the same for all
LONGEST_SECONDS = 2.0
GROWTH = 0.7  # power of the batch that a round's time grows by: prompts by 1, the reading of weights by 0; assumed


def warm_up(engine: Engine, seconds: float = LONGEST_SECONDS) -> None:
    """Batches of requests: far apart first, then between them, as long as there is time. `engine.passes` has what they
    took, by phase, tokens and length of the caches."""
    config, began, longest = engine.config, time.monotonic(), engine.longest_prompt - ANSWER
    if longest < 1:
        return
    prompt, long = min(PROMPT, longest), min(LONG_PROMPT, longest)
    sizes = [1 << n for n in range(config.batch.bit_length())]
    took: dict[int, float] = {}
    for batch in sizes[::2] + sizes[1::2]:
        expected = max((2 * t * (batch / n) ** GROWTH for n, t in took.items() if n < batch), default=0.0)
        if time.monotonic() - began + expected >= seconds:
            continue
        steps = _steps(engine, batch, prompt)  # compiles
        start = time.monotonic()
        steps += _steps(engine, batch, prompt)
        took[batch] = time.monotonic() - start
        engine.passes += _passes("decode", steps) + _passes("prefill", steps)
        if batch <= LONG_BATCH:
            engine.passes += _passes("decode", _steps(engine, batch, long))


def _steps(engine: Engine, batch: int, prompt: int) -> list[dict[str, Any]]:
    """Of `batch` streamed answers by an engine of its own on the same model: pages, figures and shared beginnings of
    the other stay as they are."""
    config, draws, vocab = engine.config, random.Random(prompt), engine.model_config.vocab
    blocks = 1 + batch * -(-(prompt + ANSWER) // config.block)
    alone = {"speculation": "none", "blocks": blocks, "batch": batch, "api_keys": ()}
    beside = Engine(engine.served, config.model_copy(update=alone))
    app = create_app(beside)

    async def ask() -> None:
        body = {"prompt": [draws.randrange(vocab) for _ in range(prompt)], "max_tokens": ANSWER, "temperature": 0,
                "ignore_eos": True, "stream": True}  # fmt: skip
        messages = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])

        async def receive() -> Any:
            return next(messages, None) or await asyncio.Event().wait()

        async def send(message: Any) -> None:
            pass

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
        await app(scope, receive, send)

    async def ask_all() -> None:
        app.state.server.outbox.attach(asyncio.get_running_loop())
        asked = [asyncio.ensure_future(ask()) for _ in range(batch)]
        while beside.waiting < batch and not any(one.done() for one in asked):
            await asyncio.sleep(0)
        beside.start()  # all prompts wait: they are computed together, as many as fit into a step
        await asyncio.gather(*asked)
        await asyncio.to_thread(beside.drain, 0.0)

    asyncio.run(ask_all())
    steps = [step.to_json() for step in beside.trace.steps]
    return [step | {"gap_seconds": gap} for step, gap in zip(steps, gaps(steps), strict=True)]


def _passes(phase: str, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A typical one of those that are only `phase`, of the most tokens."""
    most = max((step[f"{phase}_tokens"] for step in steps if step["phase"] == phase), default=0)
    steps = [step for step in steps if step["phase"] == phase and step[f"{phase}_tokens"] == most]
    if not steps:
        return []
    middle = min if phase == "prefill" else statistics.median  # one prompt a round, and the first compiles
    model, sampling = (float(middle([s[f"{part}_seconds"] for s in steps])) for part in ("model", "sample"))
    host = float(middle([s["seconds"] - s["model_seconds"] - s["sample_seconds"] + s["gap_seconds"] for s in steps]))
    length = statistics.mean(s["kv_tokens"] / s["requests"] for s in steps)
    return [{"phase": phase, "requests": steps[0]["requests"], "tokens": most, "length": length,
             "model_seconds": model, "sample_seconds": sampling, "host_seconds": host}]  # fmt: skip
