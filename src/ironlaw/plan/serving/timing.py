"""Seconds of a pass: a token of every sequence (`decode_seconds`), or prompts (`prompt_seconds`).

    decode = step + sequences x sequence + layers x layer + |weights read, products| + cache read + exchanges
    prompt = prompt + layers x layer + |products (1 + ramp / rows) + attention, weights read| + exchanges

A layer's own time is gaps between kernels, and the bytes that its small kernels move for every row.
|a, b| = (a^3 + b^3)^(1/3), slightly more than the longer of the two: reading and multiplying overlap, but not fully.
Exchanges are all-reduces over tensor parallel ranks, and transfers of tokens to experts on other devices.
All arguments may be arrays over many systems at once.

The rate of C requests at once has a closed form. Each needs a prompt and `outputs` tokens, and a pass generates a token
for each: seconds = request + C x prompt + outputs x decode(C), whether prompts come first or in between; `request` is
what a server does for a request beside all passes (its text, its connection). Pipeline stages work on different
requests at the same time: C is then the number in one of `pp` lanes. `simulate.py` simulates single passes where
waiting matters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ironlaw.plan.serving.demand import Demand, Number
from ironlaw.plan.serving.rates import Rates, ServingEngine

LINK_FRACTION = 0.7
"""Fraction of a link's nominal rate that large all-reduces attain."""

ROW_BYTES, DIVIDED_BYTES = 24.0, 40.0
"""Bytes that the small kernels of a layer move for a row, by element of the residual stream: norms and residuals on
every rank; rotations, activations and what products read and write divided among ranks."""

COPY_FRACTION = 0.85
"""Fraction of the memory's nominal rate that plain passes over large tensors attain."""

SIXTEEN_BITS = 4.0
"""Bytes that a weight moves beside its own where it is converted to 16 bits ahead of the product: written and read."""

ROUTED = 0.9
"""Power of a pass's tokens that choose experts independently: tokens of one text, and popular experts, choose alike."""

LIBRARY_BYTES, EXCHANGE_BYTES = 0.7e9, 2.0e9
"""Per device: captured graphs and the framework's libraries; buffers of all-reduces, where there are several ranks.
Both are of the order of the memory outside PyTorch that vLLM prints (vllm-project/vllm pull requests 2031 and
10511).
"""

SAMPLED_BYTES = 2 + 4 + 4 + 8 + 4 + 4
"""Per row and vocabulary entry during sampling: logits in 16 and 32 bits, sorted logits, their indices, probabilities
and cumulative sums."""

UNSURE_BYTES = 1.5e9
"""Uncertainty per device of the memory that a release, its buffers and its graphs take: vLLM printed 0.2 to 3.6 GiB
beside PyTorch's memory (pull requests 10511 and 12126)."""


@dataclass(frozen=True)
class System:
    """Devices that hold one copy of a model, with its formats and rates."""

    demand: Demand
    rates: Rates
    tp: Number  # ranks that divide every matrix
    pp: Number  # pipeline stages
    attention_dp: Number  # copies of attention, each with its own sequences
    bandwidth: Number  # of the memory of one device, bytes/s
    link: Number  # of one device, bytes/s
    memory: Number  # of one device, bytes
    peak: Number  # of products, FLOP/s
    wide_peak: Number  # of 16-bit attention, FLOP/s
    dense_bytes: Number  # bytes per element, as are the next three
    head_bytes: Number
    expert_bytes: Number
    cache_bytes: Number
    pass_tokens: Number  # most new tokens of a pass
    in_flight: Number = 1.0  # passes of one prompt that are on different pipeline stages at the same time, at most
    score_bytes: Number = 0.0  # that attention of prompts moves for a query, a key and a head; 0: fused
    converts: Number = 0.0  # 1: weights are converted to 16 bits in every pass over prompts
    sums: Number = 2.0  # over tensor parallel ranks, of a layer
    launches: Number = 0.0  # operations of a layer that the host launches one by one, ahead of the device
    stored_reads: Number = 1.0  # times that a pass moves keys and values as they are stored
    expanded_reads: Number = 0.0  # times that it moves them repeated for every query head
    sampled: Number = 0.0  # rows of logits for which the engine reserves memory
    drafted: Number = 0.0  # tokens proposed per pass
    acceptance: Number = 0.0  # probability that a proposed token is accepted
    draft: System | None = None  # the draft model on the same devices; None: proposals take no time, as n-grams

    @property
    def together(self) -> Number:
        """Devices that work on the same token at the same time, over which experts are divided."""
        return self.tp * self.attention_dp

    @property
    def devices(self) -> Number:
        return self.together * self.pp

    @property
    def weight_bytes(self) -> Number:
        """Bytes of all weights over all devices; every copy of attention has all weights but the experts'."""
        d = self.demand
        dense = (d.dense - d.head) * self.dense_bytes + (d.head + d.table) * self.head_bytes
        return dense * self.attention_dp + d.experts * self.expert_bytes

    @property
    def cache_parts(self) -> Number:
        """Ranks that divide a sequence's cache: at most as many as it has heads."""
        return np.minimum(self.tp, self.demand.heads_cached)

    @property
    def workspace_bytes(self) -> Number:
        """Bytes per device: libraries, the 16-bit outputs of a layer's matrices for the largest pass, and sampling."""
        d = self.demand
        widths = d.active / (d.layers * d.hidden * self.tp) + d.chosen * d.hidden  # each expert's, before their sum
        passes = 2.0 * self.pass_tokens * widths + SAMPLED_BYTES * self.sampled * d.vocab
        return LIBRARY_BYTES + passes + np.where(self.tp > 1, EXCHANGE_BYTES, 0.0)

    @property
    def token_bytes(self) -> Number:
        """Bytes of one token's cache over all devices that hold it, without sliding windows."""
        return self.demand.cached * self.cache_bytes * self.tp / self.cache_parts


