"""Time of a kernel that only moves data: copies, norms, activations, residual adds, optimizer updates.

    time = launch + (bytes + ramp) / (fraction x bandwidth)

which is bytes / (attainable bandwidth x bytes / (bytes + ramp)): half the bandwidth at `ramp_bytes`.
The fraction depends on the quality of the kernel, so there is one per kind. A plain norm reads its row more
than once and attains a third of the bandwidth; fused by a compiler, it attains that of `elementwise`.
"""

from __future__ import annotations

import numpy as np

from ironlaw.machine.efficiency.hardware import Hardware, Number, broadcast, unwrap


def streaming_seconds(moved_bytes: Number, hardware: Hardware, kind: str = "elementwise") -> Number:
    """Return the seconds of a kernel that moves `moved_bytes` (reads plus writes), launch included.

    `kind`: "norm" or "gated_activation" as one plain kernel per call, or "elementwise": copies, casts, additions, and
    any mix that a compiler fuses.
    """
    constants = hardware.efficiency.streaming
    (size,) = broadcast(moved_bytes)
    rate = hardware.memory_bytes_per_second * constants.fraction[kind]
    seconds = np.where(size > 0, constants.launch_seconds + (size + constants.ramp_bytes) / rate, 0.0)
    return unwrap(seconds)
