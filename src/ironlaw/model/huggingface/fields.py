"""ModelConfig as the `config.json` of the architecture that computes the same. Needs no torch."""

from __future__ import annotations

from typing import Any

from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.family_fields import family_fields
from ironlaw.model.yarn import is_yarn

_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu", "relu": "relu", "relu2": "relu2"}
_CLASSES = {
    "gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "olmoe": "OlmoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM",
}  # fmt: skip


def family(config: ModelConfig) -> str:
    """gpt2, llama, mistral, qwen2, qwen3, mixtral, ...; UserError for a combination that none of them has."""
    if is_switched(config):
        fields = family_fields(config, _rope_scaling(config))
        if fields is None:
            reason = (config.switched or [f'positions = "{config.positions}"'])[0]
            raise _none(config, f"none of the families that have {reason} has the rest")
        return str(fields["model_type"])
    if config.latent is not None:
        return _family_with_latents(config)
    if config.moe is not None:
        return _family_with_experts(config)
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


def _family_with_experts(config: ModelConfig) -> str:
    """mixtral, qwen2_moe, qwen3_moe or olmoe. In evaluation none of them drops a choice, and neither do we."""
    moe = config.moe
    assert moe is not None
    if config.positions != "rope" or config.norm != "rmsnorm" or not config.gated_ffn or config.bias:
        raise _none(config, "experts go with rotary positions, rmsnorm, gated networks and no biases")
    if moe.score != "softmax" or moe.routed_scale != 1.0 or moe.balance == "bias":
        raise _none(config, "their routers score by softmax, without a scale or a bias on the choice")
    everywhere = moe.dense_layers == 0 and moe.every == 1
    if config.has_qkv_bias:
        if not (moe.shared_experts and moe.shared_gate) or config.qk_norm or config.sliding_window is not None:
            raise _none(config, "biases on query, key and value are Qwen2-MoE's, whose shared experts have a gate")
        return "qwen2_moe"
    if moe.shared_experts:
        raise _none(config, "shared experts are Qwen2-MoE's, with their gate and with biases on query, key and value")
    if config.qk_norm and config.sliding_window is not None:
        raise _none(config, "qk_norm goes without a sliding window")
    if config.qk_norm and not config.qk_norm_whole:
        return "qwen3_moe"
    if not everywhere or config.expert_ffn_size != config.ffn_size:
        raise _none(config, "without Qwen's norms every layer has experts, ffn wide: set moe.expert_ffn to model.ffn")
    if config.qk_norm:
        if config.query_size != config.hidden:
            raise _none(config, "OLMoE's heads are hidden / heads wide")
        return "olmoe"
    if not moe.normalize:
        raise _none(config, "Mixtral's weights of a token's experts sum to 1: moe.normalize")
    return "mixtral"


def _family_with_latents(config: ModelConfig) -> str:
    """deepseek_v2 or deepseek_v3: they differ in how experts are chosen."""
    moe, latent = config.moe, config.latent
    assert latent is not None
    if moe is None or not moe.shared_experts or moe.shared_gate or moe.every != 1 or not config.gated_ffn:
        raise _none(config, "latent attention goes with gated experts in all layers but the first, some of them shared")
    if config.shared_ffn_size % config.expert_ffn_size or latent.norm_eps != 1e-6 or config.sliding_window is not None:
        raise _none(config, "DeepSeek's shared experts are as wide as others, its latents' norms have norm_eps = 1e-6")
    if moe.score == "softmax" and moe.balance != "bias" and not moe.normalize:
        return "deepseek_v2"
    if moe.score == "sigmoid" and moe.balance == "bias":
        return "deepseek_v3"
    raise _none(config, "softmax scores go without a bias and a normalised sum (V2), sigmoid ones with a bias (V3)")


def is_switched(config: ModelConfig) -> bool:
    """Whether it is one of `families.py`."""
    plain = config.positions in ("learned", "rope") and config.activation not in ("relu", "relu2")
    gpt2 = config.positions == "learned" or (config.norm == "rmsnorm" and config.gated_ffn)
    return bool(config.switched) or not plain or not gpt2


