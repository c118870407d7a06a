"""The system that all jobs of one evaluation share: accelerator, fabric, engine, precision and optimizer cost.

    cost = update_cost("muon", model)
    cost.block_state_bytes, cost.end_state_bytes        # per parameter of a block, of embedding and output layer
    cost.block_bytes                                    # bytes that an update moves per parameter of a block
    cost.matrices                                       # matrix products per block: Newton-Schulz, projections

The state and operations of an optimizer come from `workload/optimizers.py` and the parameters' shapes. An AdamW update
moves 34 bytes per parameter here (states, master weight, 16-bit weight, gradient for its norm). For other optimizers,
the difference between the bytes of their own operations and of AdamW's is added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast, get_args

import numpy as np

from ironlaw.catalog.accelerators import Accelerator
from ironlaw.catalog.nodes import Cluster, Node
from ironlaw.errors import UserError, did_you_mean
from ironlaw.machine.efficiency.hardware import Efficiency, Fabric, Hardware, NetworkConstants
from ironlaw.machine.efficiency.store import (
    assumed_efficiency,
    assumed_network,
    load_efficiency,
    load_network,
    reference_accelerators,
    reference_hardware,
)
from ironlaw.model.config import ModelConfig
from ironlaw.model.parameters import Parameter, elements_of, of_blocks, of_embedding, of_head
from ironlaw.plan.cluster.candidates import Array
from ironlaw.plan.engines.engine import TrainingEngine
from ironlaw.workload.optimizers import OptimizerConfig, OptimizerName, state_bytes, update_operations

NETWORK_OF_FABRIC = {"": "infiniband", "slingshot": "infiniband", "ici": "infiniband", "efa": "efa_v2"}
"""Fabrics without their own constants, and the network whose constants they use."""

NETWORK_OF_NODE = {
    "p4d-24xlarge": "efa_v1",
    "p4de-24xlarge": "efa_v1",
    "p6-b200-48xlarge": "efa_v4",
    "p6-b300-48xlarge": "efa_v4",
}
"""Nodes whose network is of another generation than is usual for its fabric."""

ASSUMED_NETWORK_BYTES_PER_SECOND = 50e9
"""Per accelerator, where a node's network is not known: one 400 Gbit/s card each, the rule of current platforms."""

ASSUMED_CARDS_NETWORK_BYTES_PER_SECOND = 25e9
"""The same per node of PCIe accelerators without links between them: one 200 Gbit/s card."""

ALL_LINKS_TO_ONE = ("nvidia", "google")
"""Vendors whose collectives use every link at once: through NVSwitch, or around the rings of a torus."""

ASSUMED_SHARING = 0.5
"""Exponent with which cards share PCIe (`collectives.py`), where it was not measured on cards of their generation.
Measured: 0 (V100), 0.4 (RTX PRO 6000), 0.6 (Arc B60), 2 (L40S)."""

POWER_EXPONENT = 0.5
"""Exponent of the power limit in the attained rate. A lower limit lowers clock and voltage, so it costs less than it
saves. Dynamic power grows with the cube of the clock where voltage follows it, less where it does not: 1/3 to 1."""

UNITS_OF_GENERATION = {
    "blackwell": 148,
    "tpu-v4": 8, "tpu-v5e": 4, "tpu-v5p": 8, "tpu-v6e": 2, "gaudi2": 2, "gaudi3": 8,
}  # fmt: skip
"""Units that compute tiles of a matmul in parallel, for packages without a count in the catalogue: compute units of a
Blackwell package; matrix units of a TPU (tensor cores x matrix units each) and of a Gaudi."""


ADAMW_BYTES = 34.0  # moved per parameter: 7 fp32 tensors, the 16-bit weight, the fp32 gradient once more


@dataclass(frozen=True)
class UpdateCost:
    """Cost of an optimizer update, bytes per parameter. `matrices`: (m, n, k, times per block) of products in bf16."""

    name: str = "adamw"
    block_state_bytes: float = 8.0
    end_state_bytes: float = 8.0  # embedding, output layer, final norm
    block_bytes: float = ADAMW_BYTES
    end_bytes: float = ADAMW_BYTES
    matrices: tuple[tuple[int, int, int, int], ...] = ()
    owners: int = 1  # matrices of a block, the units in which whole-matrix work is distributed


ADAMW = UpdateCost()
NAMES = get_args(OptimizerName)


