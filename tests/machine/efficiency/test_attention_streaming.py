"""Physics and published points of the attention and streaming models."""

from __future__ import annotations

import numpy as np
import pytest

from ironlaw.machine.efficiency.attention import attention_flops, attention_seconds, mean_keys
from ironlaw.machine.efficiency.store import reference_hardware
from ironlaw.machine.efficiency.streaming import streaming_seconds

H100 = reference_hardware("hopper", "H100-SXM-80GB")
A100 = reference_hardware("ampere", "A100-SXM-80GB")


def attained(hardware, batch: int, sequence: int, heads: int, size: int, **options) -> float:
    seconds = attention_seconds(batch, sequence, heads, heads, size, hardware=hardware, **options)
    flops = attention_flops(batch, sequence, heads, size, direction=options.get("direction", "forward"))
    return flops / seconds / 1e12


def test_mean_keys_by_hand() -> None:
    assert mean_keys(4, causal=True) == 2.5  # 1 2 3 4
    assert mean_keys(4, causal=False) == 4
    assert mean_keys(4, causal=True, window=2) == 1.75  # 1 2 2 2
    assert mean_keys(4, causal=True, window=100) == 2.5


def test_flops_by_hand() -> None:
    assert attention_flops(1, 4, 1, 8, causal=False) == 4 * 4 * 4 * 8
    assert attention_flops(1, 4, 1, 8, direction="backward") == 2.5 * attention_flops(1, 4, 1, 8)


def test_flash_attention_3_on_h100() -> None:
    # causal, head size 128, 16k: 616 TFLOP/s in the FlashAttention-3 repository's forward benchmark
    assert attained(H100, 1, 16384, 16, 128) == pytest.approx(616, rel=0.12)


def test_below_peak_and_monotone() -> None:
    sequence = np.arange(128.0, 32769.0, 128.0)
    for hardware in (H100, A100):
        for direction in ("forward", "backward"):
            seconds = attention_seconds(2, sequence, 16, 4, 128, hardware=hardware, direction=direction)
            assert np.all(np.diff(seconds) > 0)
            flops = attention_flops(2, sequence, 16, 128, direction=direction)
            assert np.all(flops / seconds < hardware.peak("bf16"))


def test_shapes_order_as_physics_says() -> None:
    assert attained(H100, 4, 4096, 32, 64) < attained(H100, 4, 4096, 32, 128)
    assert attained(H100, 1, 1024, 8, 128) < attained(H100, 16, 1024, 32, 128) < attained(H100, 2, 16384, 32, 128)
    full = attention_seconds(1, 32768, 32, 8, 128, hardware=H100)
    window = attention_seconds(1, 32768, 32, 8, 128, hardware=H100, window=4096)
    assert window < 0.4 * full
    forward = attention_seconds(2, 8192, 32, 8, 128, hardware=H100)
    backward = attention_seconds(2, 8192, 32, 8, 128, hardware=H100, direction="backward")
    assert 2.0 < backward / forward < 3.5


def test_causal_halves_long_attention() -> None:
    causal = attention_seconds(4, 16384, 32, 32, 128, True, hardware=H100)
    full = attention_seconds(4, 16384, 32, 32, 128, False, hardware=H100)
    assert causal / full == pytest.approx(0.5, abs=0.05)


def test_streaming_is_launch_then_bandwidth() -> None:
    size = np.array([0.0, 1.0, 1e6, 1e9, 1e11])
    seconds = streaming_seconds(size, A100)
    assert seconds[0] == 0.0
    assert seconds[1] > 1e-6
    assert size[-1] / seconds[-1] < A100.memory_bytes_per_second
    assert size[-1] / seconds[-1] > 0.8 * A100.memory_bytes_per_second
    assert np.all(np.diff(seconds) > 0)


def test_residual_add_as_vidur_measured() -> None:
    # github.com/microsoft/vidur, data/profiling/compute: 4,096 tokens x 8,192, fp16, 2 reads and 1 write
    assert streaming_seconds(3 * 2 * 4096 * 8192, A100) == pytest.approx(112e-6, rel=0.1)
    assert streaming_seconds(3 * 2 * 4096 * 8192, H100) == pytest.approx(62e-6, rel=0.1)


def test_fusion_pays() -> None:
    assert streaming_seconds(1e8, H100, "elementwise") < 0.6 * streaming_seconds(1e8, H100, "norm")
