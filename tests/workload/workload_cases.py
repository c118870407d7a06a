"""Mixtures of experts that tests of FLOPs and of bytes both go through, and the allocator's own record of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

from ironlaw.observe.profile import _allocations, silent_stderr

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
    for _, pointer, size in sorted(_allocations(recorded), key=lambda event: event[0]):
        if size > 0:
            alive.add(pointer)
        elif pointer not in alive:
            continue  # allocated before the recording
        held += size
        peak = max(peak, held)
    return peak
