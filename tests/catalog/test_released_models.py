"""Models that are served: every name of published measurements is known, every shape has its published size."""

import tomllib
from pathlib import Path

import pytest
import torch

from ironlaw.catalog.models import alias_of_model, is_model, model_entry, model_names, released_names
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.model.transformer import Transformer
from ironlaw.plan.request import resolve

MEASURED = tomllib.loads(Path(__file__).with_name("measured_names.toml").read_text(encoding="utf-8"))["models"].split()


def test_every_name_of_published_measurements_is_known():
    assert len(MEASURED) == 64 and [name for name in MEASURED if not is_model(name)] == []


@pytest.mark.parametrize("name", released_names())
def test_released_models_have_their_published_size(name):
    entry = model_entry(name)
    assert ModelConfig.named(name).parameters == entry["parameters"] and entry["source"]
    assert name not in model_names()


@pytest.mark.parametrize("name", ["gemma-2b", "gpt-j-6b", "bloom-176b", "qwen2-0.5b", "qwen3-0.6b", "glm-4.5-air"])
def test_one_of_each_family_builds_to_that_size(name):
    with torch.device("meta"):
        parameters = list(Transformer(ModelConfig.named(name)).parameters())
    assert sum(p.numel() for p in parameters) == model_entry(name)["parameters"]


def test_another_name_says_what_it_differs_in():
    assert alias_of_model("deepseek-r1") == ("deepseek-v3", "the shape of V3") and alias_of_model("llama3-8b") is None
    assert resolve("llama-3.1-8b").model.parameters == ModelConfig.named("llama3-8b").parameters
    with pytest.raises(UserError, match="qwen2-7b"):
        resolve("qwen2-7bb")
