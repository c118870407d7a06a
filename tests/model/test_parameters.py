"""Parameter counts: the published ones, the config's formula and the built modules, all the same number."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ironlaw.catalog.models import model_entry, model_names
from ironlaw.config import build_config
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.model.parameters import model_parameters
from ironlaw.model.transformer import Transformer

# Written out again from the released checkpoints (their safetensors indexes), not read from the catalog.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,  # the paper says 175.0 B
    "llama3-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen3-8b": 8_190_735_360,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2-57b-a14b": 57_408_658_944,  # the report says 57.4 B
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "olmoe-1b-7b": 6_919_161_856,
    "deepseek-moe-16b": 16_375_728_128,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_404_352,  # the checkpoint's 671,026,419,200 without the biases of the experts' choice
    "kimi-k2": 1_026_408_209_408,  # the report says 1.04 T
}
SMALL = {"layers": 3, "hidden": 24, "heads": 4, "vocab": 50, "context": 12}
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "untied": {"tied": False},
    "no bias": {"bias": False},
    "qkv bias only": {"bias": False, "qkv_bias": True},
    "no qkv bias": {"bias": True, "qkv_bias": False},
    "grouped": {"kv_heads": 2},
    "one key head": {"kv_heads": 1},
    "gated": {"gated_ffn": True, "ffn": 40},
    "gated without bias": {"gated_ffn": True, "bias": False},
    "rmsnorm": {"norm": "rmsnorm"},
    "rope": {"positions": "rope"},
    "norms after": {"norm_place": "post"},
    "norms before and after": {"norm_place": "sandwich"},
    "head size": {"head_size": 10},
    "qk norm": {"qk_norm": True, "norm": "rmsnorm", "positions": "rope"},
    "latent": {
        "norm": "rmsnorm", "positions": "rope", "bias": False,
        "latent": {"query_rank": 10, "key_value_rank": 6, "plain_size": 8, "rotary_size": 4, "value_size": 7},
    },
    "latent with whole queries": {
        "norm": "rmsnorm", "positions": "rope", "bias": False,
        "latent": {"key_value_rank": 6, "plain_size": 8, "rotary_size": 4, "value_size": 12},
    },
    "llama": {
        "kv_heads": 2, "gated_ffn": True, "norm": "rmsnorm", "positions": "rope", "bias": False, "tied": False,
        "activation": "silu",
    },
}  # fmt: skip


def on_meta(config: ModelConfig) -> Transformer:
    with torch.device("meta"):
        return Transformer(config)


def test_the_list_here_is_the_catalog() -> None:
    assert set(PUBLISHED) <= set(model_names())


@pytest.mark.parametrize("name", model_names())
def test_catalogued_models_have_their_published_size(name: str) -> None:
    config = ModelConfig.named(name)
    assert config.parameters == model_entry(name)["parameters"]
    assert config.parameters == PUBLISHED.get(name, config.parameters)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("mixtral-8x7b", 12.9), ("mixtral-8x22b", 39), ("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22),
     ("olmoe-1b-7b", 1.3), ("deepseek-moe-16b", 2.8),
     ("deepseek-v2", 21.4), ("deepseek-v3", 37.6), ("kimi-k2", 32.9), ("qwen2-57b-a14b", 14), ("llama3-8b", 8.03)],
)  # fmt: skip
def test_active_parameters_are_the_published_ones(name: str, billions: float) -> None:
    """As rounded by their authors, each in the source that the catalogue names."""
    config = ModelConfig.named(name)
    assert config.active_parameters == pytest.approx(billions * 1e9, rel=0.025)
    assert config.active_parameters == model_entry(name).get("active_parameters", config.parameters)


@pytest.mark.parametrize("name", model_names())
def test_catalogued_models_build_to_that_size(name: str) -> None:
    config = ModelConfig.named(name)
    parameters = list(on_meta(config).parameters())
    assert sum(p.numel() for p in parameters) == config.parameters
    assert len(parameters) == len(model_parameters(config))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_choice_counts_like_its_module(name: str) -> None:
    config = ModelConfig(**(SMALL | VARIANTS[name]))
    parameters = dict(Transformer(config).named_parameters())
    assert sum(p.numel() for p in parameters.values()) == config.parameters
    assert [parameter.name for parameter in model_parameters(config)] == list(parameters)
    block = list(Transformer(config).blocks[0].parameters())
    assert sum(p.numel() for p in block) == config.block_parameters


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(UserError, match="llama3-8b"):
        build_config({"model": {"name": "lama3-8b"}})
