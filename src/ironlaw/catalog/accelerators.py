"""Accelerators: dense peaks, memory, links and power, one TOML file each.

    acc = accelerator("h100-sxm-80gb")
    peak(acc, "bf16").value         # 989.4e12 FLOP/s, dense
    acc.memory_bytes_per_second     # Figure(3.35e12, "nvidia-h100-datasheet", ...)

A name is a file name, or a line of `devices/` (`devices.py`): cards, laptops, phones and processors for serving. A
shorter form works if it matches only one accelerator (`h200`, `b200`, `4090`); if it matches several (`h100`, `a100`),
the error lists them, because their figures differ. What drivers and tables of measurements print is matched more
freely (`closest`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ironlaw.catalog import devices
from ironlaw.catalog.figures import Figure, figure, figures, read_entry, read_toml, stems, unknown
from ironlaw.errors import UserError

DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4")
"""Number formats that peaks are given for, widest first. FP4 is NVFP4 or MXFP4, fp32 is the vector rate."""

BEFORE_FLASH = ("volta", "turing")
"""Generations without FlashAttention-2 and PyTorch's flash kernels, which need Ampere or newer."""

_BRANDS = frozenset({"rtx", "gtx", "apple", "jetson", "tpu"})
"""First words of names that users may leave out: `4090`, `m4-max`, `v5p`."""

USUAL = ("h100-sxm-80gb", "a100-sxm-80gb", "v100-sxm-32gb", "a100-sxm-40gb", "v100-sxm-16gb")
"""The forms that most published runs used, for chips sold in several; the first that agrees with a text is taken."""

SAME_CHIP = {"a800": ("a100", "with two thirds of its NVLink")}
"""Chips without their own figures: the catalogued chip they resemble, and the difference."""

