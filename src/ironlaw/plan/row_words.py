"""The words of a row of measured runs as people write them: numbers, flags, precisions, recomputation, networks.

Empty, `nan`, `none`, `null`, `n/a` and `-` all mean unknown. A word that has no meaning here is a UserError, which
rejects its row and no other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from ironlaw.catalog.figures import Figure
from ironlaw.catalog.nodes import Node
from ironlaw.errors import UserError

Row = Mapping[str, str]

UNKNOWN = {"", "nan", "null", "n/a", "na", "-", "?", "unknown"}
MOST = {"layers": 10_000, "pp": 4_096, "virtual_stages": 1_000, "seq": 1_000_000_000}
MOST_OF_ANY = 10_000_000
"""Whole numbers above these are a slip of the keyboard, and would keep the planner busy for hours."""

TRUE = {"true", "1", "1.0", "yes", "y", "on", "t"}
FALSE = {"false", "0", "0.0", "no", "n", "off", "f", "none"}

FABRIC_WORDS = {
    "efa": "efa", "efav": "efa", "roce": "roce", "rocev": "roce", "ethernet": "roce", "gbe": "roce", "tcp": "tcpx",
    "tcpx": "tcpx", "tcpxo": "tcpx", "ib": "infiniband", "infiniband": "infiniband", "edr": "infiniband",
    "hdr": "infiniband", "ndr": "infiniband", "xdr": "infiniband", "slingshot": "slingshot", "ici": "ici",
    "rdma": "infiniband", "connectx": "infiniband", "nic": "infiniband", "nics": "infiniband",
}  # fmt: skip
"""Words of an `interconnect` column, and the kind of network they mean."""

VAGUE = {"rdma", "connectx", "nic", "nics"}
"""Of these the words that any better one overrules."""

NAMED_GBITS = {"edr": 100, "hdr": 200, "ndr": 400, "xdr": 800}
"""One InfiniBand port of a generation, where only the generation is named."""

_COUNT = re.compile(r"(?P<count>\d+)\s*(?:x|×|\*)\s*", re.IGNORECASE)
_RATE = re.compile(
    r"(?P<rate>\d+(?:\.\d+)?)\s*(?P<unit>tb/s|tbps|tbit/s|gb/s|gbps|gbit/s|gbit|gbe|gib/s|gbytes/s|g\b)?", re.IGNORECASE
)


def text(row: Row, name: str) -> str:
    """The cell without surrounding blanks; empty when it says nothing."""
    value = row.get(name) or ""
    value = value.strip()
    return "" if value.lower() in UNKNOWN else value


def number(row: Row, name: str, least: float = -math.inf) -> float | None:
    """A number, or None where the cell is empty."""
    cell = text(row, name)
    if not cell or (cell.lower() == "none"):
        return None
    try:
        value = float(cell.replace(",", "").replace("_", ""))
    except ValueError:
        raise UserError(f"{name} is not a number: '{cell}'") from None
    if not math.isfinite(value) or value < least:
        raise UserError(f"{name} must be finite and at least {least:g}, not {cell}")
    return value


def whole(row: Row, name: str, least: int = 1) -> float | None:
    """A whole number, also where it is written as 8.0."""
    value = number(row, name, least)
    if value is not None and value != round(value):
        raise UserError(f"{name} must be a whole number, not {value:g}")
    if value is not None and value > MOST.get(name, MOST_OF_ANY):
        raise UserError(f"{name} {value:g} is taken for a mistake: more than {MOST.get(name, MOST_OF_ANY):,}")
    return value


def flag(row: Row, name: str) -> bool | None:
    cell = text(row, name).lower()
    if not cell:
        return None
    if cell in TRUE or cell in FALSE:
        return cell in TRUE
    raise UserError(f"{name} is true or false, not '{cell}'")


def zero_stage(row: Row) -> float | None:
    """0 to 3; `fsdp`, `full_shard` and `zero-3` are 3."""
    cell = text(row, "zero").lower()
    if any(word in cell for word in ("fsdp", "full_shard", "full shard")):
        return 3.0
    if cell in FALSE:
        return 0.0
    digits = re.fullmatch(r"(?:zero|stage)?[\s\-_]*([0-3])(?:\.0)?", cell)
    if cell and not digits:
        raise UserError(f"zero is 0, 1, 2 or 3, not '{cell}'")
    return float(digits[1]) if digits else None


def recompute(row: Row) -> str | None:
    """none, selective or full."""
    cell = text(row, "recompute").lower()
    if not cell:
        return None
    if cell in FALSE:
        return "none"
    if any(word in cell for word in ("selective", "partial", "sac", "op")):
        return "selective"
    if cell in TRUE or any(word in cell for word in ("full", "block", "layer", "uniform", "checkpoint")):
        return "full"
    raise UserError(f"recompute is none, selective or full, not '{cell}'")


def attention(row: Row) -> str | None:
    """flash or standard; every fused kernel counts as flash."""
    cell = text(row, "attention").lower()
    if not cell:
        return None
    words = ("standard", "eager", "math", "naive", "unfused", "materiali", "vanilla")
    return "standard" if any(word in cell for word in words) else "flash"


def precision(row: Row) -> str | None:
    """Format of the matmuls: bf16, fp16, fp8, mxfp8, nvfp4, tf32, fp32."""
    cell = text(row, "precision").lower().replace("-", "").replace("_", "").replace(" ", "")
    if not cell:
        return None
    for word, meaning in (
        ("nvfp4", "nvfp4"), ("fp4", "nvfp4"), ("mxfp8", "mxfp8"), ("fp8", "fp8"), ("float8", "fp8"), ("e4m3", "fp8"),
        ("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16"), ("float16", "fp16"), ("half", "fp16"),
        ("tf32", "tf32"), ("fp32", "fp32"), ("float32", "fp32"), ("amp", "fp16"), ("mixed", "bf16"),
    ):  # fmt: skip
        if word in cell:
            return meaning
    raise UserError(f"precision '{cell}' is not known: bf16, fp16, fp8, mxfp8, nvfp4, tf32 or fp32")


def described_node(usual: Node, interconnect: str) -> Node:
    """The node with the network of a description such as `8x HDR200 IB per node` or `800 Gb/s IB per node`.

    A clause that names a kind of network and a rate describes it; rates are bits unless written GiB/s or GBytes/s.
    `per GPU` and `per node` say what a rate is of; without either, and without a count, a rate that one port has is
    taken for each of the node's usual ports, save for plain Ethernet. Anything else leaves the usual node as it is.
    """
    for clause in re.split(r"[;+,&]|\band\b", interconnect):
        words = re.findall(r"[a-z]+", clause.lower())
        telling = sorted((word for word in words if word in FABRIC_WORDS), key=VAGUE.__contains__)
        fabric = FABRIC_WORDS[telling[0]] if telling else None
        bits = _bits_per_second(clause, words)
        if fabric is None or bits is None:
            continue
        if re.search(r"per[\s-]*(gpu|accelerator|chip|device)|/\s*gpu", clause, re.IGNORECASE):
            bits *= usual.accelerators
        elif _one_port(clause, bits, words):
            bits *= usual.nics.value if usual.nics else 1
        total = Figure(bits / 8, "the run's own description")
        name = usual.name if fabric == usual.fabric else f"{usual.name}, {fabric}"
        return replace(usual, name=name, fabric=fabric, nics=Figure(1, "sum of all"), nic_bytes_per_second=total)
    return usual


def _one_port(clause: str, bits: float, words: list[str]) -> bool:
    """Whether a clause speaks of a port: `InfiniBand HDR`, `400G RoCE`; not `2x 100 Gb/s IB`, `800 Gb/s per node`."""
    counted = _COUNT.search(clause) or re.search(r"node|\d+\s*(nics?|rails|ports|hcas?|cards)\b", clause.lower())
    plain = {"ethernet", "gbe", "tcp"} & set(words)
    return not counted and not plain and bits <= 400e9


def _bits_per_second(clause: str, words: list[str]) -> float | None:
    """Rate of one clause, all its ports together; None where it names none between 1 Gbit/s and 100 Tbit/s."""
    # `NVLink4` and `EFAv2` hold digits that are versions; `ConnectX-7` too.
    plain = re.sub(
        r"(nvlink|nvl|efa\s*v|roce\s*v|connectx-?|cx-?|slingshot-?|pcie\s*(gen)?)\s*\d+", " ", clause.lower()
    )
    count = _COUNT.search(plain)
    ports = int(count["count"]) if count else 1
    if not count and (several := re.search(r"(\d+)\s*(nics?|rails|ports|hcas?|cards)\b", plain)):
        ports = int(several[1])
        plain = plain.replace(several[0], " ")
    rest = _COUNT.sub(" ", plain, count=1)
    for match in _RATE.finditer(rest):
        rate, unit = float(match["rate"]), (match["unit"] or "").lower()
        factor = {"t": 1e12, "g": 1e9, "": 1e9}[unit[:1]]
        factor *= 8 if unit in ("gib/s", "gbytes/s") else 1
        bits = rate * factor * ports
        if (unit or rate >= 10) and 1e9 <= bits <= 1e14:
            return bits
    named = next((NAMED_GBITS[word] for word in words if word in NAMED_GBITS), None)
    return None if named is None else named * 1e9 * ports
