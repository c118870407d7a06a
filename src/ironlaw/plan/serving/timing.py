"""Seconds of a pass: a token of every sequence (`decode_seconds`), or prompts (`prompt_seconds`).

    decode = step + layers x layer + |weights read, products| + cache read + sums over ranks
    prompt = prompt + layers x layer + |products (1 + ramp / tokens) + attention, weights read| + sums over ranks

|a, b| is the cubic mean of two times of which the longer rules: reading and multiplying overlap, but not wholly.
All arguments may be arrays over many systems at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ironlaw.plan.serving.demand import Demand, Number
from ironlaw.plan.serving.rates import Rates

LINK_FRACTION = 0.7
"""Of the nominal rate of a link, that large sums over ranks reach."""

WORKSPACE_BYTES = 1.5e9
"""Of each device: activations, graphs, the framework; the order of what vLLM and TensorRT-LLM report."""


@dataclass(frozen=True)
class System:
    """Devices that hold one copy of the model together, and what they hold it in.

    devices:  all of them; tp divide every matrix, experts are divided over `devices / pp`.
    pp:       parts of the layers one after another; attention_dp: copies of attention, each with its own sequences.
    bandwidth, link:  bytes/s of one device; peak, wide_peak: FLOP/s of products and of 16-bit attention.
    dense_bytes, head_bytes, expert_bytes, cache_bytes:  per element.
    """

    demand: Demand
    rates: Rates
    devices: Number
    tp: Number
    pp: Number
    attention_dp: Number
    bandwidth: Number
    link: Number
    memory: Number
    peak: Number
    wide_peak: Number
    dense_bytes: Number
    head_bytes: Number
    expert_bytes: Number
    cache_bytes: Number

    @property
    def together(self) -> Number:
        """Devices that work on the same token at the same time."""
        return np.maximum(self.devices / self.pp, 1.0)

    @property
    def weight_bytes(self) -> Number:
        """Of all weights, on all devices together."""
        d = self.demand
        return (
            (d.dense - d.head) * self.dense_bytes + (d.head + d.table) * self.head_bytes + d.experts * self.expert_bytes
        )

    @property
    def cache_parts(self) -> Number:
        """Ranks that share a sequence's cache: no more than it has heads."""
        return np.minimum(self.tp, np.maximum(self.demand.heads_cached, 1.0))

    @property
    def token_bytes(self) -> Number:
        """Of the cache of one token on all devices that hold it, where no window ends it."""
        return self.demand.cached * self.cache_bytes * self.tp / self.cache_parts


def decode_seconds(system: System, sequences: Number, length: Number) -> Number:
    """A pass that gives each of `sequences` its next token, behind `length` cached ones each."""
    d, r = system.demand, system.rates
    reading = _weights_read(system, sequences) / (system.bandwidth * r.weights)
    share = np.minimum(r.products * r.decode_products, 1.0)
    multiplying = _product_flops(system, sequences) / (system.peak * share)
    cached = sequences * d.cached_tokens(length) * d.cached * system.cache_bytes
    cache = cached / system.cache_parts / np.maximum(system.attention_dp, 1.0) / (system.bandwidth * r.cache)
    return (
        r.step_seconds + d.layers * r.layer_seconds + _longer(reading, multiplying) + cache + _sums(system, sequences)
    )


def prompt_seconds(system: System, sequences: Number, tokens: Number, cached: Number = 0.0) -> Number:
    """A pass over `tokens` of each of `sequences` prompts, behind `cached` tokens that are there already."""
    d, r = system.demand, system.rates
    all_tokens = np.maximum(sequences * tokens, 1.0)
    reading = _weights_read(system, all_tokens) / (system.bandwidth * r.weights)
    pairs = sequences * tokens * (d.cached_tokens(tokens) / 2 + d.cached_tokens(cached))
    products = _product_flops(system, all_tokens) / (system.peak * r.products) * (1.0 + r.ramp_tokens / all_tokens)
    attention = pairs * d.pair_flops / system.tp / (system.wide_peak * r.attention)
    return (
        r.prompt_seconds
        + d.layers * r.layer_seconds
        + _longer(reading, products + attention)
        + _sums(system, all_tokens)
    )


def pass_parts(
    system: System, decoding: Number, length: Number, new: Number = 0.0, cached: Number = 0.0
) -> dict[str, Number]:
    """Seconds of one pass by what they are spent on: a token of each of `decoding` sequences behind `length` tokens,
    and `new` prompt tokens behind `cached` ones.

    The sum is `decode_seconds` plus `prompt_seconds`: what a prompt adds to a pass was fitted so, to rates of servers
    that mix both, and is an upper bound where they share the reading of weights.
    """
    d, r = system.demand, system.rates
    some = np.where(np.asarray(decoding) > 0, 1.0, 0.0)
    reading = _weights_read(system, np.maximum(decoding, 1.0)) / (system.bandwidth * r.weights)
    multiplying = _product_flops(system, decoding) / (system.peak * np.minimum(r.products * r.decode_products, 1.0))
    kept = decoding * d.cached_tokens(length) * d.cached * system.cache_bytes
    return {
        "weights": some * _longer(reading, multiplying),
        "cache": kept / system.cache_parts / np.maximum(system.attention_dp, 1.0) / (system.bandwidth * r.cache),
        "prompts": np.where(np.asarray(new) > 0, prompt_seconds(system, 1.0, np.maximum(new, 1.0), cached), 0.0),
        "collectives": some * _sums(system, decoding),
        "launches": some * d.layers * r.layer_seconds,
        "host": some * r.step_seconds,
    }


def room_tokens(system: System, memory_fraction: Number = 0.9) -> Number:
    """Tokens whose cache fits beside the weights, over all devices; below 0 where the weights alone do not fit."""
    room = memory_fraction * system.memory * system.devices - system.weight_bytes - WORKSPACE_BYTES * system.devices
    return room / system.token_bytes


def _weights_read(system: System, tokens: Number) -> Number:
    """Bytes of weights that one device reads in a pass."""
    d = system.demand
    dense = ((d.dense - d.head) * system.dense_bytes + d.head * system.head_bytes) / system.tp
    return dense + d.touched(tokens) * system.expert_bytes / system.together


def _product_flops(system: System, tokens: Number) -> Number:
    """Of one device: 2 per weight and token."""
    d = system.demand
    return 2.0 * tokens * (d.dense / system.tp + d.experts * d.expert_share / system.together)


def _sums(system: System, tokens: Number) -> Number:
    """Two sums of the residual stream a layer, in 16 bits, as rings make them."""
    d, tp = system.demand, system.tp
    sent = 2.0 * (tp - 1.0) / tp * tokens * d.hidden * 2.0 / (LINK_FRACTION * system.link)
    return np.where(tp > 1, 2.0 * d.layers * (system.rates.collective_seconds + sent), 0.0)


def _longer(a: Number, b: Number) -> Number:
    return (a**3 + b**3) ** (1.0 / 3.0)
