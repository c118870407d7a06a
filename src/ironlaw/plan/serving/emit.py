"""A planned server as another engine's own command line. Sources: the engines' command references, as of 2026."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from ironlaw.errors import UserError, did_you_mean
from ironlaw.plan.serving.estimate import Served
from ironlaw.plan.serving.request import ServeRequest

_VLLM_WEIGHTS = {
    "fp8": "fp8",
    "int4-awq": "awq_marlin",
    "int4-gptq": "gptq_marlin",
    "int8-gptq": "gptq",
    "mxfp4": "mxfp4",
}
_CACHES = {"vllm": {"fp8": "fp8"}, "sglang": {"fp8": "fp8_e4m3"}, "llama.cpp": {"int8": "q8_0", "q8_0": "q8_0"}}


def emit_serving(target: str, served: Served, request: ServeRequest) -> str:
    """One shell line. UserError for an engine that is not known, or cannot run what is planned."""
    makers: dict[str, Callable[[Served, ServeRequest], list[str]]] = {
        "vllm": _vllm, "sglang": _sglang, "tensorrt-llm": _tensorrt, "llama.cpp": _llama
    }  # fmt: skip
    if target not in makers:
        raise UserError(f"--emit {target}: {did_you_mean(target, makers)}")
    return shlex.join(makers[target](served, request)) + "\n"


def _vllm(served: Served, request: ServeRequest) -> list[str]:
    layout = served.layout
    words = ["vllm", "serve", served.model.name, "--tensor-parallel-size", str(layout.tp)]
    if layout.pp > 1:
        words += ["--pipeline-parallel-size", str(layout.pp)]
    if layout.replicas > 1:
        words += ["--data-parallel-size", str(layout.replicas)]
    if quantised := _VLLM_WEIGHTS.get(served.formats.weights):
        words += ["--quantization", quantised]
    if cache := _CACHES["vllm"].get(served.formats.cache):
        words += ["--kv-cache-dtype", cache]
    return [
        *words,
        "--max-model-len", str(_longest(served, request)),
        "--max-num-seqs", str(max(1, served.most_requests(request))),
        "--max-num-batched-tokens", str(served.budget),
        "--gpu-memory-utilization", f"{served.engine.memory_fraction:g}",
    ]  # fmt: skip


def _sglang(served: Served, request: ServeRequest) -> list[str]:
    layout = served.layout
    words = ["python", "-m", "sglang.launch_server", "--model-path", served.model.name, "--tp", str(layout.tp)]
    if layout.replicas > 1:
        words += ["--dp", str(layout.replicas)]
    if served.formats.weights == "fp8":
        words += ["--quantization", "fp8"]
    if cache := _CACHES["sglang"].get(served.formats.cache):
        words += ["--kv-cache-dtype", cache]
    return [
        *words,
        "--context-length", str(_longest(served, request)),
        "--max-running-requests", str(max(1, served.most_requests(request))),
        "--chunked-prefill-size", str(served.budget),
        "--mem-fraction-static", f"{served.engine.memory_fraction:g}",
    ]  # fmt: skip


def _tensorrt(served: Served, request: ServeRequest) -> list[str]:
    words = ["trtllm-serve", served.model.name, "--tp_size", str(served.layout.tp)]
    if served.layout.pp > 1:
        words += ["--pp_size", str(served.layout.pp)]
    return [
        *words,
        "--max_batch_size", str(max(1, served.most_requests(request))),
        "--max_num_tokens", str(served.budget),
        "--max_seq_len", str(_longest(served, request)),
        "--kv_cache_free_gpu_memory_fraction", f"{served.engine.memory_fraction:g}",
    ]  # fmt: skip


def _llama(served: Served, request: ServeRequest) -> list[str]:
    """Its slots share one context: so many requests of the longest each."""
    if served.layout.tp > 1:
        raise UserError("--emit llama.cpp: it holds layers one after another: plan with --engine llama.cpp")
    at_once = max(1, min(served.most_requests(request), request.concurrency or 4))
    words = ["llama-server", "--model", f"{served.model.name}-{served.formats.weights}.gguf", "--n-gpu-layers", "999"]
    if cache := _CACHES["llama.cpp"].get(served.formats.cache):
        words += ["--cache-type-k", cache, "--cache-type-v", cache, "--flash-attn", "on"]
    return [*words, "--ctx-size", str(at_once * _longest(served, request)), "--parallel", str(at_once)]


def _longest(served: Served, request: ServeRequest) -> int:
    """Twice the mean length, which lengths at random seldom pass; no more than the model takes."""
    return min(served.model.context, 2 * request.length)
