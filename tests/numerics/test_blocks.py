"""Blocks of numbers that share a scale, against torchao's and bitsandbytes' own and against their definitions."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ironlaw.catalog.formats import number_format, number_formats
from ironlaw.errors import UserError
from ironlaw.numerics import quantize
from ironlaw.numerics.products import rotate, rotation
from ironlaw.numerics.quantized import rounded

BLOCKS = [name for name, known in number_formats().items() if known.block]


def test_errors_of_gaussian_numbers_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text("utf-8")
    line = page.partition("Relative error of Gaussian numbers")[2].partition("\n\n")[0]
    numbers = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    said = re.findall(r"(\w+) (\.\d+) / (\.\d+)", line)
    assert len(said) == 8
    for name, *errors in said:
        for rounding, error in zip(("nearest", "stochastic"), errors, strict=True):
            off = quantize(numbers, name, rounding=rounding).dequantize() - numbers  # type: ignore[arg-type]
            found = float(off.square().mean().sqrt() / numbers.square().mean().sqrt())
            assert found == pytest.approx(float(error), abs=7e-4), (name, rounding)


@pytest.fixture(scope="module")
def weights() -> torch.Tensor:
    torch.manual_seed(0)
    sizes = torch.exp2(torch.randint(-20, 20, (96, 1)).float())
    made = torch.randn(96, 256) * sizes
    made[3] = 0.0  # blocks without a largest number
    made[4, :40] = 0.0
    return made


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "mxfp6", "mxfp6_e3m2", "mxfp4"])
def test_mx_equals_torchao_to_the_bit(name: str, weights: torch.Tensor) -> None:
    mx: Any = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    words = {"mxfp6": "fp6_e2m3", "mxfp6_e3m2": "fp6_e3m2"}
    types = {"mxfp8": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2, "mxfp4": torch.float4_e2m1fn_x2}
    theirs = mx.MXTensor.to_mx(weights, types.get(name, words.get(name)), 32)
    ours = quantize(weights, name)
    assert ours.scales is not None
    assert torch.equal(ours.scales, theirs.scale.view(torch.uint8).reshape(ours.scales.shape))
    assert torch.equal(ours.dequantize(), theirs.dequantize(torch.float32))


def test_nvfp4_equals_torchao_to_the_bit(weights: torch.Tensor) -> None:
    nvfp4: Any = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    scale = nvfp4.per_tensor_amax_to_scale(weights.abs().max())
    theirs = nvfp4.NVFP4Tensor.to_nvfp4(weights, per_tensor_scale=scale)
    assert torch.equal(quantize(weights, "nvfp4").dequantize(), theirs.dequantize(torch.float32))


def test_nf4_equals_bitsandbytes_to_the_bit(weights: torch.Tensor) -> None:
    functional: Any = pytest.importorskip("bitsandbytes.functional")
    packed, state = functional.quantize_4bit(weights, quant_type="nf4", blocksize=64)
    assert torch.equal(quantize(weights, "nf4").dequantize(), functional.dequantize_4bit(packed, state))


@pytest.mark.parametrize("name", BLOCKS)
def test_errors_stay_within_half_a_step_of_the_block_and_bytes_are_counted(name: str) -> None:
    weights = torch.randn(96, 256, generator=torch.Generator().manual_seed(0))
    known, held = number_format(name), quantize(weights, name)
    assert held.dequantize().shape == weights.shape
    rows, columns = known.block or (0, 0)
    if rows and columns:
        expected = weights.numel() * known.bits_per_element / 8 + (4 if known.tensor_scale else 0)
        assert held.bytes == expected
    top = weights.abs().amax(dim=None if not rows else -1, keepdim=True)
    if rows and columns:
        top = weights.unflatten(-1, (-1, columns)).abs().amax(-1, keepdim=True).expand(-1, -1, columns).flatten(-2)
    # Half the widest step of the element format, relative to its largest number, and as much for the scale's own step.
    step = max(known.element.spacing, 2 / known.element.largest) if not known.values else 0.31
    assert ((held.dequantize() - weights).abs() <= top * step * 1.01 + 1e-30).all()


@pytest.mark.parametrize("name", BLOCKS)
def test_stochastic_rounding_within_blocks_has_the_mean_of_the_numbers(name: str) -> None:
    """z-test of each of 128 numbers over 3,000 rows of them, but for those beyond the scale's range, which saturate."""
    row = torch.randn(128, generator=torch.Generator().manual_seed(2))
    values = quantize(row.expand(3000, 128), name, rounding="stochastic", seed=5).dequantize().double()
    exact, (low, high) = row.double(), (values.amin(0), values.amax(0))
    inside = (low < exact) & (exact < high)
    z = (values.mean(0) - exact)[inside] / ((high - exact) * (exact - low) / 3000).sqrt()[inside]
    assert len(z) > 100 and z.abs().max() < 4.8 and z.mean().abs() < 4.5 / len(z) ** 0.5


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("shape", [(5, 37), (37,), (2, 3, 20), ()])
def test_any_shape_comes_back(name: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape) if shape else torch.tensor(1.5)
    back = quantize(x, name, rounding="stochastic").dequantize()
    assert back.shape == x.shape
    assert back.dtype is torch.float32
    assert back.isfinite().all()


