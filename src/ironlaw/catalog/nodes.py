"""Nodes: how many accelerators share a host, what links them, what leaves the host, what it draws.

    cluster = parse_cluster("64xh100-sxm-80gb")
    cluster.node.name, cluster.nodes        # "dgx-h100", 8
    parse_cluster("64xh100-sxm-80gb@p5-48xlarge")

Rates are one direction, bytes/s, per network card or per accelerator as the field says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from ironlaw.catalog.accelerators import Accelerator, accelerator
from ironlaw.catalog.figures import Figure, read_entry, read_toml, stems, unknown
from ironlaw.errors import UserError

MAX_ACCELERATORS = 10_000_000
"""Largest cluster that is taken for a wish rather than a slip of the keyboard."""


@dataclass(frozen=True, slots=True)
class Node:
    """A typical host. Absent figures are `None`."""

    name: str  # the catalog's name, and the data file's
    product: str  # the usual name
    accelerators: int  # per node (one operating system image)
    # Accelerators that reach each other over the scale-up link without the network: 8 in a DGX, 72 in an NVL72 rack, 1
    # where only PCIe links them.
    scale_up_accelerators: int
    fabric: str = ""  # infiniband, roce, efa, ethernet, slingshot, ici, or empty: not known
    nics: Figure | None = None  # network cards (or rails) for training traffic, per node
    nic_bytes_per_second: Figure | None = None  # each of them, one direction, bytes/s
    # Everything but the accelerators at full load, W: CPUs, memory, switches, network cards, fans, power supply losses.
    host_watts: Figure | None = None
    system_watts: Figure | None = None  # the whole node at its maximum, W
    host_memory_bytes: Figure | None = None  # memory of the processors, bytes
    host_memory_rate: Figure | None = None  # peak of all its channels together, bytes/s
    oversubscription: float = 1.0  # what the nodes can send over what the network's upper level carries; 1: all of it
    source: str = ""
    note: str = ""  # what is particular about it

    @property
    def network_bytes_per_second(self) -> float | None:
        """All training network cards of a node together, one direction, bytes/s."""
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

    @property
    def per_node(self) -> int:
        """Accelerators in use on a full host of this cluster."""
        return min(self.count, self.node.accelerators)

    def __str__(self) -> str:
        return f"{self.count}x{self.accelerator.name}@{self.node.name}"


def node_names() -> tuple[str, ...]:
    """All node names, sorted, from the file names: nothing is parsed."""
    return stems("nodes")


def node(name: str) -> Node:
    """The node of that name. Parses one file."""
    typed = name.strip().lower().replace("_", "-").replace(".", "-").replace(" ", "-")
    if typed not in node_names():
        raise unknown("node", name, node_names())
    return _load(typed)


_CLUSTER = re.compile(r"^(?:(?P<count>-?[\d_,.]+)\s*[x*]\s*)?(?P<name>[^@]+?)(?:@(?P<node>.+))?$", re.IGNORECASE)


def parse_cluster(text: str) -> Cluster:
    """A cluster from `[COUNTx]ACCELERATOR[@NODE]`: `h200`, `2xh200`, `64xh100-sxm-80gb@p5-48xlarge`."""
    match = _CLUSTER.match(text.strip())
    if match is None:
        raise UserError(f"cannot read cluster '{text}': write COUNTxACCELERATOR, for example 64xh100-sxm-80gb")
    count = _count(match["count"], text)
    chosen = accelerator(match["name"])
    return Cluster(chosen, count, node(match["node"] or chosen.default_node))


def _count(digits: str | None, text: str) -> int:
    if digits is None:
        return 1
    try:
        count = int(digits.replace(",", ""))
    except ValueError:
        count = 0
    if not 1 <= count <= MAX_ACCELERATORS:
        raise UserError(
            f"cannot read cluster '{text}': '{digits}' must be a whole number of accelerators, "
            f"1 to {MAX_ACCELERATORS:,}"
        )
    return count


@cache
def _load(name: str) -> Node:
    return read_entry(Node, name, read_toml("nodes", f"{name}.toml"))
