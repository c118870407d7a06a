"""Configs of published models of many families: sizes as published, and the arithmetic that sets a family apart."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `huggingface_cases`
from huggingface_cases import PUBLISHED

from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface import from_fields


def model(name: str) -> ModelConfig:
    return from_fields(PUBLISHED[name][0], where=f"{name}/config.json")


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name: str) -> None:
    assert model(name).parameters == PUBLISHED[name][1]


def test_windows_stand_where_the_family_has_them() -> None:
    assert [model("gemma-2-9b").is_windowed(layer) for layer in range(4)] == [True, False, True, False]
    assert [layer for layer in range(26) if not model("gemma-3-1b").is_windowed(layer)] == [5, 11, 17, 23]
    assert all(model("starcoder2-7b").is_windowed(layer) for layer in range(32))
    command = model("command-r7b")
    assert [command.is_rotated(layer) for layer in range(8)] == [True, True, True, False] * 2
    assert [command.is_windowed(layer) for layer in range(8)] == [True, True, True, False] * 2


def test_layer_types_say_what_a_pattern_says() -> None:
    fields, _ = PUBLISHED["gemma-3-1b"]
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    named = {k: v for k, v in fields.items() if k != "sliding_window_pattern"} | {"layer_types": (kinds * 5)[:26]}
    assert from_fields(named) == from_fields(fields)


def test_factors_and_parts_of_heads() -> None:
    gemma = model("gemma-2-27b")
    assert gemma.attention_scale == pytest.approx(144**-0.5) and gemma.embedding_scale == pytest.approx(4608**0.5)
    granite = model("granite-3.0-8b")
    assert (granite.logit_scale, granite.residual_scale, granite.attention_scale) == (1 / 16, 0.22, 0.0078125)
    assert [model(name).size_of_rotary for name in ("phi-2", "pythia-6.9b", "gpt-j-6b", "phi-4")] == [32, 32, 64, 128]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("falcon-7b", {"alibi": True}, "alibi = True"),
        ("opt-6.7b", {"word_embed_proj_dim": 512}, "OPT-350m"),
        ("olmo-7b", {"clip_qkv": 8.0}, "clip_qkv"),
        ("command-r", {"use_qk_norm": True}, "use_qk_norm"),
        ("mpt-7b", {"attn_config": {"alibi": False}}, "without alibi"),
        ("phi-4", {"rope_scaling": {"type": "longrope"}}, "longrope"),
        ("smollm3-3b", {"no_rope_layers": [0, 1] * 18}, "no_rope_layers"),
        ("phi-2", {"qk_layernorm": True}, "qk_layernorm"),
    ],
)
def test_what_no_switch_says_is_refused(name: str, change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        from_fields(PUBLISHED[name][0] | change)
    assert "\n" not in str(error.value)
