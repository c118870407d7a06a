"""The supported Hugging Face families: one entry each, which defines both reading and writing.

Defaults are those of the family's configuration class in `transformers` 5 (`tests/model/test_huggingface_defaults`
compares each of them). Sizes that differ between models have none, as a file without them is damaged. Needs no torch.

The order matters if several families are equivalent for a model: the first of them is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ironlaw.errors import UserError
from ironlaw.model.huggingface.parts import (
    Activation,
    Alternating,
    Always,
    ExpertGroups,
    FalconHeads,
    LayersBetween,
    Multiple,
    Rope,
    Unrotated,
    Windows,
)
from ironlaw.model.huggingface.spec import ExpertNames, Family, FamilyPart, Key, Names


def _parts(*parts: FamilyPart) -> dict[str, FamilyPart]:
    return {part.name: part for part in parts}


def _bias(key: str, default: bool, *fields: str) -> tuple[Key, ...]:
    return tuple(Key(f"{name}_bias", key, default, read_as=bool) for name in fields)


_kv_heads = partial(Key, "kv_heads", "num_key_value_heads")
_head = partial(Key, "head_size", "head_dim")
_eps = partial(Key, "norm_eps")
_tied = partial(Key, "tied", "tie_word_embeddings", read_as=bool)


def _whole(value: float) -> float:
    """Round a number that was an integer before a square root."""
    return round(value) if math.isclose(value, round(value), rel_tol=1e-12) else value


# -- RMSNorm, rotary positions and gated networks, as in Llama ---------------------------------------------------------

LLAMA = Family(
    "llama", "LlamaForCausalLM",
    _parts(
        Key("layers", "num_hidden_layers"), Key("hidden", "hidden_size"), Key("heads", "num_attention_heads"),
        _kv_heads(None), _head(None), Key("ffn", "intermediate_size"), Key("vocab", "vocab_size"),
        Key("context", "max_position_embeddings"), _tied(False), _eps("rms_norm_eps", 1e-6), Activation(), Rope(),
        *_bias("attention_bias", False, "qkv", "out"), *_bias("mlp_bias", False, "ffn"),
    ),
    has={"norm": "rmsnorm", "gated_ffn": True}, only={},
)  # fmt: skip
BIASES = ("qkv_bias", "out_bias", "ffn_bias")
PLAIN = LLAMA.derive("", None, has={"bias": False}, without=BIASES)
MISTRAL = PLAIN.derive("mistral", "MistralForCausalLM", _kv_heads(8), Windows(4096))
_QWEN_WINDOWS = Windows(4096, kinds=True, first_key="max_window_layers", switch="use_sliding_window")
QWEN2 = LLAMA.derive(
    "qwen2", "Qwen2ForCausalLM", _kv_heads(32), _QWEN_WINDOWS, has={"qkv_bias": True, "out_bias": False},
    without=BIASES,
)  # fmt: skip
QWEN3 = LLAMA.derive(
    "qwen3", "Qwen3ForCausalLM", _kv_heads(32), _head(128), _QWEN_WINDOWS, has={"qk_norm": True, "ffn_bias": False}
)

# -- with experts ------------------------------------------------------------------------------------------------------


def _experts(count: str, width: str, also: tuple[str, ...] = ()) -> tuple[FamilyPart, ...]:
    # Experts with the width of the dense network need no width of their own.
    read: Callable[[Any], Any] = (lambda found: None) if width == "intermediate_size" else int
    return (
        Key("moe.experts", count, also=also), Key("moe.experts_per_token", "num_experts_per_tok"),
        Key("moe.expert_ffn", width, read_as=read),
    )  # fmt: skip


_normalize = partial(Key, "moe.normalize", "norm_topk_prob", read_as=bool)
_shared_experts = partial(Key, "moe.shared_experts", "n_shared_experts")
_balance = partial(Key, "moe.balance_loss", "router_aux_loss_coef")


def _first_layers(dense: Sequence[int]) -> int:
    """Return the number of first layers without experts, from a file's list of dense layers."""
    if sorted(dense) != list(range(len(dense))):
        raise UserError(f"mlp_only_layers = {sorted(dense)} is not supported: the first layers are")
    return len(dense)