def decode_seconds(system: System, sequences: Number, length: Number) -> Number:
    """Return the seconds to generate the next token of each of `sequences` with `length` cached tokens."""
    return sum(decode_parts(system, sequences, length).values())


def decode_parts(system: System, sequences: Number, length: Number) -> dict[str, Number]:
    """Return `decode_seconds` by part. With `drafted` tokens, a pass has that many more per sequence, the draft model's
    passes precede it, and the sum is divided by the mean number of accepted tokens."""
    d, r = system.demand, system.rates
    rows = sequences * (1.0 + system.drafted)
    reading = _weights_read(system, rows) / (system.bandwidth * r.weights)
    multiplying = sum(_product_flops(system, rows)) / (system.peak * np.minimum(r.products * r.decode_products, 1.0))
    moved = system.stored_reads * d.cached + system.expanded_reads * d.pair_flops / 2.0  # elements of a token
    kept = sequences * d.cached_tokens(length) * moved
    parts = {
        "weights": _longer(reading, multiplying),
        "cache": kept * system.cache_bytes / system.cache_parts / system.attention_dp / (system.bandwidth * r.cache),
        "collectives": _sums(system, rows) + _exchanges(system, rows),
    }
    parts |= {
        "launches": _launches(system, rows, sum(parts.values())),
        "host": r.step_seconds + r.sequence_seconds * sequences / system.attention_dp,
    }
    if system.draft is not None:
        parts["draft"] = system.drafted * decode_seconds(system.draft, sequences, length)
    stand = tokens_of_a_pass(system.drafted, system.acceptance)
    return {name: seconds / stand for name, seconds in parts.items()}


def tokens_of_a_pass(drafted: Number, acceptance: Number) -> Number:
    """Return the mean tokens of a pass with `drafted` proposals, each accepted with probability `acceptance` if those
    before it were: (1 - a^(k+1)) / (1 - a) (Leviathan, Kalman, Matias 2023, arXiv 2211.17192, equation 1)."""
    return (1.0 - acceptance ** (drafted + 1.0)) / (1.0 - acceptance)


