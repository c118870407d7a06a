"""Time of one fused (flash) attention call, forward or backward.

    keys        mean number of keys a query attends to: causal (s + 1) / 2, window, or all
    FLOPs       forward 4 batch heads s keys d; backward 2.5 times that (five matmuls against two)
    compute     FLOPs (1 + softmax / d) (1 + fill / keys) / (attainable peak)  + tail
    tail        the share of the longest query tile that no other work overlaps
    power       as for matmul; memory: q, k, v, o once, and the library's extra traffic
    time        launch + max(compute, memory)

Online softmax and the counts: Dao et al., arXiv 2205.14135; tiles over the sequence and the backward's
five matmuls: FlashAttention-2, arXiv 2307.08691, which reaches 73% of peak forward and 63% backward on
A100, hence the backward's relative rate of 0.86; FlashAttention-3 (arXiv 2407.08608) shows the same ratio
on H100. That exponentials, not matmuls, bound short heads is section 3 of the latter.
Backward has not been measured here.
"""

from __future__ import annotations

import numpy as np

from ironlaw.catalog.formats import number_format
from ironlaw.machine.efficiency.hardware import Hardware, Number, broadcast, unwrap
from ironlaw.machine.efficiency.matmul import OVERLAP_EXPONENT

QUERY_TILE = 128
THROTTLE_SECONDS = 2e-3
BACKWARD_FLOPS_RATIO = 2.5
BACKWARD_TRAFFIC_RATIO = 2.0  # reads q k v o do, writes dq dk dv, against q k v read and o written


def mean_keys(sequence: Number, causal: bool, window: Number | None = None) -> Number:
    """Return the mean keys per query of a sequence: s, (s + 1) / 2 if causal, fewer with a sliding window."""
    s = np.asarray(sequence, dtype=np.float64)
    if window is None:
        keys = (s + 1) / 2 if causal else s
    else:
        w = np.minimum(np.asarray(window, dtype=np.float64), s)
        keys = w - w * (w - 1) / (2 * s) if causal else np.minimum(2 * w + 1, s)
    return float(keys) if np.ndim(keys) == 0 else keys


def attention_flops(
    batch: Number,
    sequence: Number,
    heads: Number,
    head_size: Number,
    causal: bool = True,
    direction: str = "forward",
    window: Number | None = None,
    value_size: Number | None = None,
) -> Number:
    """Return the floating-point operations required: masked scores are not counted.

    `value_size`: size of a head's value, by default `head_size`. Of the backward pass's five products, three are as
    wide as keys (scores again, gradients of query and key) and two as wide as values.
    """
    value = head_size if value_size is None else value_size
    widths = 3.0 * head_size + 2.0 * value if direction == "backward" else 1.0 * head_size + value
    return 2.0 * batch * heads * sequence * mean_keys(sequence, causal, window) * widths


def attention_seconds(
    batch: Number,
    sequence: Number,
    heads: Number,
    kv_heads: Number,
    head_size: Number,
    causal: bool = True,
    dtype: str = "bf16",
    *,
    hardware: Hardware,
    direction: str = "forward",
    window: Number | None = None,
    sustained: bool = False,
    value_size: Number | None = None,
) -> Number:
    """Return the seconds of one attention call over `batch` sequences of `sequence` tokens, without host time.

    `value_size`: size of a head's value, by default `head_size`. Only equal sizes were measured; terms that depend on
    the head size use the mean of both.
    """
    constants = hardware.efficiency.attention
    b, s, h, kv, d = broadcast(batch, sequence, heads, kv_heads, head_size)
    keys = np.asarray(mean_keys(s, causal, window))
    v = d if value_size is None else np.broadcast_to(np.asarray(value_size, dtype=np.float64), d.shape)
    flops = np.asarray(attention_flops(b, s, h, d, causal, direction, window, v))
    d = (d + v) / 2
    rate = hardware.peak(dtype) * constants.attainable_fraction
    rate = rate * (constants.backward_relative_fraction if direction == "backward" else 1.0)
    slowdown = (1.0 + constants.softmax_head_elements / d) * (1.0 + constants.fill_keys / keys)
    # partial query tiles are computed whole
    padded = np.ceil(s / QUERY_TILE) * QUERY_TILE / s
    compute = flops * padded * slowdown / rate
    longest = np.minimum(s if window is None else np.asarray(window), s) / keys  # longest tile over the mean
    tiles = b * h * np.ceil(s / QUERY_TILE)
    compute = compute * np.maximum(1.0, hardware.compute_units / tiles) + (
        constants.tail_rigidity * compute / tiles * longest * hardware.compute_units
    )
    powered = flops * constants.joules_per_flop / hardware.power_watts
    share = 1.0 if sustained else compute / (compute + THROTTLE_SECONDS)
    compute = compute + np.maximum(0.0, powered - compute) * share
    # q, k, v and o move once between memory and the compute units.
    traffic = 2.0 * b * s * (h + kv) * d * number_format(dtype).bytes_per_element()
    traffic = traffic * (BACKWARD_TRAFFIC_RATIO if direction == "backward" else 1.0)
    memory = traffic / (hardware.memory_bytes_per_second * constants.memory_fraction)
    seconds = (compute**OVERLAP_EXPONENT + memory**OVERLAP_EXPONENT) ** (1 / OVERLAP_EXPONENT)
    extra = constants.extra_traffic * memory
    return unwrap(np.asarray(seconds + extra + constants.launch_seconds))
