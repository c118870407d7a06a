"""A node from a user's description: its number of accelerators and its network.

    described_node(node("dgx-h100"), "8x 200 Gb/s RoCE per node, 2:1")[0]
    resized(node("dgx-h100"), 4)

For rows of measured runs (`interconnect`, `per_node`) and for `ironlaw plan --network --per-node`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from ironlaw.catalog.figures import Figure
from ironlaw.catalog.nodes import Node
from ironlaw.errors import UserError, shortened

FABRIC_WORDS = {
    "efa": "efa", "efav": "efa", "roce": "roce", "rocev": "roce", "ethernet": "roce", "gbe": "roce", "tcp": "tcpx",
    "tcpx": "tcpx", "tcpxo": "tcpx", "fastrak": "tcpx", "ib": "infiniband", "infiniband": "infiniband",
    "edr": "infiniband", "hdr": "infiniband", "ndr": "infiniband", "xdr": "infiniband", "quantum": "infiniband",
    "slingshot": "slingshot", "ici": "ici", "rdma": "infiniband", "connectx": "infiniband", "cx": "infiniband",
    "nic": "infiniband", "nics": "infiniband", "hca": "infiniband", "hcas": "infiniband",
    "bluefield": "infiniband", "spectrum": "roce",
    "opa": "infiniband", "omni": "infiniband", "omnipath": "infiniband", "fdr": "infiniband",
}  # fmt: skip
"""Words of an `interconnect` column, and the kind of network each means."""

PLAIN = {"ethernet", "gbe", "tcp"}
"""Words that may also mean a node's link to the rest of the data centre: any other kind in the text is preferred."""

CARDS = {"bluefield", "rdma", "connectx", "cx", "nic", "nics", "hca", "hcas"}
"""Words that imply no kind of network: any other word overrides them."""

NAMED_GBITS = {"fdr": 56, "edr": 100, "hdr": 200, "ndr": 400, "xdr": 800, "opa": 100, "omni": 100, "omnipath": 100}
"""Gbit/s of one port of an InfiniBand generation or of Omni-Path, where only the name is given."""

GBITS_PER_ACCELERATOR = {"tcpxo": 200, "fastrak": 200, "tcpx": 100}
"""Gbit/s of networks of one kind of instance (Google Cloud's A3 Mega and A3 High), where only the name is given."""

FASTEST_PORT = 800e9  # bit/s: XDR, and Ethernet of 2025
MIN_BITS, MAX_BITS = 1e9, 1e14  # bit/s: bounds of the total that a description of a node may give

_NUMBER = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_COUNT = re.compile(r"(?<![\d.])(\d{1,2})\s*(?:x|×|\*)\s*", re.IGNORECASE)  # not the 200 of `HDR200 x4`
_PORTS = re.compile(
    r"(\d+)\s*(?:(?:omni-?path|opa|ib|infiniband|[fehnx]dr)\s*)?"
    r"(nics?|rails?|ports?|hcas?|cards?|adapters?|links?|per\s*node)\b",
    re.IGNORECASE,
)
_COUNT_BEHIND = re.compile(
    r"(?:s|[a-z]it|\b[a-z]|[a-z]\s+|\d{3}\s*)[x×*]\s*(\d{1,2})\b(?!\.\d|\s*[TGM](?:b|\b))", re.IGNORECASE
)
_DENIED = re.compile(r"\b(?:no|without)\s+\w+|(?:\d+/)+(?=\d+\s*[TG])", re.IGNORECASE)
"""Networks that a node lacks, and the slower rates of a port: in `10/25GbE` the 25 counts."""

