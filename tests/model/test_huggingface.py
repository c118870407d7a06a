"""Hugging Face configs: published files give published parameter counts; what cannot be expressed is refused."""

import json

import pytest

from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.configs import from_fields, read_config

GPT2 = {
    "model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_ctx": 1024, "n_positions": 1024,
    "vocab_size": 50257, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "resid_pdrop": 0.1,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
QWEN2 = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu", "tie_word_embeddings": True,
    "sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 24,
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "hidden_act": "silu",
    "tie_word_embeddings": False, "attention_bias": False, "use_sliding_window": False, "rope_scaling": None,
}  # fmt: skip
MISTRAL = {
    "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "sliding_window": 4096,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02,
}  # fmt: skip
QWEN2_MOE = {
    "model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 151936, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21, "decoder_sparse_step": 1,
    "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4,
    "num_experts": 60, "norm_topk_prob": False, "router_aux_loss_coef": 0.001,
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "attention_bias": False, "use_sliding_window": False, "rope_scaling": None,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001,
}  # fmt: skip
OLMOE = {
    "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 50304, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "clip_qkv": None,
    "attention_bias": False, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
    "router_aux_loss_coef": 0.01,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek", "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "hidden_act": "silu", "tie_word_embeddings": False,
    "attention_bias": False, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": False,
    "scoring_func": "softmax", "aux_loss_alpha": 0.001,
}  # fmt: skip


YARN = {
    "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096,
}  # fmt: skip
GPT_OSS = {"model_type": "gpt_oss", "num_local_experts": 32, "num_experts_per_tok": 4, "rope_scaling": None}
DEEPSEEK_V2_LITE = DEEPSEEK | {
    "model_type": "deepseek_v2", "num_hidden_layers": 27, "max_position_embeddings": 163840, "q_lora_rank": None,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "topk_method": "greedy",
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
DEEPSEEK_V2 = DEEPSEEK_V2_LITE | {
    "hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 60, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "n_routed_experts": 160, "moe_intermediate_size": 1536,
    "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0,
}  # fmt: skip
DEEPSEEK_V3 = DEEPSEEK_V2 | {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "vocab_size": 129280, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "norm_topk_prob": True, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "topk_group": 4, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840,
    "n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0, "max_position_embeddings": 131072,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"factor": 32.0, "beta_fast": 1.0},
}  # fmt: skip
MOONLIGHT = DEEPSEEK_V3 | {
    "hidden_size": 2048, "intermediate_size": 11264, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "q_lora_rank": None, "vocab_size": 163840, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "rope_theta": 50000.0, "max_position_embeddings": 8192, "rope_scaling": None,
    "routed_scaling_factor": 2.446, "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "parameters"),
    [
        (GPT2, 124_439_808),
        (LLAMA, 8_030_261_248),
        (QWEN2, 494_032_768),
        (QWEN3, 8_190_735_360),
        (MISTRAL, 7_241_732_096),
        (MIXTRAL, 46_702_792_704),
        (QWEN2_MOE, 14_315_784_192),
        (QWEN3_MOE, 30_532_122_624),
        (OLMOE, 6_919_161_856),
        (DEEPSEEK, 16_375_728_128),
        (DEEPSEEK_V2_LITE, 15_706_484_224),
        (DEEPSEEK_V2, 235_741_434_880),
        # The checkpoint's 671,026,419,200 count the biases of the choice (58 layers of 256), which are not trained.
        (DEEPSEEK_V3, 671_026_419_200 - 58 * 256),
    ],
    ids=[
        "gpt2",
        "llama3",
        "qwen2",
        "qwen3",
        "mistral",
        "mixtral",
        "qwen2-moe",
        "qwen3-moe",
        "olmoe",
        "deepseek-moe",
        "deepseek-v2-lite",
        "deepseek-v2",
        "deepseek-v3",
    ],
)
def test_published_parameter_counts(fields, parameters):
    assert from_fields(fields).parameters == parameters


def test_counts_published_in_round_numbers():
    assert from_fields(KIMI_K2).parameters == pytest.approx(1.03e12, rel=0.005)  # 1.04 in arXiv 2507.20534
    assert from_fields(MOONLIGHT).parameters == pytest.approx(15.96e9, rel=0.001)  # arXiv 2502.16982, table 7


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (LLAMA, "llama3-8b"),
        (QWEN3, "qwen3-8b"),
        (MISTRAL, "mistral-7b"),
        (GPT2, "gpt2"),
        (MIXTRAL, "mixtral-8x7b"),
        (QWEN3_MOE, "qwen3-30b-a3b"),
        (OLMOE, "olmoe-1b-7b"),
        (DEEPSEEK, "deepseek-moe-16b"),
        (DEEPSEEK_V2_LITE, "deepseek-v2-lite"),
        (DEEPSEEK_V2, "deepseek-v2"),
        (DEEPSEEK_V3, "deepseek-v3"),
        (KIMI_K2, "kimi-k2"),
    ],
)
def test_the_catalogue_has_the_same_shapes(fields, name):
    ours, known = from_fields(fields).model_dump(), ModelConfig.named(name).model_dump()
    same = [key for key in known if key not in ("name", "dropout", "rope_scaling", "ffn", "kv_heads", "head_size")]
    assert {key: ours[key] for key in same} == {key: known[key] for key in same}
    assert from_fields(fields).rope_scaling == ModelConfig.named(name).rope_scaling


