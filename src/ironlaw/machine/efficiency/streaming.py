"""Time of a kernel that only moves data: copies, norms, activations, residual adds, optimizer updates.

    time = launch + (bytes + ramp) / (fraction x bandwidth)

which is bytes / (attainable bandwidth x bytes / (bytes + ramp)): half the bandwidth at `ramp_bytes`.
The fraction depends on how well the kernel is written, so it is kept by kind; `copy` is the best one.
"""

from __future__ import annotations

import numpy as np

from ironlaw.errors import UserError, did_you_mean
from ironlaw.machine.efficiency.hardware import Hardware, Number, broadcast, unwrap

KINDS = {
    "copy": "device to device, read plus write counted",
    "elementwise": "residual add, dropout, cast, fused optimizer: each byte once",
    "norm": "RMS or layer norm as one plain kernel per call (a row is read more than once)",
    "gated_activation": "SwiGLU and the like as one plain kernel",
    "fused": "any of these when a compiler fuses them: as elementwise",
}


def streaming_seconds(moved_bytes: Number, hardware: Hardware, kind: str = "elementwise") -> Number:
    """Seconds to read and write `moved_bytes` in all (reads plus writes), launch included."""
    constants = hardware.efficiency.streaming
    name = "elementwise" if kind == "fused" else kind
    if name not in constants.fraction:
        raise UserError(f"unknown kind of streaming kernel {kind}; {did_you_mean(kind, constants.fraction)}")
    (size,), scalar = broadcast(moved_bytes)
    rate = hardware.memory_bytes_per_second * constants.fraction[name]
    seconds = np.where(size > 0, constants.launch_seconds + (size + constants.ramp_bytes) / rate, 0.0)
    return unwrap(seconds, scalar)
