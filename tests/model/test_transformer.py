"""What the modules compute, against straightforward implementations of the same thing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.model.transformer import Transformer, rotary_tables, rotate

GPT: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 60, "context": 24}
LLAMA: dict[str, Any] = GPT | {
    "kv_heads": 2, "ffn": 48, "gated_ffn": True, "activation": "silu", "norm": "rmsnorm", "positions": "rope",
    "bias": False, "tied": False,
}  # fmt: skip
FAMILIES = {
    "gpt": GPT,
    "llama": LLAMA,
    "qwen": LLAMA | {"qk_norm": True, "head_size": 12},
    "windowed": LLAMA | {"sliding_window": 5},
}


def build(**choices: Any) -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelConfig(**choices))


def tokens_of(model: Transformer, batch: int = 3, sequence: int = 20) -> torch.Tensor:
    return torch.randint(0, model.config.vocab, (batch, sequence), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_have_the_shape_and_gradients_reach_every_parameter(family: str) -> None:
    model = build(**FAMILIES[family])
    tokens = tokens_of(model)
    assert model(tokens).shape == (3, 20, 60)
    model(tokens, tokens.roll(-1, 1)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_starts_near_that_of_a_uniform_guess(family: str) -> None:
    model = build(**FAMILIES[family])
    targets = torch.randint(0, 60, (3, 20), generator=torch.Generator().manual_seed(2))
    assert model(tokens_of(model), targets).item() == pytest.approx(math.log(60), abs=0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_later_token_does_not_change_earlier_logits(family: str) -> None:
    model = build(**FAMILIES[family]).eval()
    tokens = tokens_of(model)
    changed = tokens.clone()
    changed[:, 13] = (changed[:, 13] + 7) % 60
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :13], after[:, :13])
    assert (before[:, 13:] != after[:, 13:]).any()


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_more_tokens_than_positions_are_refused(family: str) -> None:
    """A table of one row would otherwise stand for every position."""
    model = build(**FAMILIES[family] | {"context": 1})
    with pytest.raises(UserError, match=r"20 tokens are more than model\.context = 1"):
        model(tokens_of(model))


def test_a_window_hides_what_is_further_back() -> None:
    # One layer, so that nothing reaches past the window through another token.
    model = build(**(FAMILIES["windowed"] | {"layers": 1})).eval()
    tokens = tokens_of(model)
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 7) % 60
    same = (model(tokens) == model(changed)).all(dim=-1).all(dim=0)
    assert [not bool(s) for s in same] == [4 <= position < 4 + 5 for position in range(20)]


def test_the_loss_is_the_mean_cross_entropy_of_the_logits() -> None:
    model = build(**GPT)
    tokens = tokens_of(model)
    targets = tokens.roll(-1, 1)
    by_hand = -F.log_softmax(model(tokens), -1).gather(-1, targets[..., None]).mean()
    assert model(tokens, targets).item() == pytest.approx(by_hand.item(), rel=1e-6)


def test_tied_weights_are_one_tensor_and_untied_are_two() -> None:
    tied, untied = build(**GPT), build(**(GPT | {"tied": False}))
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight
    assert not torch.equal(untied.head.weight, untied.embedding.weight)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_rotary_is_multiplication_by_unit_complex_numbers(theta: float) -> None:
    config = ModelConfig(**(LLAMA | {"rope_theta": theta}))
    cos, sin = rotary_tables(config)
    x = torch.randn(2, 24, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.empty_like(x)
    for position in range(24):
        for pair in range(4):
            angle = position * theta ** (-2 * pair / 8)
            turned = torch.complex(x[:, position, :, pair], x[:, position, :, pair + 4]) * complex(
                math.cos(angle), math.sin(angle)
            )
            expected[:, position, :, pair], expected[:, position, :, pair + 4] = turned.real, turned.imag
    torch.testing.assert_close(rotate(x, cos.double(), sin.double()), expected, rtol=1e-6, atol=1e-6)


def test_rotary_makes_scores_depend_on_distance_only() -> None:
    cos, sin = rotary_tables(ModelConfig(**LLAMA))
    query, key = torch.randn(1, 1, 1, 8).expand(1, 24, 1, 8), torch.randn(1, 1, 1, 8).expand(1, 24, 1, 8)
    scores = rotate(query, cos, sin)[0, :, 0] @ rotate(key, cos, sin)[0, :, 0].T
    for distance in (1, 7):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)


def test_llama_3_1_scaling_keeps_high_frequencies_and_stretches_low_ones() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 8192.0}
    choices = LLAMA | {"head_size": 128, "rope_theta": 500_000.0, "context": 2}
    plain = torch.atan2(*reversed([t[1].double() for t in rotary_tables(ModelConfig(**choices))]))
    scaled = torch.atan2(
        *reversed([t[1].double() for t in rotary_tables(ModelConfig(**choices, rope_scaling=scaling))])
    )
    for i in range(64):  # the rule as Meta's code writes it
        wavelength = 2 * math.pi / (500_000.0 ** (-i / 64))
        if wavelength < 8192 / 4:
            expected = 1.0
        elif wavelength > 8192 / 1:
            expected = 1 / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) / 8 + smooth
        assert float(scaled[i] / plain[i]) == pytest.approx(expected, rel=1e-4), i


def test_grouped_query_equals_repeated_heads() -> None:
    grouped = build(**(LLAMA | {"layers": 1}))
    full = build(**(LLAMA | {"layers": 1, "kv_heads": 4}))
    state = grouped.state_dict()
    query, key, value = state["blocks.0.attention.qkv.weight"].split((32, 16, 16))

    def repeat(weight: torch.Tensor) -> torch.Tensor:
        return weight.view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32)

    state["blocks.0.attention.qkv.weight"] = torch.cat((query, repeat(key), repeat(value)))
    full.load_state_dict(state)
    tokens = tokens_of(grouped)
    torch.testing.assert_close(grouped(tokens), full(tokens), rtol=1e-5, atol=1e-6)


def test_attention_equals_softmax_of_scores_written_out() -> None:
    model = build(**(GPT | {"layers": 1}))
    attention = model.blocks[0].attention
    x = torch.randn(2, 10, 32)
    query, key, value = (t.view(2, 10, 4, 8).transpose(1, 2) for t in attention.qkv(x).split(32, dim=-1))
    scores = query @ key.transpose(-1, -2) / math.sqrt(8)
    scores = scores.masked_fill(torch.ones(10, 10).triu(1).bool(), float("-inf"))
    mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(2, 10, 32)
    torch.testing.assert_close(attention(x, None, None), attention.out(mixed), rtol=1e-5, atol=1e-6)


def test_residual_projections_start_smaller() -> None:
    model = build(**(GPT | {"layers": 8, "hidden": 64}))
    block = model.blocks[0]
    assert float(block.ffn.up.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert float(block.ffn.down.weight.std()) == pytest.approx(0.02 / 4, rel=0.1)


def test_the_factor_of_an_embedding_is_as_precise_as_the_embedding() -> None:
    """Gemma's, in transformers and as it was trained: the root of 3,072 is 55.5 in bf16."""
    config = ModelConfig(layers=1, hidden=8, heads=1, vocab=10, context=8, embedding_scale=3072**0.5)
    model, tokens = Transformer(config).bfloat16(), torch.arange(8)[None]
    assert model.embedding is not None and model.positions is not None
    assert torch.equal(model.embed(tokens, 8), model.embedding(tokens) * 55.5 + model.positions.weight)