def to_fields(config: ModelConfig) -> dict[str, Any]:
    """The content of `config.json`."""
    kind = family(config)
    if is_switched(config):
        fields = family_fields(config, _rope_scaling(config))
        assert fields is not None
        return fields
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
    if kind in ("mistral", "mixtral"):
        fields |= {"sliding_window": config.sliding_window}
    if kind.startswith("qwen"):
        fields |= {"use_sliding_window": False}
    return fields | _expert_fields(config, kind) | _latent_fields(config, kind)


def _expert_fields(config: ModelConfig, kind: str) -> dict[str, Any]:
    moe = config.moe
    if moe is None:
        return {}
    coefficient = moe.balance_loss if moe.balance == "loss" else 0.0
    fields: dict[str, Any] = {"num_experts_per_tok": moe.experts_per_token, "router_aux_loss_coef": coefficient}
    if kind == "mixtral":
        return fields | {"num_local_experts": moe.experts}
    if config.latent is not None:
        return {"num_experts_per_tok": moe.experts_per_token}
    fields |= {"num_experts": moe.experts, "norm_topk_prob": moe.normalize}
    if kind == "olmoe":
        return fields
    fields |= {
        "moe_intermediate_size": config.expert_ffn_size, "decoder_sparse_step": moe.every,
        "mlp_only_layers": list(range(moe.dense_layers)),
    }  # fmt: skip
    return fields | ({"shared_expert_intermediate_size": config.shared_ffn_size} if kind == "qwen2_moe" else {})


def _latent_fields(config: ModelConfig, kind: str) -> dict[str, Any]:
    moe, latent = config.moe, config.latent
    if moe is None or latent is None:
        return {}
    fields = {
        "q_lora_rank": latent.query_rank, "kv_lora_rank": latent.key_value_rank, "v_head_dim": latent.value_size,
        "qk_nope_head_dim": latent.plain_size, "qk_rope_head_dim": latent.rotary_size, "attention_bias": False,
        "head_dim": latent.rotary_size, "num_key_value_heads": config.heads,
        "n_routed_experts": moe.experts, "n_shared_experts": config.shared_ffn_size // config.expert_ffn_size,
        "moe_intermediate_size": config.expert_ffn_size, "first_k_dense_replace": moe.dense_layers,
        "norm_topk_prob": moe.normalize, "routed_scaling_factor": moe.routed_scale, "scoring_func": moe.score,
        "n_group": moe.groups, "topk_group": moe.groups_per_token or moe.groups,
    }  # fmt: skip
    if kind == "deepseek_v3":
        return fields | {"topk_method": "noaux_tc", "rope_interleave": True, "num_nextn_predict_layers": 0}
    limited = "group_limited_greedy" if moe.limits_groups else "greedy"
    return fields | {"topk_method": limited, "aux_loss_alpha": moe.balance_loss if moe.balance == "loss" else 0.0}


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    if config.rope_scaling is None:
        return None
    scaling = dict(config.rope_scaling)
    if config.rope_short and config.rope_long:
        extra = {"attention_factor": scaling["attention_factor"]} if "attention_factor" in scaling else {}
        return {
            "rope_type": "longrope", "short_factor": list(config.rope_short), "long_factor": list(config.rope_long),
            "factor": scaling["factor"], "original_max_position_embeddings": int(scaling["original_context"]), **extra,
        }  # fmt: skip
    if set(scaling) == {"factor"}:
        return {"rope_type": "linear", **scaling}
    original = int(scaling.pop("original_context"))
    if is_yarn(scaling):
        whole = {} if scaling.pop("truncate", 1.0) else {"truncate": False}
        return {"rope_type": "yarn", **scaling, **whole, "original_max_position_embeddings": original}
    return {"rope_type": "llama3", **scaling, "original_max_position_embeddings": original}


def _none(config: ModelConfig, why: str) -> UserError:
    return UserError(f"no Hugging Face architecture computes {config.name} ({why}): it cannot be exported")
