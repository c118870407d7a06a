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


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_few_bits_without_a_kernel_are_said_to_be_wide(weights: str, device: torch.device) -> None:
    found = {}
    for name in ("bf16", weights):
        torch.manual_seed(0)
        served = prepare(Transformer(ModelConfig(**LLAMA)).eval(), ServeConfig(weights=name), "it")
        tokens = torch.arange(40).remainder(512)[None].to(served.device)
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            found[name] = served.model(tokens).float()
    assert served.weights == "bf16" and f"no kernel multiplies {weights} here" in served.note
    torch.testing.assert_close(found[weights], found["bf16"])


@pytest.mark.parametrize("settings", [{}, {"kv": "int8"}, {"kv": "fp8"}, {"graphs": True}], ids=str)
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_a_batch_answers_as_each_request_alone(weights: str, settings: dict[str, Any], device: torch.device) -> None:
    """In fp32 to the token; in fewer bits sums of another order part some answers."""
    torch.manual_seed(0)
    config = ServeConfig(weights=weights, blocks=400, **settings)
    served = prepare(Transformer(ModelConfig(**LLAMA)).eval(), config, "it")
    draws = random.Random(2)
    prompts = [[draws.randrange(512) for _ in range(1 + draws.randrange(60))] for _ in range(16)]
    greedy = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    together = [r.answer for r in Engine(served, config).generate(prompts, greedy)]
    alone = [Engine(served, config).generate([prompt], greedy)[0].answer for prompt in prompts]
    same = sum(a == b for one, other in zip(together, alone, strict=True) for a, b in zip(one, other, strict=True))
    assert same >= (16 * 30 if weights == "fp32" and "kv" not in settings else 0.5 * 16 * 30)
