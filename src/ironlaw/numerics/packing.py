"""Codes of 1, 4 and 6 bits packed into bytes along the last dimension, the first code in the lowest bits."""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
