"""`ironlaw plan WHAT --serve REQUEST`: the plan on given devices, or without any the cheapest devices for the request.

A candidate is one copy of the model on 1, 2, 4 or 8 devices of a kind, with the most requests at once within the limits
on token time and waiting; the rate gives the number of copies. Closed forms choose, `simulate.py` checks the choice.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from ironlaw.catalog.accelerators import Accelerator, accelerator, accelerator_names
from ironlaw.catalog.formats import stored_format
from ironlaw.errors import UserError, parse_words
from ironlaw.model.config import ModelConfig
from ironlaw.plan.budget import COMPUTING_SHARE, hourly_rent
from ironlaw.plan.request_types import SERVED, Assumption, Options, PlanOutcome, assume_accelerator
from ironlaw.plan.serving.emit import emit_notes, emit_serving
from ironlaw.plan.serving.estimate import Served, interval, plan_serving
from ironlaw.plan.serving.rates import ServingEngine, serving_engine, vendor
from ironlaw.plan.serving.request import ServeRequest, parse_request
from ironlaw.plan.serving.systems import CACHE_BYTES, Formats, ServingLayout
from ironlaw.plan.serving.timing import at_concurrency

DEVICES_OF_A_COPY = (1, 2, 4, 8)
BUSY = 0.85
"""Share of a copy's rate that random arrivals may use: beyond it, queues grow without bound. Assumed."""

CLEARLY = 1.25
"""Ratio of rates, or of shares of the load, from which on a pipeline or copies of attention are taken: less is within
what the rate of a source left out of the fit is off by (docs/plan-serving.md)."""

TRIED = 12  # candidates that are simulated before the search gives up


@dataclass(frozen=True)
class Candidate:
    """One way to serve a request. requests: at once, per copy; usd_each: per device and hour, None if not known."""

    served: Served
    requests: int
    ttft_seconds: float
    tpot_seconds: float
    tokens_per_second: float  # of one copy
    usd_each: float | None

    @property
    def usd_per_hour(self) -> float | None:
        """The cost of all devices per hour."""
        return None if self.usd_each is None else self.usd_each * self.served.devices

    @property
    def usd_per_million(self) -> float | None:
        """The cost per million output tokens, with all copies as busy as planned."""
        return usd_per_million(self.usd_per_hour, self.tokens_per_second * self.served.layout.replicas)

    def to_json(self) -> dict[str, Any]:
        return self.served.to_json() | {
            "requests_at_once": self.requests, "ttft_seconds": self.ttft_seconds, "tpot_seconds": self.tpot_seconds,
            "tokens_per_second": self.tokens_per_second * self.served.layout.replicas,
            "usd_per_hour": self.usd_per_hour, "usd_per_million_tokens": self.usd_per_million,
        }  # fmt: skip


def usd_per_hour(device: Accelerator, given: float | None = None) -> float | None:
    """Return the `hourly_rent` of one device in USD, None if it is not known."""
    rent = hourly_rent(device, given)
    return None if rent is None else float(rent["usd_per_hour"])


def usd_per_million(usd_per_hour: float | None, tokens_per_second: float) -> float | None:
    """Return the cost per million output tokens; None without a price, or if nothing is served."""
    return usd_per_hour / 3600 / tokens_per_second * 1e6 if usd_per_hour and tokens_per_second else None


def frontier(served: Served, request: ServeRequest, given_price: float | None = None) -> list[Candidate]:
    """Return candidates with 1, 2, 4, ... requests at once: waiting against throughput."""
    return list(_candidates(served, request, given_price, 2))


