"""Hugging Face configs of families that the switches of `switches.py` set apart. Needs no torch.

Defaults of keys that a file leaves out are those of the family's own configuration class in `transformers` 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ironlaw.errors import UserError
from ironlaw.model.huggingface.common import (
    Fields,
    activation,
    biases,
    experts,
    llama_family,
    refuse,
    rope,
    rotary_size,
    windows,
)

# -- RMSNorm and gated networks, as in Llama -----------------------------------------------------------------------


def _gemma(fields: Fields) -> dict[str, Any]:
    refuse(fields, "attention_bias", "use_bidirectional_attention")
    # Files of the first Gemma say "gelu" and mean its approximation, which `hidden_activation` says.
    name = fields.get("hidden_activation") or "gelu_pytorch_tanh"
    return llama_family(fields) | {
        "activation": activation({"hidden_activation": name}, "hidden_activation", name),
        "head_size": fields.get("head_dim", 256),
        "embedding_scale": math.sqrt(fields["hidden_size"]),
        "tied": fields.get("tie_word_embeddings", True),
    }


def _gemma2(fields: Fields) -> dict[str, Any]:
    return _gemma(fields) | windows(fields, every=2) | {
        "norm_place": "sandwich",
        "attention_scale": fields.get("query_pre_attn_scalar", 256) ** -0.5,
        "attention_cap": fields.get("attn_logit_softcapping"),
        "logit_cap": fields.get("final_logit_softcapping"),
    }  # fmt: skip


def _gemma3(fields: Fields) -> dict[str, Any]:
    every = fields.get("sliding_window_pattern") or fields.get("_sliding_window_pattern") or 6
    local = (fields.get("rope_parameters") or {}).get("sliding_attention") or {}
    theta = rope(fields)[1] if "rope_parameters" in fields else float(fields.get("rope_theta", 1e6))
    placed = windows(fields, every)
    own = {"rope_theta_local": float(local.get("rope_theta") or fields.get("rope_local_base_freq") or 1e4)}
    return _gemma2(fields) | placed | (own if placed else {}) | {"qk_norm": True, "rope_theta": theta}


def _phi3(fields: Fields) -> dict[str, Any]:
    """Phi-3 and Phi-4."""
    return llama_family({"rms_norm_eps": 1e-5, **fields}) | {
        "sliding_window": fields.get("sliding_window"), "rotary_size": rotary_size(fields),
    }  # fmt: skip


def _olmo(fields: Fields) -> dict[str, Any]:
    refuse(fields, "clip_qkv", "attention_bias")
    return llama_family(fields) | {"norm": "layernorm", "norm_weight": False, "norm_eps": 1e-5}


def _olmo2(fields: Fields) -> dict[str, Any]:
    """OLMo 2, and OLMo 3, whose layers with a window do not scale positions."""
    refuse(fields, "attention_bias")
    values = llama_family({"rms_norm_eps": 1e-5, **fields}) | {
        "norm_place": "post",
        "qk_norm": True,
        "qk_norm_whole": True,
    }
    placed = windows(fields, every=4) if fields["model_type"] == "olmo3" else {}
    scaled = values["rope_scaling"] is not None and bool(placed)
    return values | placed | {"rope_theta_local": values["rope_theta"] if scaled else None}


def _granite(fields: Fields) -> dict[str, Any]:
    return llama_family(fields) | biases(fields) | {
        "embedding_scale": fields.get("embedding_multiplier", 1.0),
        "attention_scale": fields.get("attention_multiplier", 1.0),
        "residual_scale": fields.get("residual_multiplier", 1.0),
        "logit_scale": 1 / fields.get("logits_scaling", 1.0),
    }  # fmt: skip


def _smollm3(fields: Fields) -> dict[str, Any]:
    refuse(fields, "use_sliding_window", "attention_bias", "mlp_bias")
    layers, every = fields["num_hidden_layers"], fields.get("no_rope_layer_interval", 4)
    rotated = fields.get("no_rope_layers")  # 1 where positions are rotary
    if rotated is not None and [bool(r) for r in rotated] != [(n + 1) % every != 0 for n in range(layers)]:
        if not all(rotated):
            raise UserError("no_rope_layers is not supported: every n-th layer is without positions, or none")
        every = None
    tied = fields.get("tie_word_embeddings", True)
    return llama_family(fields) | {"unrotated_every": every, "tied": tied}


def _glm(fields: Fields) -> dict[str, Any]:
    """GLM-4, whose first version has the usual norms, and the second (glm4) norms after branches too."""
    return llama_family({"rms_norm_eps": 1.5625e-07, **fields}) | {
        "qkv_bias": bool(fields.get("attention_bias")),
        "rotary_size": rotary_size(fields, 0.5),
        "norm_place": "sandwich" if fields["model_type"] == "glm4" else "pre",
    }  # fmt: skip


# -- layernorm -----------------------------------------------------------------------------------------------------


def _gpt_like(fields: Fields) -> dict[str, Any]:
    """Layernorm, two matrices and biases, under the names that Llama's fields have."""
    values = llama_family({**fields, "rms_norm_eps": fields.get("layer_norm_eps", 1e-5)})
    return values | {"norm": "layernorm", "gated_ffn": False, "bias": True}


