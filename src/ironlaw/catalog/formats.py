"""Number formats from `catalog/formats.toml`, in one table for planner, trainer, compression and report.

mxfp4 = number_format("mxfp4")
mxfp4.bits_per_element     # 4.25: 4 and an 8-bit scale per 32
mxfp4.element.largest      # 6.0
number_format("mxfp8").peak, number_format("mxfp8").rate_of
read_target("int4,2:4").format.name    # "int4"; the argument of `ironlaw compress --to` and `train.qat`

Also the formats in which served models store their weights (`stored_formats.toml`), and the formats of the three
products of a linear layer in a training recipe (`precision_recipes.toml`):

stored_format("q4_k_m").bits                 # 4.89: the mean over a whole file of Llama 3.1 8B
precision_recipe("nvfp4").gradient.name      # "nvfp4"
precision_recipe("bf16")                     # None: products of the tensors as they are
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

from ironlaw.catalog.accelerators import Accelerator, accelerator, accelerator_names
from ironlaw.catalog.figures import lookup, read_toml, source
from ironlaw.errors import UserError, did_you_mean, shortened


@dataclass(frozen=True)
class NumberFormat:
    """A number format. Fields `bits` to `special` describe one element, `block` to `tensor_scale` a block."""

    name: str
    title: str
    source: str  # key of `sources.toml`
    bits: int  # of one element, without its share of scales
    sign: bool = True
    exponent_bits: int | None = None  # of a float; None for integers and tables of values
    mantissa_bits: int | None = None
    special: str = "none"
    integers: tuple[int, int] | None = None  # lowest and highest, of an integer format
    values: tuple[float, ...] = ()  # the value of each code, for a format that is a table
    element_name: str = ""  # format of a block's elements; empty if it is this format
    # Rows and columns that share a scale, 0 for all of them; None if there is no scale.
    block: tuple[int, int] | None = None
    weight_block: tuple[int, int] | None = None  # the same for weights, if different
    scale: str = ""  # format of the scale
    # "floor": 2^(floor(log2 of the largest) - the element's greatest exponent) (OCP MX 1.0, 6.3); "largest": the
    # largest magnitude becomes the element's largest; "signed": the number of largest magnitude becomes the lowest
    # integer.
    rule: str = ""
    tensor_scale: bool = False  # one more fp32 scale for the whole tensor
    held_as: str = ""  # format of the tensors between products; empty if a step does not compute in this format
    peak: str = ""  # key of an accelerator's catalogued rate; empty if no hardware multiplies this format
    block_scaled: bool = False  # multiplied only by matrix units that apply block scales themselves
    rate_of: str = ""  # format whose rate a plan assumes on hardware without a peak for this one; may be empty
    kernels_of: str = ""  # format whose measured kernels are used instead; empty if its own were measured
    vendor: str = ""  # the only vendor whose hardware multiplies this format; may be empty
    capability: tuple[int, int] | None = None  # first NVIDIA compute capability that multiplies this format
    library: str = ""  # library whose products training uses on such hardware; empty if there is none

    @property
    def element(self) -> NumberFormat:
        """The format of one element."""
        return number_format(self.element_name) if self.element_name else self

    @property
    def bias(self) -> int:
        """The exponent bias, which is subtracted from the stored exponent."""
        assert self.exponent_bits is not None
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def min_exponent(self) -> int:
        """log2 of the smallest normal number."""
        return 1 - self.bias if self.mantissa_bits else -self.bias

    @property
    def max_exponent(self) -> int:
        """floor(log2) of the largest number."""
        assert self.exponent_bits is not None
        codes = (1 << self.exponent_bits) - 1 - self.bias
        # IEEE reserves the highest exponent for infinities and NaN; e8m0 reserves its highest code for NaN.
        return codes - (self.special == "ieee" or not self.mantissa_bits)

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        if self.integers:
            return float(max(abs(bound) for bound in self.integers))
        if self.values:
            return max(map(abs, self.values))
        assert self.mantissa_bits is not None
        # If the only NaN is the highest code, the largest number is the code below it.
        steps = 2.0 ** (1 - self.mantissa_bits) if self.special == "nan" else 2.0**-self.mantissa_bits
        return float(2.0**self.max_exponent * (2.0 - steps)) if self.mantissa_bits else 2.0**self.max_exponent

    @property
    def smallest(self) -> float:
        """The smallest magnitude above 0."""
        if self.integers:
            return 1.0
        if self.values:
            return min(abs(value) for value in self.values if value)
        assert self.mantissa_bits is not None
        return float(2.0 ** (self.min_exponent - self.mantissa_bits))

    @property
    def spacing(self) -> float:
        """Distance from 1 to the next number: twice the largest relative error of rounding."""
        return 2.0**-self.mantissa_bits if self.mantissa_bits is not None else self.smallest / self.largest

    def block_of(self, weight: bool = False) -> tuple[int, int] | None:
        return (self.weight_block or self.block) if weight else self.block

    def bytes_per_element(self, weight: bool = False) -> float:
        """Return bytes per element with its share of scales, except scales of a whole row or tensor."""
        rows, columns = self.block_of(weight) or (0, 0)
        shared = rows * columns
        return (self.bits + (number_format(self.scale).bits / shared if shared else 0.0)) / 8

    @property
    def bits_per_element(self) -> float:
        return 8 * self.bytes_per_element()

    def multiplied_by(self, found: Accelerator) -> bool:
        """Whether an accelerator multiplies this format. Block scales need units that multiply 4-bit numbers too."""
        peaks = found.peak_flops_per_second
        return self.peak in peaks and (not self.block_scaled or "fp4" in peaks) and self.vendor in ("", found.vendor)

    def is_native(self, capability: tuple[int, int] | None) -> bool:
        """Whether a training step computes natively in this format at this compute capability (None: a CPU)."""
        reached = self.capability is None or (capability is not None and capability >= self.capability)
        return bool(self.library) and reached

    @property
    def trained_by(self) -> str:
        """The library that training uses, or "emulated"; empty if training does not compute in this format."""
        return (self.library or "emulated") if self.held_as else ""

    @property
    def of_weights(self) -> tuple[object, ...]:
        """The properties that determine a weight's codes and scales."""
        return self.element.name, self.block_of(weight=True), self.scale, self.rule, self.tensor_scale

    @property
    def needs_maximum(self) -> bool:
        """Whether a whole row or tensor shares a scale, so that all of it is read before rounding."""
        return self.tensor_scale or (self.block is not None and 0 in self.block)

    @property
    def narrow(self) -> bool:
        """Whether products take 8 bits or fewer, of tensors held in 16."""
        return bool(self.held_as) and self.bits <= 8


