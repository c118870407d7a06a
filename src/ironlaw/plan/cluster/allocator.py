"""What an allocator can hand out of a device's memory, and what it costs when that is nearly used up."""

from __future__ import annotations

import numpy as np

from ironlaw.plan.cluster.candidates import Array
from ironlaw.plan.cluster.system import System

UNUSABLE_BYTES = 1.0 * 2**30
"""Of a device's memory: driver context, kernels and communicators that no allocator can hand out."""


PRESSURE_SHARE = 0.9
"""Of what an allocator can hand out: from here on it is likely to free and retry within a step."""


def usable_bytes(where: System) -> float:
    """Of one device, for tensors."""
    return where.memory_bytes - UNUSABLE_BYTES


def under_pressure(seconds: Array, highest_bytes: Array, where: System) -> Array:
    """Step seconds with the cost of an allocator that runs out: freeing cached blocks stops the device."""
    nearly_full = highest_bytes > PRESSURE_SHARE * usable_bytes(where)
    return seconds * np.where(nearly_full, where.engine.pressure_slowdown, 1.0)
