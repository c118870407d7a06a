"""GPTQ costs less output error than rounding to nearest, on inputs that are correlated as activations are."""

from __future__ import annotations

import pytest
import torch

from ironlaw.catalog.formats import number_format
from ironlaw.errors import UserError
from ironlaw.numerics import quantize
from ironlaw.numerics.gptq import gptq


@pytest.mark.parametrize("name", ["int4", "nf4", "mxfp4", "nvfp4", "int8"])
@pytest.mark.parametrize("inputs", [192, 200])  # a multiple of every block, and of none
def test_the_output_is_nearer_than_with_rounding_to_nearest(name: str, inputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(inputs, inputs, generator=generator) / inputs**0.5
    x = torch.randn(2000, inputs, generator=generator) @ mixing * (1 + 5 * torch.rand(inputs, generator=generator))
    weight = torch.randn(64, inputs, generator=generator)
    ours = gptq(weight, x.t() @ x, number_format(name))
    nearest = quantize(weight, name)
    cost = [((x @ (weight - held.dequantize()).t()) ** 2).sum() for held in (ours, nearest)]
    assert cost[0] < 0.8 * cost[1]
    assert ours.bytes == nearest.bytes


def test_uncorrelated_inputs_leave_nothing_to_put_right() -> None:
    weight = torch.randn(8, 64)
    ours = gptq(weight, torch.eye(64), number_format("int4"))
    assert torch.equal(ours.dequantize(), quantize(weight, "int4").dequantize())


def test_inputs_that_are_never_used_get_no_weight() -> None:
    moment = torch.eye(64)
    moment[5] = 0.0
    held = gptq(torch.randn(8, 64), moment, number_format("int8")).dequantize()
    assert (held[:, 5] == 0).all() and (held[:, 6] != 0).any()


def test_formats_without_scales_along_rows_are_refused() -> None:
    for name in ("fp8_e4m3", "fp8"):
        with pytest.raises(UserError, match="use rtn"):
            gptq(torch.randn(8, 64), torch.eye(64), number_format(name))
