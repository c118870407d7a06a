"""Weights in the layout of `product.c`, and their products with rows: fp32, bf16 and int8 on processors with AVX-512.

One thread, AMD EPYC (Zen 5), K x N of 256 x 1536 to 2048 x 768: products of 1 row took 0.5 to 0.85 of oneDNN's time in
fp32 and bf16 and 0.4 to 0.7 of fbgemm's in int8; of 16 rows 0.7 to 0.95; of 512 rows as long.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ironlaw.kernels.library import FLOAT, FORMATS, INT, LONG, POINTER, address, function, library

_TILE = 32  # as in `product.c`
ACTIVATIONS = {name: number for number, name in enumerate(("none", "relu", "relu2", "silu", "gelu", "gelu_tanh"))}


class Linear(ctypes.Structure):
    """A packed weight, as `product.c` declares it."""

    _fields_ = (
        *((name, POINTER) for name in ("weight", "bias", "scales", "sums")),
        *((name, INT) for name in ("inputs", "outputs", "format")),
    )


class Result(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("sum", "out", "times")),
        ("factor", FLOAT), ("activation", INT), ("is_bf16", INT),
    )  # fmt: skip


class Products:
    """The compiled library."""

    def __init__(self, compiled: Any) -> None:
        compiled.formats.restype = INT
        known = compiled.formats()
        self.formats = {dtype for dtype, number in FORMATS.items() if known >> number & 1}
        if self.formats:
            self.product = function(compiled.product, POINTER, POINTER, POINTER, POINTER, LONG, INT)
            self.quantize = function(compiled.quantize, POINTER, POINTER, POINTER, LONG, LONG)


@cache
def products() -> Products | None:
    compiled = library("product.c")
    return None if compiled is None else Products(compiled)


def multiplies(dtype: torch.dtype, inputs: int) -> bool:
    """Whether a weight (N, inputs) of this type can be packed here."""
    found = products()
    return found is not None and dtype in found.formats and inputs * dtype.itemsize % 4 == 0


class Weight:
    """A weight (N, K) packed; of int8 `scales` (N,) belong to its rows. The caller has asked `multiplies`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None) -> None:
        found = products()
        assert found is not None
        self.library, self.dtype = found, weight.dtype
        (outputs, inputs), together = weight.shape, 4 // weight.itemsize
        whole = F.pad(weight.detach(), (0, 0, 0, -outputs % _TILE))
        self.packed = whole.view(-1, _TILE, inputs // together, together).transpose(1, 2).contiguous()
        sums = whole.sum(1, dtype=torch.int32).mul_(-128) if scales is not None else None
        assert (scales is not None) == (weight.dtype is torch.int8)
        bias = None if bias is None else bias.detach().float().contiguous()
        scales = None if scales is None else scales.detach().float().contiguous()
        self.tensors = [t for t in (self.packed, bias, scales, sums) if t is not None]  # to which the struct points
        at = (*(address(t, torch.float32, outputs) for t in (bias, scales)), address(sums, torch.int32, len(whole)))
        self.struct = Linear(self.packed.data_ptr(), *at, inputs, outputs, FORMATS[weight.dtype])
        self._at = ctypes.byref(self.struct)

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.itemsize for t in self.tensors)

    def __call__(self, x: Tensor, dtype: torch.dtype, activation: str = "none", times: Tensor | None = None) -> Tensor:
        """(..., N) in fp32 or bf16 from x (..., K), activated, then multiplied by `times` (..., N) of that type."""
        inputs, outputs, kind = self.struct.inputs, self.struct.outputs, self.dtype
        x = x.to(torch.float32 if kind is torch.int8 else kind).contiguous()
        at, scales, rows = address(x, x.dtype, *x.shape[:-1], inputs), None, x.numel() // inputs
        if kind is torch.int8:
            codes, scales = torch.empty(rows, inputs, dtype=torch.uint8), torch.empty(rows)
            self.library.quantize(at, codes.data_ptr(), scales.data_ptr(), rows, inputs)
            at = codes.data_ptr()
        out = torch.empty(*x.shape[:-1], outputs, dtype=dtype)
        by = address(times, dtype, *out.shape)
        result = Result(None, out.data_ptr(), by, 1.0, ACTIVATIONS[activation], dtype is torch.bfloat16)
        of_rows = None if scales is None else scales.data_ptr()
        self.library.product(self._at, at, of_rows, ctypes.byref(result), rows, torch.get_num_threads())
        return out
