"""Load generator for any server with OpenAI's API, and the latencies that its clients see: `ironlaw bench`.

In an open loop, requests are sent whether earlier ones are answered or not, at the times of a Poisson process or of a
recorded trace. In a closed loop, without a rate, a fixed number is in progress. Refusals are counted, not repeated.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from ironlaw.errors import MAX_INTEGER, UserError
from ironlaw.files import parse_json, read_text
from ironlaw.serve.measured import COUNTERS

_WORDS = (
    "the model and its data when a step of each layer is done or not yet some value was read from that page "
    "for every token in an answer return self if none else"
)

GET_SECONDS = 10
MAX_LINE_BYTES = 2**24  # bytes of one event: a server that never ends its line would fill the memory

_RECORDED_STEPS = 3  # of each phase, under the profiler


@dataclass(frozen=True)
class PlannedRequest:
    """One request to send: when, and of which length."""

    at: float  # seconds after the start
    prompt_tokens: int
    output_tokens: int
    prompt: str | None = None


@dataclass
class RequestOutcome:
    """One request as its client saw it. Times are in seconds, by one clock."""

    at: float
    prompt_tokens: int
    asked_tokens: int
    output_tokens: int = 0
    has_usage: bool = False  # the server told the tokens; else they are those asked for, and pieces of the answer
    status: int = 0  # of HTTP; 0: no response
    error: str | None = None
    ttft: float | None = None
    end: float | None = None  # after the start of the request
    times: list[float] = field(default_factory=list)  # of each piece, after the start of the request

    @property
    def is_ok(self) -> bool:
        return self.error is None and self.output_tokens > 0

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first."""
        if not self.is_ok or self.output_tokens < 2 or self.ttft is None or self.end is None:
            return None
        return (self.end - self.ttft) / (self.output_tokens - 1)

    def to_json(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if k != "times"} | {"tpot": self.tpot}


def poisson(rate: float, requests: int, prompt: int, output: int, seed: int) -> list[PlannedRequest]:
    """Return requests of the given lengths that arrive at a mean of `rate` per second."""
    draws, at, plans = random.Random(seed), 0.0, []
    for _ in range(requests):
        plans.append(PlannedRequest(at, prompt, output))
        at += draws.expovariate(rate) if math.isfinite(rate) else 0.0
    return plans


# Names of a request's time, prompt length and answer length: Mooncake's, Azure's, and those of `requests.jsonl`.
_COLUMNS = (
    ("timestamp", "TIMESTAMP", "at"),
    ("input_length", "ContextTokens", "prompt_tokens"),
    ("output_length", "GeneratedTokens", "output_tokens"),
)


def read_trace(path: Path) -> list[PlannedRequest]:
    """Read JSON lines (or CSV with a header) of `timestamp` in seconds, `input_length`, `output_length`, and `prompt`.

    `prompt` is optional. Also reads Mooncake's traces (milliseconds, recognized by `hash_ids`) and Azure's columns.
    """
    import csv
    import datetime

    try:
        text = read_text(path, "trace")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    is_lines = text.lstrip().startswith("{")
    try:
        lines = [line for line in text.splitlines() if line.strip()]
        rows = [parse_json(line, "a line") for line in lines] if is_lines else list[Any](csv.DictReader(lines))
        plans = []
        for row in rows:
            found: list[Any] = [next((row[name] for name in names if name in row), None) for names in _COLUMNS]
            when, prompt, output = found[0], int(found[1]), int(found[2])
            try:
                at = float(when)
            except ValueError:
                at = datetime.datetime.fromisoformat(str(when)[:26]).timestamp()
            if "hash_ids" in row:
                at /= 1000
            plans.append(PlannedRequest(at, prompt, output, row.get("prompt")))
            if not math.isfinite(at) or min(prompt, output) < 0:
                raise ValueError(f"a request of {prompt} and {output} tokens at {when}")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"{path} is not a trace ({error}): write lines of timestamp, input_length and output_length"
        ) from None
    if not plans:
        raise UserError(f"{path} has no requests")
    first = min(plan.at for plan in plans)
    return sorted((replace(plan, at=plan.at - first) for plan in plans), key=lambda plan: plan.at)


