"""Blocked attention gives what the fused kernel gives, forward and backward, and the same bits every time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ironlaw.model.blocked import causal_attention


def inputs(sequence: int, heads: int, shared: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values as the model's projection leaves them: heads behind tokens."""
    torch.manual_seed(sequence)
    sizes = (heads, shared, shared)
    made = [torch.randn(2, sequence, n, 16, dtype=dtype).transpose(1, 2).requires_grad_() for n in sizes]
    return [*made, torch.randn(2, sequence, heads, 16, dtype=dtype).transpose(1, 2)]


def both_ways(out: Tensor, query: Tensor, key: Tensor, value: Tensor, gradient: Tensor) -> list[Tensor]:
    return [out, *torch.autograd.grad(out, (query, key, value), gradient)]


@pytest.mark.parametrize("sequence", [1, 17, 64, 150, 300])
@pytest.mark.parametrize("shared", [4, 2])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_it_is_attention(sequence: int, shared: int, scale: float | None, dtype: torch.dtype, tolerance: float) -> None:
    query, key, value, gradient = inputs(sequence, 4, shared, dtype)
    ours = both_ways(causal_attention(query, key, value, scale), query, key, value, gradient)
    again = both_ways(causal_attention(query, key, value, scale), query, key, value, gradient)
    q, k, v, g = (t.detach().double().requires_grad_() for t in (query, key, value, gradient))
    exact = both_ways(
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared != 4, scale=scale), q, k, v, g
    )
    for one, other, same in zip(ours, exact, again, strict=True):
        assert one.shape == other.shape
        assert float(((one - other).norm() / other.norm().clamp(min=1e-3)).detach()) < tolerance
        assert torch.equal(one, same)


def test_the_output_is_laid_out_for_the_next_layer() -> None:
    query, key, value, _ = inputs(40, 4, 4, torch.float32)
    assert causal_attention(query, key, value).transpose(1, 2).is_contiguous()
