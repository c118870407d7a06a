"""Prompts computed by some copies of a model, answers by others: the cache of every prompt crosses a link in between.

No prompt delays an answer, and prompts wait for prompts alone (Splitwise, arXiv 2311.18677; DistServe, 2401.09670). The
copies that compute prompts are played like a server whose answers have one token; the others decode, at a steady rate,
as many at once as arrive in the time that one takes (Little's law).
"""

from __future__ import annotations

from dataclasses import replace

from ironlaw.errors import UserError
from ironlaw.plan.serving.request import ServeRequest
from ironlaw.plan.serving.simulate import Played, play
from ironlaw.plan.serving.systems import ServingLayout
from ironlaw.plan.serving.timing import LINK_FRACTION, System, decode_seconds, pass_parts, prompt_seconds


def transfer_seconds(system: System, tokens: int) -> float:
    """Of the cache of a prompt, each rank's part over its own link."""
    held = system.demand.cached * float(system.demand.cached_tokens(tokens)) * system.cache_bytes
    return float(held / system.cache_parts / (LINK_FRACTION * system.link))


def play_apart(
    system: System, layout: ServingLayout, request: ServeRequest, kv_tokens: float, most: int, *, budget: int, seed: int
) -> Played:
    """As `play`, per decoding copy. UserError without a rate."""
    if request.rate is None:
        raise UserError("--layout prefill= is planned for requests that arrive at a rate: write rate=10/s in --serve")
    asked = replace(request, output=1, rate=request.rate / layout.prefill)
    prompts = play(system, asked, kv_tokens, most, budget=budget, seed=seed)
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
    """Output tokens per second of all copies where requests never run out: of prompts or of answers, the slower."""
    prompts = layout.prefill / float(prompt_seconds(system, 1.0, request.input - request.prefix, request.prefix))
    answers = layout.replicas * most / float(decode_seconds(system, float(most), request.length))
    return min(prompts * request.output, answers)