class Client:
    """A minimal HTTP client for streamed answers, with no layers between the socket and the clock."""

    def __init__(self, url: str, model: str | None, key: str | None, timeout: float) -> None:
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            known, port = parts.scheme in ("http", "https") and " " not in url and url.isprintable(), parts.port
        except ValueError:
            known = False
        if not known or not parts.hostname:
            raise UserError(f"{url} is not a server's address: write for example http://127.0.0.1:8000")
        if key and not (key.isascii() and key.isprintable()):
            raise UserError("--api-key has characters that no header can hold: give the key alone")
        if parts.username or parts.query or parts.fragment:
            raise UserError(f"{url} has more than a server's address: leave out names, and all from ? or # on")
        self.url, self.host, self.is_tls = url, parts.hostname, parts.scheme == "https"
        self.port = port or (443 if self.is_tls else 80)
        self.base = parts.path.rstrip("/").removesuffix("/v1")
        self.model, self.timeout = model, timeout
        self.headers = {"Host": parts.netloc, "Connection": "close"}
        if key:
            self.headers["Authorization"] = f"Bearer {key}"

    async def open(self, method: str, path: str, body: Any = None) -> tuple[int, AsyncIterator[bytes], Any]:
        reader, writer = await asyncio.open_connection(self.host, self.port, ssl=self.is_tls or None)
        data = b"" if body is None else json.dumps(body).encode()
        headers = self.headers | {"Content-Length": str(len(data)), "Content-Type": "application/json"}
        head = f"{method} {self.base}{path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items())
        writer.write(head.encode() + b"\r\n" + data)
        status = 100
        while 100 <= status < 200:  # an answer may be announced
            status, found = int((await reader.readline()).split()[1]), dict[str, str]()
            while line := (await reader.readline()).strip():
                name, _, value = line.decode("latin1").partition(":")
                found[name.lower()] = value.strip()
        return status, _lines(reader, found.get("transfer-encoding", "").lower() == "chunked"), writer

    async def get(self, path: str, method: str = "GET") -> tuple[int, Any]:
        """Return the status (0: no answer) and the JSON document, or None if the server has none there."""
        status, data = 0, b""
        with suppress(OSError, ValueError, IndexError, RecursionError, EOFError):  # a TimeoutError is an OSError
            async with asyncio.timeout(GET_SECONDS):
                status, lines, writer = await self.open(method, path)
                data = b"".join([line async for line in lines])
            writer.close()
            return status, json.loads(data) if status == 200 else None
        return status, None

    async def send(
        self, plan: PlannedRequest, prompt: str | list[int], ignore_eos: bool = False, at: float = 0.0
    ) -> RequestOutcome:
        """Send a completion request, `at` seconds after the start of the load, and read its stream."""
        outcome = RequestOutcome(at, plan.prompt_tokens, plan.output_tokens)
        body = {
            "prompt": prompt, "max_tokens": plan.output_tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, "model": self.model,
        } | ({"ignore_eos": True} if ignore_eos else {})  # fmt: skip
        began = time.perf_counter()
        writer = None
        try:
            async with asyncio.timeout(self.timeout):
                status, lines, writer = await self.open("POST", "/v1/completions", body)
                outcome.status = status
                if status == 200:
                    await self._read(lines, outcome, began)
                else:
                    outcome.error = _message(b"".join([line async for line in lines])) or f"HTTP {status}"
        except TimeoutError:
            outcome.error = f"no answer in {self.timeout:g} s"
        except (OSError, EOFError) as error:
            outcome.error = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError):
            outcome.error = "the answer has not OpenAI's form"
        finally:
            outcome.end = time.perf_counter() - began
            if writer is not None:
                writer.close()
        return outcome

    async def _read(self, lines: AsyncIterator[bytes], outcome: RequestOutcome, began: float) -> None:
        done = False
        async for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                done = True
                break
            document = json.loads(data)
            if document.get("error"):
                outcome.error = _message(data) or "an error without a message"
                return
            usage = document.get("usage")
            if usage:
                counts = [int(usage[f"{kind}_tokens"]) for kind in ("completion", "prompt")]
                if not 0 <= min(counts) <= max(counts) <= MAX_INTEGER:
                    raise ValueError(f"{counts} tokens")
                outcome.output_tokens, outcome.prompt_tokens = counts
                outcome.has_usage = True
            for choice in document.get("choices") or ():
                done = done or choice.get("finish_reason") is not None  # some servers send no [DONE]
                if choice.get("text") or choice.get("finish_reason") is None or not outcome.times:
                    outcome.times.append(time.perf_counter() - began)
                    outcome.ttft = outcome.times[0]
        outcome.output_tokens = outcome.output_tokens or len(outcome.times)
        if not done:
            outcome.error = "the answer broke off" if outcome.times else "the answer is no stream of events"