def search_serving(
    model: ModelConfig, engine: ServingEngine, formats: Sequence[Formats], request: ServeRequest, *,
    devices: Iterable[str] | None = None, given_price: float | None = None,
) -> tuple[Candidate, list[Candidate], dict[str, int]]:  # fmt: skip
    """Return the cheapest candidate within the limits, the next ones, and the number ruled out by each reason.

    Without `devices`, all catalogued ones with a price are tried. Raises UserError if none serves the request.
    """
    ruled_out: Counter[str] = Counter()
    found = []
    for served in _forms(model, engine, formats, request, devices, given_price):
        if not served.fits_request(request):
            ruled_out["memory"] += 1
            continue
        best = _within_limits(served, request, given_price)
        if best is None:
            ruled_out["limits on waiting or token time"] += 1
        elif best.usd_per_hour is None:
            ruled_out["no price"] += 1
        else:
            found.append(best)
    found.sort(key=lambda c: (c.usd_per_hour or math.inf, not c.served.layout.is_plain, c.tpot_seconds))
    for number, chosen in enumerate(found[:TRIED], 1):
        ledger = plan_serving(chosen.served, request)
        if all(limit["holds"] for limit in ledger.facts["limits"].values()):
            return chosen, _others(found[number:], chosen), ruled_out
        ruled_out["limits, once played step by step"] += 1
    what = ", ".join(f"{count} by {wall}" for wall, count in ruled_out.items()) or "no device is known"
    raise UserError(
        f"nothing serves this request ({what}): loosen ttft, tpot or rate, or give --weights fp8 or int4-awq"
    )


def _forms(
    model: ModelConfig, engine: ServingEngine, formats: Sequence[Formats], request: ServeRequest,
    devices: Iterable[str] | None, given_price: float | None,
) -> Iterator[Served]:  # fmt: skip
    for name in devices if devices is not None else accelerator_names():
        device = accelerator(name)
        if device.memory_bytes_per_second is None or device.memory_bytes is None or not device.peak_flops_per_second:
            continue
        if devices is None and usd_per_hour(device, given_price) is None:
            continue
        for form in formats:
            if form.weights.startswith("fp8") and "fp8" not in device.peak_flops_per_second:
                continue
            for count in DEVICES_OF_A_COPY:
                for layout in layouts_of_copies(model, device, engine, count):
                    yield _served(model, device, engine, layout, form, request)


def _served(
    model: ModelConfig, device: Accelerator, engine: ServingEngine, layout: ServingLayout, formats: Formats,
    request: ServeRequest,
) -> Served:  # fmt: skip
    """Return the model on devices, with the request's speculation."""
    draft = ModelConfig.named(request.draft) if request.draft else None
    return Served(
        model, device, engine, layout, formats, drafted=request.speculate, acceptance=request.accept, draft=draft
    )


def layouts_of_copies(
    model: ModelConfig, device: Accelerator, engine: ServingEngine, devices: int, replicas: int = 1
) -> Iterator[ServingLayout]:
    """Yield the ways in which an engine divides copies among `devices` each: every matrix, where heads allow it; with
    copies of attention that share the experts, over a link; a pipeline of layers."""
    shares_experts = model.moe is not None and device.link_bytes_per_second is not None
    if engine.by_layers:
        yield ServingLayout(pp=devices, replicas=replicas)
        return
    heads, shared = model.heads, model.key_value_heads
    for tp in (n for n in DEVICES_OF_A_COPY if devices % n == 0 and heads % n == 0):
        rest = devices // tp
        if shared % tp and tp % shared:
            continue
        if rest == 1:
            yield ServingLayout(tp, replicas=replicas)
        if rest > 1 and "pp" in engine.tried and rest <= model.layers:
            yield ServingLayout(tp, rest, replicas=replicas)
        if rest > 1 and "ep" in engine.tried and shares_experts:
            yield ServingLayout(tp, attention_dp=rest, replicas=replicas)


def _within_limits(served: Served, request: ServeRequest, given_price: float | None) -> Candidate | None:
    """Return the candidate with the most requests at once within the limits, and as many copies as the rate needs."""
    best = None
    for candidate in _candidates(served, request, given_price, 1.3):
        if (request.tpot and candidate.tpot_seconds > request.tpot) or (
            request.ttft and candidate.ttft_seconds > request.ttft
        ):
            break
        best = candidate
    if best is None:
        return None
    copies = 1
    if request.rate is not None:
        copies = max(1, math.ceil(request.rate * request.output / (best.tokens_per_second * BUSY)))
    elif request.concurrency is not None:
        copies = max(1, math.ceil(request.concurrency / best.requests))
    return replace(best, served=replace(best.served, layout=replace(best.served.layout, replicas=copies)))


