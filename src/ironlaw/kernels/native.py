"""The operations of a decode step in C, compiled for a model's shapes when it is loaded, and called through ctypes.

On a CPU, a decode step is some thousand small PyTorch operations whose overhead exceeds their work, and keys and values
are copied out of their pages before use. Here a layer's attention is one call without a copy. Without a C compiler,
`compiled` returns None, and PyTorch's operations are used.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ironlaw.kernels.library import FLOAT, FORMATS, INT, LONG, POINTER, address, function, library, rows
from ironlaw.kernels.product import NO_MEMORY, CLinear


class CLayer(ctypes.Structure):
    """One layer's pages and attention settings, as declared in `decode.c`."""

    _fields_ = (
        *((name, POINTER) for name in ("keys", "values", "key_scales", "value_scales", "slopes", "sinks")),
        ("scale", FLOAT), ("cap", FLOAT), ("window", INT),
    )  # fmt: skip


class CStep(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("table", "sequence", "positions")),
        *((name, INT) for name in ("tokens", "width", "threads")),
    )


class CNorm(ctypes.Structure):
    _fields_ = (("weight", POINTER), ("bias", POINTER), ("eps", FLOAT), ("centers", INT))


class CBlock(ctypes.Structure):
    """One block of a decoder: its pages and weights."""

    _fields_ = (
        ("layer", POINTER), *((name, CLinear) for name in ("qkv", "out", "gate", "up", "down")),
        ("attention_norm", CNorm), ("ffn_norm", CNorm), ("factor", FLOAT),
        *((name, INT) for name in ("hidden", "activation", "parallel")),
    )  # fmt: skip


@dataclass(frozen=True)
class Shapes:
    """The sizes compiled into the code: query heads, key/value heads, elements of a key and of a value, stride between
    rows of values, and tokens per page."""

    heads: int
    shared: int
    key: int
    value: int
    value_stride: int
    page: int


class Native:
    """The compiled library. Tensors are owned by the caller and contiguous within a token."""

    def __init__(self, library: Any, shapes: Shapes, store: torch.dtype, activation: torch.dtype) -> None:
        self.shapes, self.store, self.activation = shapes, store, activation
        pointer, long, where = POINTER, LONG, (ctypes.POINTER(CLayer), ctypes.POINTER(CStep))
        self._attend = function(library.attend, *where, pointer, long, pointer)
        self._turn = function(library.turn, pointer, long, INT, pointer, pointer, INT, INT)
        self._norm = function(library.norm, ctypes.POINTER(CNorm), pointer, pointer, long, long)
        self.keeps = hasattr(library, "keep")  # not for 8 and 4 bits, which PyTorch scales
        if self.keeps:
            self._keep = function(library.keep, *where, pointer, long, pointer, long)
        self.block = None  # a whole block in one call, if products are compiled too
        if self.keeps and shapes.key == shapes.value and hasattr(library, "block"):
            arguments = (ctypes.POINTER(CBlock), where[1], pointer, pointer, pointer, INT, pointer)
            self.block = function(library.block, *arguments, memory_for=NO_MEMORY)
        numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        function(library.prepare, pointer)(numbers.data_ptr())

    def keep(self, layer: CLayer, step: CStep, key: Tensor, value: Tensor | None = None) -> None:
        """Write new keys (N, K, D) and values (N, K, W) to their pages."""
        shapes, kind, count = self.shapes, self.activation, step.tokens
        values = (None, 0) if value is None else rows(value, kind, count, shapes.shared, shapes.value)
        self._keep(layer, step, *rows(key, kind, count, shapes.shared, shapes.key), *values)

    def attend(self, layer: CLayer, step: CStep, query: Tensor) -> Tensor:
        """Return the attention output (N, A, W) of queries (N, A, D)."""
        shapes, count = self.shapes, step.tokens
        out = query.new_empty(count, shapes.heads, shapes.value)
        self._attend(layer, step, *rows(query, self.activation, count, shapes.heads, shapes.key), out.data_ptr())
        return out

    def rotate(self, x: Tensor, cosines: Tensor, sines: Tensor, size: int | None) -> None:
        """Apply `model.rotary.rotate_fused` to x (N, heads, D) in place."""
        (count, heads, _), size = x.shape, min(size or self.shapes.key, self.shapes.key)
        self._turn(*rows(x, self.activation, count, heads, self.shapes.key), heads,
                   *self.tables(count, cosines, sines), count, size)  # fmt: skip

    def tables(self, count: int, *tables: Tensor) -> list[int | None]:
        """Return the addresses of cosines and sines (N, 1, D)."""
        return [address(table, self.activation, count, 1, self.shapes.key) for table in tables]

    def norm(self, by: CNorm, x: Tensor, size: int) -> Tensor:
        """Return the norm in fp32 over the last dimension, which has `size` elements."""
        out = torch.empty_like(x)
        self._norm(by, address(x, torch.float32, *x.shape[:-1], size), out.data_ptr(), x.numel() // size, size)
        return out


def compiled(shapes: Shapes, store: torch.dtype, activation: torch.dtype, folder: Path | None = None) -> Native | None:
    """Return the library for these shapes, or None if it cannot be compiled."""
    on_stack = shapes.heads // shapes.shared * (shapes.key + shapes.value + shapes.page) * 4  # bytes per thread
    if store not in FORMATS or activation not in FORMATS or on_stack > 2**20:
        return None
    numbers = {name.upper(): number for name, number in vars(shapes).items()}
    found = library("decode.c", numbers | {"STORE": FORMATS[store], "ACTIVATION": FORMATS[activation]}, folder)
    return None if found is None else Native(found, shapes, store, activation)