def _gpt_neox(fields: Fields) -> dict[str, Any]:
    """GPT-NeoX and Pythia."""
    theta = rope(fields)[1] if "rope_parameters" in fields else float(fields.get("rotary_emb_base", 10_000))
    attention = None if fields.get("attention_bias", True) else False
    fields = {name: value for name, value in fields.items() if name != "num_key_value_heads"}  # not its own
    return _gpt_like({"hidden_act": "gelu"} | dict(fields)) | {
        "parallel_norms": 2 if fields.get("use_parallel_residual", True) else 0,
        "rotary_size": rotary_size(fields, 0.25, "rotary_pct"), "rope_theta": theta,
        "qkv_bias": attention, "out_bias": attention,
    }  # fmt: skip


def _gptj(fields: Fields) -> dict[str, Any]:
    return {
        "layers": fields["n_layer"], "hidden": fields["n_embd"], "heads": fields["n_head"],
        "ffn": fields.get("n_inner"), "activation": activation(fields, "activation_function", "gelu_new"),
        "norm_eps": fields.get("layer_norm_epsilon", 1e-5), "positions": "rope", "parallel_norms": 1,
        "rotary_size": fields.get("rotary_dim") or None, "qkv_bias": False, "out_bias": False, "head_bias": True,
        "vocab": fields["vocab_size"], "context": fields["n_positions"],
        "tied": fields.get("tie_word_embeddings", False),
    }  # fmt: skip


def _phi(fields: Fields) -> dict[str, Any]:
    """Phi-1, 1.5 and 2."""
    refuse(fields, "qk_layernorm")
    return _gpt_like({"hidden_act": "gelu_new"} | dict(fields)) | {
        "parallel_norms": 1, "head_bias": True, "rotary_size": rotary_size(fields, 0.5),
    }  # fmt: skip


def _starcoder2(fields: Fields) -> dict[str, Any]:
    values = _gpt_like({"hidden_act": "gelu_pytorch_tanh"} | dict(fields))
    return values | windows(fields) | {
        "bias": fields.get("use_bias", True), "norm_eps": fields.get("norm_epsilon", 1e-5),
        "tied": fields.get("tie_word_embeddings", True),
    }  # fmt: skip


def _stablelm(fields: Fields) -> dict[str, Any]:
    refuse(fields, "qk_layernorm")  # a norm of its own for every head
    return _gpt_like(fields) | {
        "gated_ffn": True, "bias": False, "qkv_bias": bool(fields.get("use_qkv_bias")),
        "rotary_size": rotary_size(fields, 0.25, "rope_pct"),
        "parallel_norms": 1 if fields.get("use_parallel_residual") else 0,
    }  # fmt: skip


def _falcon(fields: Fields) -> dict[str, Any]:
    """Falcon 7B: one norm and one key/value head; from 40B on two norms and groups of heads."""
    refuse(fields, "alibi")  # which the first models scale by the head size, too
    newer, parallel = fields.get("new_decoder_architecture"), fields.get("parallel_attn", True)
    heads, norms = fields["num_attention_heads"], fields.get("num_ln_in_parallel_attn")
    kv_heads = fields.get("num_kv_heads", heads) if newer else 1 if fields.get("multi_query", True) else heads
    ffn = fields.get("ffn_hidden_size") or 4 * fields["hidden_size"]
    usual = {"max_position_embeddings": 2048, "intermediate_size": ffn} | dict(fields)
    return _gpt_like(usual | {"hidden_act": fields.get("activation", "gelu")}) | {
        "kv_heads": kv_heads, "bias": bool(fields.get("bias")),
        "parallel_norms": (norms or 2) if newer else 1 if parallel else 0,
        "norm_eps": fields.get("layer_norm_epsilon", 1e-5), "tied": fields.get("tie_word_embeddings", True),
    }  # fmt: skip


def _cohere(fields: Fields) -> dict[str, Any]:
    """Command R, and Command R7B (cohere2), whose layers without a window have no positions."""
    refuse(fields, "use_qk_norm", "attention_bias")
    placed = windows(fields, fields.get("sliding_window_pattern", 4)) if fields["model_type"] == "cohere2" else {}
    return _gpt_like({"hidden_act": "silu"} | dict(fields)) | placed | {
        "gated_ffn": True, "bias": False, "norm_bias": False, "parallel_norms": 1,
        "logit_scale": fields.get("logit_scale", 0.0625), "unrotated_every": placed.get("full_every"),
        "tied": fields.get("tie_word_embeddings", True),
    }  # fmt: skip


