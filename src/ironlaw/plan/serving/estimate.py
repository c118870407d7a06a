"""The plan of a served model on given devices, as a ledger with the keys of a measured server's.

ledger = plan_serving(Served(model, device, engine, layout, formats), parse_request("input=1024 output=256 rate=4"))
ledger.totals["ttft_seconds"], ledger.totals["tpot_seconds"], ledger.totals["kv_tokens"]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ironlaw.catalog.accelerators import Accelerator
from ironlaw.catalog.formats import stored_format
from ironlaw.ledger import Estimate, Kind, Ledger, Line, MemoryLine, Origin, Phase
from ironlaw.model.config import ModelConfig
from ironlaw.plan.serving.rates import ServingEngine, interval_of, is_measured
from ironlaw.plan.serving.request import ServeRequest
from ironlaw.plan.serving.simulate import Played, most_apart, play, play_apart, transfer_seconds
from ironlaw.plan.serving.systems import Formats, ServingLayout, system_of
from ironlaw.plan.serving.timing import (
    System,
    decode_seconds,
    prompt_seconds,
    room_error,
    room_tokens,
    tokens_of_a_pass,
    unlimited,
)

BLOCK_TOKENS = 16
"""Tokens of a page of the cache: the default of vLLM and TensorRT-LLM."""


@dataclass(frozen=True)
class Served:
    """A model on devices: one copy uses `layout.devices` of them, `layout.replicas` copies share the requests."""

    model: ModelConfig
    device: Accelerator
    engine: ServingEngine
    layout: ServingLayout
    formats: Formats
    drafted: int = 0  # tokens per pass
    acceptance: float = 0.0  # probability that a drafted token is accepted
    draft: ModelConfig | None = None  # the draft model; None: n-grams

    @cached_property
    def system(self) -> System:
        where = self.device, self.engine, self.layout, self.formats
        made = system_of(self.model, *where)
        if not self.drafted:
            return made
        draft = system_of(self.draft, *where) if self.draft is not None else None
        return replace(made, drafted=float(self.drafted), acceptance=self.acceptance, draft=draft)

    @cached_property
    def kv_tokens(self) -> float:
        """Tokens that the cache of one copy holds; below 0 if the weights do not fit."""
        return float(room_tokens(self.system, self.engine.memory_fraction, self.engine.of_free))

    @property
    def devices(self) -> int:
        return self.layout.devices * (self.layout.replicas + self.layout.prefill)

    def lanes(self, request: ServeRequest) -> int:
        """Return the batches in progress at once: one per copy and pipeline stage for which a request fits; in
        llama.cpp one per copy."""
        parts = self.layout.pp if self.engine.family == "gpu" else 1
        return self.layout.replicas * max(1, min(parts, self.most_requests(request)))

    def most_requests(self, request: ServeRequest) -> int:
        """Return the requests whose caches fit at full length, at most those that the engine decodes at once.
        Contiguous caches reserve the full length; pages are allocated as needed, and only the last is partly empty."""
        kept = float(self.system.demand.cached_tokens(request.length))
        if self.engine.paged:
            kept = math.ceil(kept / BLOCK_TOKENS) * BLOCK_TOKENS
        return int(min(self.kv_tokens // kept, float(self.system.rates.most_requests) * self.layout.attention_dp))

    def fits_request(self, request: ServeRequest) -> bool:
        return self.most_requests(request) >= 1

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device.name, "devices": self.devices, "layout": str(self.layout),
            "engine": self.engine.name, "weights": self.formats.weights, "kv": self.formats.cache,
        }  # fmt: skip


def plan_serving(served: Served, request: ServeRequest) -> Ledger:
    """Return the plan. Totals are per copy unless their basis is all copies; `facts["fits"]`: whether it can serve."""
    ledger = Ledger("plan", facts=_facts(served, request))
    ledger.memory = _memory(served, request)
    ledger.totals |= _capacity(served, request)
    ledger.facts["fits"] = served.fits_request(request)
    if not ledger.facts["fits"]:
        return ledger
    layout, most, lanes = served.layout, served.most_requests(request), served.lanes(request)
    one = replace(
        request,
        rate=request.rate / lanes if request.rate else None,
        concurrency=math.ceil(request.concurrency / lanes) if request.concurrency else None,
    )
    if layout.prefill:
        played = play_apart(served.system, layout, request, served.kv_tokens, most)
    else:
        pp = lanes // layout.replicas
        played = play(served.system, one, served.kv_tokens / pp, most // pp)
    _times(ledger, served, one, played)
    _lines(ledger, served, one, played)
    ledger.facts["keeps_up"] = played.keeps_up
    ledger.facts["preemptions"] = played.preemptions
    ledger.facts["limits"] = _limits(played, request, lanes)
    ledger.facts["binds"] = _binds(played, served, one)
    return ledger


def interval(kind: str, served: Served) -> tuple[float, float]:
    """Return the factors on seconds between which 80% of measurements lie; `kind`: decode, prompt, first (token, under
    load), requests, unlimited."""
    low, high = interval_of(served.engine, served.device, kind)
    return math.exp(low), math.exp(high)


def _estimate(value: float, kind: str, served: Served, basis: str, rate: bool = False) -> Estimate:
    low, high = interval(kind, served)
    if rate:
        low, high = 1 / high, 1 / low
    return Estimate(value, Origin.CALCULATED, basis, value * low, value * high)


def _times(ledger: Ledger, served: Served, request: ServeRequest, played: Played) -> None:
    system, totals, lanes = served.system, ledger.totals, served.lanes(request)
    if served.layout.prefill:
        lanes = served.layout.replicas
    ttft, tpot = played.ttft_seconds, played.tpot_seconds
    played_as = "requests played step by step"
    totals["ttft_seconds"] = _estimate(ttft["p50"], "first", served, played_as)
    totals["ttft_p90_seconds"] = _estimate(ttft["p90"], "first", served, played_as)
    totals["ttft_p99_seconds"] = _estimate(ttft["p99"], "first", served, played_as)
    totals["tpot_seconds"] = _estimate(tpot["mean"], "decode", served, played_as)
    totals["tpot_p99_seconds"] = _estimate(tpot["p99"], "decode", served, played_as)
    rate = played.output_tokens_per_second * lanes
    totals["output_tokens_per_second"] = _estimate(rate, "requests", served, f"{played_as}, all copies", rate=True)
    totals["requests_per_second"] = _estimate(rate / request.output, "requests", served, "output / length", rate=True)
    totals["decode_batch"] = Estimate(played.decode_batch, Origin.CALCULATED, "mean of the steps that decode")
    totals["kv_usage"] = Estimate(played.kv_usage, Origin.CALCULATED, "mean over steps, of all pages")
    totals["waiting"] = Estimate(played.waiting, Origin.CALCULATED, "mean over steps")
    if system.drafted:
        stand = float(tokens_of_a_pass(system.drafted, system.acceptance))
        plain = replace(system, drafted=0.0, acceptance=0.0, draft=None)
        gain, one = (
            float(decode_seconds(plain, n, request.length) / decode_seconds(system, n, request.length))
            for n in (max(1.0, played.decode_batch), 1.0)
        )
        basis = f"of {system.drafted:.0f} drafted, each stands with {system.acceptance:.0%}: (1 - a^(k+1)) / (1 - a)"
        totals["pass_tokens"] = Estimate(stand, Origin.CALCULATED, basis)
        basis = f"decoding {played.decode_batch:.3g} at once; {one:.2f} times as fast for one request alone"
        totals["speculation_gain"] = Estimate(gain, Origin.CALCULATED, basis)
    totals["step_seconds"] = _estimate(played.step_seconds, "decode", served, "mean step")
    single = float(decode_seconds(system, 1.0, request.length))
    totals["single_tpot_seconds"] = _estimate(single, "decode", served, "one request alone")
    prompt = float(prompt_seconds(system, 1.0, request.input - request.prefix, request.prefix))
    prompt += float(system.rates.request_seconds)
    totals["single_ttft_seconds"] = _estimate(prompt, "prompt", served, "one request alone")
    most = served.most_requests(request)
    if served.layout.prefill:
        rate = most_apart(system, served.layout, request, most)
        moved, of = transfer_seconds(system, request.input), "all layers' keys and values over each rank's link"
        totals["kv_transfer_seconds"] = Estimate(moved, Origin.CALCULATED, of)
    else:
        each = unlimited(system, most, request.input - request.prefix, request.output, request.prefix)
        rate = float(each) * served.layout.replicas
    totals["most_tokens_per_second"] = _estimate(rate, "unlimited", served, "as many at once as fit", rate=True)


PARTS = {
    "weights": (Phase.DECODE, Kind.MATMUL, "memory",
                "reading weights: fewer bits a weight, more ranks, or more requests at once"),
    "cache": (Phase.DECODE, Kind.ATTENTION, "memory",
              "reading the cache: an 8-bit cache, fewer requests at once, or more copies"),
    "collectives": (Phase.DECODE, Kind.COLLECTIVE, "network",
                    "sums over ranks: fewer of them and more copies, or a faster link"),
    "launches": (Phase.DECODE, Kind.OTHER, "overhead",
                 "launches of small kernels: captured graphs, fewer and larger kernels"),
    "draft": (Phase.DECODE, Kind.MATMUL, "memory",
              "the draft model: fewer drafted tokens, a smaller draft, or n-grams"),
    "prompts": (Phase.PREFILL, Kind.MATMUL, "compute",
                "prompts: shared prefixes, a smaller budget of new tokens where answers must not stall, more copies"),
    "host": (Phase.HOST, Kind.HOST, "overhead", "the host: scheduling and sampling beside the device"),
}  # fmt: skip
"""Parts of a step: phase, kind and bound of the ledger's line, and advice to shorten it."""


