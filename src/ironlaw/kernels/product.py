"""Weights in the layout of `product.c` and their products with rows: fp32, bf16, int8, int4 with AVX-512 or AVX2.

On one thread of an AMD EPYC (Zen 5), K x N of 256 x 1536 to 2048 x 768: products of 1 row took 0.5 to 0.85 of oneDNN's
time in fp32 and bf16 and 0.4 to 0.7 of fbgemm's in int8; of 16 rows 0.7 to 0.95; of 512 rows the same time.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ironlaw.kernels.library import FLOAT, FORMATS, INT, INT4, LONG, POINTER, address, function, library

GROUP = 32  # inputs that share a scale in int4, as in `product.c`
NO_MEMORY = "product: no memory for a copy of the rows"
ACTIVATIONS = {name: number for number, name in enumerate(("none", "relu", "relu2", "silu", "gelu", "gelu_tanh"))}


class CLinear(ctypes.Structure):
    """A packed weight, as declared in `product.c`."""

    _fields_ = (
        *((name, POINTER) for name in ("weight", "bias", "scales", "sums", "groups")),
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
        compiled.formats.restype = compiled.lanes.restype = INT
        known, self.tile = compiled.formats(), 2 * compiled.lanes()
        self.formats = {dtype for dtype, number in FORMATS.items() if known >> number & 1}
        if self.formats:
            arguments = (POINTER, POINTER, POINTER, POINTER, LONG, INT)
            self.product = function(compiled.product, *arguments, memory_for=NO_MEMORY)
            self.quantize = function(compiled.quantize, POINTER, POINTER, POINTER, LONG, LONG, INT)


@cache
def products() -> Products | None:
    compiled = library("product.c")
    return None if compiled is None else Products(compiled)


def multiplies(dtype: torch.dtype, inputs: int) -> bool:
    """Whether a weight (N, inputs) of this dtype can be packed on this processor."""
    found = products()
    whole = inputs % GROUP == 0 if dtype is INT4 else inputs * dtype.itemsize % 4 == 0
    return found is not None and dtype in found.formats and whole


class Weight:
    """A packed weight (N, K). An int8 weight has `scales` (N,) for its rows. An int4 weight is given as codes from -8
    to 7 in int8, with `scales` (N, K / 32), stored in fp16. `multiplies` must hold for the weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None) -> None:
        found = products()
        assert found is not None
        given_scales = None if scales is None else scales.detach().float()
        in_groups = given_scales is not None and given_scales.dim() == 2
        self.library, self.dtype = found, INT4 if in_groups else weight.dtype
        (outputs, inputs), packed_inputs, tile = weight.shape, 4 // weight.itemsize, found.tile
        missing = (0, 0, 0, -outputs % tile)
        whole = F.pad(weight.detach(), missing)
        self.packed = whole.view(-1, tile, inputs // packed_inputs, packed_inputs).transpose(1, 2).contiguous()
        sums = groups = None
        if given_scales is not None and in_groups:
            low, high = (self.packed + 8).view(torch.uint8).chunk(2, dim=2)
            self.packed = low | high << 4
            groups = F.pad(given_scales.half(), missing).unflatten(0, (-1, tile)).transpose(1, 2).contiguous()
        elif given_scales is not None:
            sums = whole.sum(1, dtype=torch.int32).mul_(-128)
        if (given_scales is not None) != (weight.dtype is torch.int8) or (in_groups and inputs % GROUP):
            raise ValueError(f"scales do not go with a weight {weight.dtype} {tuple(weight.shape)}, or are missing")
        bias = None if bias is None else bias.detach().float().contiguous()
        scales = None if given_scales is None or in_groups else given_scales.contiguous()
        self.tensors = [t for t in (self.packed, bias, scales, sums, groups) if t is not None]  # kept alive for C
        at = [address(each, torch.float32, outputs) for each in (bias, scales)]
        at += (
            address(sums, torch.int32, len(whole)),
            address(groups, torch.half, len(whole) // tile, inputs // GROUP, tile),
        )
        self.struct = CLinear(self.packed.data_ptr(), *at, inputs, outputs, FORMATS[self.dtype])
        self._at = ctypes.byref(self.struct)

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.itemsize for t in self.tensors)

    def __call__(self, x: Tensor, dtype: torch.dtype, activation: str = "none", times: Tensor | None = None) -> Tensor:
        """Return activation(x W^T + b) * `times` (..., N) in `dtype` (fp32 or bf16); x: (..., K), `times`: (..., N)."""
        inputs, outputs, kind = self.struct.inputs, self.struct.outputs, self.dtype
        in_codes = kind in (torch.int8, INT4)
        x = x.to(torch.float32 if in_codes else kind).contiguous()
        at, scales, rows = address(x, x.dtype, *x.shape[:-1], inputs), None, x.numel() // inputs
        if in_codes:  # for int4, a 4-byte sum of each group follows the codes
            each = inputs + inputs // GROUP * 4 * (kind is INT4)
            codes, scales = torch.empty(rows * each, dtype=torch.uint8), torch.empty(rows)
            self.library.quantize(at, codes.data_ptr(), scales.data_ptr(), rows, inputs, self.struct.format)
            at = codes.data_ptr()
        out = torch.empty(*x.shape[:-1], outputs, dtype=dtype)
        by = address(times, dtype, *out.shape)
        result = Result(None, out.data_ptr(), by, 1.0, ACTIVATIONS[activation], dtype is torch.bfloat16)
        of_rows = None if scales is None else scales.data_ptr()
        self.library.product(self._at, at, of_rows, ctypes.byref(result), rows, torch.get_num_threads())
        return out
