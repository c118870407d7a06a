"""Quantised tensors: codes and scales. Blocks run along the last dimension, or over rows and columns of a matrix.

In a block, x becomes  code = round(x / s),  s = scale of the block (times the tensor's, if the format has one), with

    floor    s = 2^(floor(log2 m) - e)     m: largest magnitude of the block, e: greatest exponent of the element format
    largest  s = m / largest of the element format
    signed   s = x_m / lowest integer      x_m: the number of largest magnitude, with its sign

s is rounded to the scale's own format before the division. For NVFP4, the tensor's scale is m_tensor / (448 x 6), so
that block scales fill E4M3. The scale of a block of zeros is arbitrary. Sources: `catalog/formats.toml`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ironlaw.catalog.formats import NumberFormat, number_format
from ironlaw.errors import UserError
from ironlaw.numerics.rounding import Rounding, decode, encode, generator_of, pack, round_to, unpack


@dataclass(frozen=True)
class Quantized:
    """`codes` packed to bytes (rows, bytes of a row), encoded `scales` by block, `tensor_scale` in fp32.

    For a pruned matrix, `codes` is one row with the kept weights, and `bitmap` marks them, 8 to a byte.
    """

    format: NumberFormat
    shape: torch.Size
    codes: Tensor
    scales: Tensor | None = None
    tensor_scale: Tensor | None = None
    block: tuple[int, int] | None = None  # rows and columns, resolved to this shape
    bitmap: Tensor | None = None

    @classmethod
    def of(
        cls, format: NumberFormat, shape: torch.Size, values: Tensor, scales: Tensor | None = None,
        tensor_scale: Tensor | None = None, block: tuple[int, int] | None = None,
    ) -> Quantized:  # fmt: skip
        """Encodes and packs `values` (rows, codes of a row), which are already rounded to the element format. Where
        they are padded to whole blocks, only what `row_codes` says is kept."""
        made = cls(format, shape, values, scales, tensor_scale, block)
        kept = values[: made.matrix_shape[0], : made.row_codes]
        return replace(made, codes=pack(encode(kept, format.element), format.element.bits))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors by name, as stored in a file."""
        return {name: tensor for name, tensor in vars(self).items() if isinstance(tensor, Tensor)}

    @property
    def bytes(self) -> int:
        """Size in memory or in a file."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns; the last dimension of the tensor gives the columns."""
        return _matrix_shape(self.shape)

    @property
    def row_codes(self) -> int:
        """Number of codes in a row: padded to whole blocks if these lie along rows, as products by blocks read them."""
        width = self.block[1] if self.block and self.block[0] == 1 else 1
        return -(-self.matrix_shape[1] // width) * width

    def dequantize(self) -> Tensor:
        """Returns the numbers in fp32, in the original shape."""
        values = decode(self.each_code(), self.format.element)
        if self.block is not None:
            values = joined(in_blocks(values, self.block) * self.scale()[:, None, :, None])
        return self._cut(values)

    def values(self) -> Tensor:
        """Returns the decoded codes without scales; fp32, in the tensor's shape."""
        return self._cut(decode(self.each_code(), self.format.element))

    def each_code(self) -> Tensor:
        """Returns the unpacked codes (rows, codes of a row); pruned weights have the code of 0."""
        element, (rows, columns) = self.format.element, self.matrix_shape
        if self.bitmap is None:
            return unpack(self.codes, element.bits, self.row_codes)
        kept = unpack(self.bitmap, 1, rows * columns).view(rows, columns).bool()
        kept = torch.nn.functional.pad(kept, (0, self.row_codes - columns))
        codes = encode(torch.zeros(1), element).expand(kept.shape).clone()
        codes[kept] = unpack(self.codes, element.bits, int(kept.sum()))[0]
        return codes

    def dense(self) -> Quantized:
        """Returns the tensor with the codes of all weights, pruned ones included."""
        if self.bitmap is None:
            return self
        return replace(self, codes=pack(self.each_code(), self.format.element.bits), bitmap=None)

    def pruned(self, kept: Tensor) -> Quantized:
        """Returns the tensor without the codes of pruned weights. `kept`: mask of the others, bool (N, K)."""
        codes, bits = self.each_code()[:, : kept.shape[1]][kept], self.format.element.bits
        return replace(self, codes=pack(codes[None], bits), bitmap=pack(kept.flatten().to(torch.uint8), 1))

    def _cut(self, matrix: Tensor) -> Tensor:
        rows, columns = self.matrix_shape
        return matrix[:rows, :columns].reshape(self.shape)

    def scale_of_each(self) -> Tensor:
        """Returns the scale of each number; fp32, in the tensor's shape."""
        assert self.block is not None
        return self._cut(self.scale().repeat_interleave(self.block[0], 0).repeat_interleave(self.block[1], 1))

    def scale(self) -> Tensor:
        """Returns the scale of each block; fp32 (row blocks, column blocks)."""
        assert self.scales is not None
        return scaled_up(decode(self.scales, number_format(self.format.scale)), self.tensor_scale)


def quantize(
    tensor: Tensor,
    name: str,
    *,
    rounding: Rounding = "nearest",
    seed: int = 0,
    block: tuple[int, int] | None = None,
) -> Quantized:
    """Quantises `tensor` to the format `name`.

    rounding: "nearest" (ties to even) or "stochastic", reproducible by `seed`.
    block:    rows and columns that share a scale, 0 for all; default: the format's block.
    UserError: unknown format or rounding, empty or integer tensor, or a NaN that neither format nor scale represents.
    """
    format = number_format(name)
    if rounding not in ("nearest", "stochastic"):
        raise UserError(f"unknown rounding {rounding!r}: nearest or stochastic")
    if not tensor.is_floating_point() or not tensor.numel():
        what = "nothing" if not tensor.numel() else str(tensor.dtype).removeprefix("torch.")
        raise UserError(f"a tensor of {what} cannot be quantised: give floating-point numbers")
    generator = generator_of(seed, tensor.device) if rounding == "stochastic" else None
    matrix = tensor.detach().float().reshape(_matrix_shape(tensor.shape))
    size = resolved_block(format, matrix, block)
    if size is None:
        return Quantized.of(format, tensor.shape, round_to(matrix, format.element, generator))
    values, _, scales, tensor_scale = _round_blocks(matrix, format, size, generator)
    return Quantized.of(format, tensor.shape, joined(values), scales, tensor_scale, size)


def rounded(
    matrix: Tensor,
    format: NumberFormat,
    *,
    generator: torch.Generator | None = None,
    block: tuple[int, int] | None = None,
    headroom: float = 1.0,
    largest: Tensor | None = None,
) -> Tensor:
    """Returns `quantize(...).dequantize()` of an fp32 matrix without forming codes, for emulated products.

    headroom: factor applied after scaling and undone after rounding.
    largest:  (1, 1), magnitude that sets a tensor's single scale instead of its own; larger numbers saturate.
    """
    size = resolved_block(format, matrix, block)
    if size is None:
        return round_to(matrix, format.element, generator)
    values, scale, _, tensor_scale = _round_blocks(matrix, format, size, generator, headroom, largest)
    scale = scaled_up(scale, tensor_scale) / headroom
    return joined(values * scale[:, None, :, None])[: matrix.shape[0], : matrix.shape[1]]


def resolved_block(
    format: NumberFormat, matrix: Tensor, block: tuple[int, int] | None = None
) -> tuple[int, int] | None:
    """Returns the rows and columns of a block of this matrix; None if the format has no scales."""
    wanted = block or format.block
    return wanted and (wanted[0] or matrix.shape[0], wanted[1] or matrix.shape[1])


def _round_blocks(
    matrix: Tensor,
    format: NumberFormat,
    block: tuple[int, int],
    generator: torch.Generator | None,
    headroom: float = 1.0,
    largest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns rounded numbers / scale (row blocks, rows, column blocks, columns), and scales as in `block_scales`."""
    blocks = in_blocks(matrix, block)
    scale, scale_codes, tensor_scale = block_scales(blocks, format, largest=largest)
    if tensor_scale is None:
        scaled = blocks / scale[:, None, :, None]
    else:  # a product of reciprocals, as in NVIDIA's kernels
        scaled = blocks * ((1.0 / tensor_scale) / scale)[:, None, :, None]
    scaled = scaled * headroom
    if bool(scale.isnan().any()):  # codes of a block with a NaN scale have no meaning
        scaled = torch.where(scale.isnan()[:, None, :, None], 0.0, scaled)
    return round_to(scaled, format.element, generator), scale, scale_codes, tensor_scale


def block_scales(
    blocks: Tensor, format: NumberFormat, tensor_scale: Tensor | None = None, largest: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns fp32 scales of `blocks` (row blocks, rows, column blocks, columns) without the tensor's scale, their
    codes, and the tensor's scale. The scale of a block that holds NaN or an infinity is NaN.

    `tensor_scale` is given if the blocks are only part of a tensor; `largest` replaces the blocks' own magnitudes.
    """
    element, kept = format.element, number_format(format.scale)
    largest = blocks.abs().amax((1, 3)) if largest is None else largest
    finite = largest.isfinite()
    if format.rule == "floor":
        exponent = torch.frexp(largest).exponent - 1 - element.max_exponent
        exponent = torch.where(largest == 0, -kept.bias, exponent).clamp(-kept.bias, kept.bias)
        codes = torch.where(finite, exponent + kept.bias, 255).to(torch.uint8)
        return decode(codes, kept), codes, None
    if format.rule == "signed":
        assert element.integers is not None
        low = blocks.amin((1, 3))
        extreme = torch.where(-low >= blocks.amax((1, 3)), low, largest)
        wanted = extreme / element.integers[0]
    else:
        wanted = largest / element.largest
    if format.tensor_scale:
        if tensor_scale is None:
            top = torch.where(finite, largest, 0.0).amax()
            tensor_scale = torch.where(top > 0, top / (kept.largest * element.largest), 1.0)
        # Keep the scale a normal number: a subnormal one would lose bits.
        wanted = (wanted / tensor_scale).clamp(2.0**kept.min_exponent, kept.largest)
    wanted = torch.where(finite, torch.where(largest == 0, 1.0, wanted), torch.nan)
    if bool((wanted.abs() > kept.largest).any()):
        raise UserError(
            f"{format.name} keeps its scales in {format.scale}, which ends at {kept.largest:g}: numbers up to "
            f"{float(largest[finite].amax()):.3g} are too large; use mxfp4 or int8"
        )
    rounded = round_to(wanted, kept)
    rounded = torch.where(rounded == 0, torch.copysign(torch.tensor(kept.smallest), wanted), rounded)
    codes = encode(rounded, kept)
    return rounded, codes, tensor_scale


def scaled_up(scale: Tensor, tensor_scale: Tensor | None) -> Tensor:
    """Returns the factor of the codes: the block scale times the tensor's scale."""
    return scale if tensor_scale is None else scale * tensor_scale


def _matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Returns rows and columns of a tensor of any rank; the last dimension gives the columns."""
    columns = shape[-1] if len(shape) else 1
    return shape.numel() // max(columns, 1), columns


def in_blocks(matrix: Tensor, block: tuple[int, int]) -> Tensor:
    """Divides a matrix, padded with zeros, into blocks (row blocks, rows, column blocks, columns)."""
    rows, columns = matrix.shape
    if rows % block[0] or columns % block[1]:
        matrix = torch.nn.functional.pad(matrix, (0, -columns % block[1], 0, -rows % block[0]))
    return matrix.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))


def joined(blocks: Tensor) -> Tensor:
    """Returns the padded matrix that `in_blocks` divided."""
    return blocks.flatten(2).flatten(0, 1)