_MIXTRAL_NAMES = Names(experts=ExpertNames(
    "block_sparse_moe.gate", "block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight",
    "block_sparse_moe.experts.{}.w2.weight", choice_bias="block_sparse_moe.e_score_correction_bias",
))  # fmt: skip
MIXTRAL = PLAIN.derive(
    "mixtral", "MixtralForCausalLM", _kv_heads(8), _eps("rms_norm_eps", 1e-5), Rope(1e6), Windows(),
    *_experts("num_local_experts", "intermediate_size"), _balance(0.001), has={"moe.normalize": True},
    names=_MIXTRAL_NAMES,
)  # fmt: skip
_QWEN_EXPERTS = (
    *_experts("num_experts", "moe_intermediate_size", also=("num_local_experts",)), _normalize(False), _balance(0.001),
    Key("moe.every", "decoder_sparse_step", 1),
    Key("moe.dense_layers", "mlp_only_layers", None, read_as=_first_layers, write_as=lambda n: list(range(n))),
)  # fmt: skip
QWEN2_MOE = QWEN2.derive(
    "qwen2_moe", "Qwen2MoeForCausalLM", _kv_heads(16), *_bias("qkv_bias", True, "qkv"), *_QWEN_EXPERTS,
    Key("moe.shared_ffn", "shared_expert_intermediate_size", read_as=lambda width: width or None),
    has={"out_bias": False, "ffn_bias": False, "moe.shared_gate": True,
         "moe.shared_experts": lambda values: int(values["moe.shared_ffn"] is not None)},
    # Versions of `transformers` place windows differently.
    only={"use_sliding_window": False}, without=("windows",),
    names=Names(experts=ExpertNames(shared="mlp.shared_expert")),
)  # fmt: skip
QWEN3_MOE = QWEN3.derive(
    "qwen3_moe", "Qwen3MoeForCausalLM", _kv_heads(4), _head(None), *_QWEN_EXPERTS,
    Windows(4096, switch="use_sliding_window"),
)  # fmt: skip
OLMOE = LLAMA.derive(
    "olmoe", "OlmoeForCausalLM", _eps("rms_norm_eps", 1e-5), *_experts("num_experts", "intermediate_size"),
    _normalize(False), _balance(0.01), has={"qk_norm": True, "qk_norm_whole": True, "ffn_bias": False},
    only={"clip_qkv": None}, without=("head_size",),
)  # fmt: skip
_DEEPSEEK_EXPERTS = (
    *_experts("n_routed_experts", "moe_intermediate_size"), _shared_experts(None),
    Key("moe.dense_layers", "first_k_dense_replace", 0),
)  # fmt: skip
DEEPSEEK = PLAIN.derive(  # DeepSeekMoE 16B, which has its own code
    "deepseek", None, *_DEEPSEEK_EXPERTS, _normalize(False), Key("moe.balance_loss", "aux_loss_alpha", 0.001),
    only={"attention_bias": False, "scoring_func": "softmax", "moe_layer_freq": 1},
)  # fmt: skip
_LATENT = DEEPSEEK.derive(
    "", None,
    Key("latent.query_rank", "q_lora_rank"), Key("latent.key_value_rank", "kv_lora_rank"),
    Key("latent.plain_size", "qk_nope_head_dim"), Key("latent.rotary_size", "qk_rope_head_dim"),
    Key("latent.value_size", "v_head_dim"), Key("heads", "num_attention_heads", beside=("num_key_value_heads",)),
    has={"latent.norm_eps": 1e-6}, only={"mlp_bias": False}, without=("kv_heads", "head_size"),
)  # fmt: skip
DEEPSEEK_V2 = _LATENT.derive(
    "deepseek_v2", "DeepseekV2ForCausalLM", _shared_experts(2), ExpertGroups(method=("greedy", "group_limited_greedy")),
    Key("moe.routed_scale", "routed_scaling_factor", 1.0), has={"moe.normalize": False}, without=("moe.normalize",),
    only={"norm_topk_prob": False},  # the released code scales the experts' sum only without it
)  # fmt: skip
_BIASED_CHOICE = {"moe.score": "sigmoid", "moe.balance": "bias"}
DEEPSEEK_V3 = _LATENT.derive(  # its auxiliary loss within sequences is not supported
    "deepseek_v3", "DeepseekV3ForCausalLM", _shared_experts(1), ExpertGroups((8, 4)), _normalize(True),
    Key("moe.routed_scale", "routed_scaling_factor", 2.5), Key("moe.dense_layers", "first_k_dense_replace", 3),
    has=_BIASED_CHOICE, without=("moe.balance_loss",),
    only={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True},
)  # fmt: skip
KIMI_K2 = DEEPSEEK_V3.derive("kimi_k2", None)
GLM4_MOE = LLAMA.derive(  # GLM-4.5; its module that predicts a second token is not part of the model there either
    "glm4_moe", "Glm4MoeForCausalLM", _kv_heads(8), _eps("rms_norm_eps", 1e-5), Rope(share=0.5),
    *_bias("attention_bias", False, "qkv"), *_DEEPSEEK_EXPERTS, _shared_experts(1),
    Key("moe.dense_layers", "first_k_dense_replace", 1), _normalize(True), ExpertGroups((1, 1)),
    Key("moe.routed_scale", "routed_scaling_factor", 1.0),
    Key("qk_norm", "use_qk_norm", False), has=_BIASED_CHOICE | {"out_bias": False, "ffn_bias": False},
)  # fmt: skip
MINIMAX_M2 = PLAIN.derive(
    "minimax_m2", "MiniMaxM2ForCausalLM", _kv_heads(8), _head(128), Rope(5e6, share=1.0, count_key="rotary_dim"),
    *_experts("num_local_experts", "intermediate_size"),
    has=_BIASED_CHOICE | {"qk_norm": True, "qk_norm_whole": True, "moe.normalize": True}, names=_MIXTRAL_NAMES,
)  # fmt: skip

