"""Accelerators: dense peaks, memory, links and power, one TOML file each.

    acc = accelerator("h100-sxm-80gb")
    peak(acc, "bf16").value         # 989.4e12 FLOP/s, dense
    acc.memory_bytes_per_second     # Figure(3.35e12, "nvidia-h100-datasheet", ...)

A name is a file name, or a line of `devices/` (`devices.py`): cards, laptops, phones and processors that models are
served on. A shorter form works where only one accelerator answers to it (`h200`, `b200`,
`4090`); where several do (`h100`, `a100`) the error lists them, because their figures differ.
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
"""Number formats a peak can be given for, widest first. FP4 is NVFP4 or MXFP4, fp32 is the vector rate."""

BEFORE_FLASH = ("volta", "turing")
"""Generations that FlashAttention-2 and PyTorch's flash kernels do not run on: they need an Ampere or a newer one."""

_BRANDS = frozenset({"rtx", "gtx", "apple", "jetson", "tpu"})
"""First words of names that people leave out: `4090`, `m4-max`, `v5p`."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator as software sees it bought: a package or card, not a die. Absent figures are `None`."""

    name: str  # the catalog's name, and the data file's
    product: str  # the name on the box
    vendor: str  # nvidia, amd, intel, google or apple
    generation: str  # volta, turing, ampere, ada, hopper, blackwell, cdna2, cdna3, cdna4, ...
    default_node: str  # name of the node this accelerator is planned in unless told otherwise
    # The generation that single operations were measured on, where a chip was measured apart from others that software
    # treats alike; empty: `generation`.
    constants: str = ""
    memory_kind: str = ""  # HBM3, GDDR6X, LPDDR5 (shared with the CPU where `unified_memory`)
    unified_memory: bool = False
    link_name: str = ""  # scale-up link: NVLink 4, xGMI, ICI; empty when there is none but PCIe
    memory_bytes: Figure | None = None  # bytes a program can see in total; the note says whether measured or nominal
    memory_bytes_per_second: Figure | None = None  # peak of the memory interface, bytes/s
    l2_bytes: Figure | None = None  # last-level cache on the compute die, bytes
    compute_units: Figure | None = None  # SMs, CUs or the vendor's equivalent that are enabled
    clock_hz: Figure | None = None  # highest (boost) clock, Hz
    tdp_watts: Figure | None = None  # board or package power limit, W
    # That link, one direction, all lanes of one accelerator together, bytes/s.
    link_bytes_per_second: Figure | None = None
    pcie_bytes_per_second: Figure | None = None  # host link, one direction, bytes/s
    # A faster link to the host's memory (NVLink-C2C), one direction, bytes/s.
    host_link_bytes_per_second: Figure | None = None
    # Dense FLOP/s (OP/s for int8) by dtype; matrix units where they exist.
    peak_flops_per_second: dict[str, Figure] = field(default_factory=dict)
    note: str = ""  # what is particular about the part

    @property
    def measured_generation(self) -> str:
        """Whose constants of single operations hold."""
        return self.constants or self.generation

    @property
    def has_flash(self) -> bool:
        """Whether attention runs without its scores in memory, in the software of its training runs."""
        return self.generation not in BEFORE_FLASH

    def figures(self) -> dict[str, Figure]:
        """Every known figure by its dotted key, peaks included: for listings and for tests."""
        peaks = {f"peak_flops_per_second.{dtype}": value for dtype, value in self.peak_flops_per_second.items()}
        return figures(self) | peaks


def accelerator_names() -> tuple[str, ...]:
    """Names of those with a file of their own, which training is planned on: sorted, nothing is parsed."""
    return stems("accelerators")


def accelerator(name: str) -> Accelerator:
    """The accelerator of that name, or of an unambiguous shorter form. Parses one file."""
    return _load(resolve(name))


def peak(acc: Accelerator, dtype: str) -> Figure:
    """Dense peak of `acc` in `dtype`, FLOP/s. A dtype without a known peak is an error, never a guess."""
    known = acc.peak_flops_per_second
    if dtype in known:
        return known[dtype]
    listed = ", ".join(d for d in DTYPES if d in known) or "none"
    raise UserError(f"no dense peak of {acc.name} is known for '{dtype}': known: {listed}")


def resolve(name: str) -> str:
    """The full name behind what the user typed; an error where none or several answer to it."""
    names = accelerator_names()
    typed = name.strip().lower().replace("_", "-").replace(" ", "-")
    if typed in names:
        return typed
    matches = _answering(typed, names)
    if not matches:
        if other := devices.taken(typed):
            return other[0]
        if devices.is_device(typed):
            return typed
        matches = _answering(typed, devices.lines())
    if len(matches) == 1:
        return resolve(matches[0])
    if matches:
        raise UserError(f"accelerator '{name}' is ambiguous: write one of {', '.join(matches)}")
    raise unknown("accelerator", name, (*names, *devices.device_names()))


def _answering(typed: str, names: Iterable[str]) -> list[str]:
    """Names that have this short form; the one that it says in full but for the brand, where there is one."""
    squeezed = typed.replace("-", "")
    found = [full for full in names if squeezed in _short_forms(full)]
    whole = [full for full in found if full.replace("-", "").endswith(squeezed)]
    return whole if len(whole) == 1 else found


def taken_for(name: str) -> tuple[str, str] | None:
    """The catalogue's name for another, and why where it could be another; None where the name is the catalogue's."""
    return devices.taken(name.strip().lower().replace("_", "-").replace(" ", "-"))


def catalogued(name: str) -> str:
    """The catalogue's name of a device as its driver calls it: "NVIDIA H100 80GB HBM3" holds "h100"."""
    words = set(name.lower().replace("-", " ").split())
    words |= set() if words & {"pcie", "nvl"} else {"sxm"}
    known = [entry for entry in accelerator_names() if entry.split("-")[0] in words]
    if not known:
        raise UserError(f"the catalogue has no {name}, so there is nothing to plan with")
    return max(known, key=lambda entry: len(words & set(entry.split("-"))))


def _short_forms(full: str) -> set[str]:
    """Leading words of a name, run together: h100-sxm-80gb answers to h100, h100sxm and h100sxm80gb."""
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
    """An accelerator from the content of its file."""
    peaks = data.get("peak_flops_per_second", {})
    assert set(peaks) <= set(DTYPES), f"{name}: unknown dtypes {sorted(set(peaks) - set(DTYPES))}"
    known = {dtype: figure(peaks[dtype]) for dtype in DTYPES if dtype in peaks}
    return read_entry(Accelerator, name, data | {"peak_flops_per_second": known})


@dataclass(frozen=True, slots=True)
class PowerRange:
    """Thermal design power per physical core over the models of a family as the vendor lists them: the best that can be
    said of a CPU without a power meter. A virtual machine sees some of the cores, so watts per core carry over."""

    low: float  # watts per physical core: the family's lowest and highest TDP/cores
    high: float
    family: str  # what matched, as one writes it
    models: int  # how many listed models the range was taken over
    source: str  # key of `sources.toml`
    note: str = ""  # how the range was taken


def cpu_power(model_name: str) -> PowerRange | None:
    """The range for a CPU model name as the operating system prints it; `None` when it is not listed."""
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
