"""Rounding of fp32 numbers to a float format, an integer format or a table of values; elementwise, without scales.

For a float format with p bits of mantissa, x is rounded to a multiple of its quantum

    q(x) = 2^(max(floor(log2 |x|), e_min) - p)

which is exact in fp32, as is division by a power of two. Nearest: ties to the even multiple (IEEE 754). Stochastic:
floor(x / q + u), u uniform in [0, 1), whose mean is x / q, so that sums of many rounded numbers do not drift
(arXiv 1502.02551). Finite numbers beyond the largest become the largest ("saturate"), as do infinities in formats of at
most 8 bits. NaN stays NaN if the format has one; otherwise a NaN is an error, because any number would be wrong.

Codes of 1, 4 and 6 bits are packed into bytes along the last dimension, the first code in the lowest bits.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from ironlaw.catalog.formats import NumberFormat
from ironlaw.errors import UserError

Rounding = Literal["nearest", "stochastic"]


def generator_of(seed: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def round_to(x: Tensor, format: NumberFormat, generator: torch.Generator | None = None) -> Tensor:
    """Rounds fp32 `x` to numbers of the format, in fp32: to nearest, or stochastically if a generator is given."""
    if format.values:
        return _to_values(x, format, generator)
    if format.integers:
        return _whole(x, generator).clamp(*format.integers)
    assert format.mantissa_bits is not None
    if format.mantissa_bits >= 23:
        return x.clone()  # fp32 and wider formats
    if format.exponent_bits == 8 and format.sign:
        return _shorten(x, format, generator)
    if format.special == "none":
        _refuse_nan(x, format)
    # Read the exponent from the bits: frexp and ldexp take twenty times as long as a product.
    exponent = ((x.contiguous().view(torch.int32) >> 23) & 0xFF) - 127  # too low for 0 and subnormals: clamped below
    # Clamp above too: larger numbers saturate, and the reciprocal of their quantum might be too small for fp32.
    shift = exponent.clamp_(format.min_exponent, min(format.max_exponent, 126)) - format.mantissa_bits
    rounded = _whole(x * power_of_two(-shift), generator) * power_of_two(shift)
    saturated = rounded.clamp(-format.largest, format.largest)
    return torch.where(x.isinf(), x, saturated) if format.bits > 8 else saturated


def power_of_two(exponent: Tensor) -> Tensor:
    """Returns 2^exponent in fp32 for integer exponents from -126 to 127."""
    return ((exponent + 127) << 23).to(torch.int32).view(torch.float32)


def _whole(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Rounds to whole numbers: ties to even, or up with the probability of the fraction."""
    if generator is None:
        return x.round()
    return torch.floor(x + torch.rand(x.shape, generator=generator, device=x.device))


def _shorten(x: Tensor, format: NumberFormat, generator: torch.Generator | None) -> Tensor:
    """Rounds off the last mantissa bits of fp32, for bf16 and tf32; subnormals included."""
    assert format.mantissa_bits is not None
    dropped = 23 - format.mantissa_bits
    bits = x.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    if generator is None:
        addend = (1 << (dropped - 1)) - 1 + ((magnitude >> dropped) & 1)
    else:
        addend = torch.randint(0, 1 << dropped, x.shape, generator=generator, device=x.device, dtype=torch.int32)
    rounded = ((magnitude + addend) >> dropped) << dropped
    largest = torch.tensor(format.largest, device=x.device).view(torch.int32)
    kept = torch.minimum(rounded, largest) | (bits & ~0x7FFFFFFF)
    return torch.where(x.isfinite(), kept.view(torch.float32), x)


def _refuse_nan(x: Tensor, format: NumberFormat) -> None:
    if bool(x.isnan().any()):
        raise UserError(f"{format.name} has no NaN, and the tensor holds one: use bf16, or find where it comes from")