def prompt_seconds(
    system: System, sequences: Number, tokens: Number, cached: Number = 0.0, lanes: Number = 1.0
) -> Number:
    """Return the seconds of the passes over `tokens` of each of `sequences` prompts, with `cached` tokens before them.

    A pass takes `pass_tokens` at most: a longer prompt reads the weights again. Matrices of experts have the rows of a
    pass that chose them, and fill the device less than those that all rows pass through. `lanes`: prompts between which
    the pipeline's stages are divided; each has passes on several stages at once if the engine sends them ahead."""
    d, r = system.demand, system.rates
    all_tokens = np.maximum(sequences * tokens, 1.0)
    copies = np.clip(sequences, 1.0, system.attention_dp)  # of attention, each with its own sequences
    passes = np.maximum(all_tokens / copies / system.pass_tokens, 1.0)
    rows = all_tokens / passes
    reading = _weights_read(system, rows) / (system.bandwidth * r.weights)
    pairs = sequences * tokens * (d.cached_tokens(tokens) / 2 + d.cached_tokens(cached))
    dense, experts = (flops / (system.peak * r.products) for flops in _product_flops(system, rows))
    products = dense * (1.0 + r.ramp_tokens / rows) + experts * (1.0 + r.ramp_tokens / d.expert_rows(rows))
    attention = pairs * d.pair_flops / system.tp / copies / (system.wide_peak * r.attention)
    device = _longer(reading, products + attention / passes) + _sums(system, rows) + _exchanges(system, rows)
    # Scores of a pass are a rectangle, also of keys that its queries do not see.
    scores = (pairs + sequences * tokens * np.minimum(rows, tokens) / 2) * d.score_heads / system.tp / copies / passes
    weights = (d.dense + d.touched(rows**ROUTED)) / system.together
    moved = system.score_bytes * scores + SIXTEEN_BITS * system.converts * weights
    device += moved / (COPY_FRACTION * system.bandwidth)
    ahead, stages = np.minimum(passes, system.in_flight), system.pp / lanes
    overlap = (ahead + stages - 1.0) / (ahead * stages)
    return passes * overlap * (device + _launches(system, rows, device) + r.prompt_seconds)


def pass_parts(
    system: System, decoding: Number, length: Number, new: Number = 0.0, cached: Number = 0.0, side: Number = 1.0
) -> dict[str, Number]:
    """Return the seconds of one pass by part: a token for each of `decoding` sequences with `length` cached tokens, and
    `new` prompt tokens with `cached` ones, which as many copies of attention as `side` divide.

    The sum is `decode_seconds` plus `prompt_seconds`: an upper bound where both share the reading of weights.
    """
    some, more = (np.where(np.asarray(count) > 0, 1.0, 0.0) for count in (decoding, new))
    parts = {name: some * seconds for name, seconds in decode_parts(system, decoding, length).items()}
    return parts | {"prompts": more * prompt_seconds(system, side, np.maximum(new / side, 1.0), cached)}


def room_tokens(system: System, memory_fraction: Number = 0.9, of_free: Number = False) -> Number:
    """Return the tokens whose cache fits beside the weights, over all devices; below 0 if the weights do not fit. The
    fraction is of all memory, or with `of_free` of the memory left by weights and workspace."""
    taken = system.weight_bytes + system.workspace_bytes * system.devices
    token_bytes = system.token_bytes
    if system.draft is not None:
        taken, token_bytes = taken + system.draft.weight_bytes, token_bytes + system.draft.token_bytes
    of_all = memory_fraction * system.memory * system.devices
    return (of_all - np.where(of_free, memory_fraction, 1.0) * taken) / token_bytes


def room_error(system: System, tokens: float) -> float:
    """Return the relative error of a planned room of `tokens`: the smaller it is, the more the workspace matters."""
    unsure = (UNSURE_BYTES + (EXCHANGE_BYTES if system.tp > 1 else 0.0)) * float(system.devices / system.token_bytes)
    return max(0.05, unsure / max(tokens, 1.0))


def _weights_read(system: System, tokens: Number) -> Number:
    """Return the bytes of weights that one device reads in a pass."""
    d = system.demand
    dense = ((d.dense - d.head) * system.dense_bytes + d.head * system.head_bytes) / system.tp
    return dense + d.touched(tokens**ROUTED) * system.expert_bytes / system.together


def _product_flops(system: System, tokens: Number) -> tuple[Number, Number]:
    """Return the FLOPs of one device, 2 per weight and token: of matrices that all tokens pass through, of experts."""
    d, each = system.demand, 2.0 * tokens / system.together
    return each * d.dense, each * d.experts * d.expert_share


def _launches(system: System, rows: Number, device: Number) -> Number:
    """Return the seconds that a pass takes beyond the `device` seconds of its products, attention and exchanges: gaps
    between kernels and small kernels; and what the host takes longer to launch them one by one than they take."""
    layers, rates = system.demand.layers, system.rates
    moved = rows / system.attention_dp * system.demand.hidden * (ROW_BYTES + DIVIDED_BYTES / system.tp)
    gaps = layers * (rates.layer_seconds + moved / system.bandwidth)
    return _longer(device + gaps, layers * system.launches * rates.launch_seconds) - device