_MAKERS = {"nvidia", "amd", "intel", "google", "tesla", "geforce", "instinct", "gpu", "tensor", "core", "cloud"}
_NO_CHIPS = _BRANDS | {"cpu", "radeon", "ryzen", "titan"}  # first words that name no chip alone
_FORM = re.compile(r"(sxm|pcie|nvl|oam)\d*")
_MEMORY = re.compile(r"(\d+)(gb|gib|g)")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator as it is sold and seen by software: a package or card, not a die. Unknown figures are `None`."""

    name: str  # in the catalog, and of the data file
    product: str  # the name on the box
    vendor: str  # nvidia, amd, intel, google or apple
    generation: str  # volta, turing, ampere, ada, hopper, blackwell, cdna2, cdna3, cdna4, ...
    default_node: str  # name of the node that plans assume unless one is given
    # Generation whose measured constants of single operations apply, for a chip measured apart from others of its
    # `generation`; empty: `generation`.
    constants: str = ""
    memory_kind: str = ""  # HBM3, GDDR6X, LPDDR5 (shared with the CPU where `unified_memory`)
    unified_memory: bool = False
    link_name: str = ""  # scale-up link: NVLink 4, xGMI, ICI; empty when there is only PCIe
    memory_bytes: Figure | None = None  # total that a program can use; the note says whether measured or nominal
    memory_bytes_per_second: Figure | None = None  # peak of the memory interface, bytes/s
    l2_bytes: Figure | None = None  # last-level cache on the compute die, bytes
    compute_units: Figure | None = None  # SMs, CUs or the vendor's equivalent that are enabled
    clock_hz: Figure | None = None  # highest (boost) clock, Hz
    tdp_watts: Figure | None = None  # board or package power limit, W
    # The scale-up link, one direction, all lanes of one accelerator together, bytes/s.
    link_bytes_per_second: Figure | None = None
    pcie_bytes_per_second: Figure | None = None  # host link, one direction, bytes/s
    # A faster link to the host's memory (NVLink-C2C), one direction, bytes/s.
    host_link_bytes_per_second: Figure | None = None
    # Dense FLOP/s (OP/s for int8) by dtype; matrix units where they exist.
    peak_flops_per_second: dict[str, Figure] = field(default_factory=dict)
    note: str = ""  # peculiarities of the part

    @property
    def measured_generation(self) -> str:
        """The generation whose measured constants of single operations apply."""
        return self.constants or self.generation

    @property
    def has_flash(self) -> bool:
        """Whether attention in its training software avoids storing the scores in memory."""
        return self.generation not in BEFORE_FLASH

    def figures(self) -> dict[str, Figure]:
        """Return every known figure by its dotted key, peaks included, for listings and tests."""
        peaks = {f"peak_flops_per_second.{dtype}": value for dtype, value in self.peak_flops_per_second.items()}
        return figures(self) | peaks


def accelerator_names() -> tuple[str, ...]:
    """Return the sorted names of accelerators with their own file, for which training is planned. Parses nothing."""
    return stems("accelerators")


def accelerator(name: str) -> Accelerator:
    """Return the accelerator with this name or unambiguous shorter form. Parses one file."""
    return _load(resolve(name))


def peak(acc: Accelerator, dtype: str) -> Figure:
    """Return the dense peak of `acc` in `dtype`, FLOP/s. UserError if it is not known, never a guess."""
    known = acc.peak_flops_per_second
    if dtype in known:
        return known[dtype]
    listed = ", ".join(d for d in DTYPES if d in known) or "none"
    raise UserError(f"no dense peak of {acc.name} is known for '{dtype}': known: {listed}")


def resolve(name: str) -> str:
    """Return the full name for what the user typed. UserError if none or several match."""
    names = accelerator_names()
    typed = name.strip().lower().replace("_", "-").replace(" ", "-")
    if typed in names:
        return typed
    matches = _answering(typed, names)
    if not matches:
        if other := devices.taken(typed):
            return other[0]
        if typed in devices.lines():
            return typed
        matches = _answering(typed, devices.lines())
    if len(matches) == 1:
        return resolve(matches[0])
    if matches:
        raise UserError(f"accelerator '{name}' is ambiguous: write one of {', '.join(matches)}")
    raise unknown("accelerator", name, (*names, *devices.device_names()))


def _answering(typed: str, names: Iterable[str]) -> list[str]:
    """Return the names with this short form, or only the one that equals it except for the brand, if there is one."""
    squeezed = typed.replace("-", "")
    found = [full for full in names if squeezed in _short_forms(full)]
    whole = [full for full in found if full.replace("-", "").endswith(squeezed)]
    return whole if len(whole) == 1 else found


def taken_for(name: str) -> tuple[str, str] | None:
    """Return the catalogue's name for an alias, and why it was chosen among several; None if `name` is no alias."""
    return devices.taken(name.strip().lower().replace("_", "-").replace(" ", "-"))


def closest(text: str) -> tuple[str, str | None]:
    """Return the name of the accelerator that a driver's or a table's text means, such as "NVIDIA H100 80GB HBM3", and
    how it differs; None instead if the text is its name or a short form. Raises UserError if none is similar.

    The catalogue's own names come first. Otherwise the chip decides, and a stated form or memory must agree.
    """
    try:
        return resolve(text), (taken_for(text) or (None, None))[1]
    except UserError:
        words = _joined([word for word in re.split(r"[^a-z0-9]+", text.lower()) if word and word not in _MAKERS])
        chip = next((word for word in words if word in SAME_CHIP or _names_of(word)), "")
        same, difference = SAME_CHIP.get(chip, (chip, ""))
        form = next((match[1] for word in words if (match := _FORM.fullmatch(word))), "")
        memory = next((match[1] for word in words if (match := _MEMORY.fullmatch(word))), "")
        good = [name for name in _names_of(same) if _agrees(name, form, "" if difference else memory)]
        good = [n for n in good if not re.search(r"-\d+w$", n)] or good  # a special power limit is never implied
        if not good:
            raise
        return next((name for name in USUAL if name in good), good[0]), difference


