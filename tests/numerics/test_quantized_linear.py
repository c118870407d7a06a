"""Products on codes against the same codes dequantised."""

from __future__ import annotations

import pytest
import torch

from ironlaw.kernels.product import INT4, multiplies
from ironlaw.model.config import ModelConfig
from ironlaw.model.transformer import Transformer
from ironlaw.numerics.quantized import quantize
from ironlaw.numerics.quantized_linear import ROWS_WIDENED, Int4Linear, kernel_of, quantize_layers

from ..conftest import TINY_LLAMA

CPU = torch.device("cpu")
KERNEL_OF_INT4 = "own int4" if multiplies(INT4, 64) else "PyTorch int4"


@pytest.mark.parametrize(("format", "error"), [("int8", 0.008), ("int4", 0.008)])
@pytest.mark.parametrize(("outputs", "inputs"), [(128, 96), (48, 64)])
def test_products_on_codes_are_those_on_the_dequantised_matrix(
    format: str, error: float, outputs: int, inputs: int
) -> None:
    torch.manual_seed(0)
    held = quantize(torch.randn(outputs, inputs), format)
    kernel = kernel_of(held, CPU)
    assert kernel is not None
    layer = kernel.layer(held, torch.ones(outputs))
    error *= 2 if getattr(layer, "halved", False) else 1  # inputs in 7 bits
    assert layer.bytes <= 1.2 * held.bytes + 16 * (inputs + outputs)  # of whole tiles
    x = torch.randn(2, ROWS_WIDENED, inputs) * torch.logspace(-3, 3, ROWS_WIDENED)[:, None]  # tokens of every size
    wanted = x @ held.dequantize().t()
    difference = (layer(x) - 1 - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    small = wanted.norm(dim=-1) < 10  # where the bias of 1 leaves a float fewer bits
    assert difference[~small].max() < 2 * error
    # A token's product does not depend on the tokens beside it.
    alone = torch.stack([layer(row[None])[0] for row in x[0, :8]])
    assert torch.equal(alone, layer(x[0, :8]))


def test_a_layout_that_is_not_known_keeps_the_kernel() -> None:
    torch.manual_seed(0)
    held = quantize(torch.randn(128, 64), "int4")
    layer = Int4Linear(held, None)
    x = torch.randn(ROWS_WIDENED, 64)
    widened, layer.tiled = layer(x), False
    assert torch.allclose(layer(x), widened, rtol=0.02, atol=0.1)


def test_layers_without_a_kernel_stay_and_are_counted() -> None:
    model = Transformer(ModelConfig(**TINY_LLAMA | {"hidden": 64, "ffn": 96, "vocab": 320}))
    held = {"blocks.0.ffn.up.weight": quantize(model.blocks[0].ffn.up.weight, "nf4")}
    assert quantize_layers(model, held) == {"": 1}
    linears = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    found = quantize_layers(model, {}, "int4")
    assert found[KERNEL_OF_INT4] == linears - 1 and sum(found.values()) == linears  # the output layer is in int8
    assert not any(isinstance(module, torch.nn.Linear) for module in model.modules())
