"""Step-by-step simulation of continuous batching.

Every step generates a token for each running request and fills the rest of the budget with chunks of waiting prompts,
first come first served. A request is admitted if the cache has room for its next tokens. If the cache is full, the
latest request is preempted: it returns to the queue and is recomputed. The clock is `timing.pass_parts`, or passes
timed on this machine (`here.MeasuredClock`).

With disaggregated prefill (Splitwise, arXiv 2311.18677; DistServe, 2401.09670), some copies compute prompts and others
decode. The cache of every prompt crosses a link between them, and prompts delay only prompts. Prefill copies are
simulated as a server with outputs of one token. Decoding copies decode, at a steady rate, as many requests at once as
arrive in the time that one takes (Little's law).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from random import Random
from typing import Protocol

import numpy as np

from ironlaw.errors import UserError
from ironlaw.plan.serving.request import ServeRequest
from ironlaw.plan.serving.systems import ServingLayout
from ironlaw.plan.serving.timing import (
    LINK_FRACTION,
    System,
    at_concurrency,
    decode_parts,
    decode_seconds,
    pass_parts,
    prompt_seconds,
)

REQUESTS = 240
"""Least number simulated. The first and last tenth are not counted, as the engine fills and empties."""

VARIED = 0.25
"""Output lengths are drawn from 1 - this to 1 + this times the mean: equal ones would start and end in lockstep."""

MOST_REQUESTS, MOST_TOKENS = 3000, 3_000_000
MOST_SECONDS = 1e7


@dataclass
class SimulatedRequest:
    arrival: float
    input: int  # tokens of its prompt
    output: int  # tokens of its output
    cached: int = 0  # tokens in the cache
    produced: int = 0
    again: int = 0  # tokens produced before its preemption, which are recomputed with the prompt
    first: float = 0.0
    last: float = 0.0

    @property
    def left(self) -> int:
        """Tokens to compute before the next one is sampled; 0 or less if it decodes."""
        return self.input + self.again - self.cached


class Clock(Protocol):
    request_seconds: float  # that each request takes beside all passes, before its first token

    def parts(self, decoding: int, length: float, new: int, cached: float, prompts: int) -> dict[str, float]:
        """Return the seconds of a step by part: a token for each of `decoding` sequences with `length` cached tokens,
        and `new` tokens of `prompts` prompts with `cached` tokens."""
        ...

    def holds(self, length: float) -> float:
        """Return the tokens of cache that a sequence of `length` occupies."""
        ...


@dataclass
class Played:
    """Results of a simulation: means over steps, and percentiles by name (p50, p90, p99)."""

    ttft_seconds: dict[str, float] = field(default_factory=dict)
    tpot_seconds: dict[str, float] = field(default_factory=dict)
    output_tokens_per_second: float = 0.0
    requests_per_second: float = 0.0
    decode_batch: float = 0.0  # mean number of sequences of the steps that decode
    step_seconds: float = 0.0
    kv_usage: float = 0.0
    waiting: float = 0.0
    preemptions: int = 0
    keeps_up: bool = True
    seconds: dict[str, float] = field(default_factory=dict)  # of a mean step, by part


def play(system: System, request: ServeRequest, kv_tokens: float, most_requests: int) -> Played:
    """Simulate arrivals at `request.rate` (exponential gaps), or `request.concurrency` at once until all are done."""
    requests, draw = _enough(system, request, most_requests), Random(0)
    arrivals, coming = _arrivals(request.rate, requests, draw), []
    for at in arrivals:
        length = max(1, round(request.output * draw.uniform(1 - VARIED, 1 + VARIED)))
        coming.append(SimulatedRequest(at if request.rate else 0.0, request.input, length, cached=request.prefix))
    at_once = None if request.rate else request.concurrency or 1
    budget = int(system.pass_tokens * system.attention_dp)  # every copy of attention has its own
    return replay(_Clock(system), coming, at_once, kv_tokens, most_requests, budget)


def replay(
    clock: Clock, requests: Iterable[SimulatedRequest], at_once: int | None, kv_tokens: float, most_requests: int,
    budget: int,
) -> Played:  # fmt: skip
    """Simulate `requests` at their arrival times, or in a closed loop `at_once` of them, another whenever one ends.

    Raises ValueError if a cache of `kv_tokens` cannot hold one request.
    """
    return _Replay(clock, deque(requests), at_once, kv_tokens, most_requests, budget).play()


@dataclass
class _Replay:
    """State of a simulated engine: its requests, its time, and the seconds of its steps."""

    clock: Clock
    coming: deque[SimulatedRequest]
    at_once: int | None
    kv_tokens: float
    most_requests: int
    budget: int
    now: float = 0.0
    waiting: deque[SimulatedRequest] = field(default_factory=deque)
    running: list[SimulatedRequest] = field(default_factory=list)
    done: list[SimulatedRequest] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=dict)
    made: list[tuple[float, int]] = field(default_factory=list)  # at the end of each step: time, tokens so far
    steps: list[tuple[int, float, int]] = field(default_factory=list)  # decoding, share of the cache used, waiting
    preemptions: int = 0

    def play(self) -> Played:
        for _ in range(min(self.at_once or 0, len(self.coming))):
            self.waiting.append(self.coming.popleft())
        total = len(self.coming) + len(self.waiting)
        while len(self.done) < total and self.now < MOST_SECONDS:
            while self.at_once is None and self.coming and self.coming[0].arrival <= self.now:
                self.waiting.append(self.coming.popleft())
            if self.running or self.waiting:
                self.step()
            else:
                self.now = max(self.now, self.coming[0].arrival)
        return self.summary()

    def step(self) -> None:
        kept = self.make_room()
        decoding = [one for one in self.running if one.left <= 0]
        held = sum(one.cached for one in decoding)
        chunk, behind, prompts, kept = self.fill(self.budget - len(decoding), kept)
        if not decoding and not chunk:  # no step could ever make progress
            raise ValueError(f"a cache of {self.kv_tokens:.0f} tokens holds no request of {self.waiting[0].input}")
        mean = held / len(decoding) if decoding else 0.0
        parts = self.clock.parts(len(decoding), mean, chunk, behind / chunk if chunk else 0.0, prompts)
        self.now += sum(parts.values())
        for name, value in parts.items():
            self.spent[name] = self.spent.get(name, 0.0) + value
        self.steps.append((len(decoding), kept / max(self.kv_tokens, 1.0), len(self.waiting)))
        self.give()

    def make_room(self) -> float:
        """Preempt the latest requests until the running ones fit, and return the tokens of cache they need next."""
        kept = 0.0
        for one in self.running:
            kept += self.clock.holds(one.cached + (one.left <= 0))
        while kept > self.kv_tokens and len(self.running) > 1:
            last = self.running.pop()
            kept -= self.clock.holds(last.cached + (last.left <= 0))
            last.again, last.cached = last.produced, 0
            self.waiting.appendleft(last)
            self.preemptions += 1
        return kept

    def fill(self, left: int, kept: float) -> tuple[int, float, int, float]:
        """Fill the rest of the budget with chunks of prompts. Returns new tokens, the sum over them of the tokens
        cached before, prompts, and the tokens then in the cache."""
        prefilling = deque(one for one in self.running if one.left > 0)
        chunk, behind, prompts = 0, 0.0, 0
        while left > 0:
            is_place = self.waiting and len(self.running) < self.most_requests
            if prefilling:
                one = prefilling.popleft()
            elif is_place and kept + self.clock.holds(min(left, self.waiting[0].left)) <= self.kv_tokens:
                one = self.waiting.popleft()
                self.running.append(one)
            else:
                break
            part = min(left, one.left)
            behind += one.cached * part
            kept += self.clock.holds(one.cached + part) - self.clock.holds(one.cached)
            one.cached += part
            chunk, left, prompts = chunk + part, left - part, prompts + 1
        return chunk, behind, prompts, kept

    def give(self) -> None:
        """Give a token to each request with nothing left to compute; in a closed loop, start another where one ends."""
        given = self.made[-1][1] if self.made else 0
        for one in list(self.running):
            if one.left > 0:
                continue
            one.produced += 1
            given += 1
            one.cached += 1
            if one.produced == 1:
                one.first = self.now + self.clock.request_seconds
            if one.produced >= one.output:
                one.last = self.now + self.clock.request_seconds
                self.running.remove(one)
                self.done.append(one)
                if self.at_once is not None and self.coming:
                    self.waiting.append(self.coming.popleft())
                    self.waiting[-1].arrival = self.now
        self.made.append((self.now, given))

    def summary(self) -> Played:
        done = sorted(self.done, key=lambda r: r.arrival)
        edge = len(done) // 10
        seen = done[edge : len(done) - edge] or done
        ttft = np.array([r.first - r.arrival for r in seen])
        tpot = np.array([(r.last - r.first) / max(r.output - 1, 1) for r in seen])
        times, produced = (np.array(column, dtype=float) for column in zip(*self.made, strict=True))
        first, last = np.searchsorted(produced, [0.2 * produced[-1], 0.8 * produced[-1]])
        half, rate, falls_behind = len(ttft) // 2, produced[-1] / times[-1], False
        if self.at_once is None and half > 10:  # those that arrive are served, unless a queue grows
            # It does if waiting grows and fewer requests end than arrive. Either alone is chance near the highest rate.
            arrives, earlier, later = produced[-1] / done[-1].arrival, np.median(ttft[:half]), np.median(ttft[half:])
            falls_behind = bool(later > 1.3 * earlier + 0.2 and rate < 0.97 * arrives)
            rate = rate if falls_behind else arrives
        elif last > first:  # the middle, without the filling and emptying of the engine
            rate = (produced[last] - produced[first]) / (times[last] - times[first])
        count, (decoding, usage, queue) = len(self.steps), (list(column) for column in zip(*self.steps, strict=True))
        return Played(
            ttft_seconds={f"p{p}": float(np.percentile(ttft, p)) for p in (50, 90, 99)},
            tpot_seconds={f"p{p}": float(np.percentile(tpot, p)) for p in (50, 90, 99)} | {"mean": float(tpot.mean())},
            output_tokens_per_second=float(rate),
            requests_per_second=float(rate * len(done) / produced[-1]),
            decode_batch=sum(decoding) / max(count - decoding.count(0), 1),
            step_seconds=sum(self.spent.values()) / count,
            kv_usage=sum(usage) / count,
            waiting=sum(queue) / count,
            preemptions=self.preemptions,
            keeps_up=not falls_behind,
            seconds={name: value / count for name, value in self.spent.items()},
        )


class _Clock:
    """`pass_parts` in plain numbers, with the parts that do not depend on cache lengths memoised: batches recur."""

    def __init__(self, system: System) -> None:
        self.system, self.known = system, dict[tuple[int, ...], dict[str, float]]()
        self.windowed, self.window = system.demand.windowed, system.demand.window
        self.request_seconds = float(system.rates.request_seconds)
        # Seconds per cached token, the draft model's included.
        one, two = (decode_parts(system, 1.0, length) for length in (1.0, 2.0))
        self.cache_seconds = sum(float(two[name] - one[name]) for name in ("cache", "draft") if name in one)

    def parts(self, decoding: int, length: float, new: int, cached: float, prompts: int) -> dict[str, float]:
        side = max(1, min(prompts, int(self.system.attention_dp)))
        key = (decoding, new, round(cached / 128), side)
        if key not in self.known:
            parts = pass_parts(self.system, float(decoding), 1.0, float(new), cached, float(side))
            self.known[key] = {name: float(value) for name, value in parts.items()}
        return self.known[key] | {"cache": decoding * self.holds(length) * self.cache_seconds}

    def holds(self, length: float) -> float:
        """Return `Demand.cached_tokens` in plain numbers: it is called hundreds of thousands of times."""
        return length - self.windowed * max(length - self.window, 0.0)


def _arrivals(rate: float | None, requests: int, draw: Random) -> deque[float]:
    """Return times with exponential gaps, scaled so that their mean is that of the rate: a sample of few hundred has
    one that is several percent off."""
    ends = [*accumulate(draw.expovariate(1.0) for _ in range(requests))]
    return deque(end / ends[-1] * requests / (rate or 1.0) for end in ends)


def _enough(system: System, request: ServeRequest, most_requests: int) -> int:
    """Return ten times the requests in flight, so that filling and emptying are the tenths that are not counted. Near
    the highest rate that an engine keeps up with, a shorter run ends before the queue has grown."""
    rate, in_flight = request.rate or 0.0, float(request.concurrency or 1)
    for _ in range(50 if rate else 0):
        lanes = in_flight * float(system.pp)
        inputs, cached = request.input - request.prefix, request.prefix
        steady = at_concurrency(system, lanes, inputs, request.output, together=False, cached=cached)
        seconds = float(steady.ttft_seconds + request.output * steady.tpot_seconds)
        in_flight = min(max(1.0, rate * seconds), most_requests)
    return int(min(max(REQUESTS, 10 * in_flight), MOST_REQUESTS, max(4 * REQUESTS, MOST_TOKENS / request.output)))


def transfer_seconds(system: System, tokens: int) -> float:
    """Return the seconds to send a prompt's cache, each rank's part over its own link."""
    held = system.demand.cached * float(system.demand.cached_tokens(tokens)) * system.cache_bytes
    return float(held / system.cache_parts / (LINK_FRACTION * system.link))


def play_apart(system: System, layout: ServingLayout, request: ServeRequest, kv_tokens: float, most: int) -> Played:
    """Simulate disaggregated prefill and return results per decoding copy. Raises UserError without a rate."""
    if request.rate is None:
        raise UserError("--layout prefill= is planned for requests that arrive at a rate: write rate=10/s in --serve")
    asked = replace(request, output=1, rate=request.rate / layout.prefill)
    prompts = play(system, asked, kv_tokens, most)
    rate, batch = request.rate / layout.replicas, 1.0
    for _ in range(100):
        batch = min(float(most), rate * request.output * float(decode_seconds(system, max(batch, 1.0), request.length)))
    seconds = float(decode_seconds(system, max(batch, 1.0), request.length))
    reached = min(rate, prompts.requests_per_second * layout.prefill / layout.replicas, most / seconds / request.output)
    token = seconds + transfer_seconds(system, request.input) / max(1, request.output - 1)
    return Played(
        ttft_seconds=prompts.ttft_seconds, tpot_seconds=dict.fromkeys(("p50", "p90", "p99", "mean"), token),
        output_tokens_per_second=reached * request.output, requests_per_second=reached, decode_batch=batch,
        step_seconds=seconds, kv_usage=batch * request.length / kv_tokens, waiting=prompts.waiting,
        keeps_up=prompts.keeps_up and batch < most,
        seconds={name: float(value) for name, value in pass_parts(system, max(batch, 1.0), request.length).items()},
    )  # fmt: skip


def most_apart(system: System, layout: ServingLayout, request: ServeRequest, most: int) -> float:
    """Return all copies' output tokens per second with an endless queue: the slower of prefill and decoding."""
    each = prompt_seconds(system, 1.0, request.input - request.prefix, request.prefix)
    prompts = layout.prefill / float(each)
    answers = layout.replicas * most / float(decode_seconds(system, float(most), request.length))
    return min(prompts * request.output, answers)
