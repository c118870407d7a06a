"""`config.json` of published models, cut to what sizes and arithmetic hang on, and the parameters of their weights.

Sizes are those that the model cards and papers give or that the safetensors indexes add up to.
"""

from __future__ import annotations

from typing import Any

LLAMA_LIKE = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
              "vocab_size", "max_position_embeddings")  # fmt: skip


def fields(kind: str, *sizes: int | None, **more: Any) -> dict[str, Any]:
    return {"model_type": kind} | dict(zip(LLAMA_LIKE, sizes, strict=False)) | more


PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "gemma-7b": (fields("gemma", 28, 3072, 24576, 16, 16, 256000, 8192, head_dim=256, hidden_act="gelu"),
                 8_537_680_896),
    "gemma-2-9b": (fields("gemma2", 42, 3584, 14336, 16, 8, 256000, 8192, head_dim=256, query_pre_attn_scalar=256,
                          hidden_activation="gelu_pytorch_tanh", attn_logit_softcapping=50.0,
                          final_logit_softcapping=30.0, sliding_window=4096), 9_241_705_984),
    "gemma-2-27b": (fields("gemma2", 46, 4608, 36864, 32, 16, 256000, 8192, head_dim=128, query_pre_attn_scalar=144,
                           attn_logit_softcapping=50.0, final_logit_softcapping=30.0, sliding_window=4096),
                    27_227_128_320),
    "gemma-3-1b": (fields("gemma3_text", 26, 1152, 6912, 4, 1, 262144, 32768, head_dim=256, query_pre_attn_scalar=256,
                          sliding_window=512, sliding_window_pattern=6, rope_theta=1e6, rope_local_base_freq=10000),
                   999_885_952),
    # The text model alone; the report's table 1 has 25,600M beside the embedding.
    "gemma-3-27b": (fields("gemma3_text", 62, 5376, 21504, 32, 16, 262208, 131072, head_dim=128,
                           query_pre_attn_scalar=168, sliding_window=1024, rope_theta=1e6, rope_local_base_freq=10000,
                           rope_scaling={"factor": 8.0, "rope_type": "linear"}), 27_009_346_304),
    "phi-2": (fields("phi", 32, 2560, 10240, 32, 32, 51200, 2048, partial_rotary_factor=0.4), 2_779_683_840),
    "phi-3-mini": (fields("phi3", 32, 3072, 8192, 32, 32, 32064, 4096, sliding_window=2047), 3_821_079_552),
    "phi-4": (fields("phi3", 40, 5120, 17920, 40, 10, 100352, 16384, rope_theta=250000), 14_659_507_200),
    "pythia-6.9b": (fields("gpt_neox", 32, 4096, 16384, 32, None, 50432, 2048, rotary_pct=0.25), 6_857_302_016),
    "gpt-neox-20b": (fields("gpt_neox", 44, 6144, 24576, 64, None, 50432, 2048, rotary_pct=0.25), 20_554_567_680),
    "gpt-j-6b": ({"model_type": "gptj", "n_layer": 28, "n_embd": 4096, "n_head": 16, "n_inner": None,
                  "n_positions": 2048, "rotary_dim": 64, "vocab_size": 50400}, 6_050_882_784),
    "olmo-7b": (fields("olmo", 32, 4096, 11008, 32, 32, 50304, 2048, clip_qkv=None), 6_888_095_744),
    "olmo-2-7b": (fields("olmo2", 32, 4096, 11008, 32, 32, 100352, 4096, rope_theta=500000), 7_298_617_344),
    "olmo-2-13b": (fields("olmo2", 40, 5120, 13824, 40, 40, 100352, 4096, rope_theta=500000), 13_716_198_400),
    "starcoder2-7b": (fields("starcoder2", 32, 4608, 18432, 36, 4, 49152, 16384, sliding_window=4096, use_bias=True,
                             rope_theta=1e6), 7_173_923_840),
    "starcoder2-15b": (fields("starcoder2", 40, 6144, 24576, 48, 4, 49152, 16384, sliding_window=4096, rope_theta=1e5,
                              tie_word_embeddings=False), 15_957_889_024),
    "stablelm-3b-4e1t": (fields("stablelm", 32, 2560, 6912, 32, 32, 50304, 4096, partial_rotary_factor=0.25),
                         2_795_443_200),
    "falcon-7b": ({"model_type": "falcon", "num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71,
                   "vocab_size": 65024, "multi_query": True, "parallel_attn": True, "bias": False, "alibi": False,
                   "new_decoder_architecture": False}, 6_921_720_704),
    "opt-6.7b": ({"model_type": "opt", "num_hidden_layers": 32, "hidden_size": 4096, "ffn_dim": 16384,
                  "num_attention_heads": 32, "vocab_size": 50272, "max_position_embeddings": 2048,
                  "word_embed_proj_dim": 4096, "do_layer_norm_before": True}, 6_658_473_984 - 2 * 4096),
    "bloom-7b1": ({"model_type": "bloom", "n_layer": 30, "n_embed": 4096, "num_attention_heads": 32,
                   "vocab_size": 250880, "seq_length": 2048}, 7_069_016_064),
    "mpt-7b": ({"model_type": "mpt", "n_layers": 32, "d_model": 4096, "n_heads": 32, "vocab_size": 50432,
                "max_seq_len": 2048, "expansion_ratio": 4, "no_bias": True, "attn_config": {"alibi": True}},
               6_649_286_656),
    "command-r": (fields("cohere", 40, 8192, 22528, 64, 64, 256000, 131072, logit_scale=0.0625, rope_theta=8e6),
                  34_980_831_232),
    "command-r7b": (fields("cohere2", 32, 4096, 14336, 32, 8, 256000, 8192, logit_scale=0.25, sliding_window=4096,
                           sliding_window_pattern=4, rope_theta=50000), 8_028_033_024),
    "granite-3.0-8b": (fields("granite", 40, 4096, 12800, 32, 8, 49155, 4096, embedding_multiplier=12.0,
                              attention_multiplier=0.0078125, residual_multiplier=0.22, logits_scaling=16.0,
                              rope_theta=10000, tie_word_embeddings=True), 8_170_848_256),
    "smollm3-3b": (fields("smollm3", 36, 2048, 11008, 16, 4, 128256, 65536, rope_theta=5e6), 3_075_098_624),
    "glm-4-9b": (fields("glm", 40, 4096, 13696, 32, 2, 151552, 131072, head_dim=128, attention_bias=True,
                        partial_rotary_factor=0.5), 9_399_951_360),
    "glm-4-9b-0414": (fields("glm4", 40, 4096, 13696, 32, 2, 151552, 32768, head_dim=128, attention_bias=True,
                             partial_rotary_factor=0.5), 9_400_279_040),
}  # fmt: skip

