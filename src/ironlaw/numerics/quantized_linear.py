"""Linear layers that are only read, whose weights stay in codes: the kernel is chosen by format and device.

    int8, a scale a row    our own integer products (`kernels/product.c`), or fbgemm's; inputs in 8 bits too, with a
                           scale a token
    int4, a scale per 32   our own as well, or PyTorch's kernel that widens the weights in registers: inputs and
                           scales in bf16

Where no kernel has a format, `kernel_of` gives None: the layer is dequantised when it is read, and multiplies as
it did. With many rows products are bound by arithmetic, not by reading: PyTorch's int4 is widened to bf16 for all rows.
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

OUTPUT_FORMAT = {"int4": "int8"}  # of the output layer, the most sensitive matrix, where it differs from the others'
ROWS_WIDENED = 32  # from here on: 16 rows took the kernel 1.4 to 1.6 times as long as bf16's products (AMD EPYC)
TILE = 64  # outputs whose codes the int4 kernel keeps together on AVX-512


class QuantizedLinear(ReadOnlyLinear):
    """x (..., K) to (..., N), in the type of x."""

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
        # Two inputs more, of weight 0, hold a token's largest magnitude and its negative: the range that fbgemm gives
        # the 8 bits is then a token's own and symmetric, and no answer depends on the tokens that come beside it.
        codes = nn.functional.pad(held.codes.view(torch.int8), (0, 2))
        zeros = torch.zeros(len(codes), dtype=torch.int64)
        with warnings.catch_warnings():  # quantised tensors are to leave PyTorch; `WideInt8Linear` does without
            warnings.simplefilter("ignore")
            weight = torch._make_per_channel_quantized_tensor(codes, held.scales.flatten().double(), zeros, 0)
            self.packed = torch.ops.quantized.linear_prepack(weight, None)
        self.bytes = codes.numel() + held.scales.numel() * held.scales.element_size()
        # Without VNNI two products of 8 bits are added up in 16, which ends at half of the range.
        self.halved = not torch.cpu._is_vnni_supported()
        self.ends = torch.tensor([[1.0, -1.0]])

    def product(self, rows: Tensor) -> Tensor:
        rows = rows.float()
        largest = torch.linalg.vector_norm(rows, torch.inf, dim=-1, keepdim=True).clamp_(min=1e-30)
        ranged = torch.cat((rows / largest, self.ends.expand(len(rows), 2)), 1)
        product: Tensor = torch.ops.quantized.linear_dynamic(ranged, self.packed, self.halved)
        return product.mul_(largest)


class WideInt8Linear(QuantizedLinear):
    """The same weights, inputs in bf16: for a PyTorch without fbgemm."""

    def __init__(self, held: Quantized, bias: Tensor | None) -> None:
        super().__init__(bias)
        assert held.scales is not None
        self.codes, self.scales = held.codes.view(torch.int8), held.scales.flatten().to(torch.bfloat16)
        self.bytes = self.codes.numel() + 2 * self.scales.numel()

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
        raised = ((codes + 8) & 15).int()  # two's complement to 0 .. 15, of which the kernel subtracts 8
        self.register_buffer("packed", torch._convert_weight_to_int4pack_for_cpu(raised, 1))
        scales = held.scales.float().t()
        pairs = torch.stack((scales, torch.zeros_like(scales)), -1)  # (groups, N, scale and what is added)
        self.register_buffer("scales", pairs.to(torch.bfloat16).contiguous())
        self.bytes = self.packed.numel() + 2 * self.scales.numel()
        self.tiled = len(raised) % TILE == 0 and torch.equal(self._raised().int(), raised.t())

    def _raised(self) -> Tensor:
        """(K, N) from the kernel's layout with AVX-512: of 64 outputs the lower 32 in low bits, input by input."""
        tiles = self.packed.view(-1, self.packed.shape[1] * 2, TILE // 2)
        return torch.cat((tiles & 15, tiles >> 4), -1).transpose(0, 1).reshape(tiles.shape[1], -1)

    def _widened(self) -> Tensor:
        """The weights in bf16, transposed: (K, N)."""
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
    """A name, the format that it multiplies, which weights of that it takes, and the layer that calls it."""

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
    """None where no kernel multiplies this format here."""
    known = [kernel for kernel in KERNELS if kernel.format == held.format.name and device.type == "cpu"]
    return next((kernel for kernel in known if kernel.takes(held)), None)


@torch.no_grad()
def quantize_layers(model: Transformer, held: Mapping[str, Quantized], format: str | None = None) -> dict[str, int]:
    """Replace linear layers of a model in place, by the codes that `held` has under their names.

    format: of the layers that `held` has not, the output layer too; None: they stay as they are.
    Returns how many layers have which kernel; "" counts those that have a format and no kernel, and stay wide.
    """
    found: Counter[str] = Counter()
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, nn.Linear) or name == "latent_up":  # whose weight is read by parts
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
