"""Numbers of few bits equal those of `ml_dtypes`, on every code and on random values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ironlaw.catalog.formats import number_format, number_formats
from ironlaw.errors import UserError
from ironlaw.numerics import quantize
from ironlaw.numerics.rounding import code_values, pack, round_to, unpack

ml_dtypes = pytest.importorskip("ml_dtypes")

SAME = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2, "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn, "fp4_e2m1": ml_dtypes.float4_e2m1fn, "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16, "fp32": np.float32, "fp64": np.float64,
}  # fmt: skip
NARROW = [name for name in SAME if number_format(name).bits <= 8]


@pytest.fixture(scope="module")
def numbers() -> torch.Tensor:
    """A million: of usual sizes, and over the whole range of fp32, subnormals included."""
    torch.manual_seed(0)
    usual = torch.randn(600_000) * torch.tensor([1.0, 100.0]).repeat_interleave(300_000)
    return torch.cat((usual, torch.randn(400_000) * torch.exp2(torch.randint(-149, 126, (400_000,)).float())))


@pytest.mark.parametrize("name", SAME)
def test_a_million_numbers_round_to_the_bit_and_saturate(name: str, numbers: torch.Tensor) -> None:
    largest = min(number_format(name).largest, torch.finfo(torch.float32).max)
    expected = numbers.clamp(-largest, largest).numpy().astype(SAME[name]).astype(np.float32)
    assert np.array_equal(quantize(numbers, name).dequantize().numpy(), expected)


@pytest.mark.parametrize("name", NARROW)
def test_every_code_means_the_same_number_and_comes_back(name: str) -> None:
    known = number_format(name)
    expected = np.arange(1 << known.bits, dtype=np.uint8).view(SAME[name]).astype(np.float32)
    assert np.array_equal(code_values(known).numpy(), expected, equal_nan=True)
    finite = torch.tensor(expected[np.isfinite(expected)])
    again = quantize(finite, name)
    assert torch.equal(again.dequantize(), finite)
    assert torch.equal(again.dequantize().signbit(), finite.signbit())  # -0 too


def test_scales_of_mx_mean_powers_of_two() -> None:
    expected = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(code_values(number_format("e8m0")).numpy(), expected, equal_nan=True)


FLOATS = [n for n, f in number_formats().items() if f.exponent_bits is not None and f.sign and n != "fp64"]


@pytest.mark.parametrize("name", FLOATS)
def test_range_and_spacing_are_those_of_the_codes(name: str) -> None:
    known = number_format(name)
    beyond = torch.tensor([1.0, -1.0]) * torch.finfo(torch.float32).max
    assert quantize(beyond, name).dequantize().tolist() == [known.largest, -known.largest]
    one = torch.tensor([1.0, 1.0 + known.spacing, 1.0 + known.spacing * 0.75])
    assert quantize(one, name).dequantize().tolist() == [1.0, 1.0 + known.spacing, 1.0 + known.spacing]
    assert quantize(torch.tensor([known.smallest]), name).dequantize().item() == known.smallest


def test_infinities_saturate_up_to_8_bits_and_stay_above() -> None:
    infinite = torch.tensor([float("inf"), -float("inf")])
    for name in NARROW:
        largest = number_format(name).largest
        assert quantize(infinite, name).dequantize().tolist() == [largest, -largest], name
    assert round_to(torch.tensor([2.0**127 * 1.2, torch.inf]), number_format("e8m0")).tolist() == [2.0**127] * 2
    assert torch.equal(quantize(infinite, "bf16").dequantize(), infinite)
    assert torch.equal(quantize(infinite, "fp16").dequantize(), infinite)


def test_nan_stays_nan_or_is_refused() -> None:
    missing = torch.tensor([1.0, float("nan")])
    for name in ("fp32", "tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"):
        assert quantize(missing, name).dequantize().isnan().tolist() == [False, True]
    for name in ("fp4_e2m1", "fp6_e2m3", "fp6_e3m2"):
        with pytest.raises(UserError, match="has no NaN"):
            quantize(missing, name)


def test_stochastic_rounding_has_the_mean_of_the_number_and_is_repeatable() -> None:
    """z-test of the mean over 200,000 roundings of each of some numbers, subnormal and negative ones among them."""
    draws = 200_000
    for name in (*NARROW, "bf16", "tf32"):
        for number in (1.3, -0.0626, 0.017, 2.71):
            x = torch.full((draws,), number)
            rounded = quantize(x, name, rounding="stochastic", seed=3)
            values = rounded.dequantize().double()
            assert len(values.unique()) == 2 or values.unique().item() == pytest.approx(number, rel=1e-6)
            low, high = values.min().item(), values.max().item()
            exact = float(np.float32(number))
            assert low <= exact <= high
            deviation = ((high - exact) * (exact - low) / draws) ** 0.5  # of the mean of a two-valued variable
            assert abs(values.mean().item() - exact) <= 4.5 * deviation + 1e-9
            assert torch.equal(rounded.codes, quantize(x, name, rounding="stochastic", seed=3).codes)


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("count", [1, 2, 3, 31, 32])
def test_packed_codes_come_back(bits: int, count: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, count), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape[-1] == -(-count * bits // 8)
    assert torch.equal(unpack(packed, bits, count), codes)


def test_what_cannot_be_quantised_is_said() -> None:
    with pytest.raises(UserError, match="did you mean mxfp4"):
        quantize(torch.ones(4), "mxpf4")
    with pytest.raises(UserError, match="nearest or stochastic"):
        quantize(torch.ones(4), "int8", rounding="up")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="int64"):
        quantize(torch.ones(4, dtype=torch.int64), "int8")
    with pytest.raises(UserError, match="nothing"):
        quantize(torch.ones(0), "int8")
