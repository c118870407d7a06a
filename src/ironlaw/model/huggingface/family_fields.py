"""ModelConfig as the `config.json` of one of more families: the first whose own reader gives the same model back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.families import FAMILIES, WITH_EXPERTS

ACTIVATIONS = {
    "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "silu": "silu", "relu": "relu", "relu2": "relu2",
    "clamped_swiglu": "silu",
}  # fmt: skip
CLASSES = {
    "gemma": "Gemma", "gemma2": "Gemma2", "gemma3_text": "Gemma3", "phi": "Phi", "phi3": "Phi3", "gpt_neox": "GPTNeoX",
    "gptj": "GPTJ", "olmo": "Olmo", "olmo2": "Olmo2", "olmo3": "Olmo3", "starcoder2": "Starcoder2",
    "stablelm": "StableLm", "falcon": "Falcon", "opt": "OPT", "bloom": "Bloom", "mpt": "Mpt", "cohere": "Cohere",
    "cohere2": "Cohere2", "granite": "Granite", "nemotron": "Nemotron", "smollm3": "SmolLM3", "glm": "Glm",
    "glm4": "Glm4", "gpt_oss": "GptOss",
}  # fmt: skip


def family_fields(config: ModelConfig, scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    """The fields of the family that computes `config`, its `model_type` among them; None: no family does.

    `scaling`: of rotary positions, as files have it.
    """
    for kind, of_class in CLASSES.items():
        fields = _shared(config, kind, scaling) | _OWN.get(kind, _nothing)(config)
        fields = {name: value for name, value in fields.items() if value is not None}
        try:
            read = (FAMILIES | WITH_EXPERTS)[kind](fields)
            back = ModelConfig(**{name: value for name, value in read.items() if value is not None})
        except (KeyError, UserError, ValidationError):
            continue
        if _arithmetic(back) == _arithmetic(config):
            return fields | {"architectures": [f"{of_class}ForCausalLM"], "use_cache": True}
    return None


def _arithmetic(config: ModelConfig) -> dict[str, Any]:
    """What a model computes, however its fields say it."""
    layers = range(config.layers)
    said = {"name", "dropout", "head_size", "kv_heads", "ffn", "bias", "qkv_bias", "out_bias", "ffn_bias",
            "rotary_size", "sliding_window", "full_every", "full_first", "unrotated_every", "rope_theta_local",
            "moe"}  # fmt: skip
    unused = set() if config.positions == "rope" else {"rope_theta", "rope_scaling"}
    moe = config.moe.model_dump(exclude={"balance_loss", "expert_ffn"}) if config.moe else None
    return config.model_dump(exclude=said | unused) | {
        "sizes": (config.size_of_head, config.key_value_heads, config.ffn_size, config.expert_ffn_size),
        "turned": config.size_of_rotary if config.positions == "rope" else 0,
        "biases": (config.has_qkv_bias, config.has_out_bias, config.has_ffn_bias),
        "windows": [config.sliding_window if config.is_windowed(layer) else None for layer in layers],
        "rotated": [config.is_rotated(layer) for layer in layers], "moe": moe,
        "local": (config.rope_theta_local or config.rope_theta) if any(map(config.is_windowed, layers)) else None,
    }  # fmt: skip


WITH_HEAD_SIZE = {"gemma", "gemma2", "gemma3_text", "cohere2", "nemotron", "glm", "glm4", "gpt_oss"}


def _shared(config: ModelConfig, kind: str, scaling: dict[str, Any] | None) -> dict[str, Any]:
    """Under the names that most have."""
    layers = range(config.layers)
    kinds = ["sliding_attention" if config.is_windowed(layer) else "full_attention" for layer in layers]
    placed = kind in ("gemma2", "gemma3_text", "olmo3", "cohere2", "gpt_oss")
    eps = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
    return dict.fromkeys(eps, config.norm_eps) | {
        "model_type": kind, "num_hidden_layers": config.layers, "hidden_size": config.hidden,
        "intermediate_size": config.ffn_size, "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_value_heads, "vocab_size": config.vocab,
        "max_position_embeddings": config.context, "tie_word_embeddings": config.tied,
        "hidden_act": ACTIVATIONS[config.activation], "rope_theta": config.rope_theta, "rope_scaling": scaling,
        "head_dim": config.size_of_head if kind in WITH_HEAD_SIZE else None,
        "partial_rotary_factor": config.size_of_rotary / config.size_of_head,
        "sliding_window": config.sliding_window, "layer_types": kinds if placed else None,
        "attention_bias": config.has_qkv_bias, "mlp_bias": config.has_ffn_bias,
        "original_max_position_embeddings": (scaling or {}).get("original_max_position_embeddings"),
    }  # fmt: skip


def _nothing(config: ModelConfig) -> dict[str, Any]:
    return {}


def _gemma(config: ModelConfig) -> dict[str, Any]:
    return {"hidden_activation": ACTIVATIONS[config.activation]}


def _gemma2(config: ModelConfig) -> dict[str, Any]:
    scalar = round(config.attention_scale**-2 if config.attention_scale else config.size_of_head, 6)
    return _gemma(config) | {
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "attn_logit_softcapping": config.attention_cap,
        "final_logit_softcapping": config.logit_cap, "rope_local_base_freq": config.rope_theta_local,
    }  # fmt: skip


def _gptj(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_layer": config.layers, "n_embd": config.hidden, "n_head": config.heads, "n_inner": config.ffn_size,
        "n_positions": config.context, "rotary_dim": config.size_of_rotary,
        "activation_function": ACTIVATIONS[config.activation],
    }  # fmt: skip


def _falcon(config: ModelConfig) -> dict[str, Any]:
    one = config.key_value_heads == 1 and config.parallel_norms == 1
    return {
        "multi_query": one, "new_decoder_architecture": not one and config.parallel_norms > 0, "alibi": False,
        "parallel_attn": config.parallel_norms > 0, "num_kv_heads": config.key_value_heads,
        "num_ln_in_parallel_attn": config.parallel_norms or None, "bias": config.has_ffn_bias,
        "ffn_hidden_size": config.ffn_size, "activation": ACTIVATIONS[config.activation],
    }  # fmt: skip


def _opt(config: ModelConfig) -> dict[str, Any]:
    return {
        "ffn_dim": config.ffn_size, "activation_function": ACTIVATIONS[config.activation],
        "enable_bias": config.has_ffn_bias, "layer_norm_elementwise_affine": config.norm_weight,
        "word_embed_proj_dim": config.hidden, "do_layer_norm_before": True, "dropout": 0.0,
    }  # fmt: skip


def _bloom(config: ModelConfig) -> dict[str, Any]:
    return {"n_layer": config.layers, "n_head": config.heads, "seq_length": config.context}


def _mpt(config: ModelConfig) -> dict[str, Any]:
    whole, rest = divmod(config.ffn_size, config.hidden)
    return {
        "n_layers": config.layers, "d_model": config.hidden, "n_heads": config.heads, "max_seq_len": config.context,
        "expansion_ratio": None if rest else whole, "no_bias": True,
        "attn_config": {"alibi": True, "softmax_scale": config.attention_scale},
    }  # fmt: skip


def _granite(config: ModelConfig) -> dict[str, Any]:
    return {
        "embedding_multiplier": config.embedding_scale, "residual_multiplier": config.residual_scale,
        "attention_multiplier": config.attention_scale or config.size_of_head**-0.5,
        "logits_scaling": 1 / config.logit_scale,
    }  # fmt: skip


def _smollm3(config: ModelConfig) -> dict[str, Any]:
    rotated = [int(config.is_rotated(layer)) for layer in range(config.layers)]
    return {"no_rope_layers": rotated, "no_rope_layer_interval": config.unrotated_every, "sliding_window": None}


def _gpt_oss(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    return {
        "num_local_experts": moe.experts, "num_experts_per_tok": moe.experts_per_token,
        "intermediate_size": config.expert_ffn_size, "router_aux_loss_coef": moe.balance_loss,
    } if moe else {}  # fmt: skip


_OWN: dict[str, Callable[[ModelConfig], dict[str, Any]]] = {
    "gemma": _gemma, "gemma2": _gemma2, "gemma3_text": _gemma2, "gptj": _gptj, "falcon": _falcon, "opt": _opt,
    "bloom": _bloom, "mpt": _mpt, "granite": _granite, "smollm3": _smollm3, "gpt_oss": _gpt_oss,
    "cohere": lambda config: {"logit_scale": config.logit_scale, "sliding_window": None},
    "cohere2": lambda config: {"logit_scale": config.logit_scale},
    "starcoder2": lambda config: {"use_bias": config.has_ffn_bias},
    "stablelm": lambda config: {
        "use_qkv_bias": config.has_qkv_bias, "use_parallel_residual": config.parallel_norms == 1,
    },
    "gpt_neox": lambda config: {"use_parallel_residual": config.parallel_norms == 2},
}  # fmt: skip