def catalogued(text: str) -> str:
    """Return the catalogue's name for a device name of the driver."""
    return closest(text)[0]


def _joined(words: list[str]) -> list[str]:
    """Join words: `80 gb` to `80gb`, `tpu v5p` to `tpu-v5p`, `rtx 4090` to `rtx-4090`."""
    result: list[str] = []
    for word in words:
        if result and word in ("gb", "gib") and result[-1].isdigit():
            result[-1] += "gb"
        elif result and result[-1] in _NO_CHIPS:
            result[-1] += "-" + word
        else:
            result.append(word)
    return result


def _names_of(chip: str) -> list[str]:
    """Return the catalogue's names of one chip: its name alone, or followed by form and memory. The `v5p` of a slice
    `v5p-128` is a TPU."""
    if not chip or chip in _NO_CHIPS:
        return []
    names = (*accelerator_names(), *devices.lines())
    return [name for name in names if name in (chip, f"tpu-{chip}") or name.startswith(chip + "-")]


def _agrees(name: str, form: str, memory: str) -> bool:
    said = name.split("-")[1:]
    forms = [match[1] for word in said if (match := _FORM.fullmatch(word))]
    memories = [match[1] for word in said if (match := _MEMORY.fullmatch(word))]
    return (not form or not forms or form in forms) and (not memory or not memories or memory in memories)


def _short_forms(full: str) -> set[str]:
    """Return the leading words of a name, joined: h100-sxm-80gb has h100, h100sxm and h100sxm80gb."""
    words = full.split("-")
    starts = (0, 1) if words[0] in _BRANDS and len(words) > 1 else (0,)
    ends = range(1, len(words) + 1)
    forms = {"".join(words[start:end]) for start in starts for end in ends if end > start}
    return forms - (_BRANDS if len(words) > 1 else set())


@cache
def _load(name: str) -> Accelerator:
    data = read_toml("accelerators", f"{name}.toml") if name in accelerator_names() else devices.entry(name)
    return from_table(name, data)


def from_table(name: str, data: dict[str, Any]) -> Accelerator:
    """Build an accelerator from the content of its file."""
    peaks = data.get("peak_flops_per_second", {})
    assert set(peaks) <= set(DTYPES), f"{name}: unknown dtypes {sorted(set(peaks) - set(DTYPES))}"
    known = {dtype: figure(peaks[dtype]) for dtype in DTYPES if dtype in peaks}
    return read_entry(Accelerator, name, data | {"peak_flops_per_second": known})


@dataclass(frozen=True, slots=True)
class PowerRange:
    """Range of thermal design power per physical core over the listed models of a family: the best estimate for a CPU
    without a power meter. It is per core because a virtual machine sees only some of the cores."""

    low: float  # watts per physical core: the family's lowest and highest TDP/cores
    high: float
    family: str  # the matched family's usual name
    models: int  # number of listed models in the range
    source: str  # key of `sources.toml`
    note: str = ""  # how the range was taken


def cpu_power(model_name: str) -> PowerRange | None:
    """Return the range for a CPU's model name as the operating system prints it; `None` if it is not listed."""
    text = re.sub(r"\((?:r|tm|c)\)|[®™]", " ", model_name, flags=re.IGNORECASE)
    text = re.sub(r"\s+", " ", text).strip()
    return next((power for pattern, power in _families() if pattern.search(text)), None)


@cache
def _families() -> tuple[tuple[re.Pattern[str], PowerRange], ...]:
    listed = [dict(entry) for entry in read_toml("cpus.toml")["family"]]
    return tuple(
        (
            re.compile(entry.pop("match"), re.IGNORECASE),
            PowerRange(low=entry.pop("low_watts_per_core"), high=entry.pop("high_watts_per_core"), **entry),
        )
        for entry in listed
    )