def test_a_block_with_nan_or_infinity_is_nan_and_its_neighbours_are_not() -> None:
    x = torch.randn(1, 128)
    x[0, 3], x[0, 70] = float("nan"), float("inf")
    for name in ("mxfp8", "mxfp4", "nvfp4", "int4", "fp8_block"):
        size = (number_format(name).block or (0, 0))[1]
        lost = {index // size for index in (3, 70)}
        for block, values in enumerate(quantize(x, name).dequantize()[0].split(size)):
            assert values.isnan().all() if block in lost else values.isfinite().all(), (name, block)


def test_weights_of_blockwise_fp8_share_a_scale_in_squares() -> None:
    held = quantize(torch.randn(256, 384), "fp8_block", block=(128, 128))
    assert held.scales is not None
    assert held.scales.shape == (2, 3)
    assert held.bytes == 256 * 384 + 6 * 4 == 256 * 384 * number_format("fp8_block").bytes_per_element(weight=True)


@pytest.mark.parametrize("shape", [(32, 32), (130, 300), (3, 128)])
def test_squares_that_are_not_whole_are_held_without_padding(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    held = quantize(weight, "fp8_block", block=(128, 128))
    rows, columns = shape
    assert held.bytes == rows * columns + 4 * -(-rows // 128) * -(-columns // 128)
    assert torch.equal(held.dequantize(), rounded(weight, number_format("fp8_block"), block=(128, 128)))
    assert torch.equal(held.pruned(held.values() != 0).dense().dequantize(), held.dequantize())
    # Earlier versions kept the padding; what they stored is read as it was.
    padded = torch.nn.functional.pad(held.codes, (0, -columns % 128, 0, -rows % 128))
    assert torch.equal(replace(held, codes=padded).dequantize(), held.dequantize())


def test_a_rotation_is_undone_and_spreads_an_outlier() -> None:
    x = torch.zeros(4, 64)
    x[:, 5] = 8.0
    turned = rotate(x, 16, seed=1)
    assert turned.abs().max() == 2.0  # 8 / sqrt(16), everywhere in its block
    matrix = rotation(16, 1, torch.device("cpu"))
    assert torch.allclose((turned.unflatten(-1, (-1, 16)) @ matrix.T).flatten(-2), x, atol=1e-6)
    assert torch.allclose(matrix @ matrix.T, torch.eye(16), atol=1e-6)


def test_numbers_beyond_the_scale_are_refused() -> None:
    with pytest.raises(UserError, match="fp16, which ends at 65504"):
        quantize(torch.full((32,), 1e6), "int4")