def _sums(system: System, tokens: Number) -> Number:
    """Return the seconds of a layer's ring all-reduces of the 16-bit residual stream, over all layers."""
    d, tp = system.demand, system.tp
    sent = 2.0 * (tp - 1.0) / tp * tokens * d.hidden * 2.0 / (LINK_FRACTION * system.link)
    return np.where(tp > 1, system.sums * d.layers * (system.rates.collective_seconds + sent), 0.0)


def _exchanges(system: System, tokens: Number) -> Number:
    """Return the seconds to send 16-bit tokens to their experts and back, if copies of attention share the experts."""
    d = system.demand
    ranks = system.together
    share = tokens / system.attention_dp
    visited = ranks * (1.0 - (1.0 - 1.0 / ranks) ** d.chosen)  # devices, if experts are chosen independently
    sent = share * visited * (ranks - 1.0) / ranks * d.hidden * 2.0 / (LINK_FRACTION * system.link)
    apart = (system.attention_dp > 1) & (d.expert_layers > 0)
    return np.where(apart, 2.0 * d.expert_layers * (system.rates.collective_seconds + sent), 0.0)


def _longer(a: Number, b: Number) -> Number:
    return np.cbrt(a * a * a + b * b * b)


@dataclass(frozen=True)
class Steady:
    ttft_seconds: Number
    tpot_seconds: Number
    tokens_per_second: Number


def at_concurrency(
    system: System, requests: Number, inputs: Number, outputs: Number, together: Number, cached: Number = 0.0
) -> Steady:
    """Return times and rate of `requests` at once. `together`: as one batch; else each starts when another ends.
    `cached`: tokens before `inputs` whose keys and values are there."""
    lane = np.where(together, requests, np.maximum(requests / system.pp, 1.0))
    side = np.where(together, requests, np.clip(lane, 1.0, system.attention_dp))  # each copy of attention has its own
    own = np.where(together, 0.0, system.rates.request_seconds)
    lanes = np.where(together, 1.0, np.clip(requests, 1.0, system.pp))
    prompt, decode, seconds = _turn(system, lane, side, inputs, outputs, cached, lanes)
    busy = np.minimum(lane / side * prompt / seconds, 0.9)  # share of the time spent on other prompts
    waiting = np.where(together, 0.0, decode / 2 + prompt * busy / (2 * (1.0 - busy)))
    new, seconds = np.maximum(outputs, 1.0), seconds + own
    return Steady(own + prompt + waiting, (seconds - own - prompt) / new, requests * new / seconds)


def _turn(
    system: System, lane: Number, side: Number, inputs: Number, outputs: Number, cached: Number, lanes: Number
) -> tuple[Number, Number, Number]:
    """Return the seconds of a pass with `side` prompts, of one that decodes for `lane` requests, and of what a request
    takes: the prompts of all, and its tokens."""
    decode = decode_seconds(system, lane, cached + inputs + outputs / 2)
    prompt = prompt_seconds(system, side, np.maximum(inputs, 1.0), cached, lanes)
    return prompt, decode, lane / side * prompt + np.maximum(outputs, 1.0) * decode


def most_at_once(system: System, engine: ServingEngine, inputs: Number, outputs: Number) -> Number:
    """Return the requests whose caches fit at full length, at most those that copies of attention decode at once."""
    room = room_tokens(system, engine.memory_fraction, engine.of_free)
    kept = system.demand.cached_tokens(np.maximum(inputs + outputs, 1.0))
    return np.clip(room / np.maximum(kept, 1.0), 1.0, system.rates.most_requests * system.attention_dp)


def unlimited(system: System, requests: Number, inputs: Number, outputs: Number, cached: Number = 0.0) -> Number:
    """Return the output tokens per second if more requests wait than fit; a pass takes prompts up to its budget.
    `cached` as in `at_concurrency`."""
    side = np.maximum(1.0, system.pass_tokens / np.maximum(inputs, 1.0)) * system.attention_dp
    lane = np.maximum(requests / system.pp, 1.0)
    seconds = _turn(system, lane, side, inputs, outputs, cached, system.pp)[2]
    return requests * np.maximum(outputs, 1.0) / seconds * np.minimum(system.rates.throughput, 1.2)