_PORTS_OF_A_RATE = re.compile(rf"\d+\s*x\s*{_NUMBER}\s*[TG](?:\b|b?ps|bit|bE|b/s)", re.IGNORECASE)
_WORD_COUNT = {"one": 1, "single": 1, "dual": 2, "two": 2, "quad": 4, "four": 4, "eight": 8, "octo": 8}
_RATE = re.compile(
    rf"(?P<rate>{_NUMBER})\s*-?(?P<unit>[TGM](?:i?[bB](?:(?:it|yte)s?)?)?(?:\s*/\s*s(?:ec)?|\s*ps)?(?:[eE]\b)?\b)?",
    re.IGNORECASE,
)
_RATIO = re.compile(rf"(?<![\d:])({_NUMBER})\s*:\s*({_NUMBER})(?![\d:])", re.IGNORECASE)
_SIGN = re.compile(r"(?:^|[\s(=:,;*×]|\dx\s?)[-−]\d", re.IGNORECASE)
_INSIDE = re.compile(
    r"nvlink|nvswitch|nvl\s*\d|xgmi|infinity fabric|pci|c2c|hbm|in[\s-]*node|intra|within|chip[\s-]*to", re.IGNORECASE
)
_OTHERS = re.compile(
    r"manage|mgmt|storage|front[\s-]?end|north|in[\s-]?band|out[\s-]?of|bmc|ipmi|idrac|login|internet|uplink|"
    r"\bhost\b|control|file\s?system|lustre",
    re.IGNORECASE,
)
_COMPUTE = re.compile(r"comput|back[\s-]?end|east|scale[\s-]?out|training|gpu\s?direct|\bgdr", re.IGNORECASE)
_VERSIONS = re.compile(
    r"(nvlink|nvl|efa\s*v|roce\s*v?|connectx|\bcx|slingshot|quantum|spectrum|bluefield|pcie\s*(?:gen)?|gen)[\s-]*\d+"
    r"(?![\d.]*\s*(?:g|x))|"
    r"\b(?:gb|gh|h|a|b|v|mi|l|p|dgx|hgx|tpu|gaudi|p\d+[a-z]*)[\s-]*\d{1,4}[a-z]*(?:\.\w+)?\b(?!\s*g)",
    re.IGNORECASE,
)
"""Names with digits that are not rates, such as `NVLink4`, `EFAv2`, `ConnectX-7` and `H100`."""


def resized(usual: Node, accelerators: int) -> Node:
    """Return the node with this number of accelerators. Its island is resized with it, unless it is that of a rack.

    A node of a rack is some of its trays, each with its own network cards. Boards with a switch are used whole or in
    parts. Raises UserError for a size that is neither a divisor nor a multiple of the board.
    """
    if accelerators == usual.accelerators:
        return usual
    inside, cards, whole = usual.scale_up_accelerators, usual.nics, usual.accelerators
    divides = not (whole % accelerators and accelerators % whole)
    if inside > 2 and not divides and "v100" not in (usual.name + usual.product).lower():
        parts = ", ".join(str(part) for part in range(1, whole) if whole % part == 0)
        raise UserError(f"{accelerators} accelerators per node: {usual.name} holds {whole}: use {parts} or {whole}")
    if inside > usual.accelerators and cards is not None:
        cards = replace(cards, value=cards.value * accelerators / usual.accelerators)
        return replace(usual, accelerators=accelerators, nics=cards)
    if inside <= usual.accelerators:
        inside = min(inside, accelerators) if inside < usual.accelerators else accelerators
    return replace(usual, accelerators=accelerators, scale_up_accelerators=inside)


@dataclass(frozen=True)
class _Network:
    """One network of a description. `bits`: bit/s of all its ports on a node, None where no rate is named."""

    fabric: str
    bits: float | None
    plain: bool  # only described as Ethernet
    rank: int  # 2: described as for computing; 1: purpose not given; 0: for something else
    counted: bool  # the number of ports is given

    @property
    def cards_only(self) -> bool:
        """Whether it gives a number of cards but no rate, which may be in the next clause."""
        return self.bits is None and self.counted