def test_the_newer_place_of_rope_parameters():
    newer = {k: v for k, v in LLAMA.items() if k not in ("rope_theta", "rope_scaling")}
    newer["rope_parameters"] = LLAMA["rope_scaling"] | {"rope_theta": 500000.0}
    assert from_fields(newer) == from_fields(LLAMA)
    plain = newer | {"rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}}
    assert from_fields(plain).rope_scaling is None and from_fields(plain).rope_theta == 12345.0


def test_file_or_directory_names_the_model(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GPT2))
    assert read_config(folder) == read_config(folder / "config.json")
    assert read_config(folder).name == "my-model"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "lama"}, "did you mean llama"),
        ({"num_local_experts": 8}, "'llama' with experts is not supported: those of dbrx, deepseek"),
        ({"model_type": "deepseek_v3"}, "num_attention_heads = 32 and num_key_value_heads = 8 have to be the same"),
        ({"model_type": "deepseek_v3", "num_key_value_heads": 32}, "has no n_routed_experts"),
        (DEEPSEEK_V3 | {"rope_interleave": False}, "rope_interleave"),
        (DEEPSEEK_V3 | {"scoring_func": "softmax"}, "scoring_func"),
        (DEEPSEEK_V3 | {"topk_method": "greedy"}, "noaux_tc"),
        (DEEPSEEK_V3 | {"n_group": 7}, "not divisible by groups"),
        (DEEPSEEK_V3 | {"attention_bias": True}, "attention_bias"),
        (DEEPSEEK_V2 | {"norm_topk_prob": True}, "norm_topk_prob"),
        ({"model_type": "qwen3_next"}, "recurrent"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "original_max_position_embeddings"),
        # Versions of `transformers` differ about these two.
        ({"original_max_position_embeddings": 4096}, "= 4096 stands where"),
        (GPT_OSS, "rope_scaling = None is read in two ways"),
        ({"hidden_act": "relu6"}, "'relu6' is not supported"),
        ({"text_config": {}}, "parts beside a decoder"),
        ({"num_attention_heads": 33}, "33"),
        ({"num_hidden_layers": "many"}, "layers"),
    ],
)
def test_what_cannot_be_expressed_is_refused_in_one_line(change, message):
    with pytest.raises(UserError, match=message) as caught:
        from_fields(LLAMA | change)
    assert "\n" not in str(caught.value)


def test_an_empty_table_of_positions_is_the_familys_default():
    fields = {key: value for key, value in (LLAMA | GPT_OSS).items() if key != "rope_scaling"}
    assert from_fields(fields | {"rope_parameters": None}) == from_fields(fields)
    assert from_fields(fields).rope_scaling["factor"] == 32.0
    assert from_fields(fields | {"rope_parameters": {}}).rope_scaling is None


def test_a_factor_of_zero_is_one_that_is_given():
    table = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8192, "attention_factor": 0}
    assert from_fields(LLAMA | {"rope_scaling": table}).rope_scaling["attention_factor"] == 0.0


def test_a_missing_field_is_named():
    with pytest.raises(UserError, match="has no hidden_size"):
        from_fields({key: value for key, value in LLAMA.items() if key != "hidden_size"})


def test_windows_in_some_layers_only():
    upper = from_fields(QWEN2 | {"use_sliding_window": True, "max_window_layers": 20})
    assert [upper.is_windowed(layer) for layer in (0, 19, 20, 23)] == [False, False, True, True]
    assert from_fields(QWEN2 | {"use_sliding_window": True}).sliding_window is None  # of no layer
    thirds = ["full_attention", "sliding_attention", "sliding_attention"] * 8
    shifted = from_fields(QWEN2 | {"use_sliding_window": True, "layer_types": thirds})
    assert [shifted.is_windowed(layer) for layer in range(24)] == [kind != "full_attention" for kind in thirds]
    with pytest.raises(UserError, match="layer_types"):
        mixed = ["full_attention", "full_attention", "sliding_attention", "sliding_attention"] * 6
        from_fields(QWEN2 | {"use_sliding_window": True, "layer_types": mixed})


def test_biases_of_attention_alone():
    mixed = from_fields(LLAMA | {"attention_bias": True})
    assert (mixed.has_qkv_bias, mixed.has_out_bias, mixed.has_ffn_bias) == (True, True, False)


def test_experts_in_some_layers_only():
    sparse = from_fields(QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [0, 1]})
    assert sparse.moe is not None
    assert [sparse.moe.in_layer(layer) for layer in range(5)] == [False, False, False, True, False]
    with pytest.raises(UserError, match="mlp_only_layers"):
        from_fields(QWEN3_MOE | {"mlp_only_layers": [3]})
    with pytest.raises(UserError, match="clip_qkv"):
        from_fields(OLMOE | {"clip_qkv": 8.0})


def test_not_json_and_not_a_model(tmp_path):
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        read_config(file)
    file.write_text('{"a": 1}')
    with pytest.raises(UserError, match="not a Hugging Face model config"):
        read_config(file)
