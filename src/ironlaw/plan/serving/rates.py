"""What engines attain on devices: a base constant and the effects of engine, generation and format on it.

    rates = rates_of(serving_engine("vllm"), accelerator("h200"), "bf16")
    rates.weights        # of the memory's nominal rate, while weights are read
    rates.layer_seconds  # launches and small kernels of a layer

A constant is `base` plus the effects that apply, then a logistic function (fractions of a nominal rate) or an
exponential (seconds, counts). Effects are fitted with a penalty on their size, so that what few measurements support
stays near the base, and an engine or a generation that nobody measured takes the base (`benchmarks/fit_serving.py`,
`constants.toml`; data: `docs/plan-serving.md`).
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

LATEST = 2026  # releases whose year is not said

FRACTIONS = ("weights", "products", "cache", "attention")
"""Constants that are fractions of a nominal rate."""


@cache
def read(name: str) -> dict[str, Any]:
    """A data file of this room."""
    return read_toml(Path(__file__).with_name(name))


@dataclass(frozen=True)
class Rates:
    """Of one engine on one device, or of many."""

    weights: Number  # of the memory's rate, reading weights
    products: Number  # of the dense peak of the format, long prompts
    decode_products: Number  # factor on that where a pass has a token per sequence
    cache: Number  # of the memory's rate, reading keys and values
    attention: Number  # of the dense 16-bit peak, attention of prompts
    layer_seconds: Number  # of every layer of every pass: launches, small kernels
    step_seconds: Number  # of every decoding pass: scheduling, sampling, host
    prompt_seconds: Number  # of every prompt pass, likewise
    ramp_tokens: Number  # tokens whose products a prompt pass loses to filling the machine
    collective_seconds: Number  # latency of one sum over tensor parallel ranks
    most_requests: Number  # sequences an engine decodes at once, room for their caches given
    throughput: Number  # factor on the rate of requests with no limit on how many wait


NAMES = tuple(field.name for field in fields(Rates))


@dataclass(frozen=True)
class ServingEngine:
    """One entry of `engines.toml`."""

    name: str
    key: str  # whose effects apply
    # "gpu": products in the activations' format; "gguf": products of quantised weights in 8-bit integers.
    family: str = "gpu"
    paged: bool = True  # the cache is handed out in blocks; else every sequence reserves its longest
    memory_fraction: float = 0.9  # of the device's memory, that weights and cache may take
    of_free: bool = False  # that fraction is one of what weights leave
    # "graphs": replays captured or compiled passes; "eager": launches every operation from Python; "native": launches
    # them from a compiled language.
    host: str = "graphs"
    emit: str = ""
    # Rows of logits it makes room for before it hands out the cache, on small and on large devices.
    sampled: Sequence[int] = (0, 0)


def serving_engine(name: str) -> ServingEngine:
    """By its name or another name it goes by; UserError with the nearest for others."""
    table = read("engines.toml")
    typed = name.strip().lower()
    for key, entry in table.items():
        if typed == key or typed in entry.get("also", ()):
            return ServingEngine(key, **{"key": key} | {k: v for k, v in entry.items() if k != "also"})
    raise unknown("serving engine", name, table)


def effect_names(
    engine: ServingEngine, device: Accelerator, weights: str, backend: str = "", year: int = LATEST,
    experts: bool = False,
) -> dict[str, str]:  # fmt: skip
    """The name under which each kind of effect is looked up; "" where it has none.

    host: how an engine drives the device; release: up to 2024, or after, of any engine; age: of this one; class:
    devices of a generation; vendor: of a vendor's, by kind of memory; pair, side: of an engine's family on a class, on
    a vendor's; kernel: of an engine for a format; mixture: of experts.
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
        "pair": f"{side}/{kind}" + (f"/{backend}" if backend and own else ""),
        "side": f"{engine.family}/{vendor(device)}",
        "kernel": f"{engine.key}/{weights if own else family}" if own or family in ("int4", "int8") else "",
        "mixture": f"{side}/experts" if experts else "",
    }


def format_family(weights: str) -> str:
    """Formats whose kernels are alike: 16, fp8, int8, fp4, int4, exl2, or of GGUF by bits (q2 to q8, iq2 to iq4)."""
    name = weights.lower()
    if name in ("bf16", "fp16", "f16-gguf", "full_prec", "fp32"):
        return "16"
    for prefix in ("iq2", "iq3", "iq4", "q2", "q3", "q4", "q5", "q6", "q8", "exl2", "int8", "fp8"):
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
"""Generations that share their effects, by how their names begin."""

APART = ("ampere", "blackwell")
"""Generations of two kinds of chips: those with HBM have other matrix units and kernels than those without."""


def device_class(device: Accelerator) -> str:
    """Devices that share their effects: a generation, several of them, or a part of one."""
    generation = device.generation
    if generation in APART and not (device.memory_kind or "").startswith("HBM"):
        return f"{generation}-gddr"
    return next((name for start, name in TOGETHER.items() if generation.startswith(start)), generation)


VENDORS = {
    "cpu": ("cpu",), "apple": ("apple",), "amd": ("rdna", "cdna"), "intel": ("xe",),
    "other": ("gaudi", "sn40l", "tpu", "trainium", "hexagon"),
}  # fmt: skip
"""By how a device's class begins; all others are NVIDIA's, with HBM and without."""


def vendor(device: Accelerator) -> str:
    """Devices whose effects are alike, more widely than a class: what nobody measured takes after its vendor's."""
    kind = device_class(device)
    known = next((name for name, starts in VENDORS.items() if kind.startswith(starts)), None)
    return known or ("nvidia-hbm" if (device.memory_kind or "").startswith("HBM") else "nvidia-gddr")


def rates_of(
    engine: ServingEngine, device: Accelerator, weights: str, backend: str = "", year: int = LATEST,
    experts: bool = False,
) -> Rates:  # fmt: skip
    """The constants of one engine on one device, weights in one format."""
    names = effect_names(engine, device, weights, backend, year, experts)
    table, found = read("constants.toml"), {}
    for name in NAMES:
        effects = (float(table[name].get(kind, {}).get(of, 0.0)) for kind, of in names.items())
        found[name] = float(link(name, float(table[name]["base"]) + sum(effects)))
    return Rates(**found)


def is_measured(engine: ServingEngine, device: Accelerator) -> bool:
    """Whether constants of this engine, on such devices, were learned from measurements."""
    known = read("constants.toml")["evidence"]
    pair = effect_names(engine, device, "bf16")["pair"]
    return engine.key in known["engines"] and any(
        name == pair or name.startswith(f"{pair}/") for name in known["pairs"]
    )


def interval_of(engine: ServingEngine, device: Accelerator, kind: str) -> tuple[float, float]:
    """Natural logarithms of measured over planned seconds between which 80% lie; `kind`: decode, prompt, first (token,
    under load), requests, unlimited."""
    seen = "known" if is_measured(engine, device) else "unseen"
    stated = read("constants.toml")["interval"][seen][kind]
    return stated["low"], stated["high"]


def link(name: str, total: Number) -> Number:
    """From a sum of effects to the constant."""
    return 1.0 / (1.0 + np.exp(-total)) if name in FRACTIONS else np.exp(total)
