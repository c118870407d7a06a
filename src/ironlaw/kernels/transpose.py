"""A transposed copy of a matrix made on all cores, as a PyTorch operator; PyTorch's own copy uses one core."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ironlaw.kernels.library import INT, LONG, POINTER, function, library

_TILE = 16  # a multiple of the length of any vector in `transpose.c`


@cache
def _compiled() -> Any:
    found = library("transpose.c")
    return None if found is None else function(found.transpose, POINTER, LONG, LONG, POINTER, INT)


_library = torch.library.Library("ironlaw", "FRAGMENT")
_library.define("transposed(Tensor x) -> Tensor")
transposed = torch.ops.ironlaw.transposed.default  # (M, N) -> contiguous (N, M)


@torch.library.register_fake("ironlaw::transposed")
def _made(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[::-1])


@torch.library.impl(_library, "transposed", "CPU")
def _transpose(x: Tensor) -> Tensor:
    whole = x.dtype is torch.float32 and x.is_contiguous() and all(size % _TILE == 0 for size in x.shape)
    if not whole or _compiled() is None:
        return x.t().clone(memory_format=torch.contiguous_format)
    out = _made(x)
    _compiled()(x.data_ptr(), *x.shape, out.data_ptr(), torch.get_num_threads())
    return out