SMALL = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 70, "max_position_embeddings": 64}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 12},
    "gemma2": {"head_dim": 12, "sliding_window": 8, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0,
               "final_logit_softcapping": 3.0},
    "gemma3_text": {"head_dim": 12, "sliding_window": 8, "query_pre_attn_scalar": 20,
                    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                    "rope_parameters": {
                        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
                    }},
    "phi": {"num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "phi3": {"sliding_window": 8, "pad_token_id": 0},
    "gpt_neox": {"intermediate_size": 64},
    "gpt_neox one after the other": {"use_parallel_residual": False},
    "gptj": {"n_layer": 3, "n_embd": 32, "n_head": 4, "n_inner": 48, "n_positions": 64, "rotary_dim": 4,
             "vocab_size": 70},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "starcoder2": {"sliding_window": 8},
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "stablelm in parallel": {"use_parallel_residual": True},
    "falcon": {"ffn_hidden_size": 48},
    "falcon with groups": {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 48},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 3, "n_head": 4},
    "mpt": {"n_layers": 3, "d_model": 32, "n_heads": 4, "max_seq_len": 64, "vocab_size": 70},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"sliding_window": 8, "head_dim": 8,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "granite": {"embedding_multiplier": 3.0, "attention_multiplier": 0.5, "residual_multiplier": 0.3,
                "logits_scaling": 4.0},
    "nemotron": {"head_dim": 8},
    "smollm3": {"no_rope_layers": [1, 0, 1], "no_rope_layer_interval": 2, "pad_token_id": 0},
    "glm": {"head_dim": 8, "pad_token_id": 0},
    "glm4": {"head_dim": 8, "pad_token_id": 0},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
}  # fmt: skip
"""Small models as `transformers` builds them, by model_type."""
