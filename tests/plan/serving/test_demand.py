"""What serving asks of hardware is what the program of a pass does, operation by operation."""

from __future__ import annotations

import pytest

from ironlaw.ledger import Kind
from ironlaw.model.config import ModelConfig
from ironlaw.model.parameters import model_parameters
from ironlaw.plan.serving.demand import demand_of
from ironlaw.workload.serving import Chunk, forward_pass

DENSE = {
    "gpt2": ModelConfig.named("gpt2"),
    "grouped": ModelConfig.named("llama3-8b"),
    "tied": ModelConfig(layers=3, hidden=64, heads=4, kv_heads=2, vocab=100, context=256, tied=True),
    "window": ModelConfig(layers=4, hidden=64, heads=4, vocab=100, context=512, sliding_window=32, positions="rope"),
}


@pytest.mark.parametrize("name", DENSE)
def test_flops_and_cache_are_those_of_the_program(name: str) -> None:
    model = DENSE[name]
    demand = demand_of(model)
    chunks = [Chunk(1, 200), Chunk(1, 17)]
    program = forward_pass(model, chunks)
    operations = [op for layer in program.stages[0].layers for op in layer.forward]
    products = sum(op.flops or 0 for op in operations if op.kind is Kind.MATMUL)
    matrices = sum(p.elements for p in model_parameters(model) if p.name.endswith("weight") and len(p.shape) == 2)
    matrices -= 0 if model.tied else model.vocab * model.hidden  # the embedding is looked up
    matrices -= model.context * model.hidden if model.positions == "learned" else 0
    assert 2 * len(chunks) * matrices == products
    vectors = sum(p.elements for p in model_parameters(model) if len(p.shape) == 1)
    assert demand.dense == matrices + vectors
    attended = sum(op.flops or 0 for op in operations if op.attention)
    lengths = [c.cached + 1 for c in chunks]
    assert demand.pair_flops * sum(demand.cached_tokens(n) for n in lengths) == pytest.approx(attended)
    windows = [model.sliding_window if model.is_windowed(layer) else None for layer in range(model.layers)]
    held = sum(min(window or n, n) for window in windows for n in lengths)
    assert demand.cached * sum(demand.cached_tokens(n) for n in lengths) == pytest.approx(model.cached_size * held)


def test_parameters_are_the_models_own() -> None:
    for name in ("gpt2", "llama3-70b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-20b"):
        model = ModelConfig.named(name)
        assert demand_of(model).parameters == model.parameters


def test_experts_are_read_as_far_as_tokens_choose_them() -> None:
    demand = demand_of(ModelConfig.named("mixtral-8x7b"))
    assert demand.touched(1) == pytest.approx(demand.experts * 2 / 8)
    assert demand.touched(2) == pytest.approx(demand.experts * (1 - 0.75**2))
    assert demand.touched(64) == pytest.approx(demand.experts, rel=1e-6)


def test_latent_attention_keeps_the_narrow_vector() -> None:
    model = ModelConfig.named("deepseek-v3")
    assert demand_of(model).cached == model.layers * (512 + 64)
