"""A planned server as another engine's command line. Sources: the engines' command references, as of 2026."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable

from ironlaw.catalog.formats import stored_format
from ironlaw.catalog.models import repository
from ironlaw.errors import UserError, did_you_mean
from ironlaw.plan.emit import first_reason, given
from ironlaw.plan.serving.estimate import Served
from ironlaw.plan.serving.rates import vendor
from ironlaw.plan.serving.request import ServeRequest

_CACHES = {
    "vllm": {"fp8": "fp8"}, "sglang": {"fp8": "fp8_e4m3"}, "tensorrt-llm": {"fp8": "fp8"},
    "llama.cpp": {"int8": "q8_0", "q8_0": "q8_0"},
}  # fmt: skip
"""Formats of the cache beside 16 bits, as each engine names them."""

_PLAIN = ("bf16", "fp16", "fp8")
"""Formats to which an engine converts the published checkpoint while loading it."""

_GGUF = ("llama-cpp-quantize", "ggml-blocks")
"""Sources of the formats of GGUF files, which also hold weights in 16 bits and in mxfp4."""

_MAX_SLOTS = 256
"""Most requests at once of llama.cpp (`LLAMA_MAX_SEQ`)."""


def emit_serving(target: str, served: Served, request: ServeRequest) -> str:
    """Return one shell line. Raises UserError for an unknown engine, or one that cannot run the plan."""
    makers: dict[str, Callable[[Served, ServeRequest], list[str]]] = {
        "vllm": _vllm, "sglang": _sglang, "tensorrt-llm": _tensorrt, "llama.cpp": _llama
    }  # fmt: skip
    if target not in makers:
        raise UserError(f"--emit {target}: {did_you_mean(target, makers)}")
    if reason := _reason_against(target, served):
        raise UserError(f"--emit {target}: {reason}")
    return " ".join(makers[target](served, request)) + "\n"


def _reason_against(target: str, served: Served) -> str | None:
    """Return why the engine would refuse the plan, or None."""
    layout, formats, model = served.layout, served.formats, served.model
    kept = ("bf16", "fp16", *_CACHES[target])
    is_gguf = formats.weights in ("bf16", "fp16", "mxfp4") or stored_format(formats.weights).source in _GGUF
    return first_reason(
        (layout.prefill, "prompts apart are several servers and a router: leave prefill= out"),
        (served.drafted and target != "vllm", "speculation is written for vllm alone: leave speculate= out"),
        (formats.cache not in kept, f"it keeps no cache in {formats.cache}: use --kv {' or '.join(kept)}"),
        (model.heads % layout.tp, f"its ranks have equally many of {model.heads} heads: use another tp"),
        (layout.attention_dp > 1 and model.moe is None,
         f"ranks share experts by ep, and {model.name} has none: leave ep= out"),
        (layout.attention_dp > 1 and target == "tensorrt-llm",
         "its command line says no copies of attention: leave ep= out"),
        (target == "tensorrt-llm" and not vendor(served.device).startswith("nvidia"),
         f"it runs on NVIDIA's GPUs, not on {served.device.name}: use vllm"),
        (target == "llama.cpp" and layout.tp > 1,
         "it holds layers one after another: plan with --engine llama.cpp"),
        (target == "llama.cpp" and not is_gguf,
         f"it reads GGUF files, which hold no {formats.weights}: use for example --weights q4_k_m"),
    )  # fmt: skip


def emit_notes(target: str, served: Served) -> list[str]:
    """Return notes on what the command line does not express."""
    stored, notes, name = served.formats.weights, [str(served.layout)], repository(served.model.name)
    if target == "tensorrt-llm" and served.formats.cache == "fp8":
        notes.append("an fp8 cache is set in the file of --config: kv_cache_config: {dtype: fp8}")
    alone = target in ("llama.cpp", "tensorrt-llm") or (target == "vllm" and served.layout.attention_dp > 1)
    if served.layout.replicas > 1 and alone:
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
        (formats.weights == "fp8", "--quantization fp8"),
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
    return given(
        (True, f"python -m sglang.launch_server --model-path {_repository(served)} --tp {layout.ep}"),
        (layout.pp > 1, f"--pp-size {layout.pp}"),
        (layout.attention_dp > 1, f"--attn-dp-size {layout.attention_dp} --ep-size {layout.ep}"),
        (layout.replicas > 1, f"--dp {layout.replicas}"),
        (served.formats.weights == "fp8", "--quantization fp8"),
        (cache in _CACHES["sglang"], f"--kv-cache-dtype {_CACHES['sglang'].get(cache)}"),
        (True, f"--context-length {_longest(served, request)}"),
        (True, f"--max-running-requests {max(1, served.most_requests(request))}"),
        (True, f"--chunked-prefill-size {served.engine.pass_tokens * layout.attention_dp}"),  # all copies' of attention
        (True, f"--mem-fraction-static {served.engine.memory_fraction:g}"),
    )


def _tensorrt(served: Served, request: ServeRequest) -> list[str]:
    layout = served.layout
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
    wanted = math.ceil((request.concurrency or 4) / served.layout.replicas)
    at_once = max(1, min(served.most_requests(request), wanted, _MAX_SLOTS))
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
