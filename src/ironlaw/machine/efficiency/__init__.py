"""Time of single operations on catalogued accelerators, from a few physical constants per generation.

    hardware = Hardware("h100", {"bf16": 989e12}, 3.35e12, 132, 700.0, load_efficiency("hopper"))
    matmul_seconds(8192, 4096, 4096, dtype="bf16", hardware=hardware)

All functions take plain floats or numpy arrays and broadcast. Nothing here imports torch.
"""

from ironlaw.machine.efficiency.attention import attention_flops, attention_seconds
from ironlaw.machine.efficiency.collectives import (
    bus_bytes_per_second,
    collective_seconds,
    ideal_fabric,
    traffic_bytes,
)
from ironlaw.machine.efficiency.hardware import (
    AttentionConstants,
    CollectiveConstants,
    Efficiency,
    Evidence,
    Fabric,
    Hardware,
    MatmulConstants,
    NetworkConstants,
    StreamingConstants,
)
from ironlaw.machine.efficiency.matmul import matmul_bound, matmul_flops, matmul_seconds
from ironlaw.machine.efficiency.store import (
    generations,
    load_efficiency,
    load_network,
    reference_accelerators,
    reference_hardware,
)
from ironlaw.machine.efficiency.streaming import streaming_seconds

__all__ = [
    "AttentionConstants",
    "CollectiveConstants",
    "Efficiency",
    "Evidence",
    "Fabric",
    "Hardware",
    "MatmulConstants",
    "NetworkConstants",
    "StreamingConstants",
    "attention_flops",
    "attention_seconds",
    "bus_bytes_per_second",
    "collective_seconds",
    "generations",
    "ideal_fabric",
    "load_efficiency",
    "load_network",
    "matmul_bound",
    "matmul_flops",
    "matmul_seconds",
    "reference_accelerators",
    "reference_hardware",
    "streaming_seconds",
    "traffic_bytes",
]
