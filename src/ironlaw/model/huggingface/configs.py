"""Hugging Face `config.json` files as ModelConfig. Needs no torch.

GPT-2, Llama, Qwen2, Qwen3 and Mistral, and those of `families.py`; with experts Mixtral, Qwen2-MoE,
Qwen3-MoE, OLMoE and DeepSeek (the first); with latent attention DeepSeek-V2 and V3 and what is built like them: R1,
Kimi K2, Moonlight.

    model = read_config(Path("checkpoint/config.json"))     # or the directory that holds it

What the mapping cannot express exactly (another architecture, an exotic position encoding) is a
UserError: a plan of the nearest thing would be a plan of something else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from ironlaw.errors import UserError, did_you_mean
from ironlaw.files import read_json
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.common import Fields, activation, biases, experts, llama_family, refuse, windows
from ironlaw.model.huggingface.families import FAMILIES, REFUSED, WITH_EXPERTS

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Keys that mean a mixture of experts."""


def is_config_file(path: Path) -> bool:
    """Whether this is a `*.json` file, or a directory that holds a `config.json`."""
    return (path.is_file() and path.suffix == ".json") or (path.is_dir() and (path / "config.json").is_file())


def read_config(path: Path) -> ModelConfig:
    """The model of a `config.json`, or of the directory that holds one."""
    file = path / "config.json" if path.is_dir() else path
    try:
        document = read_json(file)
    except FileNotFoundError:
        raise UserError(f"no config.json at {path}: give the file or its directory") from None
    if not isinstance(document.get("model_type"), str):
        raise UserError(f"{file} has no model_type: it is not a Hugging Face model config")
    return from_fields(document, where=str(file))


def left_out(path: Path) -> tuple[str, ...]:
    """Parts that a config names and `transformers` builds the model without: DeepSeek-V3's second prediction."""
    file = path / "config.json" if path.is_dir() else path
    count = read_json(file).get("num_nextn_predict_layers") or 0
    return (f"{count} of the layers, for predicting tokens further ahead (num_nextn_predict_layers)",) if count else ()


def from_fields(fields: Fields, where: str = "config.json") -> ModelConfig:
    """The model of an already parsed `config.json`."""
    kind = fields["model_type"]
    if "text_config" in fields:
        raise UserError(f"{where}: '{kind}' has parts beside a decoder: save its text_config as a config.json")
    if kind in REFUSED:
        raise UserError(f"{where}: '{kind}' {REFUSED[kind]}, which is not supported")
    if kind not in _WITH_EXPERTS and any(fields.get(key) for key in EXPERT_COUNTS):
        known = ", ".join(sorted(_WITH_EXPERTS))
        raise UserError(f"{where}: '{kind}' with experts is not supported: those of {known} are")
    if kind not in _READERS:
        raise UserError(f"{where}: architecture '{kind}' is not supported: {did_you_mean(str(kind), _READERS)}")
    try:
        values = _READERS[kind](fields)
        return ModelConfig(name=_name(fields, where), **{k: v for k, v in values.items() if v is not None})
    except KeyError as error:
        raise UserError(f"{where} has no {error.args[0]}, which a {kind} config needs") from None
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except (TypeError, ValueError, AttributeError, OverflowError, ArithmeticError) as error:
        if not isinstance(error, ValidationError):
            raise UserError(f"{where} has a value of another type than a {kind} config has: {error}") from None
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{where}: {'.'.join(str(p) for p in first['loc'])} {message}".replace(":  ", ": ")) from None


def _name(fields: Fields, where: str) -> str:
    named = str(fields.get("_name_or_path") or "")
    if named and not named.startswith((".", "/")):
        return named
    path = Path(where)
    folder = path.parent.name if path.name == "config.json" else path.stem
    return folder or str(fields["model_type"])


def _gpt2(fields: Fields) -> dict[str, Any]:
    refuse(fields, "add_cross_attention", "scale_attn_by_inverse_layer_idx")
    return {
        "layers": fields["n_layer"],
        "hidden": fields["n_embd"],
        "heads": fields["n_head"],
        "ffn": fields.get("n_inner"),
        "activation": activation(fields, "activation_function", "gelu_new"),
        "norm": "layernorm",
        "norm_eps": fields.get("layer_norm_epsilon", 1e-5),
        "positions": "learned",
        "bias": True,
        "vocab": fields["vocab_size"],
        "context": fields.get("n_positions") or fields["n_ctx"],
        "tied": fields.get("tie_word_embeddings", True),
        "dropout": fields.get("resid_pdrop", 0.1),
    }


def _llama(fields: Fields) -> dict[str, Any]:
    return llama_family(fields) | biases(fields)


def _mistral(fields: Fields) -> dict[str, Any]:
    return llama_family(fields) | {"sliding_window": fields.get("sliding_window")}


def _qwen2(fields: Fields) -> dict[str, Any]:
    return llama_family(fields) | _upper_windows(fields) | {"qkv_bias": True}


def _upper_windows(fields: Fields) -> dict[str, Any]:
    """Qwen's: in layers from `max_window_layers` on, and mostly switched off."""
    if not fields.get("use_sliding_window"):
        return {}
    first = fields.get("max_window_layers", 28)
    if fields.get("layer_types") is None and first >= fields["num_hidden_layers"]:
        return {}
    return windows(fields) | ({"full_first": first} if fields.get("layer_types") is None else {})


def _qwen3(fields: Fields) -> dict[str, Any]:
    refuse(fields, "attention_bias")
    shared = llama_family(fields) | _upper_windows(fields)
    return shared | {"qk_norm": True, "head_size": fields.get("head_dim", 128)}


