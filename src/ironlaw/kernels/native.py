"""The operations of a decode step in C, compiled for one model's shapes when it is loaded, called through ctypes.

On a CPU a step of few tokens is some thousand small operations of PyTorch, each of which costs more than it computes,
and keys and values are copied out of their pages before they are read. Here a layer's attention is one call, without a
copy. Where there is no C compiler, `compiled` gives None, and PyTorch's operations do the same.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ironlaw.kernels.library import FLOAT, FORMATS, INT, LONG, POINTER, address, function, library
from ironlaw.kernels.product import Linear


class Layer(ctypes.Structure):
    """One layer's pages and rules, as `decode.c` declares it."""

    _fields_ = (
        *((name, POINTER) for name in ("keys", "values", "key_scales", "value_scales", "slopes", "sinks")),
        ("scale", FLOAT), ("cap", FLOAT), ("window", INT),
    )  # fmt: skip


class Step(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("table", "sequence", "positions")),
        *((name, INT) for name in ("tokens", "width", "threads")),
    )


class Block(ctypes.Structure):
    """One block of a decoder: its pages and what is multiplied."""

    _fields_ = (
        ("layer", POINTER), *((name, Linear) for name in ("qkv", "out", "gate", "up", "down")),
        ("attention_norm", POINTER), ("ffn_norm", POINTER),
        *((name, FLOAT) for name in ("attention_eps", "ffn_eps", "factor")), ("hidden", INT), ("activation", INT),
    )  # fmt: skip


@dataclass(frozen=True)
class Shapes:
    """What the code is compiled for: query heads, key/value heads, elements of a key and a value, from which on a row
    of values follows another, tokens of a page."""

    heads: int
    shared: int
    key: int
    value: int
    value_stride: int
    page: int


class Native:
    """The compiled library. Tensors are the caller's, contiguous within a token."""

    def __init__(self, library: Any, shapes: Shapes, store: torch.dtype, activation: torch.dtype) -> None:
        self.shapes, self.store, self.activation = shapes, store, activation
        pointer, long = POINTER, LONG
        self._attend = function(library.attend, pointer, pointer, pointer, long, pointer)
        self._turn = function(library.turn, pointer, long, INT, pointer, pointer, INT, INT)
        self._norm = function(library.norm, pointer, pointer, pointer, long, long, FLOAT)
        self.keeps = hasattr(library, "keep")  # 8-bit formats are scaled by PyTorch
        if self.keeps:
            self._keep = function(library.keep, pointer, pointer, pointer, long, pointer, long)
        self.block = None  # a whole one, where products are compiled too
        if self.keeps and shapes.key == shapes.value and hasattr(library, "block"):
            self.block = function(library.block, pointer, pointer, pointer, pointer, pointer, INT, pointer)
        numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        function(library.prepare, pointer)(numbers.data_ptr())

    def _reads(self, *tensors: Tensor) -> None:
        """Of another type C would read, and write, past the end of them."""
        for tensor in tensors:
            if tensor.dtype is not self.activation:
                raise TypeError(f"compiled for {self.activation}, called with {tensor.dtype}")

    def keep(self, layer: Any, step: Any, key: Tensor, value: Tensor | None = None) -> None:
        """New keys (N, K, D) and values (N, K, W) to their pages."""
        self._reads(key, *(() if value is None else (value,)))
        stride = 0 if value is None else value.stride(0)
        self._keep(layer, step, key.data_ptr(), key.stride(0), address(value), stride)

    def attend(self, layer: Any, step: Any, query: Tensor) -> Tensor:
        """(N, A, W) of queries (N, A, D)."""
        self._reads(query)
        out = query.new_empty(query.shape[0], self.shapes.heads, self.shapes.value)
        self._attend(layer, step, query.data_ptr(), query.stride(0), out.data_ptr())
        return out

    def turn(self, x: Tensor, cosines: Tensor, sines: Tensor, size: int | None) -> None:
        """`model.rotary.turn` of x (N, heads, D), in place."""
        self._reads(x, cosines, sines)
        (count, heads), size = x.shape[:2], size or self.shapes.key
        self._turn(x.data_ptr(), x.stride(0), heads, cosines.data_ptr(), sines.data_ptr(), count, size)

    def norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """RMSNorm in fp32 over the last dimension; `x` is contiguous."""
        out = torch.empty_like(x)
        size = x.shape[-1]
        self._norm(x.data_ptr(), address(weight), out.data_ptr(), x.numel() // size, size, eps)
        return out


def compiled(shapes: Shapes, store: torch.dtype, activation: torch.dtype, folder: Path | None = None) -> Native | None:
    """The library for these shapes; None where it cannot be compiled."""
    if store not in FORMATS or activation not in FORMATS:
        return None
    numbers = {name.upper(): number for name, number in vars(shapes).items()}
    found = library("decode.c", numbers | {"STORE": FORMATS[store], "ACTIVATION": FORMATS[activation]}, folder)
    return None if found is None else Native(found, shapes, store, activation)