def update_cost(name: str, model: ModelConfig) -> UpdateCost:
    """Returns the cost of optimizer `name` on this model. Raises UserError for an unknown name."""
    if name not in NAMES:
        raise UserError(f"unknown optimizer '{name}': {did_you_mean(name, NAMES)}")
    if name in ("adam", "adamw"):
        return ADAMW
    block, ends = of_blocks(model, [0]), of_embedding(model) + of_head(model)
    config = OptimizerConfig(name=cast(OptimizerName, name))
    products = [op for op in update_operations(block, config, cuda=True) if op.matmul is not None]
    return UpdateCost(
        name,
        block_state_bytes=state_bytes(block, config) / elements_of(block),
        end_state_bytes=state_bytes(ends, config) / elements_of(ends),
        block_bytes=_moved(block, config),
        end_bytes=_moved(ends, config),
        matrices=tuple((*op.matmul, op.repeat) for op in products if op.matmul is not None),
        owners=sum(p.is_block_matrix for p in block),
    )


def _moved(parameters: list[Parameter], config: OptimizerConfig) -> float:
    """Returns the bytes per parameter that an update's element-wise kernels move: AdamW's 34 plus the difference."""
    own, usual = (
        sum(op.bytes_moved * op.repeat for op in update_operations(parameters, by, cuda=True) if op.matmul is None)
        for by in (config, OptimizerConfig())
    )
    return ADAMW_BYTES + float(own - usual) / elements_of(parameters)


@dataclass(frozen=True)
class Host:
    """One accelerator's share of its host."""

    link_bytes_per_second: float  # to the accelerator, one direction
    memory_bytes: float
    memory_bytes_per_second: float


@dataclass(frozen=True)
class ClusterSystem:
    """A cluster. `precision`: of the blocks' linear layers; under fp8, attention and output layer stay in 16 bits."""

    hardware: Hardware
    fabric: Fabric
    engine: TrainingEngine
    precision: str
    memory_bytes: float  # as the device reports it
    update: UpdateCost = ADAMW
    host: Host | None = None  # target of offloaded state and activations; None: not known

    @property
    def wide_precision(self) -> str:
        """Precision of attention and of the output layer."""
        return self.precision if self.precision in ("bf16", "fp16", "fp32", "tf32") else "bf16"


def system_of(cluster: Cluster, engine: TrainingEngine, precision: str, update: UpdateCost = ADAMW) -> ClusterSystem:
    """Returns the system of a catalogued cluster. Raises UserError where it lacks a figure that every plan needs."""
    acc = cluster.accelerator
    if acc.memory_bytes is None:
        raise UserError(f"the memory of {acc.name} is not known: choose another accelerator")
    hardware, fabric = hardware_of(acc), alone(acc)
    if cluster.count > 1:
        fabric = fabric_of(acc, cluster.node)
        hardware = replace(hardware, efficiency=replace(hardware.efficiency, collectives=fabric.island))
    constants = engine.on(acc.generation).computing_in(precision, acc.generation)
    if acc.vendor != "nvidia" and acc.generation not in engine.by_generation:
        # Fitted to products of other chips: here they are no nearer to the kernels alone than is known of any software.
        slowdown = max(constants.matmul_slowdown, TrainingEngine.matmul_slowdown)
        constants = replace(constants, matmul_slowdown=slowdown)
    if update is not ADAMW:
        constants = replace(
            constants, moment_bytes=update.block_state_bytes, end_moment_bytes=update.end_state_bytes
        )  # fmt: skip
    host = host_of(cluster)
    return ClusterSystem(hardware, fabric, constants, precision, acc.memory_bytes.value, update, host)


HOST_USABLE = 0.9  # of a host's memory: the rest is the operating system's, the data loaders' and the page cache's


def host_of(cluster: Cluster) -> Host | None:
    """Returns one accelerator's share of its host; None where the catalogue lacks a figure of the host."""
    acc, node = cluster.accelerator, cluster.node
    link = acc.host_link_bytes_per_second or acc.pcie_bytes_per_second
    if acc.unified_memory or link is None or node.host_memory_bytes is None or node.host_memory_rate is None:
        return None
    share = 1 / node.accelerators
    return Host(link.value, HOST_USABLE * node.host_memory_bytes.value * share, node.host_memory_rate.value * share)


@lru_cache(maxsize=64)
def _efficiency(generation: str) -> Efficiency:
    try:
        return load_efficiency(generation)
    except UserError:
        return assumed_efficiency(generation)


