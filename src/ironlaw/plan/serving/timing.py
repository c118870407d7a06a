"""Seconds of a pass: a token of every sequence (`decode_seconds`), or prompts (`prompt_seconds`).

    decode = step + layers x layer + |weights read, products| + cache read + exchanges
    prompt = prompt + layers x layer + |products (1 + ramp / tokens) + attention, weights read| + exchanges

|a, b| is the cubic mean of two times of which the longer rules: reading and multiplying overlap, but not wholly.
Exchanges are sums over tensor parallel ranks, and tokens on their way to experts on other devices.
All arguments may be arrays over many systems at once.

Rates of many requests follow without a clock. Over the life of C of them every one brings a prompt and `outputs`
tokens, and a pass gives a token to each: seconds = C x prompt + outputs x decode(C), whether the prompts come first or
between. Parts of a pipeline work on different requests at the same time: C is then those of one of `pp` lanes.
`simulate.py` plays the passes one by one where waiting matters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ironlaw.plan.serving.demand import Demand, Number
from ironlaw.plan.serving.rates import Rates, ServingEngine

LINK_FRACTION = 0.7
"""Of the nominal rate of a link, that large sums over ranks reach."""

BUDGET_TOKENS = 8192
"""New tokens of a pass: what vLLM and TensorRT-LLM take at most by default (max_num_batched_tokens)."""

LIBRARY_BYTES, EXCHANGE_BYTES = 0.7e9, 2.0e9
"""Of each device: captured graphs and the framework's libraries; buffers of sums over ranks, where there are several.
Both are the order of what vLLM prints of memory that PyTorch did not take (vllm-project/vllm pull requests 2031 and
10511).
"""

SAMPLED_BYTES = 2 + 4 + 4 + 8 + 4 + 4
"""Of each row and entry of the vocabulary while tokens are drawn: logits in 16 and 32 bits, sorted, their places,
probabilities, and their sums."""

UNSURE_BYTES = 1.5e9
"""Of each device, about what a release, its buffers and its graphs take more or less than is planned: vLLM printed 0.2
to 3.6 GiB beside PyTorch's memory (pull requests 10511 and 12126)."""


@dataclass(frozen=True)
class System:
    """Devices that hold one copy of the model together, and what they hold it in."""

    demand: Demand
    rates: Rates
    devices: Number  # all of them; experts are divided over `devices / pp`
    tp: Number  # that divide every matrix
    pp: Number  # parts of the layers one after another
    attention_dp: Number  # copies of attention, each with its own sequences
    bandwidth: Number  # of the memory of one device, bytes/s
    link: Number  # of one device, bytes/s
    memory: Number  # of one device, bytes
    peak: Number  # of products, FLOP/s
    wide_peak: Number  # of 16-bit attention, FLOP/s
    dense_bytes: Number  # per element, as the three that follow
    head_bytes: Number
    expert_bytes: Number
    cache_bytes: Number
    sampled: Number = 0.0  # rows of logits that the engine leaves room for
    drafted: Number = 0.0  # tokens proposed to a pass
    acceptance: Number = 0.0  # the chance that one stands
    draft: System | None = None  # what proposes them, on the same devices; None: what takes no time, as n-grams

    @property
    def together(self) -> Number:
        """Devices that work on the same token at the same time."""
        return np.maximum(self.devices / self.pp, 1.0)

    @property
    def weight_bytes(self) -> Number:
        """Of all weights, on all devices together; copies of attention have all but the experts."""
        d = self.demand
        dense = (d.dense - d.head) * self.dense_bytes + (d.head + d.table) * self.head_bytes
        return dense * self.attention_dp + d.experts * self.expert_bytes

    @property
    def cache_parts(self) -> Number:
        """Ranks that share a sequence's cache: no more than it has heads."""
        return np.minimum(self.tp, np.maximum(self.demand.heads_cached, 1.0))

    @property
    def workspace_bytes(self) -> Number:
        """Of one device: libraries, the outputs of a layer's matrices for the largest pass in 16 bits, and what tokens
        are drawn from."""
        d = self.demand
        widths = d.active / (d.layers * d.hidden * self.tp) + d.chosen * d.hidden  # each expert's, before their sum
        passes = 2.0 * BUDGET_TOKENS * widths + SAMPLED_BYTES * self.sampled * d.vocab
        return LIBRARY_BYTES + passes + np.where(self.tp > 1, EXCHANGE_BYTES, 0.0)

    @property
    def token_bytes(self) -> Number:
        """Of the cache of one token on all devices that hold it, where no window ends it."""
        return self.demand.cached * self.cache_bytes * self.tp / self.cache_parts


def decode_seconds(system: System, sequences: Number, length: Number) -> Number:
    """That give each of `sequences` its next token, behind `length` cached ones each."""
    return sum(decode_parts(system, sequences, length).values())


def decode_parts(system: System, sequences: Number, length: Number) -> dict[str, Number]:
    """The same by what they are spent on. With `drafted` tokens a pass has so many more of each sequence, the draft
    model's passes come before it, and all of it is divided by the tokens that stand."""
    d, r = system.demand, system.rates
    rows = sequences * (1.0 + system.drafted)
    reading = _weights_read(system, rows) / (system.bandwidth * r.weights)
    multiplying = _product_flops(system, rows) / (system.peak * np.minimum(r.products * r.decode_products, 1.0))
    kept = sequences * d.cached_tokens(length) * d.cached * system.cache_bytes
    parts = {
        "weights": _longer(reading, multiplying),
        "cache": kept / system.cache_parts / np.maximum(system.attention_dp, 1.0) / (system.bandwidth * r.cache),
        "collectives": _sums(system, rows) + _exchanges(system, rows),
        "launches": d.layers * r.layer_seconds,
        "host": r.step_seconds,
    }
    if system.draft is not None:
        parts["draft"] = system.drafted * decode_seconds(system.draft, sequences, length)
    stand = tokens_of_a_pass(system.drafted, system.acceptance)
    return {name: seconds / stand for name, seconds in parts.items()}


