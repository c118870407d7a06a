"""A node as somebody describes it: how many accelerators it holds, what network leaves it.

    described_node(node("dgx-h100"), "8x 200 Gb/s RoCE per node, 2:1")
    resized(node("dgx-h100"), 4)

For rows of measured runs (`interconnect`, `per_node`) and for `ironlaw plan --network --per-node`.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ironlaw.catalog.figures import Figure
from ironlaw.catalog.nodes import Node

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
_RATIO = re.compile(r"\b(\d+(?:\.\d+)?)\s*:\s*([1-9]\d*(?:\.\d+)?)\b")


def resized(usual: Node, accelerators: int) -> Node:
    """The node with so many accelerators; an island that ends at the node ends with it, one of a rack does not.

    What people call a node of a rack is some of its trays, each with its own network cards.
    """
    if accelerators == usual.accelerators:
        return usual
    inside, cards = usual.scale_up_accelerators, usual.nics
    if inside > usual.accelerators and cards is not None:
        cards = replace(cards, value=cards.value * accelerators / usual.accelerators)
        return replace(usual, accelerators=accelerators, nics=cards)
    if inside <= usual.accelerators:
        inside = min(inside, accelerators) if inside < usual.accelerators else accelerators
    return replace(usual, accelerators=accelerators, scale_up_accelerators=inside)


def described_node(usual: Node, interconnect: str) -> Node:
    """The node with the network of a description such as `8x HDR200 IB per node` or `8x 400 Gb/s RoCE, 2:1`.

    A clause that names a kind of network and a rate describes it; rates are bits unless written GiB/s or GBytes/s.
    `per GPU` and `per node` say what a rate is of; without either, and without a count, a rate that one port has is
    taken for each of the node's usual ports, save for plain Ethernet. `2:1` says that the upper level of the network
    carries half of what the nodes can send. Anything else leaves the usual node as it is.
    """
    if ratio := _RATIO.search(interconnect):
        usual = replace(usual, oversubscription=max(float(ratio[1]) / float(ratio[2]), 1.0))
        interconnect = _RATIO.sub(" ", interconnect)
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
