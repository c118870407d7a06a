"""Codes of 1, 4 and 6 bits packed into bytes along the last dimension, the first code in the lowest bits."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes of shape (..., n) -> uint8 of shape (..., ceil(n bits / 8)); as they are at 8 bits and more."""
    if bits >= 8:
        return codes
    per_group, group_bytes = _group(bits)
    groups = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per_group)).unflatten(-1, (-1, per_group)).int()
    word = sum(groups[..., place] << (bits * place) for place in range(per_group))
    assert isinstance(word, Tensor)
    packed = torch.stack([(word >> (8 * place)) & 0xFF for place in range(group_bytes)], dim=-1)
    return packed.flatten(-2)[..., : -(-codes.shape[-1] * bits // 8)].to(torch.uint8)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The `count` codes of every row that `pack` took."""
    if bits >= 8:
        return packed
    per_group, group_bytes = _group(bits)
    whole = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % group_bytes))
    groups = whole.unflatten(-1, (-1, group_bytes)).int()
    word = sum(groups[..., place] << (8 * place) for place in range(group_bytes))
    assert isinstance(word, Tensor)
    codes = torch.stack([(word >> (bits * place)) & ((1 << bits) - 1) for place in range(per_group)], dim=-1)
    return codes.flatten(-2)[..., :count].to(torch.uint8)


def _group(bits: int) -> tuple[int, int]:
    """Codes and bytes after which both end together."""
    common = math.lcm(bits, 8)
    return common // bits, common // 8
