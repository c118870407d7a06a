"""A tensor in codes and scales. Blocks run along the last dimension, or over rows and columns of a matrix.

x of a block becomes  code = round(x / s),  s = scale of the block (times the tensor's, where the format has one), with

    floor    s = 2^(floor(log2 m) - e)     m: largest magnitude of the block, e: greatest exponent of the element format
    largest  s = m / largest of the element format
    signed   s = x_m / lowest integer      x_m: the number of largest magnitude, with its sign

rounded to the scale's own format before it divides. Of NVFP4 the tensor's scale is m_tensor / (448 x 6), so that block
scales fill E4M3. A block of zeros has a scale of which nothing depends. Sources: `catalog/formats.toml`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ironlaw.catalog.formats import NumberFormat, number_format
from ironlaw.errors import UserError
from ironlaw.numerics.packing import pack, unpack
from ironlaw.numerics.rounding import Rounding, decode, encode, generator_of, round_to


@dataclass(frozen=True)
class Quantized:
    """`codes` packed to bytes, (rows, bytes of a row); `scales` by block as encoded numbers; `tensor_scale` fp32.

    Of a pruned matrix `codes` are one row of the weights that stay, and `bitmap` says which those are, 8 to a byte.
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
        """From numbers (rows, codes of a row) that are rounded to the element format."""
        codes = pack(encode(values, format.element), format.element.bits)
        return cls(format, shape, codes, scales, tensor_scale, block)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By name, as they lie in a file."""
        return {name: tensor for name, tensor in vars(self).items() if isinstance(tensor, Tensor)}

    @property
    def bytes(self) -> int:
        """What it takes in memory or in a file."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns: a tensor's last dimension is a row's."""
        return _matrix_shape(self.shape)

    @property
    def row_codes(self) -> int:
        """Codes of a row, which ends with its last block."""
        width = self.block[1] if self.block else 1
        return -(-self.matrix_shape[1] // width) * width

    def dequantize(self) -> Tensor:
        """fp32, of the shape that was quantised."""
        values = self._decoded()
        if self.block is not None:
            values = _joined(_divided(values, self.block) * self.scale()[:, None, :, None])
        return self._cut(values)

    def values(self) -> Tensor:
        """What the codes mean, without their scales; fp32, of the tensor's shape."""
        return self._cut(self._decoded())

    def _decoded(self) -> Tensor:
        return decode(self.each_code(), self.format.element)

    def each_code(self) -> Tensor:
        """Unpacked (rows, codes of a row), of pruned weights the code of 0."""
        element, (rows, columns) = self.format.element, self.matrix_shape
        if self.bitmap is None:
            return unpack(self.codes, element.bits, self.row_codes)
        kept = unpack(self.bitmap, 1, rows * columns).view(rows, columns).bool()
        kept = torch.nn.functional.pad(kept, (0, self.row_codes - columns))
        codes = encode(torch.zeros(1), element).expand(kept.shape).clone()
        codes[kept] = unpack(self.codes, element.bits, int(kept.sum()))[0]
        return codes

    def dense(self) -> Quantized:
        """With the codes of all weights."""
        if self.bitmap is None:
            return self
        return replace(self, codes=pack(self.each_code(), self.format.element.bits), bitmap=None)

    def pruned(self, kept: Tensor) -> Quantized:
        """Without the codes of weights that are 0 by pruning. `kept`: bool (N, K), which stay."""
        codes, bits = self.each_code()[:, : kept.shape[1]][kept], self.format.element.bits
        return replace(self, codes=pack(codes[None], bits), bitmap=pack(kept.flatten().to(torch.uint8), 1))

    def _cut(self, matrix: Tensor) -> Tensor:
        rows, columns = self.matrix_shape
        return matrix[:rows, :columns].reshape(self.shape)

    def scale_of_each(self) -> Tensor:
        """What each number's code is multiplied by; fp32, of the tensor's shape."""
        assert self.block is not None
        return self._cut(self.scale().repeat_interleave(self.block[0], 0).repeat_interleave(self.block[1], 1))

    def scale(self) -> Tensor:
        """Of each block; fp32 (row blocks, column blocks)."""
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
    """`tensor` in the format `name`.

    rounding: "nearest" (ties to even) or "stochastic", repeatable by `seed`.
    block:    rows and columns that share a scale, 0 for all of them; the format's own unless given.
    UserError: no such format or rounding, no numbers, or a NaN in a format without one and without a scale that has.
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
    return Quantized.of(format, tensor.shape, _joined(values), scales, tensor_scale, size)


def with_scales(weight: Tensor, format: NumberFormat, scale: Tensor) -> Quantized:
    """A matrix (N, K) rounded to nearest with chosen scales, one a block, numbers of the scales' format."""
    matrix, kept = weight.detach().float(), number_format(format.scale)
    block = resolved_block(format, matrix, format.weight_block)
    assert block is not None
    values = round_to(_joined(in_blocks(matrix, block) / scale[:, None, :, None]), format.element)
    return Quantized.of(format, weight.shape, values, encode(scale, kept), None, block)


def rounded(
    matrix: Tensor,
    format: NumberFormat,
    *,
    generator: torch.Generator | None = None,
    block: tuple[int, int] | None = None,
    headroom: float = 1.0,
    largest: Tensor | None = None,
) -> Tensor:
    """`quantize(...).dequantize()` of an fp32 matrix without the codes between: what emulated products multiply.

    headroom: factor between scaling and rounding, undone after.
    largest:  (1, 1), what a tensor's one scale is made of in place of its own largest number; more saturates.
    """
    size = resolved_block(format, matrix, block)
    if size is None:
        return round_to(matrix, format.element, generator)
    values, scale, _, tensor_scale = _round_blocks(matrix, format, size, generator, headroom, largest)
    scale = scaled_up(scale, tensor_scale) / headroom
    return _joined(values * scale[:, None, :, None])[: matrix.shape[0], : matrix.shape[1]]


def resolved_block(
    format: NumberFormat, matrix: Tensor, block: tuple[int, int] | None = None
) -> tuple[int, int] | None:
    """Rows and columns of a block of this matrix; None where the format has no scales."""
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
    """Numbers (row blocks, rows, column blocks, columns) in units of their scales, and those as `block_scales` does."""
    blocks = in_blocks(matrix, block)
    scale, scale_codes, tensor_scale = block_scales(blocks, format, largest=largest)
    scaled = _scaled(blocks, scale, tensor_scale) * headroom
    if bool(scale.isnan().any()):  # codes of a block without numbers say nothing
        scaled = torch.where(scale.isnan()[:, None, :, None], 0.0, scaled)
    return round_to(scaled, format.element, generator), scale, scale_codes, tensor_scale


def block_scales(
    blocks: Tensor, format: NumberFormat, tensor_scale: Tensor | None = None, largest: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of (row blocks, rows, column blocks, columns): the scales without the tensor's (fp32), their codes, the tensor's.

    `tensor_scale` is given where the blocks are not all of the tensor, `largest` where it is not theirs.

    A block that holds NaN or an infinity has the scale NaN.
    """
    element, kept = format.element, number_format(format.scale)
    largest = blocks.abs().amax((1, 3)) if largest is None else largest
    finite = largest.isfinite()
    if format.rule == "floor":
        exponent = torch.frexp(largest).exponent - 1 - element.greatest_exponent
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
        # The scale stays a normal number: a subnormal one would have lost bits of its own.
        wanted = (wanted / tensor_scale).clamp(2.0**kept.least_exponent, kept.largest)
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
    """What a code is multiplied by."""
    return scale if tensor_scale is None else scale * tensor_scale


def _scaled(blocks: Tensor, scale: Tensor, tensor_scale: Tensor | None) -> Tensor:
    """Numbers over their scale. With two scales by the product of reciprocals, as NVIDIA's kernels do."""
    if tensor_scale is None:
        return blocks / scale[:, None, :, None]
    return blocks * ((1.0 / tensor_scale) / scale)[:, None, :, None]


def _matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Rows and columns of a tensor of any rank: the last dimension is a row's."""
    columns = shape[-1] if len(shape) else 1
    return shape.numel() // max(columns, 1), columns


def in_blocks(matrix: Tensor, block: tuple[int, int]) -> Tensor:
    """(row blocks, rows, column blocks, columns) of a matrix, filled up with zeros."""
    rows, columns = matrix.shape
    if rows % block[0] or columns % block[1]:
        matrix = torch.nn.functional.pad(matrix, (0, -columns % block[1], 0, -rows % block[0]))
    return _divided(matrix, block)


def _divided(matrix: Tensor, block: tuple[int, int]) -> Tensor:
    """(rows, columns) -> (row blocks, rows of one, column blocks, columns of one)."""
    return matrix.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))


def _joined(blocks: Tensor) -> Tensor:
    return blocks.flatten(2).flatten(0, 1)