def tokens_of_a_pass(drafted: Number, acceptance: Number) -> Number:
    """Mean tokens that a pass over `drafted` proposals gives, each accepted with chance `acceptance` if those before
    it were: (1 - a^(k+1)) / (1 - a) (Leviathan, Kalman, Matias 2023, arXiv 2211.17192, equation 1)."""
    return (1.0 - acceptance ** (drafted + 1.0)) / (1.0 - acceptance)


def prompt_seconds(system: System, sequences: Number, tokens: Number, cached: Number = 0.0) -> Number:
    """A pass over `tokens` of each of `sequences` prompts, behind `cached` tokens that are there already."""
    d, r = system.demand, system.rates
    all_tokens = np.maximum(sequences * tokens, 1.0)
    reading = _weights_read(system, all_tokens) / (system.bandwidth * r.weights)
    pairs = sequences * tokens * (d.cached_tokens(tokens) / 2 + d.cached_tokens(cached))
    products = _product_flops(system, all_tokens) / (system.peak * r.products) * (1.0 + r.ramp_tokens / all_tokens)
    copies = np.clip(sequences, 1.0, np.maximum(system.attention_dp, 1.0))  # of attention, each with its own sequences
    attention = pairs * d.pair_flops / system.tp / copies / (system.wide_peak * r.attention)
    return (
        r.prompt_seconds
        + d.layers * r.layer_seconds
        + _longer(reading, products + attention)
        + _sums(system, all_tokens)
        + _exchanges(system, all_tokens)
    )


def pass_parts(
    system: System, decoding: Number, length: Number, new: Number = 0.0, cached: Number = 0.0
) -> dict[str, Number]:
    """Seconds of one pass by what they are spent on: a token of each of `decoding` sequences behind `length` tokens,
    and `new` prompt tokens behind `cached` ones.

    The sum is `decode_seconds` plus `prompt_seconds`: what a prompt adds to a pass was fitted so, to rates of servers
    that mix both, and is an upper bound where they share the reading of weights.
    """
    some = np.where(np.asarray(decoding) > 0, 1.0, 0.0)
    prompts = np.where(np.asarray(new) > 0, prompt_seconds(system, 1.0, np.maximum(new, 1.0), cached), 0.0)
    return {name: some * seconds for name, seconds in decode_parts(system, decoding, length).items()} | {
        "prompts": prompts
    }


def room_tokens(system: System, memory_fraction: Number = 0.9, of_free: Number = False) -> Number:
    """Tokens whose cache fits beside the weights, over all devices; below 0 where the weights alone do not fit. The
    fraction is one of all memory, or `of_free` memory: what weights and workspace leave."""
    taken = system.weight_bytes + system.workspace_bytes * system.devices
    token_bytes = system.token_bytes
    if system.draft is not None:
        taken, token_bytes = taken + system.draft.weight_bytes, token_bytes + system.draft.token_bytes
    of_all = memory_fraction * system.memory * system.devices
    return (of_all - np.where(of_free, memory_fraction, 1.0) * taken) / token_bytes


def room_error(system: System, tokens: float) -> float:
    """Share by which so many tokens of room are uncertain: little that weights leave hangs much on the workspace."""
    unsure = (UNSURE_BYTES + (EXCHANGE_BYTES if system.tp > 1 else 0.0)) * float(system.devices / system.token_bytes)
    return max(0.05, unsure / max(tokens, 1.0))


def _weights_read(system: System, tokens: Number) -> Number:
    """Bytes of weights that one device reads in a pass."""
    d = system.demand
    dense = ((d.dense - d.head) * system.dense_bytes + d.head * system.head_bytes) / system.tp
    return dense + d.touched(tokens) * system.expert_bytes / system.together


def _product_flops(system: System, tokens: Number) -> Number:
    """Of one device: 2 per weight and token."""
    d = system.demand
    dense = d.dense / (system.tp * np.maximum(system.attention_dp, 1.0))
    return 2.0 * tokens * (dense + d.experts * d.expert_share / system.together)


def _sums(system: System, tokens: Number) -> Number:
    """Two sums of the residual stream a layer, in 16 bits, as rings make them."""
    d, tp = system.demand, system.tp
    sent = 2.0 * (tp - 1.0) / tp * tokens * d.hidden * 2.0 / (LINK_FRACTION * system.link)
    return np.where(tp > 1, 2.0 * d.layers * (system.rates.collective_seconds + sent), 0.0)


def _exchanges(system: System, tokens: Number) -> Number:
    """Experts on more devices than divide attention: tokens go to the devices of their experts and back, 16 bits."""
    d = system.demand
    ranks = system.together
    share = tokens / np.maximum(system.attention_dp, 1.0)
    visited = ranks * (1.0 - (1.0 - 1.0 / ranks) ** d.chosen)  # devices, where experts are chosen independently
    sent = share * visited * (ranks - 1.0) / ranks * d.hidden * 2.0 / (LINK_FRACTION * system.link)
    apart = (system.attention_dp > 1) & (d.expert_layers > 0)
    return np.where(apart, 2.0 * d.expert_layers * (system.rates.collective_seconds + sent), 0.0)


def _longer(a: Number, b: Number) -> Number:
    return (a**3 + b**3) ** (1.0 / 3.0)


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