def _lines(ledger: Ledger, served: Served, request: ServeRequest, played: Played) -> None:
    """Add the lines of a mean engine step, with the phases of a measured server and the parts of decode."""
    spent = played.seconds
    decoding = sum(seconds for name, seconds in spent.items() if name not in ("prompts", "host"))
    ledger.phase_seconds = {
        Phase.PREFILL: spent["prompts"], Phase.DECODE: decoding, Phase.SAMPLING: 0.0, Phase.HOST: spent["host"],
    }  # fmt: skip
    for name, (phase, kind, bound, _) in PARTS.items():
        if spent.get(name, 0.0) > 0:
            ledger.lines.append(Line(phase, kind, name, seconds=spent[name], bound=bound))


def _capacity(served: Served, request: ServeRequest) -> dict[str, Estimate]:
    system, tokens = served.system, max(served.kv_tokens, 0.0)
    share, less = (
        f"{served.engine.memory_fraction:.0%}",
        f"weights and {float(system.workspace_bytes) / 1e9:.2g} GB each",
    )
    memory = f"the memory of {served.layout.devices}"
    of = f"{share} of what {less} leave of {memory}" if served.engine.of_free else f"{share} of {memory} less {less}"
    of += f", over {float(system.token_bytes):,.0f} bytes a token"
    calculated, off = Origin.CALCULATED, room_error(system, tokens)
    return {
        "parameters": Estimate(float(system.demand.parameters), calculated, "sum over the model's tensors"),
        "weight_bytes": Estimate(float(system.weight_bytes), calculated, _stored(served.formats)),
        "kv_tokens": Estimate(tokens, calculated, of, tokens * max(0.0, 1 - off), tokens * (1 + off)),
        "most_requests": Estimate(
            float(max(served.most_requests(request), 0)), calculated,
            f"at once, {request.length:,} tokens each",
        ),
    }  # fmt: skip


