"""Warm-up of a server: a CPU compiles its products for every number of rows, and the measured times are the basis of
the plan for this server (`plan/serving/here.py`).

The requests come from clients in another process, over a socket, as under load: text, events, sockets and clients take
their share of the interpreter and of the cores.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import torch
import uvicorn

from ironlaw.serve.api import create_app
from ironlaw.serve.engine import Engine
from ironlaw.serve.load import run_until_interrupted
from ironlaw.serve.measured import gaps

PROMPT, LONG_PROMPT, ANSWER = 32, 128, 16  # tokens
LONG_BATCH = 16  # largest batch timed with long prompts, too: a cached token costs the same in every batch
MAX_PAGES = 256
MAX_SECONDS = 2.0
CLIENT_SECONDS = 60.0  # limit for clients to start, to ask and to be answered
GROWTH = 0.7  # assumed exponent of the time of a batch in its size: 1 for prompts, 0 for reading weights


def warm_up(engine: Engine, seconds: float = MAX_SECONDS) -> None:
    """Answer batches of requests, of sizes far apart first, then of those between, while time is left. `engine.passes`
    receives the measured times by phase, tokens and length of the caches."""
    longest = engine.longest_prompt - ANSWER
    if longest >= 1:
        run_until_interrupted(_warm_up(engine, seconds, min(PROMPT, longest), min(LONG_PROMPT, longest)))


async def _warm_up(engine: Engine, seconds: float, prompt: int, long: int) -> None:
    """Use a separate engine on the same model, so that pages, statistics and shared prefixes of `engine` do not
    change."""
    config, key, size, groups = engine.config, secrets.token_hex(), engine.config.block, len(engine.blocks.windows)
    pages = (groups * -(-(tokens + ANSWER) // size) * n for tokens, n in ((prompt, config.batch), (long, LONG_BATCH)))
    most = max(MAX_PAGES, engine.blocks.count // 16)  # a GPU has little memory left beside the pages of `engine`
    alone = {"speculation": "none", "blocks": 1 + min(max(pages), most), "api_keys": (key,)}
    alone |= {"waiting": config.batch, "body_bytes": 2**20}  # limits set by the user do not apply to these clients
    measured = Engine(engine.served, config.model_copy(update=alone))

    async def measure_batch(batch: int, prompt: int) -> list[dict[str, Any]]:
        """Answer `batch` requests whose prompts arrive together. Returns the steps, with the gaps before them."""
        first, began = measured.trace.count, time.monotonic()
        answered = asyncio.create_task(exchange(batch, prompt, ANSWER))
        async with asyncio.timeout(CLIENT_SECONDS):
            while measured.waiting < batch and not answered.done():
                await asyncio.sleep(1e-4)
        engine.request_seconds = (time.monotonic() - began) / batch
        await asyncio.to_thread(_run_until_done, measured)
        await answered
        steps = [step.to_json() for step in measured.trace.since(first)]
        return [step | {"gap_seconds": gap} for step, gap in zip(steps, gaps(steps), strict=True)]

    # Without clients nothing is timed, and the plan uses the machine's own measurements.
    with suppress(OSError):
        async with _clients(measured, key) as exchange:
            began, took = time.monotonic(), dict[int, float]()
            sizes = [1 << n for n in range(config.batch.bit_length())]
            for batch in sizes[::2] + sizes[1::2]:
                expected = max((2 * t * (batch / n) ** GROWTH for n, t in took.items() if n < batch), default=0.0)
                if time.monotonic() - began + expected >= seconds:
                    continue
                await measure_batch(batch, prompt)  # compiles
                start = time.monotonic()
                steps = await measure_batch(batch, prompt)
                took[batch] = time.monotonic() - start
                engine.passes += _passes("decode", steps) + _passes("prefill", steps)
                if batch <= LONG_BATCH:
                    engine.passes += _passes("decode", await measure_batch(batch, long))


@asynccontextmanager
async def _clients(engine: Engine, key: str) -> AsyncIterator[Callable[..., Coroutine[Any, Any, None]]]:
    """Run the clients of `engine` in another process (`ironlaw.serve.load`). Yields a function that sends them a line
    and waits for theirs; it raises OSError if they end before."""
    app = create_app(engine)
    app.state.server.loop = asyncio.get_running_loop()
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", access_log=False, lifespan="off"))
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup()
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    # In a separate session, so that only this process receives Ctrl-C.
    words = (sys.executable, "-P", "-m", "ironlaw.serve.load")
    process = await asyncio.create_subprocess_exec(*words, stdin=PIPE, stdout=PIPE, start_new_session=True)
    to_clients, from_clients = process.stdin, process.stdout
    assert to_clients is not None and from_clients is not None

    async def exchange(*words: object) -> None:
        to_clients.write((" ".join(map(str, words)) + "\n").encode())
        if not await asyncio.wait_for(from_clients.readline(), CLIENT_SECONDS):
            raise ConnectionError("the clients have ended")

    try:
        await exchange(url, key, engine.model_config.vocab)
        yield exchange
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await server.shutdown()


def _run_until_done(engine: Engine) -> None:
    """Take steps until no request is left, as `Engine.start` does."""
    torch.set_num_threads(engine.served.threads)
    while engine.waiting or engine.running:
        engine.step()
        engine.after_step()


def _passes(phase: str, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean of the steps that consist of `phase` only and have the most tokens. The first decode step is left
    out, since it follows prompts."""
    most = max((step[f"{phase}_tokens"] for step in steps if step["phase"] == phase), default=0)
    steps = [step for step in steps if step["phase"] == phase and step[f"{phase}_tokens"] == most]
    steps = steps[1:] if phase == "decode" else steps
    if not steps:
        return []
    model, sampling, seconds, gap, cached = (
        statistics.mean(step[name] for step in steps)
        for name in ("model_seconds", "sample_seconds", "seconds", "gap_seconds", "kv_tokens")
    )
    requests = steps[0]["requests"]
    return [{"phase": phase, "requests": requests, "tokens": most, "length": cached / requests, "model_seconds": model,
             "sample_seconds": sampling, "host_seconds": seconds - model - sampling + gap}]  # fmt: skip
