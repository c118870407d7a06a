"""oneDNN's products give PyTorch's numbers, forward and backward, in every case that a model meets."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ironlaw.model.config import ModelConfig
from ironlaw.model.linear import Linear, linear, onednn_available, onednn_weight_gradient, use_onednn
from ironlaw.model.transformer import Transformer

pytestmark = pytest.mark.skipif(not onednn_available(), reason="this PyTorch is built without oneDNN")


@pytest.mark.parametrize("shape", [(5, 7, 3), (2, 8, 16), (64, 24, 96)])
@pytest.mark.parametrize("leading", [(), (3,)])
@pytest.mark.parametrize("bias", [False, True])
def test_same_output_and_gradients_as_pytorch(shape: tuple[int, int, int], leading: tuple[int, ...], bias: bool):
    rows, outputs, inputs = shape
    torch.manual_seed(0)
    x = torch.randn(*leading, rows, inputs, dtype=torch.float64)
    weight, shift = torch.randn(outputs, inputs, dtype=torch.float64), torch.randn(outputs, dtype=torch.float64)
    seed = torch.randn(*leading, rows, outputs, dtype=torch.float64)

    def run(function, dtype):
        tensors = [t.to(dtype).requires_grad_() for t in (x, weight, shift)[: 2 + bias]]
        output = function(*tensors)
        output.backward(seed.to(dtype))
        return [output.detach(), *(t.grad for t in tensors)]

    for got, exact in zip(run(linear, torch.float32), run(F.linear, torch.float64), strict=True):
        assert got.dtype == torch.float32 and got.is_contiguous()
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-4)


def test_weight_gradient_in_both_orientations():
    torch.manual_seed(0)
    for outputs, inputs in ((4, 32), (32, 4)):
        gradient, x = torch.randn(50, outputs), torch.randn(50, inputs)
        torch.testing.assert_close(onednn_weight_gradient(gradient, x), gradient.t() @ x, rtol=1e-5, atol=1e-4)


def test_only_what_is_asked_for_is_computed():
    frozen = Linear(4, 4)
    frozen.weight.requires_grad_(False)
    use_onednn(frozen)
    frozen(torch.randn(2, 4)).sum().backward()
    assert frozen.weight.grad is None and frozen.bias.grad is not None


def test_autocast_keeps_its_own_products():
    layer = Linear(8, 8)
    use_onednn(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(2, 8)).dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_trains_to_the_same_gradients(tied: bool):
    config = ModelConfig(layers=2, hidden=32, heads=4, vocab=64, context=16, tied=tied)
    torch.manual_seed(0)
    model = Transformer(config)
    tokens = torch.randint(0, 64, (3, 16))
    gradients = {}
    for wanted in (False, True):
        use_onednn(model, wanted)
        model.zero_grad()
        model(tokens, tokens).backward()
        gradients[wanted] = {name: p.grad.clone() for name, p in model.named_parameters()}
    for name, gradient in gradients[False].items():
        torch.testing.assert_close(gradients[True][name], gradient, rtol=1e-4, atol=1e-6)
