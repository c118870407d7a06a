"""A planned server as another engine's command line. Sources: the engines' command references, as of 2026."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable

from ironlaw.catalog.models import repository
from ironlaw.errors import UserError, did_you_mean
from ironlaw.plan.emit import given
from ironlaw.plan.serving.estimate import Served
from ironlaw.plan.serving.request import ServeRequest

_VLLM_WEIGHTS = {
    "fp8": "fp8",
    "int4-awq": "awq_marlin",
    "int4-gptq": "gptq_marlin",
    "int8-gptq": "gptq_marlin",
    "mxfp4": "mxfp4",
}
_CACHES = {
    "vllm": {"fp8": "fp8"}, "sglang": {"fp8": "fp8_e4m3"}, "tensorrt-llm": {"fp8": "fp8"},
    "llama.cpp": {"int8": "q8_0", "q8_0": "q8_0"},
}  # fmt: skip
"""Formats of the cache beside 16 bits, as each engine names them."""

_PLAIN = ("bf16", "fp16", "fp8")
"""Formats to which an engine converts the published checkpoint while loading it."""


def emit_serving(target: str, served: Served, request: ServeRequest) -> str:
    """Return one shell line. Raises UserError for an unknown engine, or one that cannot run the plan."""
    makers: dict[str, Callable[[Served, ServeRequest], list[str]]] = {
        "vllm": _vllm, "sglang": _sglang, "tensorrt-llm": _tensorrt, "llama.cpp": _llama
    }  # fmt: skip
    if target not in makers:
        raise UserError(f"--emit {target}: {did_you_mean(target, makers)}")
    if served.layout.prefill:
        raise UserError(f"--emit {target}: prompts apart are several servers and a router: leave prefill= out")
    if served.drafted and target != "vllm":
        raise UserError(f"--emit {target}: speculation is written for vllm alone: leave speculate= out")
    kept = ("bf16", "fp16", *_CACHES[target])
    if served.formats.cache not in kept:
        raise UserError(f"--emit {target}: it keeps no cache in {served.formats.cache}: use --kv {' or '.join(kept)}")
    return " ".join(makers[target](served, request)) + "\n"


def emit_notes(target: str, served: Served) -> list[str]:
    """Return notes on what the command line does not express."""
    stored, notes, name = served.formats.weights, [str(served.layout)], repository(served.model.name)
    if target == "tensorrt-llm" and served.formats.cache == "fp8":
        notes.append("an fp8 cache is set in the file of --config: kv_cache_config: {dtype: fp8}")
    if served.layout.replicas > 1 and (target in ("llama.cpp", "tensorrt-llm") or served.layout.attention_dp > 1):
        notes.append(f"this starts one of {served.layout.replicas} copies: give each devices of its own")
    if target == "llama.cpp":
        notes.append(f"the file is {name} in {stored}")
    elif stored not in _PLAIN and not (stored == "mxfp4" and served.model.name.startswith("gpt-oss")):
        notes.append(f"{name} is not stored in {stored}: name a checkpoint that is")
    return notes


def _repository(served: Served) -> str:
    return shlex.quote(repository(served.model.name))


def _vllm(served: Served, request: ServeRequest) -> list[str]:
    layout, formats, draft = served.layout, served.formats, served.draft
    shares = layout.attention_dp > 1
    how = {"model": repository(draft.name)} if draft else {"method": "ngram", "prompt_lookup_max": 4}
    guesses = shlex.quote(json.dumps(how | {"num_speculative_tokens": served.drafted}))
    return given(
        (True, f"vllm serve {_repository(served)} --tensor-parallel-size {layout.tp}"),
        (layout.pp > 1, f"--pipeline-parallel-size {layout.pp}"),
        (shares, f"--data-parallel-size {layout.attention_dp} --enable-expert-parallel"),
        (not shares and layout.replicas > 1, f"--data-parallel-size {layout.replicas}"),
        (formats.weights in _VLLM_WEIGHTS, f"--quantization {_VLLM_WEIGHTS.get(formats.weights)}"),
        (formats.cache in _CACHES["vllm"], f"--kv-cache-dtype {_CACHES['vllm'].get(formats.cache)}"),
        (served.drafted, f"--speculative-config {guesses}"),
        (True, f"--max-model-len {_longest(served, request)}"),
        (True, f"--max-num-seqs {max(1, served.most_requests(request) // layout.attention_dp)}"),
        (True, f"--max-num-batched-tokens {served.engine.pass_tokens}"),
        (True, f"--gpu-memory-utilization {served.engine.memory_fraction:g}"),
    )


def _sglang(served: Served, request: ServeRequest) -> list[str]:
    """SGLang's tp counts the ranks of all copies of attention."""
    layout, cache = served.layout, served.formats.cache
    shares = layout.attention_dp > 1
    return given(
        (True, f"python -m sglang.launch_server --model-path {_repository(served)} --tp {layout.ep}"),
        (layout.pp > 1, f"--pp-size {layout.pp}"),
        (shares, f"--dp {layout.attention_dp} --enable-dp-attention --ep-size {layout.ep}"),
        (not shares and layout.replicas > 1, f"--dp {layout.replicas}"),
        (served.formats.weights == "fp8", "--quantization fp8"),
        (cache in _CACHES["sglang"], f"--kv-cache-dtype {_CACHES['sglang'].get(cache)}"),
        (True, f"--context-length {_longest(served, request)}"),
        (True, f"--max-running-requests {max(1, served.most_requests(request))}"),
        (True, f"--chunked-prefill-size {served.engine.pass_tokens * layout.attention_dp}"),  # all copies' of attention
        (True, f"--mem-fraction-static {served.engine.memory_fraction:g}"),
    )


def _tensorrt(served: Served, request: ServeRequest) -> list[str]:
    layout = served.layout
    if layout.attention_dp > 1:
        raise UserError("--emit tensorrt-llm: its command line says no copies of attention: leave ep= out")
    return given(
        (True, f"trtllm-serve {_repository(served)} --tp_size {layout.tp}"),
        (layout.pp > 1, f"--pp_size {layout.pp}"),
        (True, f"--max_batch_size {max(1, served.most_requests(request))}"),
        (True, f"--max_num_tokens {served.engine.pass_tokens}"),
        (True, f"--max_seq_len {_longest(served, request)}"),
        (True, f"--kv_cache_free_gpu_memory_fraction {served.engine.memory_fraction:g}"),
    )


def _llama(served: Served, request: ServeRequest) -> list[str]:
    """llama.cpp's slots share one context, so its size is the number of requests times the longest."""
    if served.layout.tp > 1:
        raise UserError("--emit llama.cpp: it holds layers one after another: plan with --engine llama.cpp")
    wanted = math.ceil((request.concurrency or 4) / served.layout.replicas)
    at_once = max(1, min(served.most_requests(request), wanted))
    file = shlex.quote(f"{served.model.name}-{served.formats.weights}.gguf")
    cache = _CACHES["llama.cpp"].get(served.formats.cache)
    return given(
        (True, f"llama-server --model {file} --n-gpu-layers 999"),
        (cache, f"--cache-type-k {cache} --cache-type-v {cache} --flash-attn on"),
        (True, f"--ctx-size {at_once * _longest(served, request)} --parallel {at_once}"),
    )


def _longest(served: Served, request: ServeRequest) -> int:
    """Return twice the mean length, which random lengths seldom exceed, at most the model's context."""
    return min(served.model.context, 2 * request.length)
