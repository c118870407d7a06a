"""Configs of published models of many families: sizes as published, and the arithmetic that sets a family apart."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for `huggingface_cases`
from huggingface_cases import OWN_NAMES, PUBLISHED, SMALL, TINY
from safetensors.torch import load_file

from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.configs import family_of, from_fields, read_config, to_fields
from ironlaw.model.huggingface.verify import verify
from ironlaw.model.huggingface.weights import check_weights, load_weights, write_model
from ironlaw.model.transformer import Transformer

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported: nothing here needs the network


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
        ("opt-6.7b", {"word_embed_proj_dim": 512}, "word_embed_proj_dim = 512"),
        ("command-r", {"use_qk_norm": True}, "use_qk_norm"),
        ("mpt-7b", {"attn_config": {"alibi": False}}, "attn_config.alibi = False"),
        ("phi-4", {"rope_scaling": {"type": "dynamic"}}, "dynamic"),
        ("smollm3-3b", {"no_rope_layers": [0, 1] * 18}, "no_rope_layers"),
        ("phi-2", {"qk_layernorm": True}, "qk_layernorm"),
        ("stablelm-3b-4e1t", {"partial_rotary_factor": 0.0}, "leaves no position"),
        ("gemma-3-1b", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ("gemma-3-1b", {"rope_parameters": {"rope_type": "linear", "factor": 8.0}}, "for full_attention and one for"),
        ("gemma-3-1b", {"rope_scaling": {"type": "linear", "factor": 8.0}}, "write rope_type"),
        ("glm-4-9b", {"partial_rotary_factor": None}, "partial_rotary_factor = None"),
        ("olmo-2-7b", {"model_type": "olmo3", "rope_theta": 20_000.0}, "in two ways"),
        (
            "smollm3-3b",
            {"layer_types": ["sliding_attention"] * 36, "sliding_window": 8},
            "sliding_attention is not supp",
        ),
        ("olmo-2-7b", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "write one table"),
        ("olmo-2-7b", {"is_causal": False}, "is_causal"),
        ("command-r7b", {"head_dim": 64}, "head_dim = 64"),
        ("bloom-7b1", {"n_head": 16}, "n_head = 16"),
        ("mpt-7b", {"num_hidden_layers": 16}, "num_hidden_layers = 16"),
        ("opt-6.7b", {"num_attention_heads": 32, "head_dim": 64}, "head_dim"),
    ],
)
def test_what_no_switch_says_is_refused(name: str, change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        from_fields(PUBLISHED[name][0] | change)
    assert "\n" not in str(error.value)


def test_of_two_tables_of_positions_the_older_is_taken_whole() -> None:
    """As `transformers` 5 reads a file that has both."""
    both = {"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}
    both["rope_parameters"]["rope_theta"] = 1000.0  # type: ignore[assignment]
    found = from_fields(PUBLISHED["olmo-2-7b"][0] | both)
    assert (found.rope_scaling, found.rope_theta) == (None, 500_000.0)


def test_a_family_with_windows_is_written_with_one_where_no_layer_has_it() -> None:
    """Version 4 of `transformers` builds the mask of a window all the same."""
    fields = PUBLISHED["gemma-2-9b"][0]
    plain = from_fields(fields | {"layer_types": ["full_attention"] * 42})
    written = to_fields(plain)
    assert written["sliding_window"] == 4096 and from_fields(written).sliding_window is None


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("name", TINY)
def test_what_transformers_saves_computes_the_same_here(name: str, tmp_path: Path) -> None:
    """From their own random initialisation, written by their own code, at a length that the windows do not reach."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = name.split()[0]
    fields = AutoConfig.for_model(kind, **(TINY[name] if kind in OWN_NAMES else SMALL | TINY[name]))
    torch.manual_seed(2)
    theirs = AutoModelForCausalLM.from_config(fields, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    skipped = 2 * config.hidden if kind == "opt" else 0
    trained = sum(parameter.numel() for parameter in theirs.parameters() if parameter.requires_grad)
    assert config.parameters == trained - skipped
    check_weights(tmp_path, config)
    ours = Transformer(config).eval()
    load_weights(tmp_path, ours, config)
    tokens = torch.randint(1, config.vocab, (2, 40))
    with torch.no_grad():
        for length in (20, 40):
            some = tokens[:, :length]
            torch.testing.assert_close(ours(some), theirs(some).logits, rtol=1e-4, atol=1e-4)
    # And back: what we write, read by their code.
    write_model(tmp_path / "again", config, ours.state_dict())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", attn_implementation="eager").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("name", ["gemma2", "nemotron"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_16_bits_are_written_as_they_were_read(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Those of norms that multiply by one and their weight, too: 16 bits hold less of a weight in such a sum."""
    from transformers import AutoConfig, AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SMALL | TINY[name]))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.to(dtype).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    ours = Transformer(config).eval()
    load_weights(tmp_path, ours, config)
    write_model(tmp_path / "again", config, ours.state_dict(), dtype)
    again = load_file(tmp_path / "again" / "model.safetensors")
    for at, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(again[at], tensor), at
    assert not verify(tmp_path / "again", ours, dtype).differs


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_is_written_as_its_own_family(name: str) -> None:
    kind = PUBLISHED[name][0]["model_type"]
    same = {"phi3": ("phi3", "llama", "mistral"), "opt": ("gpt2",)}.get(kind, (kind,))  # other forms of the same
    assert family_of(model(name)).kind in same
    assert from_fields(to_fields(model(name))).parameters == PUBLISHED[name][1]


def test_what_no_family_computes_is_refused() -> None:
    mixed = model("gemma-2-9b").model_copy(update={"positions": "alibi"})
    with pytest.raises(UserError, match="is nearest, and differs in"):
        family_of(mixed)