@cache
def number_formats() -> dict[str, NumberFormat]:
    """Return all formats, in the order of the file."""
    tables = read_toml("formats.toml")
    return {name: _read(name, table, tables) for name, table in tables.items()}


def number_format(name: str) -> NumberFormat:
    """Return the format with this name; UserError with the nearest names if there is none."""
    return lookup("number format", name, number_formats())


@cache
def computing_formats() -> tuple[str, ...]:
    """Return the formats that a training step can compute in, widest first."""
    return tuple(name for name, known in number_formats().items() if known.held_as)


def _read(name: str, table: dict[str, Any], tables: dict[str, Any]) -> NumberFormat:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    element = fields.pop("element", "")
    bits = fields.pop("bits", 0) or tables[element]["bits"]
    return NumberFormat(name=name, element_name=element, bits=bits, **fields)


def format_entries(name: str | None = None) -> list[dict[str, Any]]:
    """Return the rows of `ironlaw formats`: one format, or all.

    Each row is `{name, title, bits, bits_per_element, largest, smallest, spacing, block, scale, trained_by,
    multiplied_by, source, url}`. `block` is [rows, columns], 0 for all of them; `trained_by` is the library whose
    products training uses, or "emulated"; `multiplied_by` lists the accelerators that multiply the format.
    """
    catalogued = [accelerator(found) for found in accelerator_names()]
    formats = [number_format(name)] if name else list(number_formats().values())
    return [
        {
            **{
                key: getattr(known, key)
                for key in ("name", "title", "bits", "bits_per_element", "block", "scale", "trained_by")
            },
            **{key: getattr(known.element, key) for key in ("largest", "smallest", "spacing")},
            "multiplied_by": [found.name for found in catalogued if known.multiplied_by(found)],
            "source": source(known.source).title,
            "url": source(known.source).url,
        }
        for known in formats
    ]


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """A format of stored weights. `bits` per weight include its share of the scales."""

    name: str
    bits: float
    source: str  # key of `sources.toml`
    wide: bool = False  # embedding and output layer stay in 16 bits; otherwise `bits` is the mean over the whole file
    experts: bool = False  # only experts are stored in this format, everything else in 16 bits
    note: str = ""

    @property
    def bytes_per_weight(self) -> float:
        return self.bits / 8


def stored_format(name: str) -> StoredFormat:
    """Return the format with this name in any case; UserError with the nearest names if there is none."""
    table, typed = read_toml("stored_formats.toml"), name.strip().lower()
    line = lookup("weight format", typed, table["formats"])
    return StoredFormat(name=typed, **line | {"source": table["sources"][line["source"]]})


