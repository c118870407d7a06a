"""ModelConfig as the `config.json` of the architecture that computes the same. Needs no torch."""

from __future__ import annotations

from typing import Any

from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig

_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu"}
_CLASSES = {
    "gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
}  # fmt: skip


def family(config: ModelConfig) -> str:
    """gpt2, llama, mistral, qwen2 or qwen3; UserError for a combination that none of them has."""
    if config.moe is not None:
        raise UserError("a mixture of experts has no Hugging Face weights here yet: dense models do")
    square = config.key_value_heads == config.heads and config.query_size == config.hidden
    if config.positions == "learned":
        plain = config.norm == "layernorm" and not config.gated_ffn and not config.qk_norm
        if plain and square and config.bias and config.has_qkv_bias and config.sliding_window is None:
            return "gpt2"
        raise _none(config, "learned positions go with GPT-2's layernorm, biases, plain feed-forward and equal heads")
    if config.norm != "rmsnorm" or not config.gated_ffn:
        raise _none(config, "rotary positions go with rmsnorm and a gated feed-forward network")
    if config.qk_norm:
        if config.bias or config.has_qkv_bias or config.sliding_window is not None or config.qk_norm_whole:
            raise _none(config, "qk_norm is Qwen3's: one norm per head, no biases and no sliding window")
        return "qwen3"
    if config.has_qkv_bias != config.bias:
        if config.bias or config.sliding_window is not None:
            raise _none(config, "biases on query, key and value only are Qwen2's, without a sliding window")
        return "qwen2"
    if config.sliding_window is not None:
        if config.bias:
            raise _none(config, "a sliding window is Mistral's, which has no biases")
        return "mistral"
    return "llama"


def to_fields(config: ModelConfig) -> dict[str, Any]:
    """The content of `config.json`."""
    kind = family(config)
    shared = {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab,
        "tie_word_embeddings": config.tied,
        "use_cache": True,
    }
    if kind == "gpt2":
        return shared | {
            "n_layer": config.layers, "n_embd": config.hidden, "n_head": config.heads, "n_inner": config.ffn_size,
            "activation_function": _ACTIVATIONS[config.activation], "layer_norm_epsilon": config.norm_eps,
            "n_positions": config.context, "resid_pdrop": config.dropout, "attn_pdrop": config.dropout,
            "embd_pdrop": 0.0,
        }  # fmt: skip
    fields = shared | {
        "num_hidden_layers": config.layers, "hidden_size": config.hidden, "intermediate_size": config.ffn_size,
        "num_attention_heads": config.heads, "num_key_value_heads": config.key_value_heads,
        "head_dim": config.size_of_head, "hidden_act": _ACTIVATIONS[config.activation],
        "rms_norm_eps": config.norm_eps, "max_position_embeddings": config.context,
        "rope_theta": config.rope_theta, "rope_scaling": _rope_scaling(config),
    }  # fmt: skip
    if kind == "llama":
        fields |= {"attention_bias": config.bias, "mlp_bias": config.bias}
    if kind == "mistral":
        fields |= {"sliding_window": config.sliding_window}
    if kind in ("qwen2", "qwen3"):
        fields |= {"use_sliding_window": False}
    return fields


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    if config.rope_scaling is None:
        return None
    scaling = dict(config.rope_scaling)
    original = int(scaling.pop("original_context"))
    return {"rope_type": "llama3", **scaling, "original_max_position_embeddings": original}


def _none(config: ModelConfig, why: str) -> UserError:
    return UserError(f"no Hugging Face architecture computes {config.name} ({why}): it cannot be exported")
