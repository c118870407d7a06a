"""Compiled products are PyTorch's, in every format that this processor multiplies."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ironlaw.kernels.product import ACTIVATIONS, Weight, multiplies
from ironlaw.model.feed_forward import activate

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.int8: 0.04}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "outputs"), [(1, 70), (12, 64), (13, 33), (40, 5)])
def test_products_are_pytorchs(dtype: torch.dtype, rows: int, outputs: int) -> None:
    if not multiplies(dtype, 24):
        pytest.skip("this processor does not multiply it, or there is no C compiler")
    torch.manual_seed(rows)
    weight, bias, x = torch.randn(outputs, 24), torch.randn(outputs), torch.randn(rows, 24)
    scales = weight.abs().amax(1) / 127 if dtype is torch.int8 else None
    held = Weight((weight if scales is None else (weight / scales[:, None]).round()).to(dtype), bias, scales)
    plain, tolerance = x @ weight.t() + bias, TOLERANCE[dtype]
    for name in ACTIVATIONS:
        wanted = plain if name == "none" else activate(plain, name)
        found = held(x, torch.float32, name)
        assert (found - wanted).norm() < tolerance * wanted.norm()
        times = torch.randn(rows, outputs)
        assert (
            F.cosine_similarity((held(x, torch.float32, name, times)).flatten(), (wanted * times).flatten(), 0) > 0.999
        )
    narrow = held(x, torch.bfloat16, "silu", times.bfloat16())
    assert narrow.dtype is torch.bfloat16
    assert (narrow.float() - F.silu(plain) * times).norm() < max(tolerance, 0.01) * (F.silu(plain) * times).norm()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rows_that_are_none_not_finite_or_too_long(dtype: torch.dtype) -> None:
    if not multiplies(dtype, 24):
        pytest.skip("this processor does not multiply it, or there is no C compiler")
    held = Weight(torch.ones(5, 24).to(dtype), None, torch.ones(5) if dtype is torch.int8 else None)
    assert held(torch.ones(0, 24), torch.float32).shape == (0, 5)
    for bad in (float("nan"), float("inf"), float("-inf")):
        x = torch.ones(3, 24)
        x[1, 7] = bad
        found = held(x, torch.float32).isfinite().all(1)
        assert found.tolist() == [True, False, True]
    x = torch.ones(2, 48)
    for wrong in (
        {"x": x},
        {"x": x[:, :24], "times": torch.ones(2, 4)},
        {"x": x[:, :24], "times": torch.ones(2, 5).half()},
    ):
        with pytest.raises(ValueError, match="was called with"):
            held(dtype=torch.float32, **wrong)


def test_what_does_not_fill_four_bytes_is_left_to_others() -> None:
    assert not multiplies(torch.int8, 30) and not multiplies(torch.float16, 32)
