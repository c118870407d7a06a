"""Rates of many requests without a clock: so many at once, or as many as the cache holds.

Over the life of C requests every one brings a prompt and `outputs` tokens, and a pass gives a token to each of C:

    seconds = C x prompt + outputs x decode(C)

whether the prompts come first or between. Parts of a pipeline work on different requests at the same time: C is then
those of one of `pp` lanes. `simulate.py` plays the passes one by one where waiting matters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ironlaw.plan.serving.demand import Number
from ironlaw.plan.serving.rates import ServingEngine
from ironlaw.plan.serving.timing import BUDGET_TOKENS, System, decode_seconds, prompt_seconds, room_tokens


@dataclass(frozen=True)
class Steady:
    ttft_seconds: Number
    tpot_seconds: Number
    tokens_per_second: Number


def at_concurrency(system: System, requests: Number, inputs: Number, outputs: Number, together: bool) -> Steady:
    """`requests` at once. `together`: they start as one batch; else one follows the end of another."""
    new = np.maximum(outputs, 1.0)
    if together:
        decode = decode_seconds(system, requests, inputs + outputs / 2)
        prompts = prompt_seconds(system, requests, np.maximum(inputs, 1.0))
        return Steady(prompts, decode, requests * new / (prompts + new * decode))
    lane = np.maximum(requests / system.pp, 1.0)
    decode = decode_seconds(system, lane, inputs + outputs / 2)
    side = np.clip(lane, 1.0, system.attention_dp)  # every copy of attention takes a prompt of its own
    prompt = prompt_seconds(system, side, np.maximum(inputs, 1.0))
    seconds = lane * prompt / side + new * decode
    busy = lane * prompt / side / seconds  # share of the time that other prompts hold the machine
    waiting = decode / 2 + prompt * busy / (2 * np.maximum(1.0 - busy, 0.1))
    return Steady(prompt + waiting, (seconds - prompt) / new, requests * new / seconds)


def most_at_once(system: System, engine: ServingEngine, inputs: Number, outputs: Number) -> Number:
    """Requests whose caches fit, each at its full length, and no more than each copy of attention decodes at once."""
    room = room_tokens(system, engine.memory_fraction, engine.of_free)
    kept = system.demand.cached_tokens(np.maximum(inputs + outputs, 1.0))
    return np.clip(room / np.maximum(kept, 1.0), 1.0, system.rates.most_requests * system.attention_dp)


def unlimited(system: System, requests: Number, inputs: Number, outputs: Number) -> Number:
    """Output tokens per second where more wait than fit. Prompts are passed as many together as the budget takes."""
    side = np.maximum(1.0, BUDGET_TOKENS / np.maximum(inputs, 1.0)) * system.attention_dp
    prompt = prompt_seconds(system, side, np.maximum(inputs, 1.0)) / side
    new = np.maximum(outputs, 1.0)
    lane = np.maximum(requests / system.pp, 1.0)
    seconds = lane * prompt + new * decode_seconds(system, lane, inputs + outputs / 2)
    return requests * new / seconds * np.minimum(system.rates.throughput, 1.2)
