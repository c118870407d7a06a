"""Time of one (batched) matrix product C[m, n] = A[m, k] B[k, n].

The model, minimised over the tiles and K-splits that libraries offer:

    tiles       T = batch ceil(m / tm) ceil(n / tn) s              s: split of K
    waves       W = T / units, rounded up if below one, else by the scheduler's rigidity
    compute     W (k / s + fill) 2 (tm tn + operand (tm + tn)) / (attainable peak / units)
    power       compute stretches towards FLOPs joules_per_flop / power_watts over throttle_seconds
    memory      (A + B + C) bytes / (memory_fraction bandwidth), each matrix once
    time        launch + (compute^q + memory^q)^(1/q)              q: OVERLAP_EXPONENT

Tile and wave quantisation follow NVIDIA, "Matrix Multiplication Background User's Guide" (DU-09799-001);
even spreading of tiles is stream-K (Osama et al., arXiv 2301.03598); the roofline is Williams et al.,
CACM 52(4), 2009. Measurements show that arithmetic energy bounds the rate of large products: within a
generation, the attained rate scales with the boards' power limits, not with their peaks.
"""

from __future__ import annotations

import numpy as np

from ironlaw.catalog.formats import number_format
from ironlaw.machine.efficiency.hardware import Array, Hardware, MatmulConstants, Number, broadcast, unwrap

TILES = (
    (256, 128), (128, 256), (192, 128), (128, 192), (128, 128),
    (256, 64), (64, 256), (128, 64), (64, 128), (64, 64),
)  # fmt: skip
SPLITS = (1, 2, 3, 4, 6, 8, 16, 32)
OVERLAP_EXPONENT = 2.5  # 1: compute and memory one after the other; infinity: perfect overlap
BLOCK = 4096  # shapes evaluated at once: bounds memory at about 20 MiB

_GRID = np.array([(tm, tn, s) for tm, tn in TILES for s in SPLITS], dtype=np.float64)
_TM, _TN, _SPLIT = (_GRID[:, i : i + 1] for i in range(3))


def matmul_seconds(
    m: Number,
    n: Number,
    k: Number,
    batch: Number = 1.0,
    dtype: str = "bf16",
    *,
    hardware: Hardware,
    library: str | None = None,
    sustained: bool = False,
) -> Number:
    """Return the seconds of one matmul, launch included, host time not.

    `sustained` applies the full power limit at any duration, as in a long training step; without it the time is that
    of a benchmark loop over this one shape, as in the measurements. With `sustained` and no `library`, each shape takes
    the time of the fastest measured library, as a training library chooses among kernels of that quality.
    """
    if sustained and library is None and len(libraries := hardware.efficiency.libraries(dtype)) > 1:
        each = [
            np.asarray(matmul_seconds(m, n, k, batch, dtype, hardware=hardware, library=name, sustained=True))
            for name in libraries
        ]
        return unwrap(np.asarray(np.min(each, axis=0)))
    constants = hardware.efficiency.matmul_for(dtype, library)
    m_, n_, k_, b_ = broadcast(m, n, k, batch)
    flat = [a.ravel() for a in (m_, n_, k_, b_)]
    out = np.empty(flat[0].size)
    for start in range(0, out.size, BLOCK):
        part = slice(start, start + BLOCK)
        mm, nn, kk, bb = (a[part] for a in flat)
        out[part] = _seconds(mm, nn, kk, bb, dtype, hardware, constants, sustained)
    return unwrap(out.reshape(m_.shape))


def _seconds(
    m: Array, n: Array, k: Array, batch: Array, dtype: str, hardware: Hardware, constants: MatmulConstants,
    sustained: bool,
) -> Array:  # fmt: skip
    bandwidth = hardware.memory_bytes_per_second
    compute = _compute_seconds(m, n, k, batch, hardware.peak(dtype), hardware, constants)
    powered = 2.0 * batch * m * n * k * constants.joules_per_flop / hardware.power_watts
    share = 1.0 if sustained else compute / (compute + constants.throttle_seconds)
    compute = compute + np.maximum(0.0, powered - compute) * share

    operand = number_format(dtype).bytes_per_element()
    result = 4.0 if dtype in ("fp32", "tf32") else 2.0
    traffic = batch * ((m * k + k * n) * operand + m * n * result)
    memory = traffic / (bandwidth * constants.memory_fraction)
    seconds = (compute**OVERLAP_EXPONENT + memory**OVERLAP_EXPONENT) ** (1 / OVERLAP_EXPONENT)
    return seconds + constants.launch_seconds


def _compute_seconds(
    m: Array, n: Array, k: Array, batch: Array, peak: float, hardware: Hardware, constants: MatmulConstants
) -> Array:
    """Return the seconds of the arithmetic at full clock, with the best of `TILES` and `SPLITS`."""
    unit_rate = peak * constants.attainable_fraction / hardware.compute_units
    waves = batch * np.ceil(m / _TM) * np.ceil(n / _TN) * _SPLIT / hardware.compute_units
    rigid = constants.wave_rigidity
    waves = np.where(waves > 1.0, rigid * np.ceil(waves) + (1.0 - rigid) * waves, 1.0)
    per_k = 2.0 * (_TM * _TN + constants.operand_elements * (_TM + _TN)) / unit_rate
    seconds = waves * (k / _SPLIT + constants.fill_elements) * per_k
    partials = np.where(_SPLIT > 1, _SPLIT * 4.0 * batch * m * n, 0.0)
    return np.min(seconds + constants.split_traffic * partials / hardware.memory_bytes_per_second, axis=0)
