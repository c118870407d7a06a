"""Serving on CUDA: what a graph replays is what its operations give."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ironlaw.model.config import ModelConfig
from ironlaw.model.transformer import Transformer
from ironlaw.serve.config import ServeConfig
from ironlaw.serve.engine import Engine
from ironlaw.serve.loading import prepare
from ironlaw.serve.request import SamplingParams

pytestmark = pytest.mark.gpu
LLAMA: dict[str, Any] = {
    "layers": 3, "hidden": 128, "heads": 4, "vocab": 512, "context": 128, "kv_heads": 2, "ffn": 256,
    "gated_ffn": True, "activation": "silu", "norm": "rmsnorm", "positions": "rope", "bias": False, "tied": False,
}  # fmt: skip


@pytest.mark.parametrize("form", [{}, {"sliding_window": 20, "attention_cap": 5.0}], ids=str)
def test_graphs_answer_as_their_operations(form: dict[str, Any], device: torch.device) -> None:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**LLAMA | form)).eval()
    draws, found = random.Random(1), []
    prompts = [[draws.randrange(512) for _ in range(1 + draws.randrange(60))] for _ in range(11)]
    for graphs in (False, True):
        config = ServeConfig(weights="fp32", graphs=graphs, blocks=400)
        engine = Engine(prepare(model, config, "it"), config)
        found.append([r.answer for r in engine.generate(prompts, SamplingParams(max_tokens=40, temperature=0))])
        assert bool(engine.runner.graphs and engine.runner.graphs.found) == graphs
    assert found[0] == found[1]
