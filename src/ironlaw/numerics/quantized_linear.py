"""Inference-only linear layers with quantised weights; the kernel is chosen by format and device.

    int8, a scale per row  Ironlaw's integer products (`kernels/product.c`), or fbgemm's; inputs in 8 bits too, with
                           a scale per token
    int4, a scale per 32   Ironlaw's as well, or PyTorch's kernel that widens the weights in registers: inputs and
                           scales in bf16

If no kernel supports a format, `kernel_of` returns None: the weights are dequantised at loading. With many rows,
products are bound by arithmetic, not by reading: PyTorch's int4 weights are then widened to bf16 once for all rows.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ironlaw.kernels.library import INT4
from ironlaw.kernels.product import GROUP, Weight, multiplies
from ironlaw.model.packed import NativeLinear, ReadOnlyLinear
from ironlaw.model.transformer import Transformer
from ironlaw.numerics.packing import unpack
from ironlaw.numerics.quantized import Quantized, quantize

OUTPUT_FORMAT = {"int4": "int8"}  # format of the output layer, the most sensitive matrix, if it differs
ROWS_WIDENED = 32  # least rows for widening: with 16 the kernel took 1.4 to 1.6 times as long as bf16 (AMD EPYC)
TILE = 64  # outputs whose codes the int4 kernel stores together on AVX-512


class QuantizedLinear(ReadOnlyLinear):
    """A linear layer from x (..., K) to (..., N), in the type of x."""

    def __init__(self, bias: Tensor | None) -> None:
        super().__init__()
        self.bias = None if bias is None else bias.detach()

    def product(self, rows: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        product = self.product(x.reshape(-1, x.shape[-1])).to(x.dtype).view(*x.shape[:-1], -1)
        return product if self.bias is None else product + self.bias.to(x.dtype)


class Int8Linear(QuantizedLinear):
    def __init__(self, held: Quantized, bias: Tensor | None) -> None:
        super().__init__(bias)
        assert held.scales is not None
        torch.backends.quantized.engine = "fbgemm"
        # Rows are divided by their largest magnitude, and two inputs of weight 0 hold 1 and -1: fbgemm's 8-bit range
        # is then symmetric and the same for each token, so that no result depends on other tokens of the batch.
        codes = nn.functional.pad(held.codes.view(torch.int8), (0, 2))
        zeros = torch.zeros(len(codes), dtype=torch.int64)
        with warnings.catch_warnings():  # PyTorch deprecates quantised tensors; `WideInt8Linear` does not need them
            warnings.simplefilter("ignore")
            weight = torch._make_per_channel_quantized_tensor(codes, held.scales.flatten().double(), zeros, 0)
            self.packed = torch.ops.quantized.linear_prepack(weight, None)
        self.bytes = codes.nbytes + held.scales.nbytes
        # Without VNNI, two 8-bit products are added in 16 bits, which suffices for half of the range.
        self.halved = not torch.cpu._is_vnni_supported()
        self.ends = torch.tensor([[1.0, -1.0]])

    def product(self, rows: Tensor) -> Tensor:
        rows = rows.float()
        largest = torch.linalg.vector_norm(rows, torch.inf, dim=-1, keepdim=True).clamp_(min=1e-30)
        ranged = torch.cat((rows / largest, self.ends.expand(len(rows), 2)), 1)
        product: Tensor = torch.ops.quantized.linear_dynamic(ranged, self.packed, self.halved)
        return product.mul_(largest)


class WideInt8Linear(QuantizedLinear):
    """An int8 layer with bf16 inputs, for a PyTorch without fbgemm."""

    def __init__(self, held: Quantized, bias: Tensor | None) -> None:
        super().__init__(bias)
        assert held.scales is not None
        self.codes, self.scales = held.codes.view(torch.int8), held.scales.flatten().to(torch.bfloat16)
        self.bytes = self.codes.nbytes + self.scales.nbytes

    def product(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.aten._weight_int8pack_mm(rows.to(torch.bfloat16), self.codes, self.scales)
        return product


class Int4Linear(QuantizedLinear):
    packed: Tensor
    scales: Tensor

    def __init__(self, held: Quantized, bias: Tensor | None) -> None:
        super().__init__(bias)
        assert held.block is not None and held.scales is not None
        self.group = held.block[1]
        codes = unpack(held.codes, 4, held.row_codes)
        raised = ((codes + 8) & 15).int()  # two's complement to 0 .. 15; the kernel subtracts 8
        self.register_buffer("packed", torch._convert_weight_to_int4pack_for_cpu(raised, 1))
        scales = held.scales.float().t()
        pairs = torch.stack((scales, torch.zeros_like(scales)), -1)  # (groups, N, (scale, zero))
        self.register_buffer("scales", pairs.to(torch.bfloat16).contiguous())
        self.bytes = self.packed.numel() + 2 * self.scales.numel()
        self.tiled = len(raised) % TILE == 0 and torch.equal(self._raised().int(), raised.t())

    def _raised(self) -> Tensor:
        """Returns (K, N) from the kernel's AVX-512 layout: per input, the first 32 of 64 outputs in the low bits."""
        tiles = self.packed.view(-1, self.packed.shape[1] * 2, TILE // 2)
        return torch.cat((tiles & 15, tiles >> 4), -1).transpose(0, 1).reshape(tiles.shape[1], -1)

    def _widened(self) -> Tensor:
        """Returns the weights in bf16, transposed: (K, N)."""
        groups = (self._raised().view(torch.int8) - 8).to(torch.bfloat16).unflatten(0, (-1, self.group))
        return (groups * self.scales[:, None, :, 0]).flatten(0, 1)

    def product(self, rows: Tensor) -> Tensor:
        rows = rows.to(torch.bfloat16)
        if len(rows) >= ROWS_WIDENED and self.tiled:
            return rows @ self._widened()
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.packed, self.group, self.scales)
        return product