# -- more of Llama's kind ----------------------------------------------------------------------------------------------

_SANDWICH = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_FUSED_GATE = "mlp.gate_up_proj"
_POST = Names(norms=("post_attention_layernorm", "post_feedforward_layernorm"))
GEMMA = LLAMA.derive(
    "gemma", "GemmaForCausalLM", _kv_heads(16), _head(256), _tied(True),
    # In files of the first Gemma, "gelu" means its tanh approximation.
    Activation("gelu_pytorch_tanh", also=("hidden_activation",), legacy={"gelu": "gelu_pytorch_tanh"}),
    has={"embedding_scale": lambda values: math.sqrt(values["hidden"]), "ffn_bias": False},
    only={"use_bidirectional_attention": None}, names=Names(plus_one=True),
)  # fmt: skip
GEMMA2 = GEMMA.derive(
    "gemma2", "Gemma2ForCausalLM", _kv_heads(4), Activation("gelu_pytorch_tanh", "hidden_activation"),
    Windows(4096, kinds=True, every=2),
    Key("attention_scale", "query_pre_attn_scalar", 256, read_as=lambda s: s**-0.5, write_as=lambda s: _whole(s**-2)),
    Key("attention_cap", "attn_logit_softcapping", 50.0), Key("logit_cap", "final_logit_softcapping", 30.0),
    has={"norm_place": "sandwich"}, names=Names(norms=_SANDWICH, plus_one=True),
)  # fmt: skip
GEMMA3 = GEMMA2.derive(
    "gemma3_text", "Gemma3ForCausalLM",
    Windows(4096, kinds=True, every=6, every_key="sliding_window_pattern"),
    Rope(1e6, local_key="rope_local_base_freq", local_theta=1e4, by_kind=True),
    Key("logit_cap", "final_logit_softcapping", None), has={"qk_norm": True}, without=("attention_cap",),
    only={"attn_logit_softcapping": None},  # its code does not apply a cap
)  # fmt: skip
PHI3 = PLAIN.derive(  # Phi-3 and Phi-4
    "phi3", "Phi3ForCausalLM", _eps("rms_norm_eps", 1e-5), Rope(share=1.0, only_longrope=True), Windows(),
    names=Names(query_key_value=("self_attn.qkv_proj",), gate=_FUSED_GATE, up=_FUSED_GATE),
)  # fmt: skip
OLMO = LLAMA.derive(
    "olmo", "OlmoForCausalLM", Key("qkv_clip", "clip_qkv", None),
    has={"norm": "layernorm", "norm_weight": False, "norm_eps": 1e-5, "ffn_bias": False},
)  # fmt: skip
OLMO2 = LLAMA.derive(
    "olmo2", "Olmo2ForCausalLM", _eps("rms_norm_eps", 1e-5), names=_POST,
    has={"norm_place": "post", "qk_norm": True, "qk_norm_whole": True, "ffn_bias": False},
)  # fmt: skip
OLMO3 = OLMO2.derive(  # layers with a window do not scale positions
    "olmo3", "Olmo3ForCausalLM", Windows(4096, kinds=True, every=4), Rope(None, by_kind=True, local_theta=5e5)
)
GRANITE = LLAMA.derive(
    "granite", "GraniteForCausalLM", Key("embedding_scale", "embedding_multiplier", 1.0),
    Key("attention_scale", "attention_multiplier", 1.0), Key("residual_scale", "residual_multiplier", 1.0),
    Key("logit_scale", "logits_scaling", 1.0, read_as=lambda s: 1 / s, write_as=lambda s: 1 / s),
)  # fmt: skip
GRANITE_MOE = GRANITE.derive(
    "granitemoe", "GraniteMoeForCausalLM", *_experts("num_local_experts", "intermediate_size"), _balance(0.001),
    has={"moe.normalize": True, "ffn_bias": False},
    names=Names(experts=ExpertNames(
        "block_sparse_moe.router.layer", "block_sparse_moe.input_linear.weight", "block_sparse_moe.input_linear.weight",
        "block_sparse_moe.output_linear.weight", shared="shared_mlp",
    )),
)  # fmt: skip
SMOLLM3 = LLAMA.derive(
    "smollm3", "SmolLM3ForCausalLM", _kv_heads(4), _tied(True), Rope(2e6), Unrotated(),
    only={"use_sliding_window": False},
)  # fmt: skip
GLM = LLAMA.derive(
    "glm", "GlmForCausalLM", _kv_heads(2), _head(128), _eps("rms_norm_eps", 1.5625e-07), Rope(share=0.5),
    *_bias("attention_bias", True, "qkv"), has={"out_bias": False, "ffn_bias": False},
    names=Names(gate=_FUSED_GATE, up=_FUSED_GATE, neighbours=True),
)  # fmt: skip
GLM4 = GLM.derive(
    "glm4", "Glm4ForCausalLM", has={"norm_place": "sandwich"},
    names=Names(gate=_FUSED_GATE, up=_FUSED_GATE, neighbours=True, norms=(
        "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm",
    )),
)  # fmt: skip
GPT_OSS = LLAMA.derive(
    "gpt_oss", "GptOssForCausalLM", _kv_heads(8), _head(64), _eps("rms_norm_eps", 1e-5),
    *_bias("attention_bias", True, "qkv", "out"), Windows(128, kinds=True, every=2),
    Rope(150_000.0, scaling={"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                             "truncate": False, "original_max_position_embeddings": 4096}),
    *_experts("num_local_experts", "intermediate_size"), _balance(0.001),
    has={"ffn_bias": False, "attention_sinks": True, "activation": "clamped_swiglu", "moe.normalize": True,
         "moe.bias": True},
    only={"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "hidden_act": "silu"},
    names=Names(experts=ExpertNames(
        "mlp.router", "mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj",
        inputs_first=("gate", "up", "down"), bias="_bias",
    )),
)  # fmt: skip
SEED_OSS = LLAMA.derive(
    "seed_oss", "SeedOssForCausalLM", _kv_heads(8), _head(128), *_bias("attention_bias", True, "qkv"),
    *_bias("attention_out_bias", False, "out"),
)  # fmt: skip
ERNIE = LLAMA.derive(
    "ernie4_5", "Ernie4_5ForCausalLM", _kv_heads(2), _head(128), _tied(True), _eps("rms_norm_eps", 1e-5), Rope(5e5),
    *_bias("use_bias", False, "qkv", "out", "ffn"), names=Names(neighbours=True),
)  # fmt: skip
ERNIE_MOE = ERNIE.derive(
    "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", _kv_heads(4), Key("moe.experts", "moe_num_experts"),
    Key("moe.experts_per_token", "moe_k"), Key("moe.expert_ffn", "moe_intermediate_size"),
    Key("moe.shared_experts", "moe_num_shared_experts", 2), LayersBetween(), without=(*BIASES, "head_size"),
    only={"use_bias": False, "moe_norm_min": 1e-12}, has={"bias": False, "moe.balance": "bias", "moe.normalize": True},
    names=Names(neighbours=True, experts=ExpertNames(
        choice_bias="mlp.moe_statics.e_score_correction_bias", choice_extra_dimension=True,
    )),
)  # fmt: skip
EXAONE4 = PLAIN.derive(
    "exaone4", "Exaone4ForCausalLM", _kv_heads(32), _eps("rms_norm_eps", 1e-5),
    Windows(4096, kinds=True, every=4, every_key="sliding_window_pattern", turned="windowed or all"),
    has={"norm_place": "post", "qk_norm": True}, names=_POST,
)  # fmt: skip

# -- layernorm ---------------------------------------------------------------------------------------------------------

_GPT_LIKE = LLAMA.derive(
    "", None, _eps("layer_norm_eps", 1e-5), has={"norm": "layernorm", "gated_ffn": False, "bias": True}, without=BIASES
)
GPT2 = _GPT_LIKE.derive(
    "gpt2", "GPT2LMHeadModel", Key("layers", "n_layer"), Key("hidden", "n_embd"), Key("heads", "n_head"),
    Key("ffn", "n_inner", None), Activation("gelu_new", "activation_function"), _eps("layer_norm_epsilon", 1e-5),
    Key("context", "n_positions", also=("n_ctx",)), _tied(True), Always({"embd_pdrop": 0.0}),
    Key("dropout", "resid_pdrop", 0.1, beside=("attn_pdrop",)), has={"positions": "learned"},
    without=("kv_heads", "head_size", "rope"),
    only={"add_cross_attention": False, "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True},
    names=Names(
        "transformer.wte", "transformer.h", "transformer.ln_f", norms=("ln_1", "ln_2"), out="attn.c_proj",
        query_key_value=("attn.c_attn",), up="mlp.c_fc", down="mlp.c_proj", positions="transformer.wpe",
        transposed=True,
    ),
)  # fmt: skip
GPT_BIGCODE = GPT2.derive(  # StarCoder
    "gpt_bigcode", "GPTBigCodeForCausalLM", Activation("gelu_pytorch_tanh", "activation_function"),
    Key("kv_heads", "multi_query", True, read_as=lambda one: 1 if one else None, write_as=lambda heads: heads == 1),
    names=replace(GPT2.names, transposed=False, by_head=True),
)  # fmt: skip
GPT_NEO = GPT2.derive(
    "gpt_neo", "GPTNeoForCausalLM", Key("layers", "num_layers"), Key("hidden", "hidden_size"),
    Key("heads", "num_heads"), Key("ffn", "intermediate_size", None), Key("context", "max_position_embeddings"),
    Alternating(), without=("dropout", "always"),
    has={"attention_scale": 1.0, "qkv_bias": False, "out_bias": True, "ffn_bias": True},
    names=replace(
        GPT2.names, transposed=False, query_key_value=tuple(f"attn.attention.{part}_proj" for part in "qkv"),
        out="attn.attention.out_proj",
    ),
)  # fmt: skip
PHI = _GPT_LIKE.derive(  # Phi-1, 1.5 and 2
    "phi", "PhiForCausalLM", Activation("gelu_new"), Rope(share=0.5), has={"parallel_norms": 1, "head_bias": True},
    only={"qk_layernorm": False}, without=("head_size",),
    names=Names(final_norm="model.final_layernorm", norms=("input_layernorm",), out="self_attn.dense", up="mlp.fc1",
                down="mlp.fc2"),
)  # fmt: skip
GPT_NEOX = _GPT_LIKE.derive(  # GPT-NeoX and Pythia
    "gpt_neox", "GPTNeoXForCausalLM", Activation("gelu"), *_bias("attention_bias", True, "qkv", "out"),
    Rope(theta_key="rotary_emb_base", share=0.25, share_key="rotary_pct"),
    Key("parallel_norms", "use_parallel_residual", True, read_as=lambda p: 2 if p else 0, write_as=bool),
    has={"ffn_bias": True}, without=("kv_heads", "head_size"),
    names=Names("gpt_neox.embed_in", "gpt_neox.layers", "gpt_neox.final_layer_norm", "embed_out",
                query_key_value=("attention.query_key_value",), out="attention.dense", up="mlp.dense_h_to_4h",
                down="mlp.dense_4h_to_h", by_head=True),
)  # fmt: skip
GPTJ = GPT2.derive(
    "gptj", "GPTJForCausalLM", Key("context", "n_positions"), _tied(False), Key("rotary_size", "rotary_dim", 64),
    has={"positions": "rope", "parallel_norms": 1, "qkv_bias": False, "out_bias": False, "ffn_bias": True,
         "head_bias": True},
    without=("dropout",),
    names=Names("transformer.wte", "transformer.h", "transformer.ln_f", norms=("ln_1",),
                query_key_value=("attn.q_proj", "attn.k_proj", "attn.v_proj"), out="attn.out_proj", up="mlp.fc_in",
                down="mlp.fc_out", neighbours=True),
)  # fmt: skip
STARCODER2 = _GPT_LIKE.derive(
    "starcoder2", "Starcoder2ForCausalLM", Activation("gelu_pytorch_tanh"), _kv_heads(2), _tied(True), Windows(),
    _eps("norm_epsilon", 1e-5), *_bias("use_bias", True, "qkv", "out", "ffn"),
    names=Names(up="mlp.c_fc", down="mlp.c_proj"),
)  # fmt: skip
STABLELM = _GPT_LIKE.derive(
    "stablelm", "StableLmForCausalLM", Rope(share=0.25), _kv_heads(32), *_bias("use_qkv_bias", False, "qkv"),
    Key("parallel_norms", "use_parallel_residual", False, read_as=int, write_as=bool),
    has={"gated_ffn": True, "out_bias": False, "ffn_bias": False}, without=("head_size",),
    only={"qk_layernorm": False},  # it would be a separate norm for every head
)  # fmt: skip
_FALCON_NAMES = Names(
    "transformer.word_embeddings", "transformer.h", "transformer.ln_f", two_norms=("ln_attn", "ln_mlp"),
    query_key_value=("self_attention.query_key_value",), out="self_attention.dense", up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h", by_head=True, embedding_norm="transformer.word_embeddings_layernorm",
)  # fmt: skip
FALCON = _GPT_LIKE.derive(
    "falcon", "FalconForCausalLM", Activation("gelu", "activation"), FalconHeads(), Key("ffn", "ffn_hidden_size", None),
    Key("context", "max_position_embeddings", 2048), _eps("layer_norm_epsilon", 1e-5), _tied(True),
    *_bias("bias", False, "qkv", "out", "ffn"), without=("head_size",),
    only={"alibi": False},  # the first models also scale ALiBi by the head size
    names=_FALCON_NAMES,
)  # fmt: skip
OPT = _GPT_LIKE.derive(
    "opt", "OPTForCausalLM", Key("ffn", "ffn_dim"), Activation("relu", "activation_function"), _tied(True),
    *_bias("enable_bias", True, "qkv", "out", "ffn"), Key("norm_weight", "layer_norm_elementwise_affine", True),
    Key("hidden", "hidden_size", beside=("word_embed_proj_dim",)),  # OPT-350m's embedding is narrower than its blocks
    Always({"dropout": 0.0}), has={"positions": "learned", "norm_eps": 1e-5},
    only={"do_layer_norm_before": True, "_remove_final_layer_norm": False},
    without=("kv_heads", "head_size", "rope"),
    names=Names("model.decoder.embed_tokens", "model.decoder.layers", "model.decoder.final_layer_norm",
                norms=("self_attn_layer_norm", "final_layer_norm"), out="self_attn.out_proj", up="fc1", down="fc2",
                positions="model.decoder.embed_positions", positions_skipped=2),
)  # fmt: skip
_ALIBI = _GPT_LIKE.derive(
    "", None, _eps("layer_norm_epsilon", 1e-5), _tied(True), has={"positions": "alibi"},
    without=("kv_heads", "head_size", "rope", "activation"),
)  # fmt: skip
BLOOM = _ALIBI.derive(
    "bloom", "BloomForCausalLM", Key("layers", "n_layer", also=("num_hidden_layers",)),
    Key("hidden", "hidden_size", also=("n_embed",)), Key("heads", "n_head", also=("num_attention_heads",)),
    Key("context", "seq_length", 2048), has={"embedding_norm": True, "activation": "gelu_tanh"}, without=("ffn",),
    only={"apply_residual_connection_post_layernorm": False}, names=_FALCON_NAMES,
)  # fmt: skip
MPT = _ALIBI.derive(
    "mpt", "MptForCausalLM", Key("layers", "n_layers"), Key("hidden", "d_model"), Key("heads", "n_heads"),
    Multiple("expansion_ratio", 4), Key("context", "max_seq_len"),
    Key("attention_scale", "attn_config.softmax_scale", None), Key("qkv_clip", "attn_config.clip_qkv", None),
    has={"bias": False, "norm_bias": False, "activation": "gelu"},
    only={"attn_config.qk_ln": False, "attn_config.prefix_lm": False,
          "attn_config.alibi": True, "attn_config.alibi_bias_max": 8, "logit_scale": None, "no_bias": True},
    names=Names("transformer.wte", "transformer.blocks", "transformer.norm_f", norms=("norm_1", "norm_2"),
                query_key_value=("attn.Wqkv",), out="attn.out_proj", up="ffn.up_proj", down="ffn.down_proj"),
)  # fmt: skip
DBRX = _GPT_LIKE.derive(
    "dbrx", "DbrxForCausalLM", Key("layers", "n_layers"), Key("hidden", "d_model"), Key("heads", "n_heads"),
    Key("context", "max_seq_len"), Key("kv_heads", "attn_config.kv_n_heads", 1),
    Key("qkv_clip", "attn_config.clip_qkv", None), Rope(theta_key="attn_config.rope_theta"),
    Key("moe.experts", "ffn_config.moe_num_experts"), Key("moe.experts_per_token", "ffn_config.moe_top_k"),
    Key("moe.expert_ffn", "ffn_config.ffn_hidden_size"), Key("moe.balance_loss", "ffn_config.moe_loss_weight", 0.01),
    Always({"ffn_config.moe_jitter_eps": None}),  # noise on the router's input, in training only
    has={"gated_ffn": True, "bias": False, "norm_bias": False, "norm_eps": 1e-5, "activation": "silu",
         "moe.normalize": True},
    only={"resid_pdrop": 0.0, "emb_pdrop": 0.0, "attn_config.attn_pdrop": 0.0, "ffn_config.ffn_act_fn.name": "silu",
          "ffn_config.moe_normalize_expert_weights": 1.0},
    without=("ffn", "head_size"),
    names=Names("transformer.wte", "transformer.blocks", "transformer.norm_f",
                norms=("norm_attn_norm.norm_1", "norm_attn_norm.norm_2"),
                query_key_value=("norm_attn_norm.attn.Wqkv",), out="norm_attn_norm.attn.out_proj",
                experts=ExpertNames("ffn.router.layer", "ffn.experts.mlp.w1", "ffn.experts.mlp.v1",
                                    "ffn.experts.mlp.w2", inputs_first=("down",), merged_experts=True)),
)  # fmt: skip
COHERE = _GPT_LIKE.derive(  # Command R
    "cohere", "CohereForCausalLM", Activation(), Rope(None), _tied(True), Key("logit_scale", "logit_scale", 0.0625),
    *_bias("attention_bias", False, "qkv", "out"), only={"use_qk_norm": False},
    has={"gated_ffn": True, "ffn_bias": False, "norm_bias": False, "parallel_norms": 1},
    names=Names(norms=("input_layernorm",), neighbours=True),
)  # fmt: skip
COHERE2 = COHERE.derive(  # Command R7B: layers without a window have no positions
    "cohere2", "Cohere2ForCausalLM", Rope(),
    Windows(4096, kinds=True, every=4, every_key="sliding_window_pattern", turned="windowed"), without=("head_size",),
)  # fmt: skip
NEMOTRON = _GPT_LIKE.derive(  # Nemotron-4 and Minitron
    "nemotron", "NemotronForCausalLM", Activation("relu2"), _eps("norm_eps", 1e-5), Rope(share=0.5),
    *_bias("attention_bias", False, "qkv", "out"), *_bias("mlp_bias", False, "ffn"), names=Names(plus_one=True),
)  # fmt: skip
ARCEE = LLAMA.derive("arcee", "ArceeForCausalLM", Activation("relu2"), _eps("rms_norm_eps", 1e-5),
                     has={"gated_ffn": False})  # fmt: skip

FAMILIES = {
    family.kind: family
    for family in (
        GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, DEEPSEEK, DEEPSEEK_V2, DEEPSEEK_V3,
        KIMI_K2, GEMMA, GEMMA2, GEMMA3, PHI, PHI3, GPT_NEOX, GPTJ, OLMO, OLMO2, OLMO3, STARCODER2, STABLELM, FALCON,
        OPT, BLOOM, MPT, COHERE, COHERE2, GRANITE, NEMOTRON, SMOLLM3, GLM, GLM4, GPT_OSS, GLM4_MOE, MINIMAX_M2,
        GRANITE_MOE, SEED_OSS, ERNIE, ERNIE_MOE, DBRX, EXAONE4, GPT_BIGCODE, GPT_NEO, ARCEE,
    )
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
"""Decoders that ModelConfig cannot express."""
