"""A planned server as another engine's own command line. Sources: the engines' command references, as of 2026."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable

from ironlaw.catalog.models import repository
from ironlaw.errors import UserError, did_you_mean
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
    "vllm": {"fp8": "fp8"}, "sglang": {"fp8": "fp8_e4m3"},
    "llama.cpp": {"int8": "q8_0", "q8_0": "q8_0"},
}  # fmt: skip
_PLAIN = ("bf16", "fp16", "fp8")
"""Formats that an engine makes of the published checkpoint while it loads it."""


def emit_serving(target: str, served: Served, request: ServeRequest) -> str:
    """One shell line. UserError for an engine that is not known, or cannot run what is planned."""
    makers: dict[str, Callable[[Served, ServeRequest], list[str]]] = {
        "vllm": _vllm, "sglang": _sglang, "tensorrt-llm": _tensorrt, "llama.cpp": _llama
    }  # fmt: skip
    if target not in makers:
        raise UserError(f"--emit {target}: {did_you_mean(target, makers)}")
    if served.layout.prefill:
        raise UserError(f"--emit {target}: prompts apart are several servers and a router: leave prefill= out")
    if served.speculation.drafted and target != "vllm":
        raise UserError(f"--emit {target}: speculation is written for vllm alone: leave speculate= out")
    return shlex.join(makers[target](served, request)) + "\n"


def emit_notes(target: str, served: Served) -> list[str]:
    """What a command line does not say."""
    stored, notes = served.formats.weights, [str(served.layout)]
    if target == "tensorrt-llm" and served.formats.cache == "fp8":
        notes.append("an fp8 cache is set in the file of --config: kv_cache_config: {dtype: fp8}")
    if target == "llama.cpp":
        notes.append(f"the file is {_repository(served)} in {stored}")
    elif stored not in _PLAIN and not (stored == "mxfp4" and served.model.name.startswith("gpt-oss")):
        notes.append(f"{_repository(served)} is not stored in {stored}: name a checkpoint that is")
    return notes


def _repository(served: Served) -> str:
    return repository(served.model.name)


def _vllm(served: Served, request: ServeRequest) -> list[str]:
    layout = served.layout
    words = ["vllm", "serve", _repository(served), "--tensor-parallel-size", str(layout.tp)]
    if layout.pp > 1:
        words += ["--pipeline-parallel-size", str(layout.pp)]
    if layout.attention_dp > 1:
        if layout.replicas > 1:
            raise UserError("--emit vllm: one command starts one copy that shares experts: leave replicas= out")
        words += ["--data-parallel-size", str(layout.attention_dp), "--enable-expert-parallel"]
    elif layout.replicas > 1:
        words += ["--data-parallel-size", str(layout.replicas)]
    if quantised := _VLLM_WEIGHTS.get(served.formats.weights):
        words += ["--quantization", quantised]
    if cache := _CACHES["vllm"].get(served.formats.cache):
        words += ["--kv-cache-dtype", cache]
    if drafted := served.speculation.drafted:
        draft = served.speculation.draft
        how = {"model": repository(draft.name)} if draft else {"method": "ngram", "prompt_lookup_max": 4}
        words += ["--speculative-config", json.dumps(how | {"num_speculative_tokens": drafted})]
    return [
        *words,
        "--max-model-len", str(_longest(served, request)),
        "--max-num-seqs", str(max(1, served.most_requests(request) // layout.attention_dp)),
        "--max-num-batched-tokens", str(served.budget),
        "--gpu-memory-utilization", f"{served.engine.memory_fraction:g}",
    ]  # fmt: skip


def _sglang(served: Served, request: ServeRequest) -> list[str]:
    """Its tp counts the ranks of all copies of attention."""
    layout = served.layout
    words = ["python", "-m", "sglang.launch_server", "--model-path", _repository(served), "--tp", str(layout.ep)]
    if layout.pp > 1:
        words += ["--pp-size", str(layout.pp)]
    if layout.attention_dp > 1:
        words += ["--dp", str(layout.attention_dp), "--enable-dp-attention", "--ep-size", str(layout.ep)]
    elif layout.replicas > 1:
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
    layout = served.layout
    if layout.attention_dp > 1 or layout.replicas > 1:
        raise UserError("--emit tensorrt-llm: its command line starts one copy of tp x pp: leave ep= and replicas= out")
    words = ["trtllm-serve", _repository(served), "--tp_size", str(layout.tp)]
    if layout.pp > 1:
        words += ["--pp_size", str(layout.pp)]
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
