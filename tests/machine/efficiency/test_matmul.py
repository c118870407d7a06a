"""Physics and published points of the matmul model."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ironlaw.catalog.accelerators import accelerator, accelerator_names
from ironlaw.catalog.devices import lines
from ironlaw.errors import UserError
from ironlaw.machine.efficiency.hardware import Hardware
from ironlaw.machine.efficiency.matmul import matmul_seconds
from ironlaw.machine.efficiency.store import generations, load_efficiency, reference_accelerators, reference_hardware

MEASURED = {
    name: generation
    for name, generation in reference_accelerators().items()
    if not any(line.startswith("matmul bf16") for line in load_efficiency(generation).assumptions())
}


def hardware(name: str):
    return reference_hardware(reference_accelerators()[name], name)


def attained(m: float, n: float, k: float, name: str, **options) -> float:
    return 2.0 * m * n * k / matmul_seconds(m, n, k, hardware=hardware(name), **options) / 1e12


def test_eleven_accelerators_are_measured() -> None:
    assert len(MEASURED) == 11
    assert {"A100-SXM-80GB", "H100-SXM-80GB", "H200-SXM-141GB", "B200-SXM", "GB300"} <= set(MEASURED)


@pytest.mark.parametrize("name", sorted(MEASURED))
def test_never_above_peak_nor_above_bandwidth(name: str) -> None:
    rng = np.random.default_rng(0)
    m, n, k = np.exp(rng.uniform(0, np.log(65536), (3, 2000))).round()
    device = hardware(name)
    seconds = matmul_seconds(m, n, k, hardware=device)
    assert np.all(2.0 * m * n * k / seconds < device.peak("bf16"))
    traffic = 2 * (m * k + k * n + m * n)
    assert np.all(traffic / seconds < device.memory_bytes_per_second)


@pytest.mark.parametrize("name", ["A100-SXM-80GB", "H100-SXM-80GB", "B200-SXM", "L40S"])
@pytest.mark.parametrize("axis", range(4))
def test_monotone_in_every_size(name: str, axis: int) -> None:
    sizes = [np.full(4000, v) for v in (4096.0, 3072.0, 2048.0, 1.0)]
    sizes[axis] = np.arange(1.0, 4001.0)
    assert np.all(np.diff(matmul_seconds(*sizes, hardware=hardware(name))) >= -1e-15)


@pytest.mark.parametrize("name", ["A100-SXM-80GB", "H100-SXM-80GB"])
def test_one_row_beyond_a_tile_costs_a_tile(name: str) -> None:
    m = np.array([1024.0, 1025.0, 1088.0])
    at, above, filled = matmul_seconds(m, 8192, 8192, hardware=hardware(name))
    assert above > 1.02 * at
    assert above == pytest.approx(filled, rel=0.02)  # the rest of that tile is nearly free


def test_waves_quantise_on_ampere() -> None:
    # 128 x 128 tiles: 108 units take 108 of them together, 109 leave a tail
    n = 128.0 * np.array([104, 108, 112])
    per_column = matmul_seconds(128, n, 8192, hardware=hardware("A100-SXM-80GB")) / n
    assert per_column[1] < per_column[0]
    assert per_column[1] < per_column[2]


def test_shallow_k_and_skinny_m_attain_less() -> None:
    assert attained(8192, 8192, 128, "H100-SXM-80GB") < 0.5 * attained(8192, 8192, 4096, "H100-SXM-80GB")
    assert attained(16, 8192, 8192, "H100-SXM-80GB") < 0.15 * attained(8192, 8192, 8192, "H100-SXM-80GB")


def test_batch_is_as_many_tiles() -> None:
    device = hardware("H100-SXM-80GB")
    one, many = matmul_seconds(512, 512, 512, np.array([1.0, 264.0]), hardware=device)
    assert many < 264 * one / 5  # 264 small products fill the machine that one leaves idle
    assert matmul_seconds(512, 512, 512, 264, hardware=device) == pytest.approx(float(many))


def test_power_limits_large_products_only() -> None:
    free = attained(4096, 4096, 4096, "H100-SXM-80GB")
    throttled = attained(4096, 4096, 4096, "H100-SXM-80GB", sustained=True)
    assert throttled < 0.95 * free
    assert attained(32768, 32768, 32768, "H100-SXM-80GB") == pytest.approx(throttled, rel=0.03)


@pytest.mark.parametrize(
    ("name", "m", "n", "k", "tflops"),
    [
        # best shapes found by mamf-finder: github.com/stas00/ml-engineering, compute/accelerator/README.md
        ("A100-SXM-80GB", 6912, 16384, 2048, 267.9),
        ("H100-SXM-80GB", 6144, 17920, 2816, 792.1),
        ("MI300X", 4096, 10240, 4864, 781.9),
    ],
)
def test_published_best_shapes(name: str, m: int, n: int, k: int, tflops: float) -> None:
    # a maximum over shapes lies above a model of the typical one
    assert 0.90 * tflops < attained(m, n, k, name) < 1.03 * tflops


def test_published_products_of_a_training_library() -> None:
    # 12 products of a layer on a B300, operands cast beforehand: Transformer Engine, docs/examples/gemm_profiling
    shapes = [(15872, n, k) for n, k in ((12288, 4096), (4096, 4096), (16384, 4096), (4096, 16384))]
    shapes += [(m, k, n) for m, n, k in shapes] + [(k, n, m) for m, n, k in shapes]
    m, n, k = (np.array(sizes, dtype=float) for sizes in zip(*shapes, strict=True))
    device = hardware("B300-SXM")
    published = {"bf16": 13.102e-3, "fp8": 6.812e-3, "mxfp8": 7.161e-3, "nvfp4": 3.764e-3}
    planned = {
        dtype: matmul_seconds(m, n, k, dtype=dtype, hardware=device, sustained=True).sum() for dtype in published
    }
    assert all(0.83 < planned[dtype] / seconds < 1.05 for dtype, seconds in published.items())
    # Matrix units apply the scales of blocks: 1% (flashinfer#2256) to 5% slower than under one scale.
    assert 0.98 < planned["mxfp8"] / planned["fp8"] < 1.08


def test_formats_borrow() -> None:
    device = hardware("H100-SXM-80GB")
    assert matmul_seconds(4096, 4096, 4096, dtype="fp16", hardware=device) == matmul_seconds(
        4096, 4096, 4096, hardware=device
    )
    fast = matmul_seconds(8192, 8192, 8192, dtype="fp8", hardware=device)
    assert fast < matmul_seconds(8192, 8192, 8192, hardware=device)
    with pytest.raises(UserError, match=r"no peak for nvfp4|no matmul constants"):
        matmul_seconds(128, 128, 128, dtype="nvfp4", hardware=device)


def test_unmeasured_generations_say_so_and_are_wide() -> None:
    for generation in ("cdna2", "cdna3", "cdna4", "tpu", "turing"):
        efficiency = load_efficiency(generation)
        assert any(line.startswith("matmul") for line in efficiency.assumptions())
        evidence = efficiency.matmul_for("bf16").evidence
        assert evidence is not None and evidence.assumed
        assert math.exp(evidence.log_error_p90 - evidence.log_error_p10) > 1.8
    measured = load_efficiency("hopper").matmul_for("bf16").evidence
    assert measured is not None and not measured.assumed and measured.rows > 3000


def test_every_file_of_constants_is_of_a_catalogued_generation() -> None:
    catalogued = (accelerator(name) for name in (*accelerator_names(), *lines()))
    assert set(generations()) <= {acc.measured_generation for acc in catalogued}


def test_a_systolic_array_pays_nothing_for_the_edges_of_tiles() -> None:
    tpu = load_efficiency("tpu").matmul_for("bf16")
    device = Hardware("tpu", {"bf16": 459e12}, 2.765e12, 8, math.inf, load_efficiency("tpu"))
    rate = 2 * 16384 * 28672 * 8192 / matmul_seconds(16384, 28672, 8192, hardware=device)
    assert rate == pytest.approx(tpu.attainable_fraction * 459e12, rel=0.03)


def test_unknown_generation_names_the_nearest() -> None:
    with pytest.raises(UserError, match="hopper"):
        load_efficiency("hoper")
    assert "networks" not in generations()
