"""What readers of Hugging Face configs share (`configs.py`, `families.py`). Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ironlaw.errors import UserError, did_you_mean

Fields = Mapping[str, Any]

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
}
"""Names of activations in `config.json`, and ours: the first is exact, the next three use tanh."""


def refuse(fields: Fields, *names: str) -> None:
    """Switches that change the arithmetic in a way ModelConfig cannot say."""
    for name in names:
        if fields.get(name):
            raise UserError(f"{name} = {fields[name]} is not supported")


def activation(fields: Fields, key: str, default: str) -> str:
    name = fields.get(key, default)
    if name not in ACTIVATIONS:
        raise UserError(f"{key} = '{name}' is not supported: {did_you_mean(str(name), ACTIVATIONS)}")
    return ACTIVATIONS[name]


def biases(fields: Fields) -> dict[str, Any]:
    """Of attention, and of the feed-forward network where it differs."""
    attention, network = bool(fields.get("attention_bias")), bool(fields.get("mlp_bias"))
    return {"bias": attention, "ffn_bias": network if network != attention else None}


def llama_family(fields: Fields) -> dict[str, Any]:
    """What Llama, Mistral and Qwen share: RMSNorm, rotary positions, a gated feed-forward network."""
    scaling, theta = rope(fields)
    return {
        "layers": fields["num_hidden_layers"],
        "hidden": fields["hidden_size"],
        "heads": fields["num_attention_heads"],
        "kv_heads": fields.get("num_key_value_heads"),
        "head_size": fields.get("head_dim"),
        "ffn": fields["intermediate_size"],
        "gated_ffn": True,
        "activation": activation(fields, "hidden_act", "silu"),
        "norm": "rmsnorm",
        "norm_eps": fields.get("rms_norm_eps", 1e-6),
        "positions": "rope",
        "rope_theta": theta,
        "rope_scaling": scaling,
        **long_factors(fields),
        "bias": False,
        "vocab": fields["vocab_size"],
        "context": fields["max_position_embeddings"],
        "tied": fields.get("tie_word_embeddings", False),
    }


def rope(fields: Fields) -> tuple[dict[str, float] | None, float]:
    """Frequency scaling or none, and the base. Newer files keep both in `rope_parameters`, by kind of layer where
    these differ: then those of layers that look at all tokens."""
    newer: Fields = fields.get("rope_parameters") or {}
    newer = newer.get("full_attention", newer)
    theta = float(newer.get("rope_theta") or fields.get("rope_theta") or 10_000.0)
    table = newer or fields.get("rope_scaling") or {}
    kind = table.get("rope_type") or table.get("type") or "default"
    if kind == "default":
        return None, theta
    if kind == "yarn":
        return _yarn(table, fields), theta
    if kind == "longrope":
        original = float(table.get("original_max_position_embeddings") or fields["original_max_position_embeddings"])
        factor = float(table.get("factor") or fields["max_position_embeddings"] / original)
        fixed = {"attention_factor": float(table["attention_factor"])} if table.get("attention_factor") else {}
        return {"factor": factor, "original_context": original, **fixed}, theta
    if kind == "linear":
        return {"factor": float(table["factor"])}, theta
    if kind != "llama3":
        raise UserError(f"rope_scaling of type '{kind}' is not supported: linear, llama3, yarn and longrope are")
    names = ("factor", "low_freq_factor", "high_freq_factor")
    scaling = {name: float(table[name]) for name in names}
    return scaling | {"original_context": float(table["original_max_position_embeddings"])}, theta


def long_factors(fields: Fields) -> dict[str, Any]:
    """LongRoPE's two lists, if there are any."""
    table: Fields = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if table.get("short_factor") is None:
        return {}
    return {"rope_short": tuple(table["short_factor"]), "rope_long": tuple(table["long_factor"])}


def rotary_size(fields: Fields, share: float = 1.0, *names: str) -> int | None:
    """Elements of a head that positions turn; None: all. `names`: what older files call their share."""
    newer: Fields = fields.get("rope_parameters") or {}
    for table in (newer, fields):
        for name in ("partial_rotary_factor", *names):
            share = float(table.get(name) or share)
    size = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    return None if share == 1.0 else int(size * share)


def windows(fields: Fields, every: int | None = None) -> dict[str, Any]:
    """The sliding window and the layers that have it: of `layer_types`, or else all but each `every`-th."""
    window, layers = fields.get("sliding_window"), fields["num_hidden_layers"]
    if window is None:
        return {}
    if fields.get("layer_types") is None:
        return {"sliding_window": window, "full_every": every}
    full = [kind == "full_attention" for kind in fields["layer_types"]][:layers]
    if all(full):
        return {}
    for n in range(2, layers + 1):
        if full == [(layer + 1) % n == 0 for layer in range(layers)]:
            return {"sliding_window": window, "full_every": n}
    first = full.count(True)
    if full != [layer < first for layer in range(layers)]:
        raise UserError("layer_types is not supported: full attention is in the first layers, or in every n-th")
    return {"sliding_window": window, "full_first": first}


def _yarn(table: Fields, fields: Fields) -> dict[str, float]:
    whole = {} if table.get("truncate", True) else {"truncate": 0.0}
    original = float(table["original_max_position_embeddings"])
    scaling = {
        "factor": float(table.get("factor") or fields["max_position_embeddings"] / original),
        "beta_fast": float(table.get("beta_fast") or 32),
        "beta_slow": float(table.get("beta_slow") or 1),
        "original_context": original,
    }
    extra = ("mscale", "mscale_all_dim", "attention_factor")
    return scaling | whole | {name: float(table[name]) for name in extra if table.get(name)}


def experts(fields: Fields, count: int, width: int | None, normalize: bool = False) -> dict[str, Any]:
    """What all of them share. Where the key is missing, their own default: Mixtral normalises, the others do not."""
    return {
        "experts": count,
        "experts_per_token": fields["num_experts_per_tok"],
        "expert_ffn": width,
        "normalize": bool(fields.get("norm_topk_prob", normalize)),
        "balance_loss": fields.get("router_aux_loss_coef", 0.001),
    }
