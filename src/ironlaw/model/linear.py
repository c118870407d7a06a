"""A linear layer that can multiply fp32 matrices with oneDNN where PyTorch's default, MKL, is slower.

PyTorch sends fp32 products on x86 to MKL, which keeps to AVX2 on processors that are not Intel's; oneDNN, which
PyTorch carries for reduced precision, uses AVX-512 everywhere: measured 1.5 to 2.3 times faster on an AMD EPYC, the
same numbers but for the order of the sums. `ironlaw measure` times both, and the trainer uses the faster.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ironlaw.kernels.transpose import transposed
from ironlaw.model.autocast import followed


def capability(device: torch.device) -> tuple[int, int] | None:
    """NVIDIA's compute capability, None of a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def local_part(tensor: Tensor) -> Tensor:
    """Of a distributed tensor, what this rank has of it."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def onednn_available() -> bool:
    """Whether this PyTorch has the operator that `onednn_product` calls: its own compiler calls it too."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., K), weight (N, K), bias (N): x weight^T + bias (..., N). fp32 on the CPU, any strides, no derivative."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def onednn_weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """gradient (M, N), x (M, K): gradient^T x (N, K). oneDNN is up to 1.5 times faster with the longer side in rows.

    Its left operand lies in rows: given a transposed one, PyTorch would copy it on one core.
    """
    if gradient.shape[1] <= x.shape[1]:
        return onednn_product(transposed(gradient), x.t())
    return transposed(onednn_product(transposed(x), gradient.t()))


class OneDnnLinear(torch.autograd.Function):
    """`F.linear` with its derivatives, every product by oneDNN."""

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
    """`F.linear` by oneDNN, for plain fp32 tensors: parts of distributed ones and traced ones keep PyTorch's operator.

    Autocast runs products in reduced precision, where PyTorch chooses oneDNN itself.
    """
    plain = type(weight) in (nn.Parameter, Tensor) and x.dtype is weight.dtype is torch.float32
    if plain and not torch.is_autocast_enabled("cpu"):
        return OneDnnLinear.apply(x, weight, bias)
    return nn.functional.linear(x, weight, bias)


class Linear(nn.Linear):
    """`nn.Linear`; after `use_onednn`, its fp32 products go to oneDNN."""

    onednn = False

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias) if self.onednn else super().forward(x)


def use_onednn(model: nn.Module, wanted: bool = True) -> None:
    for module in model.modules():
        if hasattr(type(module), "onednn"):
            module.onednn = wanted  # type: ignore[assignment]


Kind = TypeVar("Kind", bound=Linear)


def become(module: Linear, kind: type[Kind]) -> Kind:
    """The module itself as a layer of another kind; its tensors and their names stay."""
    module.__class__ = kind
    assert isinstance(module, kind)
    return module


class RoundedLinear(Linear):
    """A `Linear` whose product is a function of x, the weight and the layer, on rounded operands; its bias is added in
    the precision around it."""

    function: type[torch.autograd.Function]

    def product(self, x: Tensor) -> Tensor:
        found: Tensor = self.function.apply(x, self.weight, self)
        return found

    def forward(self, x: Tensor) -> Tensor:
        product = self.product(followed(x))
        return product if self.bias is None else product + self.bias.to(product.dtype)