def _nemotron(fields: Fields) -> dict[str, Any]:
    """Nemotron-4 and Minitron."""
    return _gpt_like({"hidden_act": "relu2"} | dict(fields)) | biases(fields) | {
        "norm_eps": fields.get("norm_eps", 1e-5),
        "rotary_size": rotary_size(fields, 0.5, "rope_percent"),
    }  # fmt: skip


def _opt(fields: Fields) -> dict[str, Any]:
    """Its table of positions has two more rows, which nothing reads."""
    hidden = fields["hidden_size"]
    if not fields.get("do_layer_norm_before", True) or fields.get("word_embed_proj_dim", hidden) != hidden:
        raise UserError("norms after branches and a narrower embedding (OPT-350m) are not supported")
    refuse(fields, "_remove_final_layer_norm")
    return {
        "layers": fields["num_hidden_layers"], "hidden": hidden, "heads": fields["num_attention_heads"],
        "ffn": fields["ffn_dim"], "activation": activation(fields, "activation_function", "relu"),
        "bias": fields.get("enable_bias", True), "norm_weight": fields.get("layer_norm_elementwise_affine", True),
        "vocab": fields["vocab_size"], "context": fields["max_position_embeddings"],
        "tied": fields.get("tie_word_embeddings", True),
    }  # fmt: skip


def _bloom(fields: Fields) -> dict[str, Any]:
    refuse(fields, "apply_residual_connection_post_layernorm")
    return {
        "layers": fields.get("n_layer") or fields["num_hidden_layers"],
        "hidden": fields.get("hidden_size") or fields["n_embed"],
        "heads": fields.get("n_head") or fields["num_attention_heads"],
        "norm_eps": fields.get("layer_norm_epsilon", 1e-5), "positions": "alibi", "embedding_norm": True,
        "vocab": fields["vocab_size"], "context": fields.get("seq_length") or 2048,
        "tied": fields.get("tie_word_embeddings", True),
    }  # fmt: skip


def _mpt(fields: Fields) -> dict[str, Any]:
    attention = fields.get("attn_config") or {}
    refuse(attention, "clip_qkv", "qk_ln", "prefix_lm")
    refuse(fields, "logit_scale")
    if not attention.get("alibi", True) or attention.get("alibi_bias_max", 8) != 8:
        raise UserError("attn_config without alibi, or with an alibi_bias_max other than 8, is not supported")
    if not fields.get("no_bias", True):
        raise UserError("no_bias = False is not supported")
    return {
        "layers": fields["n_layers"], "hidden": fields["d_model"], "heads": fields["n_heads"],
        "ffn": fields.get("expansion_ratio", 4) * fields["d_model"], "activation": "gelu", "positions": "alibi",
        "bias": False, "norm_bias": False, "norm_eps": fields.get("layer_norm_epsilon", 1e-5),
        "attention_scale": attention.get("softmax_scale"), "vocab": fields["vocab_size"],
        "context": fields["max_seq_len"], "tied": fields.get("tie_word_embeddings", True),
    }  # fmt: skip


def _gpt_oss(fields: Fields) -> dict[str, Any]:
    if fields.get("swiglu_limit", 7.0) != 7.0 or fields.get("swiglu_alpha", 1.702) != 1.702:
        raise UserError("swiglu_limit other than 7 is not supported")
    moe = experts(fields, fields["num_local_experts"], None, normalize=True) | {"normalize": True, "bias": True}
    return llama_family({"rms_norm_eps": 1e-5, **fields}) | windows(fields, every=2) | {
        "bias": bool(fields.get("attention_bias", True)), "ffn_bias": False, "attention_sinks": True,
        "activation": "clamped_swiglu", "moe": moe,
    }  # fmt: skip


WITH_EXPERTS: dict[str, Callable[[Fields], dict[str, Any]]] = {"gpt_oss": _gpt_oss}
FAMILIES: dict[str, Callable[[Fields], dict[str, Any]]] = {
    "gemma": _gemma, "gemma2": _gemma2, "gemma3_text": _gemma3, "phi": _phi, "phi3": _phi3, "gpt_neox": _gpt_neox,
    "gptj": _gptj, "olmo": _olmo, "olmo2": _olmo2, "olmo3": _olmo2, "starcoder2": _starcoder2,
    "stablelm": _stablelm, "falcon": _falcon, "opt": _opt, "bloom": _bloom, "mpt": _mpt, "cohere": _cohere,
    "cohere2": _cohere, "granite": _granite, "nemotron": _nemotron, "smollm3": _smollm3, "glm": _glm, "glm4": _glm,
}  # fmt: skip

REFUSED = {
    **dict.fromkeys(
        ("mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "zamba2", "falcon_h1", "granitemoehybrid", "nemotron_h",
         "recurrent_gemma", "rwkv", "xlstm", "lfm2", "qwen3_next", "kimi_linear", "minimax"),
        "has recurrent or convolutional layers in place of attention",
    ),
    "gemma3n_text": "has layers that share keys and values",
    "llama4_text": "has attention in chunks",
}  # fmt: skip
"""Decoders whose arithmetic no switch says."""
