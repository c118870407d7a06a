"""A linear layer that can multiply fp32 matrices with oneDNN where PyTorch's default, MKL, is slower.

PyTorch computes fp32 products on x86 with MKL, which is limited to AVX2 on processors other than Intel's. oneDNN, which
PyTorch includes for reduced precision, uses AVX-512 everywhere: measured 1.5 to 2.3 times faster on an AMD EPYC, with
results equal up to the order of sums. `ironlaw measure` times both, and the trainer uses the faster.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ironlaw.kernels.transpose import transposed


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return NVIDIA's compute capability, None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a distributed tensor; other tensors are returned unchanged."""
    any_tensor: Any = tensor
    return any_tensor.to_local() if hasattr(type(tensor), "to_local") else tensor  # compilers know the type


def onednn_available() -> bool:
    """Whether this PyTorch has the operator used by `onednn_product`, which its own compiler uses too."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias (..., N) for x (..., K), weight (N, K), bias (N): fp32, CPU, any strides, no grad."""
    if torch.compiler.is_compiling():
        return torch.ops.ironlaw.onednn_product.default(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


# Whole in a trace: PyTorch's compiler replaces its operator by others, for weights that are constants.
_library = torch.library.Library("ironlaw", "FRAGMENT")
_library.define("onednn_product(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("onednn_product", onednn_product, "CPU")


@torch.library.register_fake("ironlaw::onednn_product")
def _made(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def onednn_weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """Return gradient^T x (N, K) for gradient (M, N) and x (M, K).

    oneDNN is up to 1.5 times faster with the longer side in rows. Its left operand is made contiguous first: given a
    transposed one, PyTorch would copy it on one core."""
    if gradient.shape[1] <= x.shape[1]:
        return onednn_product(transposed(gradient), x.t())
    return transposed(onednn_product(transposed(x), gradient.t()))


class OneDnnLinear(torch.autograd.Function):
    """`F.linear` with forward and backward products by oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        return onednn_product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = onednn_product(gradient, weight.t())
        if ctx.needs_input_grad[1]:
            assert x is not None
            of_weight = onednn_weight_gradient(rows, x.flatten(0, -2))
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_x, of_weight, of_bias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` by oneDNN for plain fp32 tensors; distributed and traced tensors use PyTorch's operator.

    Under autocast, products run in reduced precision, for which PyTorch itself chooses oneDNN.
    """
    plain = type(weight) in (nn.Parameter, Tensor) and x.dtype is weight.dtype is torch.float32
    if plain and not torch.is_autocast_enabled("cpu"):
        return OneDnnLinear.apply(x, weight, bias)
    return nn.functional.linear(x, weight, bias)


class Linear(nn.Linear):
    """`nn.Linear` whose fp32 products are computed by oneDNN after `use_onednn`."""

    onednn = False

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias) if self.onednn else super().forward(x)


def use_onednn(model: nn.Module, wanted: bool = True) -> None:
    for module in model.modules():
        if hasattr(type(module), "onednn"):
            module.onednn = wanted  # type: ignore[assignment]


Kind = TypeVar("Kind", bound=nn.Module)


def become(module: nn.Module, kind: type[Kind]) -> Kind:
    """Change the class of a layer in place and return it; its tensors and their names do not change."""
    module.__class__ = kind
    assert isinstance(module, kind)
    return module


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return autocast's dtype on the device of `x`; None if it is off or unsupported on the device (meta)."""
    device = x.device.type
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


def cast_like_autocast(x: Tensor) -> Tensor:
    """Cast `x` to `autocast_dtype(x)`, if any."""
    dtype = autocast_dtype(x)
    return x if dtype is None else x.to(dtype)


class RoundedLinear(Linear):
    """A `Linear` whose product is an autograd function of x, weight and layer, with rounded operands. The bias is added
    in the product's output precision."""

    function: type[torch.autograd.Function]

    def product(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.weight, self)

    def forward(self, x: Tensor) -> Tensor:
        product = self.product(cast_like_autocast(x))
        return product if self.bias is None else product + self.bias.to(product.dtype)
