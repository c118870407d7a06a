"""Products on codes against the same codes dequantised."""

from __future__ import annotations

import pytest
import torch

from ironlaw.kernels.product import INT4, multiplies
from ironlaw.model.config import ModelConfig
from ironlaw.model.packed import pack
from ironlaw.model.transformer import Transformer
from ironlaw.numerics.quantized import quantize
from ironlaw.numerics.quantized_linear import quantize_layers, quantized_layer

from ..conftest import TINY_LLAMA

ROWS = 32
KERNEL_OF_INT4 = "own int4" if multiplies(INT4, 64) else "PyTorch int4"


@pytest.mark.parametrize(("format", "error"), [("int8", 0.008), ("int4", 0.008)])
@pytest.mark.parametrize(("outputs", "inputs"), [(128, 96), (48, 64)])
@pytest.mark.parametrize("compiled", [True, False])
def test_products_on_codes_are_those_on_the_dequantised_matrix(
    format: str, error: float, outputs: int, inputs: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr("ironlaw.numerics.quantized_linear.multiplies", lambda dtype, inputs: False)
    torch.manual_seed(0)
    held = quantize(torch.randn(outputs, inputs), format)
    made = quantized_layer(held, torch.ones(outputs))
    assert made is not None and (compiled or made[0] == f"PyTorch {format}")
    layer = made[1]
    assert layer.bytes <= 1.2 * held.bytes + 16 * (inputs + outputs)  # of whole tiles
    x = torch.randn(2, ROWS, inputs) * torch.logspace(-3, 3, ROWS)[:, None]  # tokens of every size
    wanted = x @ held.dequantize().t()
    difference = (layer(x) - 1 - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    small = wanted.norm(dim=-1) < 10  # where the bias of 1 leaves a float fewer bits
    assert difference[~small].max() < 2 * error
    # A token's product does not depend on the tokens beside it.
    alone = torch.stack([layer(row[None])[0] for row in x[0, :8]])
    assert torch.equal(alone, layer(x[0, :8]))


def test_layers_without_a_kernel_stay_and_are_counted() -> None:
    model = Transformer(ModelConfig(**TINY_LLAMA | {"hidden": 64, "ffn": 96, "vocab": 320}))
    held = {"blocks.0.ffn.up.weight": quantize(model.blocks[0].ffn.up.weight, "nf4")}
    assert quantize_layers(model, held) == {"": 1}
    linears = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    found = quantize_layers(model, {}, "int4")
    assert found[KERNEL_OF_INT4] == linears - 1 and sum(found.values()) == linears  # the output layer is in int8
    assert not any(isinstance(module, torch.nn.Linear) for module in model.modules())


@pytest.mark.parametrize("name", ["up", "gate", "down"])
def test_a_network_some_of_whose_layers_are_quantised_is_packed_layer_by_layer(name: str) -> None:
    """As formats are mixed within a size, or where only some rows are whole blocks."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**TINY_LLAMA)).eval()
    tokens = torch.arange(8)[None]
    wanted = model(tokens)
    weight = getattr(model.blocks[0].ffn, name).weight
    assert quantize_layers(model, {f"blocks.0.ffn.{name}.weight": quantize(weight, "int8")})
    pack(model, "fp32")
    assert (model(tokens) - wanted).abs().max() < 0.02 * wanted.abs().max()