def _to_values(x: Tensor, format: NumberFormat, generator: torch.Generator | None) -> Tensor:
    table = code_values(format, x.device)
    _refuse_nan(x, format)
    above = torch.searchsorted(table, x.contiguous()).clamp(1, len(table) - 1)
    low, high = table[above - 1], table[above]
    if generator is None:
        return torch.where(x - low < high - x, low, high)  # ties are rounded up
    fraction = ((x - low) / (high - low)).clamp(0, 1)
    return torch.where(torch.rand(x.shape, generator=generator, device=x.device) < fraction, high, low)


@cache
def code_values(format: NumberFormat, device: torch.device | str = "cpu") -> Tensor:
    """Returns the value of each code of a format of at most 8 bits: fp32, indexed by the code."""
    if format.values:
        return torch.tensor(format.values, device=device)
    if format.integers:
        codes = torch.arange(1 << format.bits, device=device)
        return torch.where(codes >= 1 << (format.bits - 1), codes - (1 << format.bits), codes).float()
    assert format.exponent_bits is not None and format.mantissa_bits is not None
    codes = torch.arange(1 << (format.exponent_bits + format.mantissa_bits), device=device)
    exponent, fraction = codes >> format.mantissa_bits, codes & ((1 << format.mantissa_bits) - 1)
    if not format.mantissa_bits:  # a format of scales: every code is a power of two, and there is no 0
        values = torch.ldexp(torch.ones_like(codes, dtype=torch.float64), exponent - format.bias).float()
        return torch.where(codes == codes[-1], torch.nan, values)
    normal = (exponent > 0).double()
    significand = normal + fraction / (1 << format.mantissa_bits)
    power = exponent.clamp(min=1) - format.bias
    values = torch.ldexp(significand, power).float()
    if format.special == "ieee":
        top = exponent == (1 << format.exponent_bits) - 1
        values = torch.where(top, torch.where(fraction == 0, torch.inf, torch.nan), values)
    elif format.special == "nan":
        values[-1] = torch.nan
    return torch.cat((values, -values)) if format.sign else values


def encode(x: Tensor, format: NumberFormat) -> Tensor:
    """Returns codes of numbers from `round_to`: uint8 up to 8 bits, else the narrowest PyTorch type that holds them."""
    if format.bits > 8:
        return x.to(
            {"fp64": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16}.get(format.name, torch.float32)
        )
    if format.integers:
        return (x.to(torch.int16) & ((1 << format.bits) - 1)).to(torch.uint8)
    table = code_values(format, x.device)
    if format.values:
        return torch.searchsorted(table, x.contiguous()).to(torch.uint8)
    half = len(table) // 2 if format.sign else len(table)
    positive = table[:half]
    finite = int(positive.isfinite().sum())
    code = torch.searchsorted(positive[:finite].contiguous(), x.abs().contiguous())  # inf: the code above the finite
    code = torch.where(x.isnan(), half - 1, code)
    return (code + (half * x.signbit() if format.sign else 0)).to(torch.uint8)


def decode(codes: Tensor, format: NumberFormat) -> Tensor:
    """Returns the fp32 numbers for the codes of `encode`."""
    return codes.float() if format.bits > 8 else code_values(format, codes.device)[codes.int()]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Packs uint8 codes (..., n) to uint8 (..., ceil(n bits / 8)); codes of 8 bits and more are returned unchanged."""
    return codes if bits >= 8 else _regrouped(codes, bits, 8)[..., : -(-codes.shape[-1] * bits // 8)]


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Inverse of `pack`: returns the `count` codes of each row."""
    return packed if bits >= 8 else _regrouped(packed, 8, bits)[..., :count]


def _regrouped(numbers: Tensor, bits: int, to: int) -> Tensor:
    """Regroups numbers of `bits` bits to numbers of `to` bits, padded with zeros to a common multiple."""
    whole = math.lcm(bits, to)
    padded = torch.nn.functional.pad(numbers, (0, -numbers.shape[-1] % (whole // bits)))
    groups = padded.unflatten(-1, (-1, whole // bits)).int()
    word = sum(groups[..., place] << (bits * place) for place in range(whole // bits))
    assert isinstance(word, Tensor)
    parts = [(word >> (to * place)) & ((1 << to) - 1) for place in range(whole // to)]
    return torch.stack(parts, dim=-1).flatten(-2).to(torch.uint8)
