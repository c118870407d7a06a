"""Scores that change between attention's two products: by hand on a CPU, by FlexAttention's rules on CUDA."""

from __future__ import annotations

import math

import pytest
import torch

from ironlaw.model.config import ModelConfig
from ironlaw.model.masks import additive, alibi_bias, alibi_slopes, attend, block_mask, dense_mask, flexible, score_rule

SIZES = {"layers": 1, "hidden": 32, "heads": 4, "vocab": 50, "context": 24, "kv_heads": 2}
MODELS = {
    "cap": {"attention_cap": 0.7, "positions": "rope"},
    "sinks": {"attention_sinks": True, "positions": "rope"},
    "cap, sinks and a scale": {"attention_cap": 2.0, "attention_sinks": True, "attention_scale": 0.9},
    "alibi": {"positions": "alibi"},
}


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", MODELS)
def test_both_ways_give_the_same(name: str, window: int | None) -> None:
    config = ModelConfig(**SIZES | MODELS[name])
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 24, 8) for heads in (4, 2, 2))
    sinks = torch.randn(4) if config.attention_sinks else None
    device = torch.device("cpu")
    mask = additive(dense_mask(24, device, window, None))
    if config.positions == "alibi":
        mask = mask + alibi_bias(4, torch.arange(24), 24, mask.dtype)
    by_hand = attend(query, key, value, mask, config, sinks)
    blocks = block_mask(24, device, window, None)
    flex = flexible(query, key, value, blocks, config.score_scale, score_rule(config, device), sinks)
    torch.testing.assert_close(by_hand, flex, rtol=1e-4, atol=1e-5)


def test_slopes_are_those_of_the_paper() -> None:
    assert alibi_slopes(8, torch.device("cpu")).tolist() == [2.0**-n for n in range(1, 9)]
    twelve = alibi_slopes(12, torch.device("cpu")).tolist()  # eight, and every other one of sixteen
    assert twelve[8:] == pytest.approx([2 ** (-n / 2) for n in (1, 3, 5, 7)])


def test_a_sink_takes_its_share_and_gives_nothing() -> None:
    config = ModelConfig(**SIZES | {"attention_sinks": True, "kv_heads": 4})
    query, key, value = torch.zeros(1, 4, 3, 8), torch.zeros(1, 4, 3, 8), torch.ones(1, 4, 3, 8)
    mask = additive(dense_mask(3, torch.device("cpu"), None, None))
    mixed = attend(query, key, value, mask, config, torch.full((4,), math.log(2.0)))
    # The n-th token sees n keys of weight 1 beside a sink of weight 2.
    assert mixed[0, 0, :, 0].tolist() == pytest.approx([1 / 3, 2 / 4, 3 / 5])
