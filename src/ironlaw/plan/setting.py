"""What all jobs of one evaluation share: accelerator, fabric, engine and precision."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ironlaw.catalog.accelerators import Accelerator
from ironlaw.catalog.nodes import Cluster, Node
from ironlaw.errors import UserError
from ironlaw.machine.efficiency import (
    Efficiency,
    Fabric,
    Hardware,
    NetworkConstants,
    load_efficiency,
    load_network,
    reference_accelerators,
    reference_hardware,
)
from ironlaw.plan.engine import Engine
from ironlaw.plan.provisional import provisional_efficiency, provisional_network

NETWORK_OF_FABRIC = {"": "infiniband", "slingshot": "infiniband", "ici": "infiniband", "efa": "efa_v2"}
"""Fabrics without constants of their own, and whose are used."""

NETWORK_OF_NODE = {
    "p4d-24xlarge": "efa_v1",
    "p4de-24xlarge": "efa_v1",
    "p6-b200-48xlarge": "efa_v4",
    "p6-b300-48xlarge": "efa_v4",
}
"""Nodes whose network is another generation than the usual one of its fabric."""

ASSUMED_NETWORK_BYTES_PER_SECOND = 50e9
"""Per accelerator, where a node's network is not known: one 400 Gbit/s card each, the rule of current platforms."""

POWER_EXPONENT = 0.5
"""Attained rate over power limit: a lower limit lowers clock and voltage together, so it costs less than it saves.
Dynamic power grows with the cube of the clock where voltage follows it, less where it does not; between 1/3 and 1."""

UNITS_OF_GENERATION = {"blackwell": 148}
"""Compute units of packages whose own count is not published."""


@dataclass(frozen=True)
class Setting:
    """`precision` is that of the linear layers of the blocks; attention and output layer stay in 16 bits under fp8."""

    hardware: Hardware
    fabric: Fabric
    engine: Engine
    precision: str
    memory_bytes: float  # what the device reports

    @property
    def wide_precision(self) -> str:
        """Precision of attention and of the output layer."""
        return self.precision if self.precision in ("bf16", "fp16", "fp32", "tf32") else "bf16"


def setting(cluster: Cluster, engine: Engine, precision: str) -> Setting:
    """The setting of a catalogued cluster."""
    acc = cluster.accelerator
    if acc.memory_bytes is None:
        raise UserError(f"the memory of {acc.name} is not known: choose another accelerator")
    return Setting(
        hardware_of(acc), fabric_of(acc, cluster.node), engine.on(acc.generation), precision, acc.memory_bytes.value
    )


@lru_cache(maxsize=64)
def _efficiency(generation: str) -> Efficiency:
    try:
        return load_efficiency(generation)
    except UserError:
        return provisional_efficiency(generation)


@lru_cache(maxsize=16)
def _network(fabric: str, node: str) -> NetworkConstants:
    try:
        return load_network(NETWORK_OF_NODE.get(node) or NETWORK_OF_FABRIC.get(fabric, fabric))
    except (UserError, FileNotFoundError):
        return provisional_network()


def hardware_of(acc: Accelerator) -> Hardware:
    """Nominal figures of the catalogue with the fitted constants of the generation."""
    units = acc.compute_units.value if acc.compute_units else UNITS_OF_GENERATION.get(acc.generation)
    wanted = {
        "memory_bytes_per_second": acc.memory_bytes_per_second,
        "compute_units": units,
        "tdp_watts": acc.tdp_watts,
    }
    for name, value in wanted.items():
        if value is None:
            raise UserError(f"{name} of {acc.name} is not known: a plan needs it")
    assert acc.memory_bytes_per_second and units and acc.tdp_watts
    return Hardware(
        name=acc.name,
        peak_flops_per_second={dtype: value.value for dtype, value in acc.peak_flops_per_second.items()},
        memory_bytes_per_second=acc.memory_bytes_per_second.value,
        compute_units=int(units),
        power_watts=effective_power_watts(acc.generation, acc.tdp_watts.value),
        efficiency=_efficiency(acc.generation),
        l2_bytes=acc.l2_bytes.value if acc.l2_bytes else 0.0,
        clock_hertz=acc.clock_hz.value if acc.clock_hz else None,
    )


@lru_cache(maxsize=64)
def effective_power_watts(generation: str, limit_watts: float) -> float:
    """The power that the efficiency constants see: the limit they were measured at, scaled by `POWER_EXPONENT`."""
    measured = [
        reference_hardware(generation, name).power_watts
        for name, of in reference_accelerators().items()
        if of == generation
    ]
    if not measured:
        return limit_watts
    nearest = min(measured, key=lambda watts: abs(watts - limit_watts))
    return float(nearest * (limit_watts / nearest) ** POWER_EXPONENT)


def fabric_of(acc: Accelerator, node: Node) -> Fabric:
    """Scale-up island of the node, joined by its network cards."""
    link = acc.link_bytes_per_second or acc.pcie_bytes_per_second
    if link is None:
        raise UserError(f"no link of {acc.name} is known: a plan over several accelerators needs one")
    efficiency = _efficiency(acc.generation)
    island = efficiency.collectives or provisional_efficiency(acc.generation).collectives
    assert island is not None
    network = node.network_bytes_per_second or ASSUMED_NETWORK_BYTES_PER_SECOND * node.accelerators
    return Fabric(
        island_ranks=max(node.scale_up_accelerators, 1),
        island_bytes_per_second=link.value,
        island=island,
        topology="switch" if acc.vendor == "nvidia" and acc.link_bytes_per_second else "mesh",
        network_bytes_per_second=network / node.accelerators,
        network=_network(node.fabric, node.name),
    )
