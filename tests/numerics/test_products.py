"""Emulated products are those of the rounded operands, and their gradients are without bias where rounding is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from ironlaw.catalog.formats import PrecisionRecipe, precision_recipe, precision_recipes
from ironlaw.catalog.nodes import parse_cluster
from ironlaw.model.config import ModelConfig
from ironlaw.model.linear import Linear
from ironlaw.model.transformer import Transformer
from ironlaw.numerics import quantize
from ironlaw.numerics.products import LowPrecisionLinear, Moment, emulate
from ironlaw.plan.cluster.estimate import ClusterRequest, plan_cluster
from ironlaw.train.precision import PRODUCTS, LibraryLinear, Product, _by_torchao, mxfp8_product, use_product
from ironlaw.workload.layout import parse_layout

TOKENS, INPUTS, OUTPUTS = 96, 64, 160
PLAIN = [n for n, r in precision_recipes().items() if not r.stochastic and not r.rotation and not r.history]


def one_layer(name: str, moment: Moment) -> LowPrecisionLinear:
    rules = precision_recipe(name)
    assert rules is not None
    torch.manual_seed(0)
    blocks = nn.ModuleList([nn.Sequential(Linear(INPUTS, OUTPUTS)), nn.Sequential(Linear(2, 2))])
    emulate(blocks, rules, moment)
    layer = blocks[0].get_submodule("0")
    assert isinstance(layer, LowPrecisionLinear)
    return layer


def gradients(name: str, moment: Moment) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    layer = one_layer(name, moment)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, TOKENS // 3, INPUTS, generator=generator).requires_grad_()
    g = torch.randn(3, TOKENS // 3, OUTPUTS, generator=generator)
    y = layer(x)
    y.backward(g)
    assert x.grad is not None and layer.weight.grad is not None
    return x.detach().flatten(0, 1), g.flatten(0, 1), y.detach() - layer.bias, x.grad.flatten(0, 1), layer.weight.grad


@pytest.mark.parametrize("name", PLAIN)
def test_the_three_products_are_those_of_the_rounded_operands(name: str) -> None:
    rules, layer = precision_recipe(name), one_layer(name, Moment())
    assert rules is not None
    x, g, y, of_x, of_weight = gradients(name, Moment())
    weight, block = layer.weight.detach(), rules.weight_block

    def q(tensor: torch.Tensor, format_name: str, block: tuple[int, int] | None = None) -> torch.Tensor:
        return quantize(tensor, format_name, block=block).dequantize()

    forward = q(weight, rules.weight.name, block)
    backward = forward if rules.square_weights else q(weight.t(), rules.weight.name, block).t()
    assert torch.allclose(y.flatten(0, 1), q(x, rules.input.name) @ forward.t(), atol=1e-5)
    assert torch.allclose(of_x, q(g, rules.gradient.name) @ backward, atol=1e-5)
    assert torch.allclose(of_weight, q(g.t(), rules.gradient.name) @ q(x.t(), rules.input.name).t(), atol=1e-4)


def test_delayed_scales_are_of_the_micro_batches_before() -> None:
    """As Transformer Engine has them: scale = the most of the history / 448, or / 57344 of gradients; 1 at first."""
    moment = Moment()
    layer = one_layer("fp8_delayed", moment)
    seen: dict[str, list[float]] = {"x": [], "w": [], "g": []}
    for step, size in enumerate((1.0, 40.0, 2.0)):
        moment.step = step
        x, g = (size * torch.randn(8, n, generator=torch.Generator().manual_seed(step)) for n in (INPUTS, OUTPUTS))
        x.requires_grad_()
        of_weight = torch.autograd.grad(y := layer(x), (x, layer.weight), g)[1]
        operands = {"x": (x, 448.0, torch.float8_e4m3fn), "w": (layer.weight, 448.0, torch.float8_e4m3fn),
                    "g": (g, 57344.0, torch.float8_e5m2)}  # fmt: skip
        narrow = {}
        for name, (tensor, greatest, dtype) in operands.items():
            scale = max(seen[name]) / greatest if seen[name] else 1.0
            scaled = (tensor.detach() / scale).clamp(-greatest, greatest)
            narrow[name] = scaled.to(dtype).float() * scale
            seen[name].append(float(tensor.detach().abs().max()))
        torch.testing.assert_close(y.detach() - layer.bias, narrow["x"] @ narrow["w"].t(), rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(of_weight, narrow["g"].t() @ narrow["x"], rtol=1e-5, atol=1e-3)
    again = Moment(step=3)
    again.load_state_dict(moment.state_dict())
    assert again.largest("0.x", x, 2, training=True) == pytest.approx(max(seen["x"][-3:]))
    again.step = 4
    assert again.largest("0.x", x, 2, training=False) == pytest.approx(seen["x"][-1])  # of a history of two


@pytest.mark.parametrize("name", [n for n, r in precision_recipes().items() if not r.history])
def test_products_stay_near_those_of_full_precision(name: str) -> None:
    x, g, y, of_x, of_weight = gradients(name, Moment())
    layer = one_layer(name, Moment())
    exact = x @ layer.weight.detach().t(), g @ layer.weight.detach(), g.t() @ x
    limit = 0.3 if precision_recipe(name).gradient.bits == 4 else 0.08  # type: ignore[union-attr]
    for made, wanted in zip((y.flatten(0, 1), of_x, of_weight), exact, strict=True):
        assert 0.001 < (made - wanted).norm() / wanted.norm() < limit


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_stochastic_gradients_have_no_bias_and_depend_on_the_moment_alone(name: str) -> None:
    """The mean over 400 roundings of g: what remains shrinks with the root of the number, as noise does."""
    draws = [gradients(name, Moment(step=step))[3] for step in range(400)]
    mean = torch.stack(draws).mean(0)
    rules, layer = precision_recipe(name), one_layer(name, Moment())
    assert rules is not None
    _, g, _, _, _ = gradients(name, Moment())
    weight = layer.weight.detach()
    if rules.square_weights:
        narrow = quantize(weight, rules.weight.name, block=rules.weight_block).dequantize()
    else:
        narrow = quantize(weight.t(), rules.weight.name).dequantize().t()
    of_one = (draws[0] - g @ narrow).norm()
    assert (mean - g @ narrow).norm() < of_one * 0.12
    assert torch.equal(draws[3], gradients(name, Moment(step=3))[3])
    assert not torch.equal(draws[3], draws[4])


def test_the_last_blocks_of_nvfp4_and_the_head_stay_wide() -> None:
    model = Transformer(ModelConfig(layers=8, hidden=32, heads=2, vocab=64, context=16))
    rules = precision_recipe("nvfp4")
    assert rules is not None
    names = set(model.state_dict())
    assert emulate(model.blocks, rules, Moment()) == 6 * 4
    narrow = {name.split(".")[1] for name, module in model.named_modules() if isinstance(module, LowPrecisionLinear)}
    assert narrow == {str(number) for number in range(6)}
    assert set(model.state_dict()) == names


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_plan_counts_in_few_bits_what_the_trainer_computes_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLOPs of a step by the precision of their products, in the last blocks and in layers of no whole tiles too."""
    tables = {"layers": 7, "hidden": 128, "heads": 2, "ffn": 192, "gated_ffn": True, "vocab": 64, "context": 16}
    config = ModelConfig.model_validate(tables)
    asked = ClusterRequest(config, parse_cluster("1xb200-sxm"), config.context, 4, name, "ironlaw")
    planned: Counter[str] = Counter()
    for product in plan_cluster(asked, parse_layout("dp=1 micro_batch=2")).ledger.facts["products"]:
        planned[product["precision"]] += round(product["flops"] * product["share_of_layers"] * config.layers)

    monkeypatch.setitem(PRODUCTS, name, lambda: lambda x, weight: x @ weight.t())
    model, computed = Transformer(config), Counter[str]()
    rules = precision_recipe(name)
    assert rules is not None
    _by_torchao(model.blocks, rules)

    def count(layer: nn.Module, x: tuple[torch.Tensor], y: torch.Tensor) -> None:
        computed[name if isinstance(layer, LibraryLinear) else "bf16"] += 2 * y.numel() * x[0].shape[-1]

    for layer in model.blocks.modules():
        if isinstance(layer, Linear):
            layer.register_forward_hook(count)
    model(torch.zeros(2, config.context, dtype=torch.long))
    assert planned == computed and computed[name] and (name == "mxfp8" or computed["bf16"])


