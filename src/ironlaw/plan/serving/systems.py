"""Build a `System` from a model, catalogued devices, an engine, formats and degrees of parallelism.

system = system_of(ModelConfig.named("llama3-70b"), accelerator("h100-sxm-80gb"), serving_engine("vllm"),
                   ServingLayout(tp=4), Formats("fp8"))
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ironlaw.catalog.accelerators import Accelerator
from ironlaw.catalog.formats import stored_format
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.plan.serving.demand import Demand, demand_of
from ironlaw.plan.serving.rates import Rates, ServingEngine, rates_of, vendor
from ironlaw.plan.serving.timing import System

WIDE_BYTES = 2.0
PCIE_BYTES_PER_SECOND = 20e9
"""Rate between devices for which no link and no PCIe rate is catalogued."""

LARGE_BYTES = 70 * 2**30
"""Memory from which vLLM runs 1,024 requests at once by default, except on A100 (vllm/engine/arg_utils.py)."""

INTEGERS_PER_LANE = 4
"""8-bit products of a CPU per 32-bit lane (AVX-VNNI, Arm's dot product), unless the catalogue has a lower rate."""

VECTORS_ALONE = {("vulkan", "xe_hpg")}
"""Backend of llama.cpp and generation whose matrix units it leaves alone (ggml-vulkan.cpp: cooperative matrices from
Xe2 on). Vector units run 16-bit products at twice the fp32 rate, 8-bit ones at four times."""

BLOCK_FLOPS, BLOCK_FLOPS_OF_VECTORS = 4.0, 2.0
"""FLOPs of quantised products that llama.cpp's kernels reach for a 32-bit FLOP of the vector units, which bind them:
they unpack weights, and convert, scale and add the sums of every block of 32 weights. That takes about 8 instructions
of 2 FLOPs for the 64 FLOPs of a block, and as many again where they multiply too, with no matrix units beside them."""

DUAL_ISSUE = ("rdna3", "rdna3.5")
"""Generations whose 32-bit rate counts two instructions at once, which kernels other than plain sums seldom have."""

WIDE = ("bf16", "fp16", "f16-gguf")
"""Formats of GGUF files that are not quantised."""

CACHE_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "q8_0": 1.0625, "int4": 0.5, "fp32": 4.0}


@dataclass(frozen=True)
class Formats:
    """Formats of weights (stored), activations (of products; empty: as the weights) and cache (keys and values)."""

    weights: str = "bf16"
    activations: str = ""
    cache: str = "bf16"


@dataclass(frozen=True)
class ServingLayout:
    """attention_dp: copies of attention that share the experts (ep = tp x attention_dp ranks); replicas: copies of the
    model; prefill: further ones for prompts alone."""

    tp: int = 1
    pp: int = 1
    attention_dp: int = 1
    replicas: int = 1
    prefill: int = 0

    @property
    def ep(self) -> int:
        return self.tp * self.attention_dp

    @property
    def is_plain(self) -> bool:
        """Whether every matrix is divided, and nothing else."""
        return self.attention_dp == self.pp == 1

    @property
    def devices(self) -> int:
        """Devices of one copy of the model."""
        return self.ep * self.pp

    def __str__(self) -> str:
        unsaid = {"pp": 1, "ep": self.tp, "replicas": 1, "prefill": 0}
        said = {name: getattr(self, name) for name in ("tp", *unsaid)}
        return " ".join(f"{name}={value}" for name, value in said.items() if value != unsaid.get(name))


