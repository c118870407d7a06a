"""Rates that engines attain on devices: a base constant plus effects of engine, generation and format.

    rates = rates_of(serving_engine("vllm"), accelerator("h200"), "bf16")
    rates.weights        # fraction of the memory's nominal rate, while reading weights
    rates.layer_seconds  # launches and small kernels of a layer

A constant is a logistic function (fractions of a nominal rate) or an exponential (seconds, counts) of the sum of `base`
and the effects that apply. Effects are fitted with a penalty on their size, so that those with few measurements are
small, and an unmeasured engine or generation gets the base (`benchmarks/fit_serving.py`, `constants.toml`; data:
`docs/plan-serving.md`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ironlaw.catalog.accelerators import Accelerator
from ironlaw.catalog.figures import unknown
from ironlaw.files import read_toml
from ironlaw.plan.serving.demand import Number

LATEST = 2026  # the year of releases that state none

FRACTIONS = ("weights", "products", "cache", "attention")
"""Constants that are fractions of a nominal rate."""


@cache
def read(name: str) -> dict[str, Any]:
    """Return the content of a data file of this package."""
    return read_toml(Path(__file__).with_name(name))


@dataclass(frozen=True)
class Rates:
    """Constants of one engine on one device, or of many as arrays."""

    weights: Number  # fraction of the memory's rate, reading weights
    products: Number  # fraction of the format's dense peak, long prompts
    decode_products: Number  # factor on `products` for passes with one token per sequence
    cache: Number  # fraction of the memory's rate, reading keys and values
    attention: Number  # fraction of the dense 16-bit peak, attention of prompts
    layer_seconds: Number  # per layer and pass: gaps between kernels, small kernels
    launch_seconds: Number  # of the host for an operation, where it launches every one and runs ahead
    step_seconds: Number  # per decoding pass: scheduling, sampling, host
    sequence_seconds: Number  # per decoding pass and sequence: scheduling, sampling, text
    prompt_seconds: Number  # per prompt pass, likewise
    request_seconds: Number  # of a server for a request, beside all passes: its text, its connection
    ramp_tokens: Number  # extra tokens whose products a prompt pass spends on filling the device
    collective_seconds: Number  # latency of one all-reduce over tensor parallel ranks
    throughput: Number  # factor on the rate of requests with an unlimited queue
    most_requests: Number  # sequences an engine decodes at once, if their caches fit


NAMES = tuple(field.name for field in fields(Rates))


@dataclass(frozen=True)
class ServingEngine:
    """One entry of `engines.toml`."""

    name: str
    key: str  # the engine whose effects apply
    # "gpu": products in the activations' format; "gguf": products of quantised weights in 8-bit integers.
    family: str = "gpu"
    by_layers: bool = False  # several devices divide the layers, not every matrix
    tried: Sequence[str] = ()  # ways to divide a copy beside tensor parallelism: pp, ep
    sums: int = 2  # of a layer, where devices divide every matrix: of the outputs of attention and of the MLP
    paged: bool = True  # the cache is allocated in blocks; False: every sequence reserves its full length
    memory_fraction: float = 0.9  # of the device's memory, for weights and cache
    of_free: bool = False  # that fraction applies to the memory left by the weights
    pass_tokens: int = 8192  # most new tokens of a pass: the default of vLLM and TensorRT-LLM (max_num_batched_tokens)
    in_flight: int = 1  # passes of one prompt that may be on different stages of a pipeline at the same time
    score_bytes: int = 0  # that attention of prompts moves for a query, a key and a head; 0: one fused kernel
    converts: bool = False  # on NVIDIA's devices all quantised weights to 16 bits, ahead of the products of prompts
    reads: Sequence[int] = (1, 0)  # how often a pass moves keys and values: as stored, repeated for all query heads
    # "graphs": replays captured or compiled passes; "eager": launches every operation from Python; "native": launches
    # them from a compiled language.
    host: str = "graphs"
    launches: int = 0  # operations of a layer that an eager host launches
    # Rows of logits for which it reserves memory before it allocates the cache, on small and on large devices.
    sampled: Sequence[int] = (0, 0)


def serving_engine(name: str) -> ServingEngine:
    """Return the engine of a name or alias. Raises UserError with the nearest name for others."""
    table = read("engines.toml")
    typed = name.strip().lower()
    for key, entry in table.items():
        if typed == key or typed in entry.get("also", ()):
            found = {"key": key} | table.get(entry.get("like"), {}) | entry
            return ServingEngine(key, **{k: v for k, v in found.items() if k not in ("also", "like")})
    raise unknown("serving engine", name, table)


def effect_names(
    engine: ServingEngine, device: Accelerator, weights: str, backend: str = "", year: int = LATEST,
    experts: bool = False,
) -> dict[str, str]:  # fmt: skip
    """Return the name under which each kind of effect is looked up; "" for none.

    host: how the engine drives the device; release: any engine up to 2024, or after; age: the same of this engine;
    class: devices of a generation; vendor: a vendor's devices by kind of memory; bus: with a link between devices or
    without; pair: an engine (or its family) on a class; support: a family of engines on a vendor's devices up to 2024,
    or after; kernel: an engine's kernel for a format; mixture: experts on an engine.
    """
    family, own = format_family(weights), engine.family == "gguf"
    kind, release = device_class(device), "2024" if year <= 2024 else "2025"
    side = engine.key if own else "gpu"
    return {
        "engine": engine.key,
        "host": engine.host,
        "release": "" if own else release,
        "age": f"{engine.key}/{release}",
        "class": kind,
        "vendor": vendor(device),
        "format": f"gguf-{family}" if own else family,
        "bus": "link" if device.link_bytes_per_second else "pcie",
        "pair": f"{side}/{kind}" + (f"/{backend}" if backend and own else ""),
        "support": f"{engine.family}/{vendor(device)}/{release}",
        "kernel": f"{engine.key}/{family if family in KERNELS else weights}" if own or family in NARROW else "",
        "mixture": f"{side}/experts" if experts else "",
    }


KERNELS = ("int4", "int8")
NARROW = (*KERNELS, "unfused")
"""Formats for which every engine has kernels of its own: one, or one for each unfused format (and GGUF's)."""

UNFUSED = ("int8-w8a8-dynamic", "uint", "codebook")
"""Formats of torchao whose weights or activations are converted by passes of their own, not within the product."""


def format_family(weights: str) -> str:
    """Return the group of formats with similar kernels: 16, fp8, int8, fp4, int4, GGUF's by bits, or unfused."""
    name = weights.lower()
    if name.startswith(UNFUSED):
        return "unfused"
    if name in ("bf16", "fp16", "f16-gguf", "full_prec", "fp32"):
        return "16"
    for prefix in ("iq2", "iq3", "iq4", "q2", "q3", "q4", "q5", "q6", "q8", "int8", "fp8"):
        if name.startswith(prefix):
            return {"iq4": "q4", "q6": "q5", "iq3": "iq2", "q2": "q3"}.get(prefix, prefix)
    if name in ("nvfp4", "mxfp4"):
        return "fp4"
    if name == "mxfp4-gguf-f16-attention":
        return "q4"
    return "fp8" if name in ("fp6", "mxfp8", "mxfp6") else "int4"


TOGETHER = {
    "rdna": "rdna", "cdna": "cdna", "gaudi": "gaudi", "apple": "apple", "ampere_graphics": "ampere-gddr",
}  # fmt: skip
"""Classes of generations that share effects, by the start of their names."""

APART = ("ampere", "blackwell")
"""Generations with two kinds of chips: those with HBM have other matrix units and kernels than those without."""


def device_class(device: Accelerator) -> str:
    """Return the class of devices that share effects: a generation, several of them, or a part of one."""
    generation = device.generation
    if generation in APART and not (device.memory_kind or "").startswith("HBM"):
        return f"{generation}-gddr"
    return next((name for start, name in TOGETHER.items() if generation.startswith(start)), generation)


VENDORS = {
    "cpu": ("cpu",), "apple": ("apple",), "amd": ("rdna", "cdna"), "intel": ("xe",),
    "other": ("gaudi", "sn40l", "tpu", "trainium", "hexagon"),
}  # fmt: skip
"""Vendors by the start of a device's class; all others are NVIDIA's, with HBM and without."""


def vendor(device: Accelerator) -> str:
    """Return a wider group than a class: unmeasured devices get the effects of their vendor's."""
    kind = device_class(device)
    known = next((name for name, starts in VENDORS.items() if kind.startswith(starts)), None)
    return known or ("nvidia-hbm" if (device.memory_kind or "").startswith("HBM") else "nvidia-gddr")


def rates_of(
    engine: ServingEngine, device: Accelerator, weights: str, backend: str = "", year: int = LATEST,
    experts: bool = False,
) -> Rates:  # fmt: skip
    """Return the constants of one engine on one device, with weights in one format."""
    names = effect_names(engine, device, weights, backend, year, experts)
    table, found = read("constants.toml"), {}
    for name in NAMES:
        effects = (float(table[name].get(kind, {}).get(of, 0.0)) for kind, of in names.items())
        found[name] = float(link(name, float(table[name]["base"]) + sum(effects)))
    return Rates(**found)


def is_measured(engine: ServingEngine, device: Accelerator) -> bool:
    """Return whether measurements of this engine and of such devices took part in the fit: constants have effects of
    theirs."""
    table, pair = read("constants.toml"), effect_names(engine, device, "bf16")["pair"]
    engines, pairs = (
        {name for constant in NAMES for name in table[constant].get(kind, ())} for kind in ("engine", "pair")
    )
    return engine.key in engines and any(name == pair or name.startswith(f"{pair}/") for name in pairs)


def interval_of(engine: ServingEngine, device: Accelerator, kind: str) -> tuple[float, float]:
    """Return the natural logarithms of measured over planned seconds between which 80% lie; `kind`: decode, prompt,
    first (token, under load), requests, unlimited."""
    seen = "known" if is_measured(engine, device) else "unseen"
    low, high = read("constants.toml")["interval"][seen][kind]
    return low, high


def link(name: str, total: Number) -> Number:
    """Return the constant for a sum of effects."""
    return 1.0 / (1.0 + np.exp(-total)) if name in FRACTIONS else np.exp(total)
