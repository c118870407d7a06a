"""Compiled products are PyTorch's, in every format that this processor multiplies."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F

from ironlaw.kernels.product import ACTIVATIONS, GROUP, INT4, Result, Weight, multiplies, products
from ironlaw.model.feed_forward import activate

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.int8: 0.015, INT4: 0.015}  # of inputs in 8 bits


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "outputs"), [(1, 70), (12, 64), (13, 33), (40, 5)])
def test_products_are_pytorchs(dtype: torch.dtype, rows: int, outputs: int) -> None:
    inputs = 96
    if not multiplies(dtype, inputs):
        pytest.skip("this processor does not multiply it, or there is no C compiler")
    torch.manual_seed(rows)
    weight, bias, x = torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(rows, inputs)
    if dtype is INT4:
        codes, scales = torch.randint(-8, 8, (outputs, inputs)).to(torch.int8), torch.rand(outputs, inputs // GROUP)
        weight = codes * scales.half().float().repeat_interleave(GROUP, 1)
        held = Weight(codes, bias, scales)
    elif dtype is torch.int8:
        codes, scales = torch.randint(-127, 128, (outputs, inputs)).to(torch.int8), torch.rand(outputs)
        weight, held = codes * scales[:, None], Weight(codes, bias, scales)
    else:
        held = Weight(weight.to(dtype), bias)
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
    if not multiplies(dtype, GROUP):
        pytest.skip("this processor does not multiply it, or there is no C compiler")
    scales = {torch.int8: torch.ones(5), INT4: torch.ones(5, 1)}.get(dtype)
    held = Weight(torch.ones(5, GROUP).to(torch.int8 if dtype is INT4 else dtype), None, scales)
    assert held(torch.ones(0, GROUP), torch.float32).shape == (0, 5)
    for bad in (float("nan"), float("inf"), float("-inf")):
        x = torch.ones(3, GROUP)
        x[1, 7] = bad
        assert held(x, torch.float32).isfinite().all(1).tolist() == [True, False, True]
    for size, times in ((2 * GROUP, None), (GROUP, torch.ones(2, 4)), (GROUP, torch.ones(2, 5).half())):
        with pytest.raises(ValueError, match="was called with"):
            held(torch.ones(2, size), torch.float32, times=times)


def test_no_memory_for_rows_is_an_error() -> None:
    found = products()
    if found is None or torch.float32 not in found.formats:
        pytest.skip("this processor does not multiply it, or there is no C compiler")
    held, x = Weight(torch.ones(5, GROUP), None), torch.ones(1, GROUP)
    with pytest.raises(MemoryError, match="copy of the rows"):  # more than any address space; nothing is read before
        found.product(ctypes.byref(held.struct), x.data_ptr(), None, ctypes.byref(Result()), 2**50, 1)


def test_what_does_not_fill_four_bytes_is_left_to_others() -> None:
    assert not multiplies(torch.int8, 30) and not multiplies(torch.float16, 32) and not multiplies(INT4, 48)