async def _lines(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """Yield the lines of a body, of known length or in chunks."""

    async def piece() -> bytes:
        if not chunked:
            return await reader.read(65536)
        size = int((await reader.readline()).split(b";")[0] or b"0", 16)
        data = await reader.readexactly(size) if size else b""
        await reader.readline()
        return data

    rest = b""
    while data := await piece():
        *whole, rest = (rest + data).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise ValueError("a line without an end")
        for line in whole:
            yield line
    if rest:
        yield rest


def _message(data: bytes) -> str | None:
    try:
        error = json.loads(data)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:200]
    except (ValueError, KeyError, TypeError):
        return None


@dataclass
class Report:
    """The results of a load test."""

    outcomes: list[RequestOutcome] = field(default_factory=list)  # of the requests that have ended
    seconds: float = 0.0
    server: dict[str, Any] | None = None  # steps and facts of an Ironlaw server


def run_until_interrupted(work: Coroutine[Any, Any, None]) -> None:
    """Run asynchronous work. Ctrl-C cancels its tasks and raises KeyboardInterrupt.

    asyncio does so only where the signal has its default handler. Raised by another one within a task, the interruption
    would stay with that task, whose traceback is printed when it is collected.
    """
    if threading.current_thread() is not threading.main_thread():
        asyncio.run(work)
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        asyncio.run(work)
    finally:
        signal.signal(signal.SIGINT, before)


async def run(
    client: Client, plans: Sequence[PlannedRequest], report: Report, *, concurrency: int | None, ignore_eos: bool,
    shared_prefix: int = 0, profile: bool = False, progress: Callable[[float], None] = lambda done: None,
) -> None:  # fmt: skip
    """Send requests and fill `report`, which after an interruption has the requests that ended before it.

    `concurrency`: number in progress, whatever the plans' times; None: at their times. `profile`: an Ironlaw server
    records a few steps by operation, afterwards, since a profiler slows small steps severalfold.
    """
    status, models = await client.get("/v1/models")
    if status in (401, 403):
        raise UserError(f"the server at {client.url} wants a key: give --api-key, or set OPENAI_API_KEY")
    if models is None:
        raise UserError(f"no OpenAI-compatible server answers at {client.url}: start one first")
    try:
        client.model = client.model or models["data"][0]["id"]
    except (IndexError, KeyError, TypeError):
        raise UserError(f"the server at {client.url} names no model: give --model NAME") from None
    prompts = await _prompts(client, plans, shared_prefix)
    _, before = await client.get("/steps?since=999999999")
    limit = asyncio.Semaphore(concurrency or len(plans))
    began, done = time.perf_counter(), 0

    async def one(plan: PlannedRequest, prompt: str | list[int]) -> RequestOutcome:
        nonlocal done
        if concurrency is None:
            await asyncio.sleep(max(0.0, began + plan.at - time.perf_counter()))
        async with limit:
            outcome = await client.send(plan, prompt, ignore_eos, time.perf_counter() - began)
        done += 1
        progress(done / len(plans))
        return outcome

    tasks = [asyncio.create_task(one(p, t)) for p, t in zip(plans, prompts, strict=True)]
    try:
        await asyncio.gather(*tasks)
    finally:
        ended = [task for task in tasks if task.done() and not task.cancelled() and task.exception() is None]
        report.outcomes = [task.result() for task in ended]
        report.seconds = time.perf_counter() - began
    server = None
    with suppress(KeyError, TypeError):  # some foreign servers answer every path
        if before["facts"]["engine"] == "ironlaw":
            _, server = await client.get(f"/steps?since={before['next']}&after={before['now']}")
    if server is not None:
        for name in COUNTERS:  # what counts is this load's share
            server["facts"][name] -= before["facts"][name]
        server["lost_steps"] = server["steps"][0]["number"] - before["next"] if server["steps"] else 0
    if server is not None and profile:
        some = plans[: max((step["requests"] for step in server["steps"]), default=1)]
        server["lines"] = await _profiled(client, some, await _prompts(client, some, shared_prefix, seed=8))
    report.server = server


