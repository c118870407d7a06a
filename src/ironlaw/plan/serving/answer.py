"""`ironlaw plan WHAT --serve REQUEST`: on given devices the plan, without any the cheapest that serve it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from ironlaw.catalog.accelerators import accelerator
from ironlaw.catalog.formats import stored_format
from ironlaw.errors import UserError, words_of
from ironlaw.model.config import ModelConfig
from ironlaw.plan.request_types import SERVED, Options, PlanOutcome
from ironlaw.plan.serving.emit import emit_notes, emit_serving
from ironlaw.plan.serving.estimate import Served, interval, plan_serving
from ironlaw.plan.serving.rates import ServingEngine, serving_engine
from ironlaw.plan.serving.request import ServeRequest, parse_request
from ironlaw.plan.serving.search import (
    DEVICES_OF_A_COPY,
    copies_on,
    frontier,
    joules_per_million,
    search_serving,
    usd_per_hour,
)
from ironlaw.plan.serving.systems import CACHE_BYTES, Formats, ServingLayout
from ironlaw.plan.work import Assumption

DEFAULT_ENGINE = "vllm"
GGUF_ENGINE = "llama.cpp"
GAUDI = ("gaudi2", "gaudi3")


def answer_serving(model: ModelConfig, on: str | None, text: str, options: Options) -> PlanOutcome:
    """UserError for what cannot be planned; `fits` is False where limits or memory do not hold."""
    options.refuse_beside(SERVED)
    request = parse_request(text)
    if request.length > model.context:
        raise UserError(
            f"--serve: input + output = {request.length:,} tokens, and {model.name} takes {model.context:,}"
        )
    assumed: list[Assumption] = []
    engine = _engine(options, on, assumed)
    formats = _formats(options, assumed, searched=on is None)
    draft = ModelConfig.named(request.draft) if request.draft else None
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
    served = replace(served, drafted=request.speculate, acceptance=request.accept, draft=draft)
    ledger = plan_serving(served, request)
    fits = bool(ledger.facts["fits"]) and all(limit["holds"] for limit in ledger.facts.get("limits", {}).values())
    more |= {"assumed": [one.to_json() for one in assumed], "served": _served(served)}
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
    # Devices that vLLM does not serve from: processors, Apple's chips, neural units.
    small = device and device.vendor not in ("nvidia", "amd", "google") and device.generation not in GAUDI
    name = GGUF_ENGINE if re.match(r"i?q\d|.*gguf", weights) or small else DEFAULT_ENGINE
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
    assumed.append(Assumption("weights", "bf16", "as they are published", "--weights"))
    return [Formats("bf16", "", cache)]


def _place(on: str) -> tuple[int, str]:
    match = re.fullmatch(r"(?:(\d{1,6})x)?([\w.-]+)", on.strip())
    if not match or (match.group(1) and int(match.group(1)) < 1):
        raise UserError(f"--on {on[:60]!r}: write COUNTxACCELERATOR, for example 4xh100-sxm-80gb")
    return int(match.group(1) or 1), match.group(2)


def _given(
    model: ModelConfig, on: str, engine: ServingEngine, formats: Formats, layout: str | None, request: ServeRequest
) -> Served:
    """One copy on as few of the devices as hold it, and copies on the rest, unless a layout is given."""
    count, name = _place(on)
    device = accelerator(name)
    if layout:
        return Served(model, device, engine, _layout(layout, count), formats)
    best: Served | None = None
    for size in [n for n in DEVICES_OF_A_COPY if n <= count and count % n == 0] or [count]:
        if engine.family != "gguf" and model.heads % size:
            continue
        served = Served(model, device, engine, copies_on(engine, size, count // size), formats)
        if best is None or (served.fits_request(request) and _better(served, best, request)):
            best = served
    assert best is not None
    return best


def _better(served: Served, than: Served, request: ServeRequest) -> bool:
    """Fits where the other does not; holds the limits, or else is faster for one request."""
    if not than.fits_request(request):
        return True
    if request.tpot is None and request.ttft is None and request.rate is not None:
        now, before = (frontier(s, request)[-1].tokens_per_second * s.layout.replicas for s in (served, than))
        return now > before
    now, before = (frontier(s, request)[0].tpot_seconds for s in (served, than))
    return now < before


def _layout(text: str, count: int) -> ServingLayout:
    found = {"tp": 1, "pp": 1, "ep": 0, "replicas": 0, "prefill": 0}
    for key, value in words_of(text, "--layout of serving", found, "tp=4 replicas=2").items():
        if not value.isdigit() or int(value) < 1:
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
    return ServingLayout(ep * pp, tp, pp, ep // tp, copies, prefill)


def _served(served: Served) -> dict[str, Any]:
    return {
        "device": served.device.name, "product": served.device.product, "devices": served.devices,
        "layout": str(served.layout), "engine": served.engine.name, "weights": served.formats.weights,
        "kv": served.formats.cache,
    }  # fmt: skip


def _cost(served: Served, tokens_per_second: float, price: float | None) -> dict[str, Any]:
    each = usd_per_hour(served.device, price)
    dollars = None if each is None else each * served.devices
    return {
        "usd_per_hour": dollars,
        "usd_per_million_tokens": dollars / 3600 / tokens_per_second * 1e6 if dollars and tokens_per_second else None,
        "joules_per_million_tokens": joules_per_million(served, tokens_per_second),
        "source": "--price-per-hour" if price else "lowest catalogued rent",
    }