def _mixtral(fields: Fields) -> dict[str, Any]:
    values = llama_family(fields) | {"sliding_window": fields.get("sliding_window")}
    return values | {"moe": experts(fields, fields["num_local_experts"], None, normalize=True)}


def _qwen_moe(fields: Fields) -> dict[str, Any]:
    """Every `decoder_sparse_step`-th layer has experts, but for those named in `mlp_only_layers`."""
    # Newer files say num_local_experts.
    count = fields["num_local_experts"] if "num_local_experts" in fields else fields["num_experts"]
    moe = experts(fields, count, fields["moe_intermediate_size"])
    dense = sorted(fields.get("mlp_only_layers") or [])
    if dense != list(range(len(dense))):
        raise UserError(f"mlp_only_layers = {dense} is not supported: the first layers are")
    moe |= {"dense_layers": len(dense), "every": fields.get("decoder_sparse_step", 1)}
    return {"moe": moe}


def _qwen2_moe(fields: Fields) -> dict[str, Any]:
    values = _qwen2(fields) | _qwen_moe(fields)
    shared = {"shared_experts": 1, "shared_ffn": fields["shared_expert_intermediate_size"], "shared_gate": True}
    return values | {"moe": values["moe"] | shared}


def _qwen3_moe(fields: Fields) -> dict[str, Any]:
    return _qwen3(fields) | _qwen_moe(fields)


def _olmoe(fields: Fields) -> dict[str, Any]:
    refuse(fields, "clip_qkv", "attention_bias")
    values = llama_family(fields) | {"qk_norm": True, "qk_norm_whole": True}
    count = fields["num_local_experts"] if "num_local_experts" in fields else fields["num_experts"]
    return values | {"moe": experts(fields, count, None)}


def _deepseek(fields: Fields) -> dict[str, Any]:
    """DeepSeekMoE 16B; V2 and V3 attend differently."""
    return llama_family(fields) | {"moe": _deepseek_experts(fields)}


def _deepseek_experts(fields: Fields) -> dict[str, Any]:
    refuse(fields, "attention_bias")
    moe = experts(fields, fields["n_routed_experts"], fields["moe_intermediate_size"])
    scored = "sigmoid" if fields["model_type"] in ("deepseek_v3", "kimi_k2") else "softmax"
    if fields.get("scoring_func", scored) != scored or fields.get("moe_layer_freq", 1) != 1:
        raise UserError(f"scoring_func other than {scored}, or moe_layer_freq other than 1, is not supported")
    return moe | {
        "shared_experts": fields.get("n_shared_experts") or 0,
        "dense_layers": fields.get("first_k_dense_replace", 0),
        "balance_loss": fields.get("aux_loss_alpha", 0.001),
    }


def _latent(fields: Fields) -> dict[str, Any]:
    """Attention of DeepSeek-V2 and later. A module that predicts a second token is no part of the model there either:
    `num_nextn_predict_layers` is not read."""
    refuse(fields, "mlp_bias")
    if fields.get("rope_interleave", True) is False:
        raise UserError("rope_interleave = False is not supported: released checkpoints interleave")
    values = llama_family(fields) | {"kv_heads": None, "head_size": None}
    latent = {
        "query_rank": fields["q_lora_rank"],
        "key_value_rank": fields["kv_lora_rank"],
        "plain_size": fields["qk_nope_head_dim"],
        "rotary_size": fields["qk_rope_head_dim"],
        "value_size": fields["v_head_dim"],
    }
    return values | {"latent": latent}


def _deepseek_v2(fields: Fields) -> dict[str, Any]:
    refuse(fields, "norm_topk_prob")  # the released code scales the experts' sum without it, and not with it
    limited = fields.get("topk_method", "greedy") == "group_limited_greedy"
    moe = _deepseek_experts(fields) | {
        "normalize": False, "routed_scale": fields.get("routed_scaling_factor", 1.0),
        "groups": fields["n_group"] if limited else 1, "groups_per_token": fields["topk_group"] if limited else None,
    }  # fmt: skip
    return _latent(fields) | {"moe": moe}


def _deepseek_v3(fields: Fields) -> dict[str, Any]:
    """Kimi K2 as well, whose code is the same. Their auxiliary loss within sequences has no place here."""
    if fields.get("topk_method", "noaux_tc") != "noaux_tc":
        raise UserError(f"topk_method = {fields['topk_method']} is not supported: noaux_tc is")
    groups, of_token = fields.get("n_group") or 1, fields.get("topk_group") or 1
    moe = _deepseek_experts(fields) | {
        "score": "sigmoid", "normalize": fields.get("norm_topk_prob", True), "balance": "bias",
        "routed_scale": fields.get("routed_scaling_factor", 2.5),
        "groups": groups, "groups_per_token": of_token if groups > 1 else None,
    }  # fmt: skip
    del moe["balance_loss"]
    return _latent(fields) | {"moe": moe}


_WITH_EXPERTS = {
    "mixtral": _mixtral, "qwen2_moe": _qwen2_moe, "qwen3_moe": _qwen3_moe, "olmoe": _olmoe, "deepseek": _deepseek,
    "deepseek_v2": _deepseek_v2, "deepseek_v3": _deepseek_v3, "kimi_k2": _deepseek_v3,
    **WITH_EXPERTS,
}  # fmt: skip
_READERS = cast(
    dict[str, Callable[[Fields], dict[str, Any]]],
    {
        "gpt2": _gpt2,
        "llama": _llama,
        "mistral": _mistral,
        "qwen2": _qwen2,
        "qwen3": _qwen3,
        **FAMILIES,
        **_WITH_EXPERTS,
    },
)
