"""Accelerators: dense peaks, memory, links and power, one TOML file each.

    acc = accelerator("h100-sxm-80gb")
    peak(acc, "bf16").value         # 989.4e12 FLOP/s, dense
    acc.memory_bytes_per_second     # Figure(3.35e12, "nvidia-h100-datasheet", ...)

A name is a file name, or a line of `devices/` (`devices.py`): cards, laptops, phones and processors for serving. A
name may leave out what tells forms of one chip apart, if only one form is known (`h200`, `b200`, `4090`); if there are
several (`h100`, `a100`), the error lists them, because their figures differ. For what drivers and tables of
measurements print, the usual form is taken (`closest`). Another chip is never taken: an RTX 4060 Ti is no RTX 4060.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache

from ironlaw.catalog import devices
from ironlaw.catalog.figures import Figure, figure, figures, read_entry, read_toml, stems, unknown
from ironlaw.errors import UserError

DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4")
"""Number formats that peaks are given for, widest first. FP4 is NVFP4 or MXFP4, fp32 is the vector rate."""

BEFORE_FLASH = ("volta", "turing")
"""Generations without FlashAttention-2 and PyTorch's flash kernels, which need Ampere or newer."""

USUAL_FORMS = ("h100-sxm-80gb", "a100-sxm-80gb", "v100-sxm-32gb", "a100-sxm-40gb", "v100-sxm-16gb")
"""The forms that most published runs used, for chips sold in several; the first that agrees with a text is taken."""

_IGNORED_WORDS = {
    "nvidia", "amd", "intel", "google", "apple", "tesla", "geforce", "instinct", "radeon", "gpu", "graphics", "card",
    "accelerator", "tensor", "core", "cloud", "data", "center", "dgx", "hgx", "generation", "edition", "with", "w",
    "design",
}  # fmt: skip
"""Words of names that tell no device from another."""

_BRAND = re.compile(r"(rtx|gtx|rx|jetson|tpu|)(.*)")
"""First words that users may leave out: `4090`, `v5p`."""

_CONFIGURATION = re.compile(r"(?P<form>sxm|pcie|nvl|oam)\d*|(?P<memory>\d+)g(?:i?b)?|(?P<power>\d+)w|(?P<cores>\d+)c")
"""Words that tell forms of one chip apart. All others tell chips apart: Ti, Super, Laptop, Max-Q, D."""


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
    typed = _normalized(name)
    if typed in accelerator_names():
        return typed
    if other := devices.aliases().get(typed):
        return other[0]
    matches = [typed] if typed in devices.lines() else _forms_of(name)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UserError(f"accelerator '{name}' is ambiguous: write one of {', '.join(matches)}")
    raise unknown("accelerator", name, (*accelerator_names(), *devices.device_names()))


def alias_of(name: str) -> tuple[str, str] | None:
    """Return the catalogue's name for an alias, and why it was chosen among several; None if `name` is no alias."""
    return devices.aliases().get(_normalized(name))


def closest(text: str) -> tuple[str, str | None]:
    """Return the name of the accelerator that a driver's or a table's text means, such as "NVIDIA H100 80GB HBM3", and
    how it differs; None instead if the text is its name. Raises UserError if it means none.

    Of several forms of a chip that agree with the text, the usual one is taken.
    """
    try:
        name = resolve(text)
        return name, None if name == _normalized(text) else (alias_of(text) or ("", ""))[1]
    except UserError:
        found = _forms_of(text)
        if not found:
            raise
        plain = [name for name in found if "power" not in _read(name)[2]]  # a power limit is never implied
        chosen = next((name for name in (*USUAL_FORMS, *plain) if name in found), found[0])
        others = ", ".join(name for name in found if name != chosen)
        return chosen, f"the form is not said; not {others}"


def catalogued(text: str) -> str:
    """Return the catalogue's name for a device name of the driver."""
    return closest(text)[0]


def _normalized(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")


@cache
def _read(text: str) -> tuple[str, str, dict[str, str]]:
    """Return brand, chip and configuration of a name: ("rtx", "4060ti", {"memory": "16"}) of "RTX 4060 Ti 16 GB"."""
    text = re.sub(r"\((?:r|tm)\)", " ", text.lower())
    text = re.sub(r"(\d) (gi?b)\b", r"\1\2", text)
    text = re.sub(r"\b(v\d[a-z])-\d+\b", r"\1", text)  # a slice of TPUs
    chip, said = "", {}
    for word in re.findall(r"[a-z0-9]+", text):
        if match := _CONFIGURATION.fullmatch(word):
            said[str(match.lastgroup)] = match[str(match.lastgroup)]
        elif word not in _IGNORED_WORDS and not re.fullmatch(r"(hbm|gddr)\w+", word):
            chip += word
    brand, chip = re.fullmatch(_BRAND, chip).groups()  # type: ignore[union-attr]
    return brand, chip, said


def _forms_of(text: str) -> list[str]:
    """Return the accelerators of exactly the chip that `text` names, in the forms that agree with it: those that say
    most of what it says, and of these the ones with their own file."""
    brand, chip, said = _read(text)
    found = dict[str, tuple[int, bool]]()
    for name in (*accelerator_names(), *devices.device_names()):
        its_brand, its_chip, own = _read(name)
        if chip and its_chip == chip and brand in ("", its_brand) and _agrees(name, own, said):
            found[name] = len(said.keys() & own.keys()), name in accelerator_names()
    best = [name for name, rank in found.items() if rank == max(found.values())]
    return list(dict.fromkeys(map(resolve, best)))


def _agrees(name: str, own: dict[str, str], said: dict[str, str]) -> bool:
    """Whether the configuration of a name, or its memory where it tells none, is the `said` one."""
    if "memory" in said.keys() - own.keys():
        memory, asked = accelerator(name).memory_bytes, float(said["memory"])
        if memory and all(abs(memory.value / unit - asked) > 0.1 * asked for unit in (1e9, 2**30)):
            return False
    return all(own.get(kind, "" if kind == "cores" else value) == value for kind, value in said.items())


@cache
def _load(name: str) -> Accelerator:
    data = read_toml("accelerators", f"{name}.toml") if name in accelerator_names() else devices.entry(name)
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
