"""Causal attention of whole sequences in C for CPUs, as a differentiable PyTorch operator.

PyTorch's fused CPU attention multiplies inefficiently small tiles, most of all in its backward pass, and in fp32 uses
MKL, which is limited to AVX2 on processors other than Intel's. `attention.c` computes the same in fp32 registers, saves
the same for the backward pass (each query's log-sum-exp), and rounds once, at the end. `ironlaw measure` times both
kernels, and the plan chooses the faster one.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ironlaw.kernels.library import FLOAT, FORMATS, INT, LONG, POINTER, address, function, library

TENSORS = ("query", "key", "value", "out", "out_gradient", "query_gradient", "key_gradient", "value_gradient")


class _Tensor(ctypes.Structure):
    _fields_ = (("data", POINTER), *((name, LONG) for name in ("batch", "head", "row")))


class _Call(ctypes.Structure):
    """The arguments of a call, as declared in `attention.c`."""

    _fields_ = (
        *((name, _Tensor) for name in TENSORS), ("log_sums", POINTER), ("scale", FLOAT),
        *((name, INT) for name in ("batch", "heads", "shared", "sequence", "key_size", "value_size")),
        ("threads", INT),
    )  # fmt: skip


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """Return (B, A, S, D) from queries of that shape and keys and values (B, K, S, D).

    Equals `scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)`, which is
    called if this kernel is not available."""
    if not query.is_cpu or not available(query.dtype):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    out: Tensor = _CausalAttention.apply(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale)
    return out


@torch.compiler.assume_constant_result
def available(dtype: torch.dtype) -> bool:
    """Whether there is a C compiler, and a kernel for this dtype."""
    return dtype in (torch.float32, torch.bfloat16) and _compiled(dtype) is not None


@cache
def _compiled(dtype: torch.dtype) -> Any:
    found = library("attention.c", {"ACTIVATION": FORMATS[dtype]})
    message = "causal attention: no memory for the scores of a block of queries"
    return None if found is None else function(found.causal, POINTER, INT, memory_for=message)


def _run(tensors: tuple[Tensor, ...], log_sums: Tensor, scale: float, *, backward: bool) -> None:
    query, key, value = tensors[:3]
    (batch, heads, sequence, size), shared, wide = query.shape, key.shape[1], value.shape[3]
    of_keys, of_values, of_out = (shared, sequence, size), (shared, sequence, wide), (heads, sequence, wide)
    shapes = ((heads, sequence, size), of_keys, of_values, of_out, of_out, (heads, sequence, size), of_keys, of_values)
    for tensor, shape in zip(tensors, shapes, strict=False):
        if tensor.shape != (batch, *shape) or tensor.dtype is not query.dtype or heads % shared:
            raise ValueError(
                f"causal attention of {query.dtype} {tuple(query.shape)} with {shared} key heads: {tensor.dtype} "
                f"{tuple(tensor.shape)} stands where {(batch, *shape)} belongs"
            )
    described = [_Tensor(tensor.data_ptr(), *tensor.stride()[:3]) for tensor in tensors]
    described += [_Tensor()] * (len(TENSORS) - len(tensors))
    at = address(log_sums, torch.float32, batch, heads, sequence)
    threads = torch.get_num_threads()
    call = _Call(*described, at, scale, batch, heads, shared, sequence, size, wide, threads)
    _compiled(query.dtype)(ctypes.byref(call), backward)


def _like(x: Tensor, size: int | None = None) -> Tensor:
    """Return an empty tensor in the memory layout of projections: (B, S, A, D), transposed."""
    batch, heads, sequence, own = x.shape
    return x.new_empty(batch, sequence, heads, size or own).transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


# As operators of PyTorch's dispatcher, they appear in profiles, and `torch.compile` does not trace into them.
_library = torch.library.Library("ironlaw", "FRAGMENT")
_library.define("causal_attention(Tensor query, Tensor key, Tensor value, float scale) -> (Tensor, Tensor)")
_library.define(
    "causal_attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor out, Tensor log_sums, "
    "float scale) -> (Tensor, Tensor, Tensor)"
)


@torch.library.register_fake("ironlaw::causal_attention")
def _made(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return _like(query, value.shape[3]), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.register_fake("ironlaw::causal_attention_backward")
def _gradients_made(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *kept: Any) -> tuple[Tensor, ...]:
    return _like(query), _like(key), _like(value)


@torch.library.impl(_library, "causal_attention", "CPU")
def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, log_sums = _made(query, key, value, scale)
    _run((_rows(query), _rows(key), _rows(value), out), log_sums, scale, backward=False)
    return out, log_sums


@torch.library.impl(_library, "causal_attention_backward", "CPU")
def _derive(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sums: Tensor, scale: float
) -> tuple[Tensor, ...]:
    gradients = _gradients_made(gradient, query, key, value)
    _run((*map(_rows, (query, key, value, out, gradient)), *gradients), log_sums, scale, backward=True)
    return gradients


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        out, log_sums = torch.ops.ironlaw.causal_attention.default(query, key, value, scale)
        ctx.save_for_backward(query, key, value, out, log_sums)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of = torch.ops.ironlaw.causal_attention_backward.default(gradient, *ctx.saved_tensors, ctx.scale)
        return (*of, None)