def matmul_is_assumed(generation: str) -> bool:
    """Returns whether even the constants of a generation's matmuls are assumed, not measured."""
    evidence = [constants.evidence for constants in _efficiency(generation).matmul.values()]
    return all(e is None or e.assumed for e in evidence)


@lru_cache(maxsize=16)
def _network(fabric: str, node: str) -> NetworkConstants:
    try:
        return load_network(NETWORK_OF_NODE.get(node) or NETWORK_OF_FABRIC.get(fabric, fabric))
    except (UserError, FileNotFoundError):
        return assumed_network()


def hardware_of(acc: Accelerator) -> Hardware:
    """Returns the catalogue's nominal figures with the fitted constants of the generation."""
    units = acc.compute_units.value if acc.compute_units else UNITS_OF_GENERATION.get(acc.generation)
    wanted = {"memory_bytes_per_second": acc.memory_bytes_per_second, "compute_units": units}
    for name, value in wanted.items():
        if value is None:
            raise UserError(f"a plan needs {name} of {acc.name}, which is not known: choose another accelerator")
    assert acc.memory_bytes_per_second and units
    peaks = {dtype: value.value for dtype, value in acc.peak_flops_per_second.items()}
    return Hardware(
        name=acc.name,
        peak_flops_per_second=peaks,
        memory_bytes_per_second=acc.memory_bytes_per_second.value,
        compute_units=int(units),
        # Without a known limit there is no throttling.
        power_watts=effective_power_watts(acc.measured_generation, acc.tdp_watts.value) if acc.tdp_watts else math.inf,
        efficiency=_efficiency(acc.measured_generation),
    )


@lru_cache(maxsize=64)
def effective_power_watts(generation: str, limit_watts: float) -> float:
    """Returns the power for the efficiency constants: the limit they were measured at, scaled by `POWER_EXPONENT`."""
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
    """Returns the node's scale-up islands joined by its network; accelerators without their own link use PCIe."""
    own, pcie = acc.link_bytes_per_second, acc.pcie_bytes_per_second
    ranks, link, topology = max(node.scale_up_accelerators, 1), own or pcie, "mesh"
    if link is None:
        raise UserError(f"no link of {acc.name} is known: a plan over several accelerators needs one")
    if pcie and (own is None or ranks == 1 < node.accelerators):
        ranks, link, topology = max(ranks, node.accelerators), pcie, "bus"
    elif acc.vendor in ALL_LINKS_TO_ONE:
        topology = "switch"
    island, shared = _efficiency(acc.measured_generation).collectives, topology == "bus"
    if island is None or (island.sharing_exponent > 0) != shared:  # a bus says nothing of own links, nor they of a bus
        island = assumed_efficiency(acc.generation).collectives
        assert island is not None
        island = replace(island, sharing_exponent=ASSUMED_SHARING if shared else 0.0)
    network, assumed = node.network_bytes_per_second, ASSUMED_NETWORK_BYTES_PER_SECOND * node.accelerators
    if network is None:
        network = ASSUMED_CARDS_NETWORK_BYTES_PER_SECOND if own is None else assumed
    return Fabric(
        island_ranks=ranks,
        island_bytes_per_second=link.value,
        island=island,
        topology=topology,
        network_bytes_per_second=network / node.accelerators,
        network=_network(node.fabric, node.name),
        oversubscription=node.oversubscription,
    )


def alone(acc: Accelerator) -> Fabric:
    """Returns the fabric of a single accelerator, whose rates are never used."""
    island = assumed_efficiency(acc.generation).collectives
    assert island is not None
    return Fabric(1, 1e9, island, network_bytes_per_second=1e9, network=assumed_network())


UNUSABLE_BYTES = 1.0 * 2**30
"""Device memory that no allocator can hand out: driver context, kernels and communicators."""


PRESSURE_SHARE = 0.9
"""Share of the usable memory above which the allocator is likely to free and retry within a step."""


def usable_bytes(where: ClusterSystem) -> float:
    """Returns the bytes of one device that tensors can use."""
    return where.memory_bytes - UNUSABLE_BYTES


def under_pressure(seconds: Array, highest_bytes: Array, where: ClusterSystem) -> Array:
    """Returns step seconds with the cost of an allocator that runs out: freeing cached blocks stops the device."""
    nearly_full = highest_bytes > PRESSURE_SHARE * usable_bytes(where)
    return seconds * np.where(nearly_full, where.engine.pressure_slowdown, 1.0)