def system_of(
    model: ModelConfig | Demand, device: Accelerator, engine: ServingEngine, layout: ServingLayout, formats: Formats,
    backend: str = "", rates: Rates | None = None,
) -> System:  # fmt: skip
    """Return the system of one copy of the model. Raises UserError if the catalogue lacks a necessary figure."""
    demand = model if isinstance(model, Demand) else demand_of(model)
    stored = stored_format(formats.weights)
    if device.memory_bytes_per_second is None or device.memory_bytes is None:
        raise UserError(f"the catalogue has no memory rate of {device.name}: serving cannot be planned on it")
    if formats.cache not in CACHE_BYTES:
        raise UserError(f"unknown cache format '{formats.cache}': {', '.join(CACHE_BYTES)}")
    link = device.link_bytes_per_second or device.pcie_bytes_per_second
    width = stored.bytes_per_weight
    wide = wide_peak(device)
    return System(
        demand=demand,
        rates=rates or rates_of(engine, device, formats.weights, backend, experts=demand.experts > 0),
        tp=float(layout.tp),
        pp=float(layout.pp),
        attention_dp=float(layout.attention_dp),
        bandwidth=device.memory_bytes_per_second.value,
        link=link.value if link else PCIE_BYTES_PER_SECOND,
        memory=device.memory_bytes.value,
        peak=product_peak(device, engine, formats, backend),
        wide_peak=wide,
        dense_bytes=WIDE_BYTES if stored.experts else width,
        head_bytes=WIDE_BYTES if stored.wide else width,
        expert_bytes=width,
        cache_bytes=CACHE_BYTES[formats.cache],
        pass_tokens=float(engine.pass_tokens),
        in_flight=float(engine.in_flight),
        score_bytes=float(engine.score_bytes),
        converts=float(converts(device, engine, formats)),
        sums=float(engine.sums),
        launches=float(engine.launches),
        stored_reads=float(engine.reads[0]),
        expanded_reads=float(engine.reads[1]),
        sampled=float(engine.sampled[device.memory_bytes.value >= LARGE_BYTES and device.generation != "ampere"]),
    )


def wide_peak(device: Accelerator) -> float:
    """Return the dense FLOP/s in 16 bits, else in fp32 or int8. Raises UserError if none is catalogued."""
    peaks = device.peak_flops_per_second
    known = [peaks[name].value for name in ("bf16", "fp16") if name in peaks] or [
        peaks[name].value for name in ("fp32", "int8") if name in peaks
    ]
    if not known:
        raise UserError(f"the catalogue has no peak of {device.name}: prompts cannot be planned on it")
    return max(known)


MATRIX_RATIO = 4.5
"""Peak over that of fp32 from which it is that of matrix units: vector units multiply at most four 8-bit integers in
place of one fp32 number."""


def has_matrix_units(device: Accelerator, *formats: str) -> bool:
    """Return whether matrix units multiply numbers of one of `formats`."""
    peaks = {name: figure.value for name, figure in device.peak_flops_per_second.items()}
    return any(peaks.get(name, 0.0) > MATRIX_RATIO * peaks.get("fp32", math.inf) for name in formats)


def converts(device: Accelerator, engine: ServingEngine, formats: Formats) -> bool:
    """Return whether llama.cpp converts quantised weights to 16 bits for a library's products of prompts: in early
    releases, and where matrix units know nothing else (Volta)."""
    if engine.family != "gguf" or formats.weights in WIDE or not vendor(device).startswith("nvidia"):
        return False
    return engine.converts if has_matrix_units(device, "int8") else has_matrix_units(device, "fp16")


def product_peak(device: Accelerator, engine: ServingEngine, formats: Formats, backend: str = "") -> float:
    """Return the FLOP/s of the format of products, which narrow weights alone do not make narrow."""
    peaks = {name: figure.value for name, figure in device.peak_flops_per_second.items()}
    wide = wide_peak(device)
    if engine.family == "gguf":
        quantised, fp32 = formats.weights not in WIDE, peaks.get("fp32", wide)
        if device.generation.startswith("cpu"):
            integers = min(INTEGERS_PER_LANE * fp32, peaks.get("int8", math.inf))
            return max(wide, integers) if quantised else wide
        if (backend, device.generation) in VECTORS_ALONE:
            return 2.0 * fp32
        # Graphics cards run fp16 with fp32 sums at half the printed rate, but these kernels do not need fp32 sums: half
        # the rate of 8-bit integers is that of fp16 with fp16 sums.
        peak = max(wide, 0.5 * peaks.get("int8", 0.0))
        scales = quantised and "fp32" in peaks and not converts(device, engine, formats)
        if scales and vendor(device).startswith(("nvidia", "amd")):  # one source of kernels, for CUDA and HIP
            vectors = fp32 * (0.5 if device.generation in DUAL_ISSUE else 1.0)
            peak = min(peak, vectors * (BLOCK_FLOPS if has_matrix_units(device, "int8") else BLOCK_FLOPS_OF_VECTORS))
        return peak
    narrow = formats.activations or formats.weights
    if narrow.startswith("fp8") and formats.weights != "fp8-weight-only":
        return peaks.get("fp8", wide)
    if narrow == "nvfp4":
        return peaks.get("fp4", wide)
    if narrow in ("int8-w8a8-dynamic", "int8_sq"):
        return peaks.get("int8", wide)
    return wide