def _candidates(served: Served, request: ServeRequest, given_price: float | None, growth: float) -> Iterator[Candidate]:
    """Yield candidates with 1 request at once and `growth` times as many each time, up to those that fit."""
    inputs = 0 if served.layout.prefill else request.input - request.prefix  # prefill copies compute the prompts
    each, requests, most = usd_per_hour(served.device, given_price), 1, served.most_requests(request)
    while requests <= most:
        steady = at_concurrency(served.system, float(requests), inputs, request.output, False, request.input - inputs)
        ttft, tpot, rate = map(float, (steady.ttft_seconds, steady.tpot_seconds, steady.tokens_per_second))
        yield Candidate(served, requests, ttft, tpot, rate, each)
        requests = max(requests + 1, int(requests * growth))


def _others(found: Sequence[Candidate], chosen: Candidate, shown: int = 5) -> list[Candidate]:
    """Return the cheapest candidate of each other device."""
    best: dict[str, Candidate] = {}
    for candidate in found:
        best.setdefault(candidate.served.device.name, candidate)
    best.pop(chosen.served.device.name, None)
    return list(best.values())[:shown]


def answer_serving(model: ModelConfig, on: str | None, text: str, options: Options) -> PlanOutcome:
    """Plan a `--serve` request. Raises UserError if it cannot be planned; `fits` is False if limits or memory fail."""
    options.check_subjects(SERVED)
    if on is None and options.layout:
        raise UserError("--layout divides given devices, and none are: add for example --on 4xh100-sxm-80gb")
    if options.engine and options.emit and options.engine != options.emit:
        raise UserError(f"--emit {options.emit} writes options of another engine than --engine {options.engine}")
    request = parse_request(text)
    if request.length > model.context:
        raise UserError(
            f"--serve: input + output = {request.length:,} tokens, and {model.name} takes {model.context:,}"
        )
    assumed = assume_accelerator(_place(on)[1]) if on is not None else []
    engine = _engine(options, on, assumed)
    formats = _formats(options, assumed, searched=on is None)
    price = options.prices.usd_per_hour
    more: dict[str, Any] = {}
    if on is None:
        if request.rate is None and request.concurrency is None:
            raise UserError(
                "without --on the cheapest devices are sought, for a load: write rate=10/s or concurrency=32 in --serve"
            )
        chosen, others, constraints = search_serving(model, engine, formats, request, given_price=price)
        served = chosen.served
        more |= {"chosen": chosen.to_json(), "candidates": [c.to_json() for c in others], "ruled_out": constraints}
    else:
        served = _given(model, on, engine, formats[0], options.layout, request)
    ledger = plan_serving(served, request)
    fits = bool(ledger.facts["fits"]) and all(limit["holds"] for limit in ledger.facts.get("limits", {}).values())
    more |= {
        "assumed": [one.to_json() for one in assumed],
        "served": served.to_json() | {"product": served.device.product},
    }
    if ledger.facts["fits"]:
        more["frontier"] = [c.to_json() for c in frontier(served, request, price)]
        more["cost"] = _cost(served, ledger.totals["output_tokens_per_second"].value, price)
        more["interval"] = {kind: interval(kind, served) for kind in ("decode", "prompt", "requests", "unlimited")}
    if options.emit:
        more["emit"] = {"text": emit_serving(options.emit, served, request), "notes": emit_notes(options.emit, served)}
    return PlanOutcome(ledger, fits, more)


def _engine(options: Options, on: str | None, assumed: list[Assumption]) -> ServingEngine:
    if said := options.engine or options.emit:
        return serving_engine(said)
    weights = (options.weights or "").lower()
    device = accelerator(_place(on)[1]) if on is not None else None
    # Devices for which vLLM is not usual: processors, graphics of Apple and Intel, neural units of phones.
    small = device and (vendor(device) in ("cpu", "apple", "intel") or device.generation.startswith("hexagon"))
    name = "llama.cpp" if re.match(r"i?q\d|.*gguf", weights) or small else "vllm"
    assumed.append(Assumption("engine", name, "usual for such weights and devices", "--engine"))
    return serving_engine(name)