def rules_with(tile: int) -> PrecisionRecipe:
    rules = precision_recipe("mxfp8")
    assert rules is not None
    return replace(rules, tile=tile)


def by_library(product: Product, tile: int, width: int = INPUTS) -> list[torch.Tensor]:
    """Output and gradients of a layer and of one of no whole tiles, over 3 x 11 tokens."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Sequential(Linear(width, 96), Linear(96, 7))])
    names = list(layers.state_dict())
    use_product(layers, product, rules_with(tile))
    x = torch.randn(3, 11, width, requires_grad=True)
    y = layers[0](x)
    y.square().sum().backward()
    assert list(layers.state_dict()) == names  # checkpoints and the optimizer see the weights as they were
    return [y, *(p.grad for p in (x, *layers.parameters()) if p.grad is not None)]


def test_a_librarys_product_takes_whole_tiles_of_tokens() -> None:
    shapes = []

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        shapes.append((tuple(x.shape), tuple(weight.shape)))
        return x @ weight.t()

    plain, padded = by_library(product, 1), by_library(product, 32)
    assert shapes == [((33, 64), (96, 64)), ((33, 96), (7, 96)), ((64, 64), (96, 64))]
    for one, other in zip(plain, padded, strict=True):
        torch.testing.assert_close(one, other)


def test_torchaos_mxfp8_is_the_emulated_one() -> None:
    pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear")
    emulated, x = one_layer("mxfp8", Moment()), torch.randn(3, 11, INPUTS)
    torch.manual_seed(0)
    blocks = nn.ModuleList([nn.Sequential(Linear(INPUTS, OUTPUTS))])
    use_product(blocks, mxfp8_product("emulated"), rules_with(32))
    found = []
    for layer in (emulated, blocks[0].get_submodule("0")):
        given = x.clone().requires_grad_()
        layer(given).square().sum().backward()
        found.append([given.grad, *(p.grad for p in layer.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", PRODUCTS)
def test_torchao_has_the_products_that_are_taken(name: str) -> None:
    """What runs on a GPU alone is at least there under these names."""
    pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear")
    pytest.importorskip("triton")
    assert callable(PRODUCTS[name]())
