"""Time of a kernel that only moves data: copies, norms, activations, residual adds, optimizer updates.

    time = launch + (bytes + ramp) / (fraction x bandwidth)

which is bytes / (attainable bandwidth x bytes / (bytes + ramp)): half the bandwidth at `ramp_bytes`.
The fraction depends on the quality of the kernel, so there is one per kind. A plain norm reads its row more
than once and attains a third of the bandwidth; fused by a compiler, it attains that of `elementwise`.
"""

from __future__ import annotations

import numpy as np

from ironlaw.errors import UserError, did_you_mean
from ironlaw.machine.efficiency.hardware import Hardware, Number, broadcast, unwrap

KINDS = {
    "elementwise": "elementwise",  # residual add, dropout, cast, fused optimizer: each byte once
    "copy": "elementwise",  # device to device, read plus write counted
    "fused": "elementwise",  # any mix of these fused into one kernel by a compiler
    "norm": "norm",  # RMS or layer norm as one plain kernel per call
    "gated_activation": "gated_activation",  # SwiGLU and the like as one plain kernel
}
"""Kind of kernel -> name of its fraction in the constants."""


def streaming_seconds(moved_bytes: Number, hardware: Hardware, kind: str = "elementwise") -> Number:
    """Return the seconds of a kernel that moves `moved_bytes` (reads plus writes), launch included."""
    constants = hardware.efficiency.streaming
    if kind not in KINDS:
        raise UserError(f"unknown kind of streaming kernel {kind}; {did_you_mean(kind, KINDS)}")
    (size,) = broadcast(moved_bytes)
    rate = hardware.memory_bytes_per_second * constants.fraction[KINDS[kind]]
    seconds = np.where(size > 0, constants.launch_seconds + (size + constants.ramp_bytes) / rate, 0.0)
    return unwrap(seconds)