@dataclass(frozen=True)
class PrecisionRecipe:
    """How a training step rounds. Fields without a comment are explained in `precision_recipes.toml`."""

    name: str
    title: str
    source: str
    input: NumberFormat  # formats of the operands of a linear layer's products
    weight: NumberFormat
    gradient: NumberFormat
    square_weights: bool = False
    stochastic: bool = False
    rotation: int = 0  # numbers per random Hadamard rotation of the weight gradient's operands; 0: none
    headroom: float = 1.0  # factor applied to gradients before rounding, and undone afterwards
    history: int = 0  # micro-batches whose largest numbers give a tensor's scale; 0: the tensor's own
    keep_last: float = 0.0  # share of the blocks, the last ones, that compute in `held_as`
    tile: int = 1  # matrix units compute a layer only if its inputs and outputs are multiples of this

    @property
    def weight_block(self) -> tuple[int, int] | None:
        """Rows and columns of a weight that share a scale."""
        block = self.weight.block_of(weight=True)
        if self.square_weights and block is not None:
            return (block[1], block[1])
        return block

    def blocks(self, layers: int) -> int:
        """Return how many of the first blocks compute with this recipe."""
        return layers - math.ceil(layers * self.keep_last)


@cache
def precision_recipes() -> dict[str, PrecisionRecipe]:
    recipes = {}
    for name, table in read_toml("precision_recipes.toml").items():
        formats = {key: number_format(table[key]) for key in ("input", "weight", "gradient")}
        recipes[name] = PrecisionRecipe(name=name, **{**table, **formats})
    return recipes


def precision_recipe(precision: str) -> PrecisionRecipe | None:
    """Return the recipe of a precision, or None if its products take the tensors as they are."""
    return precision_recipes().get(precision)


# -- targets of `ironlaw compress` and `train.qat` ---------------------------------------------------------------------


Method = Literal["rtn", "gptq", "awq", "smoothquant", "hqq"]
Score = Literal["magnitude", "wanda"]  # criterion for pruning weights
METHODS: tuple[Method, ...] = get_args(Method)
SCORES: tuple[Score, ...] = get_args(Score)
TWO_OF_FOUR, SHARE = "2:4", "pruned="


@dataclass(frozen=True)
class Pruning:
    """Pruning of `share` of a matrix's weights, or of `of_four` of every four neighbouring weights."""

    share: float
    of_four: int = 0

    def __str__(self) -> str:
        return f"{4 - self.of_four}:4" if self.of_four else f"pruned={100 * self.share:g}%"


@dataclass(frozen=True)
class CompressionTarget:
    """A number format (fp32 if weights are only pruned), and which weights are pruned."""

    format: NumberFormat
    pruning: Pruning | None = None

    def __str__(self) -> str:
        parts = [] if self.pruning and self.format.name == "fp32" else [self.format.name]
        return ",".join(parts + ([str(self.pruning)] if self.pruning else []))


def weight_formats() -> list[str]:
    """Return the formats for weights: 16-bit ones, and narrower ones with a scale, without which most would be 0."""
    return [n for n, known in number_formats().items() if known.bits == 16 or (known.bits < 16 and known.block)]


def read_target(text: str, option: str = "--to") -> CompressionTarget:
    """Parse `int4`, `2:4`, `pruned=50%`, or a format and one of the others joined by a comma. UserError otherwise."""
    format, pruning = None, None
    for part in (part.strip() for part in text.split(",")):
        found = _pruning(part, option)
        if (format if found is None else pruning) is not None:
            raise UserError(f"{option} {shortened(text)!r} names two of a kind: give one format, one pruning, or both")
        if found is not None:
            pruning = found
        elif part in weight_formats():
            format = number_format(part)
        else:
            known = [*weight_formats(), TWO_OF_FOUR, f"{SHARE}50%"]
            raise UserError(
                f"{option} {shortened(part)!r} is no format that holds weights: {did_you_mean(part, known)}"
            )
    return CompressionTarget(format or number_format("fp32"), pruning)


def _pruning(part: str, option: str) -> Pruning | None:
    if part == TWO_OF_FOUR:
        return Pruning(0.5, of_four=2)
    if not part.startswith(SHARE):
        return None
    try:
        share = float(part.removeprefix(SHARE).removesuffix("%")) / (100 if part.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise UserError(f"{option} {shortened(part)!r}: write the share of weights that go, such as pruned=50%")
    return Pruning(share)