def described_node(usual: Node, interconnect: str) -> tuple[Node, str]:
    """Return the node with the network of a description such as `8x HDR200 IB per node`, and a note of assumptions.

    Of several networks, the one described as for computing counts, else the fastest; networks for management or storage
    and links inside the node never do. Gb/s and Gbps are bits; GB/s are bytes if a port can be that fast. A rate is per
    accelerator or node if the text gives `per GPU` or `per node`. Without these and without a count, the rate of one
    port is taken for each of the node's usual ports, except for plain Ethernet. `2:1` means that the upper level of the
    network carries half of what the nodes can send. A kind without a rate gets the usual node's rate; a description
    that names no kind leaves the network unchanged. Raises UserError for impossible figures.
    """
    if len(interconnect) > 500:
        raise UserError(f"network '{shortened(interconnect)}' is too long: write for example 8x 200 Gb/s RoCE")
    text = _DENIED.sub(" ", re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", interconnect))
    text = re.sub(r"(?<=\d)\s?[x×*](?=\s*\w)", "x ", text)  # `4xHDR` means four HDR ports
    if re.search(r"\d,\d+\s*(?:[TGM]i?b|:)", text, re.IGNORECASE):
        raise UserError(f"network '{interconnect}': write a point before decimals, as in 1.6 Tb/s")
    if _SIGN.search(text):
        raise UserError(f"network '{interconnect}': a count or a rate is above 0")
    for ratio in _RATIO.findall(text):
        up, down = float(ratio[0]), float(ratio[1])
        if not 0 < down < math.inf or not 0 < up < math.inf:
            raise UserError(f"network '{interconnect}': write how oversubscribed it is as 2:1")
        usual = replace(usual, oversubscription=max(up / down, 1.0))
    found = _networks(_RATIO.sub(" ", text), usual, interconnect)
    known = [network for network in found if network.bits is not None]
    best = max(known, key=lambda n: (n.rank, n.bits or 0.0), default=None)
    kinds = [network for network in found if not network.plain and network.rank]
    if kinds and (best is None or best.plain or best.rank < max(n.rank for n in kinds)):
        best = max(kinds, key=lambda n: (n.rank, n.bits or 0.0))
    if best is None and found:
        best = found[0]
    words = interconnect.strip()[:80]
    if best is None or best.rank == 0:
        return usual, f"network = that of {usual.name} ('{words}' names none)" if words else ""
    name = usual.name if best.fabric == usual.fabric else f"{usual.name}, {best.fabric}"
    if best.bits is None:
        note = f"network = {best.fabric} at the rate of {usual.name} ('{words}' says none)"
        return replace(usual, name=name, fabric=best.fabric), note
    total = Figure(best.bits / 8, "the run's own description")
    return replace(usual, name=name, fabric=best.fabric, nics=Figure(1, "sum of all"), nic_bytes_per_second=total), ""


def _networks(text: str, usual: Node, whole: str) -> list[_Network]:
    """Return the networks of a description; one may span clauses, as in `8x ConnectX-7, 400 Gb/s InfiniBand`."""
    found: list[_Network] = []
    before = last = ""
    for clause in re.split(r"[;+,&|\n]|\band\b|\bplus\b|\bwith\b", text):
        joined = f"{before} {clause}" if before else clause
        network = _network(joined, usual, whole)
        if network and network.cards_only and network.rank and found and found[-1].bits and not found[-1].counted:
            found[-1] = _network(f"{clause} {last}", usual, whole) or found[-1]  # ports of the network named before
            continue
        last = joined
        waits = network is not None and (network.cards_only or (network.bits is None and not network.plain))
        before = joined if waits else ""
        if found and before != joined and joined != clause and network is not None:
            found.pop()  # the clause before was the beginning of this network
        if network is not None:
            found.append(network)
    return found


def _network(clause: str, usual: Node, whole: str) -> _Network | None:
    if _INSIDE.search(clause):
        return None
    words = re.findall(r"[a-z]+", clause.lower())
    kinds = [word for word in words if word in FABRIC_WORDS]
    if not kinds and not _PORTS_OF_A_RATE.search(clause):
        return None
    telling = sorted(kinds, key=lambda word: 2 * (word in CARDS) + (word in PLAIN))
    rank = 0 if _OTHERS.search(clause) else 2 if _COMPUTE.search(clause) else 1
    telling = telling or ["nic"]
    bits, counted = _bits_per_second(clause, words, telling[0], usual, whole)
    if not kinds:
        return _Network(usual.fabric, bits, False, rank, counted)
    fabric, plain = FABRIC_WORDS[telling[0]], telling[0] in PLAIN
    if PLAIN & set(words) and not plain and telling[0] not in CARDS and bits is not None and not counted:
        # `100GbE InfiniBand`: the rate belongs to another port than the kind.
        bits = None if "gbe" in words else bits
    if telling[0] in CARDS and PLAIN & set(words):
        fabric, plain = "roce", not counted
    return _Network(fabric, bits, plain, rank, counted)


def _bits_per_second(
    clause: str, words: list[str], kind: str, usual: Node, whole: str
) -> tuple[float | None, bool]:  # fmt: skip
    """Return the rate of one clause over all ports of a node (None if not named), and whether it counts ports."""
    plain = _VERSIONS.sub(" ", clause)
    counts = [int(number) for number in _COUNT.findall(plain)[:1]] or [int(n) for n, _ in _PORTS.findall(plain)[:1]]
    counts = counts or [int(number) for number in _COUNT_BEHIND.findall(plain)[:1]]
    counts = counts or [_WORD_COUNT[word] for word in words if word in _WORD_COUNT][:1]
    ports = counts[0] if counts else 1
    rest = _PORTS.sub(" ", _COUNT.sub(" ", plain, count=1))
    one = None
    for match in _RATE.finditer(rest):
        rate, unit = float(match["rate"]), match["unit"] or ""
        if unit or rate >= 10:
            one = rate * _unit(unit, rate, words)
            if counts and "B" in unit and one > FASTEST_PORT:
                one /= 8  # no port is that fast: bits were meant
            break
    per_accelerator = re.search(r"per[\s-]*(gpu|accelerator|chip|device)|/\s*(gpu|chip|accelerator)", clause, re.I)
    if one is None and kind in GBITS_PER_ACCELERATOR:
        one, per_accelerator = GBITS_PER_ACCELERATOR[kind] * 1e9, re.match("", "")
    if one is None:
        one = next((NAMED_GBITS[word] * 1e9 for word in words if word in NAMED_GBITS), None)
    if one is None:
        return None, bool(counts)
    bits = one * ports
    if per_accelerator:
        bits *= usual.accelerators
    elif not counts and _of_one_port(clause, one, kind):
        bits *= usual.nics.value if usual.nics else 1
    if not MIN_BITS <= bits <= MAX_BITS:
        raise UserError(f"network '{whole}': a node sends {MIN_BITS / 1e9:g} Gb/s to {MAX_BITS / 1e12:g} Tb/s")
    return bits, bool(counts)


def _unit(unit: str, rate: float, words: list[str]) -> float:
    """Return the bit/s of one unit. A capital B is a byte, unless a named port could not be that fast."""
    factor = {"t": 1e12, "g": 1e9, "m": 1e6, "": 1e9}[unit[:1].lower()]
    spelled = unit.lower()
    byte = "byte" in spelled or ("B" in unit[1:] and "bit" not in spelled and not re.search(r"[eE]$", unit))
    if byte and "byte" not in spelled and any(word in NAMED_GBITS for word in words):
        byte = rate * factor * 8 <= max(NAMED_GBITS[word] * 1e9 for word in words if word in NAMED_GBITS)
    return factor * 8 if byte else factor


def _of_one_port(clause: str, bits: float, kind: str) -> bool:
    """Return whether a rate is that of one port: `InfiniBand HDR`, `400G RoCE`; not `800 Gb/s per node`, plain Ethernet
    or EFA, whose instances are sold by the total."""
    if re.search(r"per[\s-]*(port|nic|rail|card|hca|adapter|link)|each|/\s*(port|nic)", clause, re.IGNORECASE):
        return True
    of_all = re.search(r"node|server|instance|total|aggregate|per[\s-]*(vm|host|machine)", clause.lower())
    return not of_all and kind not in PLAIN and kind not in ("efa", "efav") and bits <= FASTEST_PORT / 2
