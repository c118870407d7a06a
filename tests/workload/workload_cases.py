"""Mixtures of experts that tests of FLOPs and of bytes both go through, and the allocator's own record of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

from ironlaw.observe.events import recorded_allocations
from ironlaw.observe.profile import silent_stderr

MOE: dict[str, dict[str, Any]] = {
    "mixtral": {"experts": 8, "experts_per_token": 2},
    "mixtral with a capacity": {"experts": 6, "experts_per_token": 2, "capacity_factor": 1.3},
    "deepseek": {
        "experts": 8, "experts_per_token": 3, "expert_ffn": 16, "shared_experts": 2, "dense_layers": 1,
        "score": "sigmoid", "routed_scale": 2.5, "balance": "bias",
    },
    "qwen2-moe": {
        "experts": 6, "experts_per_token": 2, "expert_ffn": 20, "normalize": False, "shared_experts": 1,
        "shared_ffn": 44, "shared_gate": True,
    },
    "wide experts": {"experts": 4, "experts_per_token": 3, "expert_ffn": 400},
    "sparse at times": {"experts": 5, "experts_per_token": 1, "every": 2},
}  # fmt: skip


_SIZES = {"key_value_rank": 20, "plain_size": 12, "rotary_size": 4, "value_size": 10}
LATENT: dict[str, dict[str, Any]] = {
    "latent": {"kv_heads": None, "latent": _SIZES | {"query_rank": 28}},
    "latent with whole queries": {"kv_heads": None, "latent": _SIZES},
    "latent with equal sizes": {"kv_heads": None, "latent": _SIZES | {"value_size": 16}},
    "latent with experts": {
        "kv_heads": None, "latent": _SIZES | {"query_rank": 28},
        "moe": MOE["deepseek"] | {"groups": 4, "groups_per_token": 2},
    },
}  # fmt: skip


def highest_allocated(once: Callable[[], None]) -> int:
    """Bytes that `once` holds at its highest moment by the profiler's record, beside what was there before."""
    recorded = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with silent_stderr():
        recorded.start()
    once()
    with silent_stderr():
        recorded.stop()
    held = peak = 0
    alive: set[int] = set()
    for pointer, size in ((a.address, a.bytes) for a in recorded_allocations(recorded)):
        if size > 0:
            alive.add(pointer)
        elif pointer not in alive:
            continue  # allocated before the recording
        held += size
        peak = max(peak, held)
    return peak


FAMILIES: dict[str, dict[str, Any]] = {
    "opt": {"activation": "relu"},
    "nemotron": {"activation": "relu2", "positions": "rope", "rotary_size": 8, "bias": False, "tied": False},
    "starcoder2": {"positions": "rope", "kv_heads": 2},
    "gated relu": {"activation": "relu", "gated_ffn": True},
    "gpt-neox": {"positions": "rope", "rotary_size": 4, "parallel_norms": 2, "activation": "gelu", "tied": False},
    "gpt-j": {
        "positions": "rope",
        "rotary_size": 8,
        "parallel_norms": 1,
        "qkv_bias": False,
        "out_bias": False,
        "head_bias": True,
        "tied": False,
    },
    "falcon": {"positions": "rope", "parallel_norms": 1, "kv_heads": 1, "bias": False, "activation": "gelu"},
    "cohere": {
        "positions": "rope",
        "parallel_norms": 1,
        "kv_heads": 2,
        "bias": False,
        "norm_bias": False,
        "gated_ffn": True,
        "activation": "silu",
        "logit_scale": 0.0625,
    },
    "olmo": {
        "positions": "rope",
        "norm_weight": False,
        "bias": False,
        "gated_ffn": True,
        "activation": "silu",
        "tied": False,
    },
    "olmo2": {
        "positions": "rope",
        "norm": "rmsnorm",
        "norm_place": "post",
        "qk_norm": True,
        "qk_norm_whole": True,
        "bias": False,
        "gated_ffn": True,
        "activation": "silu",
        "tied": False,
    },
    "gemma": {
        "positions": "rope",
        "norm": "rmsnorm",
        "bias": False,
        "gated_ffn": True,
        "kv_heads": 1,
        "head_size": 24,
        "embedding_scale": 8.0,
    },
    "glm4": {
        "positions": "rope",
        "norm": "rmsnorm",
        "norm_place": "sandwich",
        "bias": False,
        "qkv_bias": True,
        "rotary_size": 8,
        "gated_ffn": True,
        "activation": "silu",
        "tied": False,
    },
    "granite": {
        "positions": "rope",
        "norm": "rmsnorm",
        "bias": False,
        "gated_ffn": True,
        "activation": "silu",
        "embedding_scale": 12.0,
        "residual_scale": 0.22,
        "logit_scale": 0.125,
        "attention_scale": 0.0156,
    },
    "bloom": {"embedding_norm": True, "positions": "alibi"},
    "qwen2 with windows": {
        "positions": "rope",
        "norm": "rmsnorm",
        "bias": False,
        "qkv_bias": True,
        "gated_ffn": True,
        "activation": "silu",
        "sliding_window": 9,
        "full_first": 1,
    },
    "gemma2": {
        "positions": "rope",
        "norm": "rmsnorm",
        "norm_place": "sandwich",
        "bias": False,
        "gated_ffn": True,
        "kv_heads": 2,
        "head_size": 24,
        "embedding_scale": 8.0,
        "attention_scale": 0.2,
        "sliding_window": 9,
        "full_every": 2,
        "attention_cap": 5.0,
        "logit_cap": 3.0,
    },
    "gemma3": {
        "positions": "rope",
        "norm": "rmsnorm",
        "norm_place": "sandwich",
        "bias": False,
        "gated_ffn": True,
        "kv_heads": 2,
        "qk_norm": True,
        "sliding_window": 9,
        "full_every": 3,
        "rope_theta": 1e6,
        "rope_theta_local": 1e4,
        "rope_scaling": {"factor": 8.0},
    },
    "cohere2": {
        "positions": "rope",
        "parallel_norms": 1,
        "kv_heads": 2,
        "bias": False,
        "norm_bias": False,
        "gated_ffn": True,
        "activation": "silu",
        "sliding_window": 9,
        "full_every": 2,
        "unrotated_every": 2,
    },
    "smollm3": {
        "positions": "rope",
        "norm": "rmsnorm",
        "bias": False,
        "gated_ffn": True,
        "activation": "silu",
        "unrotated_every": 2,
    },
    "gpt-oss": {
        "positions": "rope",
        "norm": "rmsnorm",
        "kv_heads": 2,
        "gated_ffn": True,
        "activation": "clamped_swiglu",
        "sliding_window": 9,
        "full_every": 2,
        "attention_sinks": True,
        "ffn_bias": False,
        "moe": {"experts": 5, "experts_per_token": 2, "bias": True},
    },
    "clipped": {
        "positions": "rope",
        "norm_bias": False,
        "bias": False,
        "kv_heads": 2,
        "gated_ffn": True,
        "activation": "silu",
        "qkv_clip": 0.05,
    },
    "sinks": {
        "positions": "rope",
        "norm": "rmsnorm",
        "kv_heads": 2,
        "gated_ffn": True,
        "activation": "silu",
        "sliding_window": 9,
        "full_every": 2,
        "attention_sinks": True,
        "ffn_bias": False,
    },
}
"""What each switch of `model/dimensions.py` changes, in a model that has it. Sizes are the tests' own."""