def _stored(formats: Formats) -> str:
    stored = stored_format(formats.weights)
    where = "experts alone, the rest in 16 bits" if stored.experts else "embedding and output layer in 16 bits"
    return f"{stored.bits:g} bits a weight" + (f", {where}" if stored.wide and stored.bits < 16 else "")


def _memory(served: Served, request: ServeRequest) -> list[MemoryLine]:
    """Return the memory lines of one copy, over all its devices."""
    system = served.system
    cache = max(served.kv_tokens, 0.0) * float(system.token_bytes)
    workspace = float(system.workspace_bytes) * served.layout.devices
    left = float(system.memory) * served.layout.devices - float(system.weight_bytes) - workspace - cache
    return [
        MemoryLine("weights", float(system.weight_bytes)),
        MemoryLine("kv", cache, note=f"{max(served.kv_tokens, 0.0):,.0f} tokens"),
        MemoryLine("workspace", workspace, note="activations, graphs, framework"),
        MemoryLine(
            "left free", max(left, 0.0), note=f"{1 - served.engine.memory_fraction:.0%} that the engine does not take"
        ),
    ]


def _facts(served: Served, request: ServeRequest) -> dict[str, Any]:
    return {
        "kind": "serving",
        "model": served.model.model_dump(exclude_none=True, mode="json"),
        "name": served.model.name,
        **served.to_json(),
        "token_budget": served.engine.pass_tokens,
        "memory_bytes": float(served.system.memory) * served.layout.devices,  # of one copy's devices
        "request": {key: value for key, value in vars(request).items() if value is not None},
        "measured": is_measured(served.engine, served.device),
    }


def _limits(played: Played, request: ServeRequest, copies: int) -> dict[str, Any]:
    """Return each requested limit with its planned value, and whether it holds."""
    ttft, tpot, rate = played.ttft_seconds["p90"], played.tpot_seconds["mean"], played.requests_per_second * copies
    asked = (
        ("ttft", request.ttft, ttft, request.ttft and ttft <= request.ttft),
        ("tpot", request.tpot, tpot, request.tpot and tpot <= request.tpot),
        ("rate", request.rate, rate, played.keeps_up),
    )
    return {
        name: {"limit": limit, "planned": planned, "holds": holds}
        for name, limit, planned, holds in asked
        if limit is not None
    }


def _binds(played: Played, served: Served, request: ServeRequest) -> dict[str, Any]:
    """Return the largest part of a step, and advice to shorten it."""
    total = sum(played.seconds.values())
    name = max(played.seconds, key=lambda part: played.seconds[part])
    if not played.keeps_up:
        words = "requests arrive faster than they are served: more copies, or longer limits"
        return {"name": "queue", "share": 0.0, "words": words}
    return {"name": name, "share": played.seconds[name] / total if total else 0.0, "words": PARTS[name][-1]}
