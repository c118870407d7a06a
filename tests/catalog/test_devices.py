"""Devices that models are served on: every name that published measurements use is known, every figure sourced."""

import tomllib
from pathlib import Path

import pytest

from ironlaw.catalog.accelerators import accelerator, accelerator_names
from ironlaw.catalog.devices import device_names, entry, lines
from ironlaw.catalog.figures import source
from ironlaw.catalog.nodes import node
from ironlaw.errors import UserError
from ironlaw.plan.measured.accelerator import accelerator_of

# As tables of published inference measurements write them.
MEASURED = tomllib.loads(Path(__file__).with_name("measured_names.toml").read_text(encoding="utf-8"))["devices"].split()

BARE = [name for name in device_names() if name in lines()]
NOT_PRINTED = {"snapdragon-8-elite-npu", "snapdragon-8-elite-gen-5-npu", "samsung-galaxy-s24-npu"}
"""Devices whose maker prints no rate of the matrix unit."""


def test_every_name_of_published_measurements_is_known():
    assert len(MEASURED) == 199
    for name in MEASURED:
        found, note = accelerator_of(name)
        assert found.memory_bytes and found.memory_bytes_per_second and found.product, name
        assert found.peak_flops_per_second or name in NOT_PRINTED, name
        assert note or name in (found.name, *device_names(), *accelerator_names()), name


@pytest.mark.parametrize("name", BARE)
def test_every_figure_of_a_device_is_sourced_and_in_si_units(name):
    found = accelerator(name)
    assert found.name == name and name not in accelerator_names()
    assert node(found.default_node).accelerators >= 1
    assert all(source(figure.source).title for figure in found.figures().values())
    bounds = {"memory_bytes": (4e9, 2e12), "memory_bytes_per_second": (1e10, 5e12), "tdp_watts": (5, 800)}
    for key, (low, high) in bounds.items():
        figure = getattr(found, key)
        assert figure is None or low <= figure.value <= high, key
    peaks = {dtype: figure.value for dtype, figure in found.peak_flops_per_second.items()}
    assert all(1e10 < value < 2e15 for value in peaks.values())
    assert "fp16" not in peaks or peaks.get("bf16", peaks["fp16"]) == pytest.approx(peaks["fp16"])
    order = [peaks[dtype] for dtype in ("fp32", "bf16", "fp8", "fp4") if dtype in peaks]
    assert order == sorted(order)  # narrower is never slower


def test_a_processors_memory_is_as_fast_as_its_cores_reach():
    cores, graphics = (accelerator(name).memory_bytes_per_second.value for name in ("cpu-m2-max", "m2-max-38c"))
    assert cores == pytest.approx(0.6 * graphics, rel=0.02)


def test_peaks_follow_from_fp32_by_the_whitepapers_ratio():
    """Dense TFLOP/s as NVIDIA and AMD print them for the card."""
    printed = {
        ("rtx-a6000", "fp16"): 154.8, ("rtx-a6000", "int8"): 309.7, ("rtx-2080-ti", "fp16"): 53.8,
        ("rtx-6000-ada", "fp8"): 728.5, ("l40", "bf16"): 181.05, ("rx-7900-xtx", "fp16"): 122.8,
        ("a40", "bf16"): 149.7, ("quadro-rtx-6000", "fp16"): 130.5, ("arc-pro-b60", "int8"): 197,
    }  # fmt: skip
    for (name, dtype), teraflops in printed.items():
        assert accelerator(name).peak_flops_per_second[dtype].value == pytest.approx(teraflops * 1e12, rel=0.01)


def test_a_name_that_says_too_little_says_what_was_taken():
    found, note = accelerator_of("a100-80gb")
    assert found.name == "a100-sxm-80gb" and "the form is not said" in note
    assert accelerator_of("h200-sxm-141gb")[0].name == "h200"
    assert accelerator_of("v100")[0].generation == "volta"


def test_a_device_like_another_differs_in_what_its_line_says():
    whole, capped = accelerator("a100-sxm-80gb"), accelerator("a100-sxm-80gb-330w")
    assert capped.tdp_watts.value == 330 and capped.memory_bytes == whole.memory_bytes
    assert accelerator("h800-sxm-80gb").link_bytes_per_second.value == 200e9
    assert accelerator("h200-nvl-141gb").link_bytes_per_second is None
    assert entry("mi250")["compute_units"]["value"] == 208


def test_short_forms_and_unknown_devices():
    assert accelerator("3060").name == "rtx-3060" and accelerator("RTX 4070 Ti Super").name == "rtx-4070-ti-super"
    with pytest.raises(UserError, match="did you mean rtx-4080"):
        accelerator("rtx-4080x")
    with pytest.raises(UserError, match="ambiguous"):
        accelerator("m2-ultra")
