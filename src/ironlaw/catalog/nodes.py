"""Nodes: the accelerators that share a host, the links between them, the network, and the power of the host.

    cluster = parse_cluster("64xh100-sxm-80gb")
    cluster.node.name, cluster.nodes        # "dgx-h100", 8
    parse_cluster("64xh100-sxm-80gb@p5-48xlarge")

Rates are one direction, bytes/s, per network card or per accelerator as the field says.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from ironlaw import units
from ironlaw.catalog.accelerators import Accelerator, accelerator
from ironlaw.catalog.figures import Figure, read_entry, read_toml, stems, unknown
from ironlaw.errors import UserError

MAX_ACCELERATORS = 10_000_000
"""Largest cluster that is accepted; a larger number is taken for a typing error."""


@dataclass(frozen=True, slots=True)
class Node:
    """A typical host. Unknown figures are `None`."""

    name: str  # in the catalog, and of the data file
    product: str  # the usual name
    accelerators: int  # per node (one operating system image)
    # Accelerators that reach each other over the scale-up link without the network: 8 in a DGX, 72 in an NVL72 rack, 1
    # if only PCIe links them.
    scale_up_accelerators: int
    fabric: str = ""  # infiniband, roce, efa, ethernet, slingshot, ici; empty: not known
    nics: Figure | None = None  # network cards (or rails) for training traffic, per node
    nic_bytes_per_second: Figure | None = None  # of each card, one direction, bytes/s
    # Everything but the accelerators at full load, W: CPUs, memory, switches, network cards, fans, power supply losses.
    host_watts: Figure | None = None
    system_watts: Figure | None = None  # the whole node at its maximum, W
    host_memory_bytes: Figure | None = None  # CPU memory, bytes
    host_memory_rate: Figure | None = None  # peak of all memory channels together, bytes/s
    oversubscription: float = 1.0  # sending rate of all nodes divided by the rate of the network's upper level
    source: str = ""
    note: str = ""  # peculiarities of the node

    @property
    def network_bytes_per_second(self) -> float | None:
        """Rate of all training network cards of a node together, one direction, bytes/s."""
        if self.nics is None or self.nic_bytes_per_second is None:
            return None
        return self.nics.value * self.nic_bytes_per_second.value


@dataclass(frozen=True, slots=True)
class Cluster:
    """`count` accelerators of one kind in nodes of one kind."""

    accelerator: Accelerator
    count: int
    node: Node

    @property
    def nodes(self) -> int:
        """Hosts needed; the last may be partly filled."""
        return -(-self.count // self.node.accelerators)

    def __str__(self) -> str:
        return f"{self.count}x{self.accelerator.name}@{self.node.name}"


def node_names() -> tuple[str, ...]:
    """Return all node names, sorted, from the file names. Parses nothing."""
    return stems("nodes")


def node(name: str) -> Node:
    """Return the node with this name. Parses one file."""
    typed = name.strip().lower().replace("_", "-").replace(".", "-").replace(" ", "-")
    if typed not in node_names():
        raise unknown("node", name, node_names())
    return _load(typed)


_CLUSTER = re.compile(r"^(?:(?P<count>-?[\d_,.]+)\s*[x*]\s*)?(?P<name>[^@]+?)(?:@(?P<node>.+))?$", re.IGNORECASE)


def parse_cluster(text: str) -> Cluster:
    """Parse a cluster from `[COUNTx]ACCELERATOR[@NODE]`: `h200`, `2xh200`, `64xh100-sxm-80gb@p5-48xlarge`."""
    match = _CLUSTER.match(text.strip())
    if match is None:
        raise UserError(f"cannot read cluster '{text}': write COUNTxACCELERATOR, for example 64xh100-sxm-80gb")
    count = _count(match["count"], text)
    chosen = accelerator(match["name"])
    return Cluster(chosen, count, node(match["node"] or chosen.default_node))


def _count(digits: str | None, text: str) -> int:
    count = 0.0
    with suppress(ValueError):
        count = 1.0 if digits is None else units.parse_number(digits)
    if not 1 <= count <= MAX_ACCELERATORS or count % 1:
        raise UserError(
            f"cannot read cluster '{text}': '{digits}' must be a whole number of accelerators, "
            f"1 to {MAX_ACCELERATORS:,}"
        )
    return int(count)


@cache
def _load(name: str) -> Node:
    return read_entry(Node, name, read_toml("nodes", f"{name}.toml"))
