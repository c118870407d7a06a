"""Columns of candidates: counts equal the exact ones of one device."""

import pytest

from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster.candidates import candidates_of
from ironlaw.workload.blocks import Shape
from ironlaw.workload.layout import Layout
from ironlaw.workload.operations import total_flops
from ironlaw.workload.program import training_operations

NAMES = ["gpt2", "gpt2-xl", "gpt3-175b", "llama3-8b", "llama3-70b", "mistral-7b"]


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_of_the_config(name):
    model = ModelConfig.named(name)
    candidates = candidates_of(model, [Layout()], sequence=model.context, global_batch=1)
    assert candidates.parameters[0] == model.parameters
    assert candidates.block_parameters == model.block_parameters


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b"])
def test_flops_are_those_of_the_operation_list(name):
    model, sequence, batch = ModelConfig.named(name), 1024, 6
    exact = total_flops(training_operations(Shape(model, batch, sequence)))
    candidates = candidates_of(model, [Layout(dp=2, micro_batch=3)], sequence=sequence, global_batch=batch)
    assert candidates.model_flops()[0] == exact


def test_hardware_flops_are_equation_3_of_the_megatron_paper():
    """96 B s l h^2 (1 + s / 6h + V / 16 l h): full recomputation, scores computed whole (arXiv 2104.04473)."""
    model = ModelConfig.named("gpt3-175b")
    s, batch, l, h, v = 2048, 1536, model.layers, model.hidden, model.vocab
    candidates = candidates_of(model, [Layout(recompute="full")], sequence=s, global_batch=batch, flash=False)
    expected = 96 * batch * s * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h))
    assert candidates.hardware_flops()[0] == pytest.approx(expected, rel=1e-9)


def test_accumulation_is_what_is_left_of_the_batch():
    candidates = candidates_of(ModelConfig.named("gpt2"), [Layout(dp=4, micro_batch=2)], sequence=128, global_batch=64)
    assert candidates.accumulation[0] == 8
