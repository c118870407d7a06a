"""Inference-only linear layers with quantised weights, on a CPU; the kernel is chosen by format and processor.

    int8, a scale per row  Ironlaw's integer products (`kernels/product.c`), with inputs in 8 bits too and a scale per
                           token; else PyTorch's kernel, with inputs in bf16
    int4, a scale per 32   likewise

Without a kernel for a format, the weights are dequantised at loading.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ironlaw.kernels.library import INT4
from ironlaw.kernels.product import GROUP, Weight, multiplies
from ironlaw.model.packed import NativeLinear, ReadOnlyLinear
from ironlaw.model.transformer import Transformer
from ironlaw.numerics.quantized import Quantized, quantize
from ironlaw.numerics.rounding import unpack

KERNEL_FORMATS = ("int8", "int4")
OUTPUT_FORMAT = {"int4": "int8"}  # format of the output layer, the most sensitive matrix, if it differs


class PyTorchLinear(ReadOnlyLinear):
    """A linear layer from x (..., K) to (..., N), in the type of x, by PyTorch's int8 and int4 kernels, which widen the
    weights in registers."""

    weight: Tensor
    scales: Tensor

    def __init__(self, held: Quantized, bias: Tensor | None) -> None:
        super().__init__()
        assert held.block is not None and held.scales is not None
        self.bias = None if bias is None else bias.detach()
        self.group = held.block[1]
        self.is_int4 = held.format.name == "int4"
        weight, scales = held.codes.view(torch.int8), held.scales.flatten()
        if self.is_int4:
            raised = ((unpack(held.codes, 4, held.row_codes) + 8) & 15).int()  # 0 .. 15; the kernel subtracts 8
            weight = torch._convert_weight_to_int4pack_for_cpu(raised, 1)
            scales = held.scales.float().t()
            scales = torch.stack((scales, torch.zeros_like(scales)), -1)  # (groups, N, (scale, zero))
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales.to(torch.bfloat16).contiguous())
        self.bytes = self.weight.nbytes + self.scales.nbytes

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        if self.is_int4:
            product = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.weight, self.group, self.scales)
        else:
            product = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scales)
        product = product.to(x.dtype).view(*x.shape[:-1], -1)
        return product if self.bias is None else product + self.bias.to(x.dtype)


def quantized_layer(
    held: Quantized, bias: Tensor | None, device: torch.device | str = "cpu"
) -> tuple[str, ReadOnlyLinear] | None:
    """Returns the name of the first kernel for these weights on this device, and a layer that calls it, or None."""
    name, (outputs, inputs), scales = held.format.name, held.matrix_shape, held.scales
    if torch.device(device).type != "cpu" or held.block is None or held.block[0] != 1 or scales is None:
        return None
    if name == "int8" and held.block[1] == inputs:
        if multiplies(torch.int8, inputs):
            return "own int8", NativeLinear(Weight(held.codes.view(torch.int8), bias, scales.flatten()))
        return "PyTorch int8", PyTorchLinear(held, bias)
    if name == "int4":
        if held.block[1] == GROUP and multiplies(INT4, inputs):
            return "own int4", NativeLinear(Weight(held.values().to(torch.int8), bias, scales))
        if outputs % 16 == 0 and inputs % held.block[1] == 0:
            return "PyTorch int4", PyTorchLinear(held, bias)
    return None


@torch.no_grad()
def quantize_layers(model: Transformer, held: Mapping[str, Quantized], format: str | None = None) -> dict[str, int]:
    """Replace linear layers of a model in place by quantised ones, with the weights in `held` under their names.

    format: for layers missing in `held`, also the output layer; None: these stay unchanged.
    Returns the number of layers by kernel; "" counts quantised weights without a kernel, whose layers stay wide.
    """
    counts: Counter[str] = Counter()
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, nn.Linear) or name == "latent_up":  # the weight of latent_up is read in parts
                continue
            weight = held.get(f"{path}.{name}.weight".lstrip("."))
            if weight is None and format is not None:
                weight = quantize(child.weight, OUTPUT_FORMAT.get(format, format) if child is model.head else format)
            if weight is None:
                continue
            kernel, layer = quantized_layer(weight.dense(), child.bias, child.weight.device) or ("", child)
            counts[kernel] += 1
            setattr(parent, name, layer)
    return dict(counts)