def _formats(options: Options, assumed: list[Assumption], searched: bool) -> list[Formats]:
    cache = options.kv or "bf16"
    if cache not in CACHE_BYTES:
        raise UserError(f"--kv {cache}: write {', '.join(CACHE_BYTES)}")
    if options.weights:
        return [Formats(stored_format(options.weights).name, "", cache)]
    if searched:
        assumed.append(Assumption("weights", "bf16 or fp8", "both tried; fp8 costs little accuracy", "--weights"))
        return [Formats("bf16", "", cache), Formats("fp8", "", cache)]
    assumed.append(Assumption("weights", "bf16", "as most weights are published, not all", "--weights"))
    return [Formats("bf16", "", cache)]


def _place(on: str) -> tuple[int, str]:
    match = re.fullmatch(r"(?:(\d{1,6})x)?([\w.-]+)", on.strip())
    if not match or (match.group(1) and int(match.group(1)) < 1):
        raise UserError(f"--on {on[:60]!r}: write COUNTxACCELERATOR, for example 4xh100-sxm-80gb")
    return int(match.group(1) or 1), match.group(2)


def _given(
    model: ModelConfig, on: str, engine: ServingEngine, formats: Formats, layout: str | None, request: ServeRequest
) -> Served:
    """Return the given layout, else the best of copies on 1, 2, 4 or 8 devices each, or the largest if none fits.

    A pipeline, or copies of attention, must be clearly better than dividing every matrix.
    """
    count, name = _place(on)
    device = accelerator(name)
    if layout:
        return _served(model, device, engine, _layout(layout, count), formats, request)
    layouts = [
        layout
        for size in DEVICES_OF_A_COPY if count % size == 0
        for layout in layouts_of_copies(model, device, engine, size, count // size)
    ]  # fmt: skip
    found = [_served(model, device, engine, layout, formats, request) for layout in layouts]
    worth = [(_worth(served, request), served) for served in found if served.fits_request(request)]
    best = max(worth, key=itemgetter(0), default=None)
    usual = (one for one in worth if one[1].layout.is_plain or engine.by_layers)
    plain = max(usual, key=itemgetter(0), default=None)
    if best is None:
        return found[-1]
    return best[1] if plain is None or best[0][0] > CLEARLY * plain[0][0] else plain[1]


def _worth(served: Served, request: ServeRequest) -> tuple[float, float]:
    """Return by what a layout is better than another: throughput under a rate without limits, else the share of the
    load that it serves within the limits, and its speed for one request alone."""
    points = frontier(served, request)
    if request.tpot is None and request.ttft is None and request.rate is not None:
        return points[-1].tokens_per_second * served.layout.replicas, 0.0
    within = _within_limits(served, request, None)
    share = 0.0 if within is None else min(1.0, served.layout.replicas / within.served.layout.replicas)
    return share, -points[0].tpot_seconds


def _layout(text: str, count: int) -> ServingLayout:
    found = {"tp": 1, "pp": 1, "ep": 0, "replicas": 0, "prefill": 0}
    for key, value in parse_words(text, "--layout of serving", found, "tp=4 replicas=2").items():
        if not value.isdecimal() or int(value) < 1:
            raise UserError(f"--layout of serving: {key}={value} is no number from 1: write for example {key}=2")
        found[key] = int(value)
    tp, pp, prefill = found["tp"], found["pp"], found["prefill"]
    ep = found["ep"] or tp
    if ep % tp:
        raise UserError(f"--layout '{text}': ep is a multiple of tp, whose ranks share the experts too")
    copies = found["replicas"] or max(1, count // (ep * pp) - prefill)
    needed = ep * pp * (copies + prefill)
    if needed != count:
        raise UserError(f"--layout '{text}' needs {needed} devices, and --on gives {count}")
    return ServingLayout(tp, pp, ep // tp, copies, prefill)


def _cost(served: Served, tokens_per_second: float, price: float | None) -> dict[str, Any]:
    """Return the cost of tokens in dollars, and in joules at the share of the power limit that kernels draw."""
    each, watts = usd_per_hour(served.device, price), served.device.tdp_watts
    dollars = None if each is None else each * served.devices
    joules = watts.value * COMPUTING_SHARE[0] * served.devices / tokens_per_second * 1e6 if watts else None
    return {
        "usd_per_hour": dollars,
        "usd_per_million_tokens": usd_per_million(dollars, tokens_per_second),
        "joules_per_million_tokens": joules,
        "source": "--price-per-hour" if price else "latest catalogued rent",
    }
