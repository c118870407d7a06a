"""Latent attention against its definition, with masks, padding and scales; YaRN; experts chosen within groups."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ironlaw.model.config import ModelConfig
from ironlaw.model.dimensions import MoEConfig
from ironlaw.model.latent import LatentAttention
from ironlaw.model.masks import additive, block_mask, dense_mask
from ironlaw.model.moe import MixtureOfExperts, Router
from ironlaw.model.rotary import rotary_tables, rotate
from ironlaw.model.transformer import Transformer

YARN = {
    "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_context": 16.0, "mscale": 0.8, "mscale_all_dim": 1.0,
}  # fmt: skip
MODEL: dict[str, Any] = {
    "layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "gated_ffn": True, "activation": "silu", "norm": "rmsnorm",
    "positions": "rope", "bias": False, "tied": False, "context": 64, "vocab": 70, "rope_scaling": YARN,
    "latent": {"query_rank": 20, "key_value_rank": 12, "plain_size": 8, "rotary_size": 6, "value_size": 10},
}  # fmt: skip


@pytest.fixture
def attention() -> LatentAttention:
    torch.manual_seed(0)
    return LatentAttention(ModelConfig(**MODEL))


def tables(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = rotary_tables(ModelConfig(**MODEL))
    return cos[:tokens], sin[:tokens]


def test_it_is_the_papers_equations(attention: LatentAttention) -> None:
    """Equations 9 to 19 of arXiv 2405.04434 head by head, scores from narrow vectors without ever making keys."""
    x, (cos, sin) = torch.randn(1, 9, 32), tables(9)
    narrow, shared = attention.latent_down(x).split((12, 6), dim=-1)
    narrow = attention.latent_norm(narrow)[0]  # (S, R)
    shared = rotate(shared.unsqueeze(2), cos, sin)[0, :, 0]
    queries = attention.query_up(attention.query_norm(attention.query_down(x)))[0].view(9, 4, 14)
    up = attention.latent_up.weight.view(4, 18, 12)
    # 0.1 x ln(4) + 1, squared, over the root of 14: mscale_all_dim is 1.
    scale = (0.1 * math.log(4) + 1) ** 2 / math.sqrt(14)
    mixed = []
    for head in range(4):
        plain, turned = queries[:, head].split((8, 6), dim=-1)
        turned = rotate(turned[None, :, None], cos, sin)[0, :, 0]
        scores = (plain @ up[head, :8] @ narrow.T + turned @ shared.T) * scale
        weights = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf).softmax(-1)
        mixed.append(weights @ narrow @ up[head, 8:].T)
    wanted = torch.cat(mixed, dim=-1) @ attention.out.weight.T
    torch.testing.assert_close(attention(x, (cos, sin), None)[0], wanted, rtol=1e-4, atol=1e-6)


def test_zeros_that_widen_values_change_nothing(attention: LatentAttention, monkeypatch: pytest.MonkeyPatch) -> None:
    x, gradients = torch.randn(2, 16, 32), []
    for pads in (True, False):
        monkeypatch.setattr(attention, "pads", lambda *_, pads=pads: pads)
        attention.zero_grad()
        result = attention(x, tables(16), None)
        result.square().sum().backward()
        gradients.append([result, *(p.grad for p in attention.parameters())])
    for padded, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(padded, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_the_block_mask_of_cuda_gives_what_the_dense_one_does(attention: LatentAttention) -> None:
    x = torch.randn(2, 24, 32)
    with torch.no_grad():
        dense = attention(x, tables(24), additive(dense_mask(24, x.device, 7, None)))
        blocks = attention(x, tables(24), block_mask(24, x.device, 7, None))
    torch.testing.assert_close(dense, blocks, rtol=1e-5, atol=1e-7)


def test_attention_stays_inside_documents() -> None:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**MODEL)).eval()
    tokens, documents = torch.randint(0, 70, (1, 30)), torch.zeros(1, 30, dtype=torch.int32)
    documents[:, 12:] = 1
    with torch.no_grad():
        together, alone = model(tokens, documents=documents)[:, 12:], model(tokens[:, 12:])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 2}, "its own sizes"),
        ({"head_size": 16}, "its own sizes"),
        ({"positions": "learned"}, "goes with positions"),
        ({"norm": "layernorm"}, "goes with positions"),
        ({"bias": True}, "no biases"),
        ({"qk_norm": True}, "no biases and norms of its own"),
        ({"latent": MODEL["latent"] | {"rotary_size": 5}}, "even size"),
        ({"latent": MODEL["latent"] | {"value_size": 15}}, "more than plain_size"),
    ],
)
def test_what_does_not_go_together_is_said(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**(MODEL | change))


@pytest.mark.parametrize(("score", "best"), [("softmax", 1), ("sigmoid", 2)])
def test_experts_come_from_the_best_groups(score: str, best: int) -> None:
    torch.manual_seed(0)
    moe = MoEConfig(experts=12, experts_per_token=3, groups=4, groups_per_token=2, score=score, balance="bias")
    config = ModelConfig(**MODEL | {"moe": moe})
    router = Router(config)
    torch.nn.init.normal_(router.weight)
    assert router.bias is not None
    router.bias.normal_(std=0.1)
    x = torch.randn(50, 32)
    weights, chosen, _, _ = router(x)
    logits = x @ router.weight.T
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    for token in range(50):
        seen = scores[token] + router.bias
        groups = [seen[3 * g : 3 * g + 3].sort(descending=True).values[:best].sum().item() for g in range(4)]
        allowed = sorted(range(4), key=lambda g: -groups[g])[:2]
        experts = sorted((3 * g + i for g in allowed for i in range(3)), key=lambda e: -seen[e].item())[:3]
        assert set(chosen[token].tolist()) == set(experts)
        share = scores[token, chosen[token]]
        torch.testing.assert_close(weights[token], share / share.sum())
    layer = MixtureOfExperts(config)
    assert layer(x[None]).shape == (1, 50, 32)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"groups": 5}, "not divisible by groups"),
        ({"groups": 4, "groups_per_token": 5}, "groups_per_token = 5 of 4"),
        ({"groups": 6, "groups_per_token": 1}, "cannot give experts_per_token"),
    ],
)
def test_groups_that_cannot_be_are_said(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEConfig(experts=12, experts_per_token=3, **table)
