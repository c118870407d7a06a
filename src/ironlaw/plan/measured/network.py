"""A node from a user's description: its number of accelerators and its network.

    described_node(node("dgx-h100"), "8x 200 Gb/s RoCE per node, 2:1")[0]
    resized(node("dgx-h100"), 4)

For rows of measured runs (`interconnect`, `per_node`) and for `ironlaw plan --network --per-node`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ironlaw.catalog.figures import Figure
from ironlaw.catalog.nodes import Node
from ironlaw.errors import UserError, shortened

FABRICS = {
    "infiniband": "ib infiniband fdr edr hdr ndr xdr quantum opa omni omnipath",
    "efa": "efa efav",
    "roce": "roce rocev spectrum ethernet gbe",
    "tcpx": "tcp tcpx tcpxo fastrak",
    "slingshot": "slingshot",
    "ici": "ici",
}
FABRIC_OF_WORD = {word: fabric for fabric, words in FABRICS.items() for word in words.split()}
"""Words of a description, and the kind of network that each means."""

PLAIN = {"ethernet", "gbe", "tcp"}
"""Words that may also mean a node's link to the rest of the data centre: any other kind in the text is preferred."""

CARD = re.compile(r"\b(?:nics?|hcas?|rdma|connectx|cx\d*|bluefield)\b|\d\s?x\s*\d+\s*[tgm]", re.IGNORECASE)
"""A network whose kind is not named: network cards, or a number of ports with a rate."""

PORT_GBITS = {"fdr": 56, "edr": 100, "hdr": 200, "ndr": 400, "xdr": 800, "opa": 100, "omni": 100, "omnipath": 100}
"""Gbit/s of one port of an InfiniBand generation or of Omni-Path, where only the name is given."""

ACCELERATOR_GBITS = {"tcpxo": 200, "fastrak": 200, "tcpx": 100}
"""Gbit/s per accelerator of networks of one kind of instance (Google Cloud's A3 Mega and A3 High), likewise."""

FASTEST_PORT = 800e9  # bit/s: XDR, and Ethernet of 2025
MIN_BITS, MAX_BITS = 1e9, 1e14  # bit/s: bounds of the total that a description of a node may give

