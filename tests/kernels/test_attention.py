"""Our own attention gives what PyTorch's gives, forward and backward, and the same bits every time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ironlaw.kernels.attention import available, causal_attention

pytestmark = pytest.mark.skipif(not available(torch.float32), reason="there is no C compiler")


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
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 2e-2)])
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
        assert float(((one - other).norm() / other.norm().clamp(min=1.0)).detach()) < tolerance
        assert torch.equal(one, same)


def test_the_output_is_laid_out_for_the_next_layer() -> None:
    query, key, value, _ = inputs(40, 4, 4, torch.float32)
    assert causal_attention(query, key, value).transpose(1, 2).is_contiguous()


def test_strides_sizes_and_the_number_of_threads_change_nothing() -> None:
    torch.manual_seed(1)
    together = torch.randn(3, 50, 3 * 2 * 24)  # one projection's output: rows of all three, heads of an odd size
    query, key, value = (part.unflatten(-1, (2, 24)).transpose(1, 2) for part in together.chunk(3, dim=-1))
    wanted = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    threads = torch.get_num_threads()
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            torch.testing.assert_close(causal_attention(query, key, value), wanted)
    finally:
        torch.set_num_threads(threads)
    columns = (query.transpose(2, 3).contiguous().transpose(2, 3), key, value)  # a head's elements lie apart
    torch.testing.assert_close(causal_attention(*columns), wanted)


def test_large_scores_neither_overflow_nor_vanish() -> None:
    query, key, value, gradient = inputs(70, 4, 2, torch.float32)
    large = [(x.detach() * 60).requires_grad_() for x in (query, key)]
    ours = both_ways(causal_attention(*large, value), *large, value, gradient)
    fused = F.scaled_dot_product_attention(*large, value, is_causal=True, enable_gqa=True)
    for one, other in zip(ours, both_ways(fused, *large, value, gradient), strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_a_compiled_model_calls_it() -> None:
    """`torch.compile` keeps the operator whole: no break in the graph, the same numbers."""
    query, key, value, _ = inputs(33, 4, 2, torch.float32)
    compiled = torch.compile(lambda q, k, v: causal_attention(q, k, v) * 2, backend="aot_eager", fullgraph=True)
    ours = torch.autograd.grad(compiled(query, key, value).sum(), (query, key, value))
    plain = torch.autograd.grad((causal_attention(query, key, value) * 2).sum(), (query, key, value))
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))


def test_scores_that_are_not_finite_are_not_hidden() -> None:
    query, key, value, _ = inputs(40, 4, 2, torch.float32)
    bad = key.detach().clone()
    bad[0, 0, 20, 3] = torch.nan
    finite = causal_attention(query, bad, value).isfinite().all(-1)
    assert finite[0, :2, :20].all() and not finite[0, :2, 20:].any() and finite[0, 2:].all() and finite[1].all()


def test_what_does_not_fit_together_is_refused() -> None:
    query, key, value, _ = inputs(9, 4, 2, torch.float32)
    for wrong in ((query, key[:, :, :8], value), (query, key, value.bfloat16()), (query, key, value[:1]),
                  (query[:, :3], key, value), (query, key[..., :8], value)):  # fmt: skip
        with pytest.raises(ValueError, match="belongs"):
            causal_attention(*wrong)


def test_other_types_are_pytorchs() -> None:
    query, key, value, _ = inputs(9, 4, 2, torch.float64)
    wanted = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert torch.equal(causal_attention(query, key, value), wanted)