async def _profiled(client: Client, plans: Sequence[PlannedRequest], prompts: Sequence[str]) -> list[Any]:
    """Return the operations of a few steps, with such requests all at once and short answers."""
    await client.get(f"/profile?steps={_RECORDED_STEPS}", "POST")
    short = [replace(plan, output_tokens=min(plan.output_tokens, _RECORDED_STEPS + 3)) for plan in plans]
    await asyncio.gather(*map(client.send, short, prompts))
    _, found = await client.get("/steps?since=999999999")
    return [] if found is None else list(found["lines"])


async def _prompts(client: Client, plans: Sequence[PlannedRequest], shared: int, seed: int = 7) -> list[str]:
    """Return texts with about the wanted numbers of tokens. A first request measures the tokens per word."""
    draws, words = random.Random(seed), _WORDS.split()
    probe = [draws.choice(words) for _ in range(64)]
    for count in (64, 2):  # two words for a model of a short context
        outcome = await client.send(PlannedRequest(0.0, 0, 1), " ".join(probe[:count]))
        if outcome.error is None:
            break
    else:
        raise UserError(f"the server refuses a first request: {outcome.error}")
    per_word = max(0.25, outcome.prompt_tokens / count) if outcome.has_usage else 1.0
    start = " ".join(draws.choice(words) for _ in range(round(shared / per_word)))

    def text(plan: PlannedRequest) -> str:
        if plan.prompt is not None:
            return plan.prompt
        count = max(1, round((plan.prompt_tokens - shared) / per_word))
        return f"{start} {' '.join(draws.choice(words) for _ in range(count))}".strip()

    return [text(plan) for plan in plans]


def summary(report: Report, ttft_limit: float | None = None, tpot_limit: float | None = None) -> dict[str, Any]:
    """Return counts, percentiles and rates, as printed by `ironlaw bench --json`."""
    good = [o for o in report.outcomes if o.is_ok]
    refused = [o for o in report.outcomes if o.status in (429, 503)]
    failed = [o for o in report.outcomes if not o.is_ok and o.status not in (429, 503)]
    errors = Counter(o.error or "empty answer" for o in failed)
    first, each = ttft_limit or math.inf, tpot_limit or math.inf
    within = [o for o in good if (o.ttft or 0.0) <= first and (o.tpot or 0.0) <= each]
    gaps = [b - a for o in good for a, b in pairwise(o.times)]
    tokens = sum(o.output_tokens for o in good)
    asked = sum(o.prompt_tokens for o in good) if all(o.has_usage for o in good) else None
    return {
        "requests": len(report.outcomes), "completed": len(good), "refused": len(refused),
        "errors": len(failed), "error_messages": errors, "seconds": report.seconds,
        "requests_per_second": len(good) / report.seconds,
        "output_tokens": tokens, "output_tokens_per_second": tokens / report.seconds,
        "prompt_tokens": asked,  # None: the server does not tell them, and its output tokens are pieces of answers
        "total_tokens_per_second": None if asked is None else (tokens + asked) / report.seconds,
        "ttft_seconds": percentiles([o.ttft for o in good]), "tpot_seconds": percentiles([o.tpot for o in good]),
        "inter_token_seconds": percentiles(gaps),
        "e2e_seconds": percentiles([o.end for o in good]),
        "queue_seconds": percentiles((report.server or {}).get("queue_seconds", [])),
        "goodput_requests_per_second": len(within) / report.seconds,
        "goodput_share": len(within) / len(report.outcomes),
        "limits": {"ttft_seconds": ttft_limit, "tpot_seconds": tpot_limit},
    }  # fmt: skip


def percentiles(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"mean": float(np.mean(known))} | {f"p{q}": float(np.percentile(known, q)) for q in (10, 50, 90, 95, 99)}


async def _run_clients() -> None:
    """Send random prompts to a server that warms up. The first line of standard input has URL, key and vocabulary size
    (everybody could see the key on a command line), every other line the sizes of one batch."""
    url, key, vocab = sys.stdin.readline().split()
    client, draws = Client(url, None, key, 60.0), random.Random(0)
    print(flush=True)
    for line in sys.stdin:
        count, prompt, answer = map(int, line.split())
        plan = PlannedRequest(0.0, prompt, answer)
        prompts = [[draws.randrange(int(vocab)) for _ in range(prompt)] for _ in range(count)]
        await asyncio.gather(*(client.send(plan, one, ignore_eos=True) for one in prompts))
        print(flush=True)


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the server that warmed up was killed
        asyncio.run(_run_clients())