_COUNTS = (
    re.compile(r"(?<![\d.])(\d{1,2})x\s", re.IGNORECASE),  # 8x 400G
    re.compile(  # 8 HDR ports
        r"(\d+)\s*(?:(?:omni-?path|opa|ib|infiniband|[fehnx]dr)\s*)?"
        r"(?:nics?|rails?|ports?|hcas?|cards?|adapters?|links?|per\s*node)\b",
        re.IGNORECASE,
    ),
    re.compile(r"[x×*]\s*(\d{1,2})\b(?!\.\d|\s*[TGM])", re.IGNORECASE),  # HDR200 x4; not the 25 of x 25G
)
_RATE = re.compile(
    r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*-?([TGM])(?:iga|era)?(i?b(?:it|yte)?s?)?(?:/\s*s(?:ec)?|ps)?e?\b", re.IGNORECASE
)
_NUMBER_OF_KIND = re.compile(
    r"(?:ib|infiniband|[fehnx]dr|omni-?path|opa|efa(?:v\d)?|roce(?:v\d)?)[\s-]*(\d{2,4})(?!\d)", re.IGNORECASE
)
_COUNT_WORDS = {"one": 1, "single": 1, "dual": 2, "two": 2, "quad": 4, "four": 4, "eight": 8}
_RATIO = re.compile(r"(?<![\d:])(\d+(?:\.\d+)?)\s*:\s*(\d+(?:\.\d+)?)(?![\d:])")
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
_PER_ACCELERATOR = re.compile(r"(?:per[\s-]*|/\s*)(?:gpu|accelerator|chip|device)", re.IGNORECASE)
_PER_PORT = re.compile(r"(?:per[\s-]*|/\s*)(?:port|nic|rail|card|hca|adapter|link)|each", re.IGNORECASE)
_OF_NODE = re.compile(r"node|server|instance|total|aggregate|per[\s-]*(?:vm|host|machine)", re.IGNORECASE)


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

    rank: int  # 2: described as for computing; 1: purpose not given; 0: for something else
    is_kind: bool  # more than Ethernet is named
    bits: float | None
    fabric: str


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
    text = re.sub(r"\b(?:no|without)\s+\w+", " ", re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", interconnect))
    text = re.sub(r"(?<=\d)\s?[x×*](?=\s*\w)", "x ", text)  # `4xHDR` means four HDR ports
    text = re.sub(rf"(?i)\b({'|'.join(_COUNT_WORDS)})\b", lambda word: f"{_COUNT_WORDS[word[0].lower()]}x ", text)
    if _SIGN.search(text):
        raise UserError(f"network '{interconnect}': a count or a rate is above 0")
    for up, down in _RATIO.findall(text):
        if not float(down) or not float(up):
            raise UserError(f"network '{interconnect}': write how oversubscribed it is as 2:1")
        usual = replace(usual, oversubscription=max(float(up) / float(down), 1.0))
    found = [_network(part, usual, interconnect) for part in _parts(_RATIO.sub(" ", text))]
    best = max((n for n in found if n), key=lambda n: (n.rank, n.is_kind, n.bits or 0.0), default=None)
    words = interconnect.strip()[:80]
    if best is None or best.rank == 0:
        return usual, f"network = that of {usual.name} ('{words}' names none)" if words else ""
    name = usual.name if best.fabric == usual.fabric else f"{usual.name}, {best.fabric}"
    if best.bits is None:
        note = f"network = {best.fabric} at the rate of {usual.name} ('{words}' says none)"
        return replace(usual, name=name, fabric=best.fabric), note
    total = Figure(best.bits / 8, "the run's own description")
    return replace(usual, name=name, fabric=best.fabric, nics=Figure(1, "sum of all"), nic_bytes_per_second=total), ""


def _parts(text: str) -> Iterator[str]:
    """Yield the description of each network: clauses, joined until both have a rate, or both a kind."""
    part = ""
    for clause in re.split(r"[;+,&|\n]|\band\b|\bplus\b|\bwith\b", text):
        if _INSIDE.search(clause):
            continue
        (rate, kinds), (more, others) = ((_rate(some), _kinds(some)) for some in (part, clause))
        if (rate and more) or (kinds and others):
            yield part
            part = clause
        else:
            part += f" {clause}"
    yield part


def _kinds(text: str) -> list[str]:
    """Return the words that name a kind of network, plain Ethernet last."""
    words = re.findall(r"[a-z]+", text.lower())
    return sorted((word for word in words if word in FABRIC_OF_WORD), key=lambda word: word in PLAIN)


def _rate(text: str) -> float | None:
    """Return the bit/s that a text names: a number with a unit, one beside a kind, or the port of a generation."""
    if match := _RATE.search(text):
        rate, unit = float(match[1]) * {"t": 1e12, "g": 1e9, "m": 1e6}[match[2].lower()], match[3] or ""
        is_bytes = ("B" in unit or "byte" in unit.lower()) and not match[0].lower().endswith("e")
        # No port is faster than FASTEST_PORT: bits were meant.
        return 8 * rate if is_bytes and (8 * rate <= FASTEST_PORT or _OF_NODE.search(text)) else rate
    if match := _NUMBER_OF_KIND.search(text):
        return float(match[1]) * 1e9
    return next((PORT_GBITS[word] * 1e9 for word in _kinds(text) if word in PORT_GBITS), None)


def _network(part: str, usual: Node, interconnect: str) -> _Network | None:
    kinds, bits = _kinds(part), _rate(part)
    if not kinds and not CARD.search(part):
        return None
    rank = 0 if _OTHERS.search(part) else 2 if _COMPUTE.search(part) else 1
    kind = kinds[0] if kinds else ""
    fabric, is_kind = FABRIC_OF_WORD.get(kind, usual.fabric), kind not in PLAIN
    per_accelerator = bool(_PER_ACCELERATOR.search(part))
    count = next((int(match[1]) for pattern in _COUNTS if (match := pattern.search(part))), None)
    if bits is None and kind in ACCELERATOR_GBITS:
        bits, per_accelerator = ACCELERATOR_GBITS[kind] * 1e9, True
    if bits is None or ("gbe" in kinds and is_kind):  # `100GbE InfiniBand`: the rate is that of another port
        return _Network(rank, is_kind, None, fabric)
    one_port = is_kind and kind not in ("efa", "efav") and bits <= FASTEST_PORT / 2 and not _OF_NODE.search(part)
    if per_accelerator:
        count = (count or 1) * usual.accelerators
    elif count is None and (one_port or _PER_PORT.search(part)):
        count = int(usual.nics.value) if usual.nics else 1
    bits *= 1 if count is None else count
    if not MIN_BITS <= bits <= MAX_BITS:
        raise UserError(f"network '{interconnect}': a node sends {MIN_BITS / 1e9:g} Gb/s to {MAX_BITS / 1e12:g} Tb/s")
    return _Network(rank, is_kind, bits, fabric)