def _native(held: Quantized, bias: Tensor | None) -> NativeLinear:
    assert held.scales is not None
    if held.format.name == "int8":
        return NativeLinear(Weight(held.codes.view(torch.int8), bias, held.scales.flatten()))
    return NativeLinear(Weight(held.values().to(torch.int8), bias, held.scales))


class QuantizedKernel(NamedTuple):
    """A kernel: its name, its format, a test for the weights that it supports, and the layer that calls it."""

    name: str
    format: str
    takes: Callable[[Quantized], bool]
    layer: Callable[[Quantized, Tensor | None], ReadOnlyLinear]


def _is_rowwise(held: Quantized) -> bool:
    return held.block == (1, held.matrix_shape[1])


def _has_fbgemm(held: Quantized) -> bool:
    has = "fbgemm" in torch.backends.quantized.supported_engines and hasattr(torch.cpu, "_is_vnni_supported")
    return _is_rowwise(held) and has


def _fills_tiles(held: Quantized) -> bool:
    (outputs, inputs), block = held.matrix_shape, held.block
    return block is not None and block[0] == 1 and outputs % 16 == 0 and inputs % block[1] == 0


def _has_own(held: Quantized) -> bool:
    if held.format.name == "int8":
        return _is_rowwise(held) and multiplies(torch.int8, held.matrix_shape[1])
    return held.block == (1, GROUP) and multiplies(INT4, held.matrix_shape[1])


KERNELS = (
    QuantizedKernel("own int8", "int8", _has_own, _native),
    QuantizedKernel("fbgemm int8", "int8", _has_fbgemm, Int8Linear),
    QuantizedKernel("PyTorch int8", "int8", _is_rowwise, WideInt8Linear),
    QuantizedKernel("own int4", "int4", _has_own, _native),
    QuantizedKernel("PyTorch int4", "int4", _fills_tiles, Int4Linear),
)


def kernel_of(held: Quantized, device: torch.device) -> QuantizedKernel | None:
    """Returns the first kernel for these weights on this device, or None."""
    known = [kernel for kernel in KERNELS if kernel.format == held.format.name and device.type == "cpu"]
    return next((kernel for kernel in known if kernel.takes(held)), None)


@torch.no_grad()
def quantize_layers(model: Transformer, held: Mapping[str, Quantized], format: str | None = None) -> dict[str, int]:
    """Replace linear layers of a model in place by quantised ones, with the weights in `held` under their names.

    format: for layers missing in `held`, also the output layer; None: these stay unchanged.
    Returns the number of layers by kernel; "" counts quantised weights without a kernel, whose layers stay wide.
    """
    found: Counter[str] = Counter()
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, nn.Linear) or name == "latent_up":  # the weight of latent_up is read in parts
                continue
            weight = held.get(f"{path}.{name}.weight".lstrip("."))
            if weight is None and format is not None:
                chosen = OUTPUT_FORMAT.get(format, format) if child is model.head else format
                weight = quantize(child.weight, chosen)
            if weight is None:
                continue
            dense = weight.dense()
            kernel = kernel_of(dense, child.weight.device)
            found["" if kernel is None else kernel.name] += 1
            if kernel is not None:
                setattr(parent, name, kernel.layer(dense, child.bias))
    return dict(found)
