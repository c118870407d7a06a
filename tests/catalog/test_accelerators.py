"""Accelerators: every figure is sourced, peaks are dense, names resolve, one file is parsed."""

import subprocess
import sys

import pytest

from ironlaw.catalog.accelerators import DTYPES, Accelerator, accelerator, accelerator_names, catalogued, peak
from ironlaw.catalog.figures import read_entry, read_toml, source
from ironlaw.catalog.nodes import node
from ironlaw.errors import UserError

# The `accelerator` column of the measured runs that plans are validated on.
NAMES_OF_MEASURED_RUNS = (
    "a100-sxm-40gb",
    "a100-sxm-80gb",
    "b200-sxm",
    "b300",
    "gb200",
    "h100-sxm-80gb",
    "h100-sxm-96gb-500w",
    "mi300x",
    "v100-sxm-32gb",
)

# Dense TFLOP/s beside the figure that tables wrongly print for it: sparse, per die, or another part's.
DENSE_NOT_SPARSE = [
    ("v100-sxm-32gb", "fp16", 125, 250),
    ("t4", "fp16", 65, 130),
    ("a10g", "bf16", 70, 125),
    ("a100-sxm-40gb", "bf16", 312, 624),
    ("a100-sxm-80gb", "bf16", 312, 624),
    ("a100-sxm-80gb", "tf32", 156, 312),
    ("a100-pcie-80gb", "int8", 624, 1248),
    ("l4", "bf16", 121, 242),
    ("l40s", "bf16", 362.05, 733),
    ("l40s", "fp8", 733, 1466),
    ("rtx-3090", "bf16", 71, 142),
    ("rtx-4090", "fp16", 165.2, 330.3),
    ("rtx-5090", "bf16", 209.5, 419),
    ("rtx-5090", "fp4", 1676, 3352),
    ("h100-sxm-80gb", "bf16", 989.4, 1979),
    ("h100-sxm-80gb", "fp8", 1978.9, 3958),
    ("h100-pcie-80gb", "bf16", 756.5, 1513),
    ("h100-nvl-94gb", "bf16", 835.5, 1671),
    ("h200", "bf16", 989.4, 1979),
    ("b200-sxm", "bf16", 2250, 4500),
    ("b200-sxm", "fp8", 4500, 9000),
    ("b300", "fp4", 13500, 18000),
    ("gb200", "bf16", 2500, 5000),
    ("gb300", "bf16", 2500, 5000),
    ("mi250x", "bf16", 383, 191.5),
    ("mi300x", "bf16", 1307.4, 2614.9),
    ("mi325x", "bf16", 1307.4, 2614.9),
    ("mi355x", "bf16", 2516.6, 5033.2),
    ("gaudi2", "bf16", 432, 865),
    ("tpu-v5p", "bf16", 459, 918),
    ("jetson-agx-orin-64gb", "int8", 85, 170),
    ("jetson-agx-thor", "fp4", 1035, 2070),
]


@pytest.mark.parametrize("name", accelerator_names())
def test_every_figure_is_positive_and_has_a_known_source(name: str) -> None:
    acc = accelerator(name)
    assert acc.figures()
    for key, figure in acc.figures().items():
        assert figure.value > 0, key
        assert source(figure.source).title, key


@pytest.mark.parametrize("name", accelerator_names())
def test_every_accelerator_can_be_planned_with(name: str) -> None:
    acc = accelerator(name)
    assert acc.memory_bytes and acc.memory_bytes_per_second and acc.peak_flops_per_second
    assert acc.vendor and acc.generation and acc.product
    assert node(acc.default_node).accelerators >= 1
    assert (acc.link_bytes_per_second is None) == (acc.link_name == "")
    if acc.generation in (
        "ampere",
        "blackwell",
    ):  # of graphics cards, kernels are others
        assert acc.memory_kind.startswith("GDDR") == acc.measured_generation.endswith("_graphics")


@pytest.mark.parametrize("name", accelerator_names())
def test_figures_are_in_si_units(name: str) -> None:
    acc = accelerator(name)
    bounds = {
        "memory_bytes": (10e9, 1e12),
        "memory_bytes_per_second": (100e9, 10e12),
        "l2_bytes": (1e6, 300e6),
        "compute_units": (5, 400),
        "clock_hz": (0.5e9, 3e9),
        "tdp_watts": (20, 2000),
        "link_bytes_per_second": (100e9, 1000e9),
        "pcie_bytes_per_second": (10e9, 130e9),
        "host_link_bytes_per_second": (30e9, 500e9),
    }
    for key, figure in acc.figures().items():
        low, high = bounds.get(key, (1e12, 20e15))
        assert low <= figure.value <= high, (key, figure)


@pytest.mark.parametrize(("name", "dtype", "dense", "wrong"), DENSE_NOT_SPARSE)
def test_peaks_are_dense(name: str, dtype: str, dense: float, wrong: float) -> None:
    value = peak(accelerator(name), dtype).value
    assert value == pytest.approx(dense * 1e12)
    assert value != pytest.approx(wrong * 1e12, rel=0.02)


@pytest.mark.parametrize("name", accelerator_names())
def test_narrower_types_are_never_slower_than_bf16(name: str) -> None:
    peaks = {dtype: figure.value for dtype, figure in accelerator(name).peak_flops_per_second.items()}
    assert set(peaks) <= set(DTYPES)
    if "bf16" in peaks:
        assert peaks.get("fp8", peaks["bf16"]) >= peaks["bf16"]
        # A sparse figure among dense ones shows as a ratio of four.
        assert peaks.get("fp8", peaks["bf16"]) < 2.1 * peaks["bf16"]
        assert peaks.get("fp16", peaks["bf16"]) == pytest.approx(peaks["bf16"])


@pytest.mark.parametrize(
    ("name", "ridge"), [("a100-sxm-40gb", 201), ("a100-sxm-80gb", 153), ("h100-sxm-80gb", 295), ("h200", 206)]
)
def test_ridge_points(name: str, ridge: int) -> None:
    """Dense bf16 peak over memory bandwidth, FLOP/byte: the worked examples of the field."""
    acc = accelerator(name)
    assert acc.memory_bytes_per_second is not None
    assert round(peak(acc, "bf16").value / acc.memory_bytes_per_second.value) == ridge


@pytest.mark.parametrize(("name", "rate"), [("a100-sxm-80gb", 300e9), ("h100-sxm-80gb", 450e9), ("b200-sxm", 900e9)])
def test_links_are_one_direction(name: str, rate: float) -> None:
    link = accelerator(name).link_bytes_per_second
    assert link is not None and link.value == rate


@pytest.mark.parametrize("name", NAMES_OF_MEASURED_RUNS)
def test_names_of_measured_runs_resolve_to_themselves(name: str) -> None:
    assert accelerator(name).name == name


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("h200", "h200"),
        ("b200", "b200-sxm"),
        ("H100-SXM-80GB", "h100-sxm-80gb"),
        ("h100_sxm_80gb", "h100-sxm-80gb"),
        ("h100 pcie", "h100-pcie-80gb"),
        ("rtx4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("v5p", "tpu-v5p"),
        ("m4-max", "apple-m4-max"),
        ("apple-m4", "apple-m4"),
    ],
)
def test_shorter_forms(typed: str, name: str) -> None:
    assert accelerator(typed).name == name


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("h100", ["ambiguous", "h100-sxm-80gb", "h100-sxm-96gb-500w", "h100-pcie-80gb", "h100-nvl-94gb"]),
        ("a100", ["ambiguous", "a100-sxm-40gb", "a100-pcie-80gb"]),
        ("h100-sxm-80", ["unknown", "h100-sxm-80gb"]),
        ("h300", ["unknown", "h200"]),
        ("orin", ["unknown", "jetson-agx-orin-64gb"]),
        ("rtx", ["unknown"]),
        ("", ["unknown"]),
        ("../sources", ["unknown"]),
    ],
)
def test_bad_names_are_one_line_with_near_names(typed: str, expected: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        accelerator(typed)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in expected), message


def test_a_peak_that_is_not_known_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"no dense peak of v100-sxm-32gb is known for 'bf16': .*fp16"):
        peak(accelerator("v100-sxm-32gb"), "bf16")


def test_unknown_keys_in_a_data_file_are_found() -> None:
    data = read_toml("accelerators", "h200.toml")
    with pytest.raises(AssertionError, match="memory_gb"):
        read_entry(Accelerator, "h200", {**data, "memory_gb": 141})


def test_asking_for_one_opens_one_file_and_nothing_heavy() -> None:
    code = (
        "import sys; opened = []\n"
        "sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == 'open' else None)\n"
        "from ironlaw.catalog.accelerators import accelerator, accelerator_names\n"
        "accelerator_names(); accelerator('h200')\n"
        "heavy = {'torch', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "print(sum(name.endswith('.toml') for name in opened), len(heavy))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["1", "0"]


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"), ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA RTX A6000", "rtx-a6000"), ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA TITAN V", "titan-v"), ("NVIDIA GH200 480GB", "gh200-480gb"), ("NVIDIA L40", "l40"),
        ("NVIDIA GeForce RTX 4060 Ti", "rtx-4060-ti"), ("RTX 4060 Ti 16GB", "rtx-4060-ti"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "rtx-4060-laptop"), ("NVIDIA GeForce RTX 4090 D", "rtx-4090-d"),
        ("NVIDIA GeForce GTX 1660 SUPER", "gtx-1660-super"), ("NVIDIA GB10", "dgx-spark-gb10"),
        ("NVIDIA GeForce GTX 1070 with Max-Q Design", "gtx-1070-max-q"), ("RTX4060Ti", "rtx-4060-ti"),
        ("NVIDIA H200 NVL", "h200-nvl-141gb"), ("Intel(R) Arc(TM) A770 Graphics", "arc-a770"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx-pro-6000-blackwell-max-q"),
        ("AMD Radeon RX 7900 XTX", "rx-7900-xtx"), ("Apple M3 Max", "m3-max-30c"),
    ],
)  # fmt: skip
def test_what_drivers_print_is_the_card_itself_not_another_of_its_brand(said: str, name: str) -> None:
    assert catalogued(said) == name


@pytest.mark.parametrize(
    "said",
    ["AMD EPYC 7B13", "Intel(R) Xeon(R) Platinum 8581C CPU @ 2.10GHz", "AMD Ryzen 9 7950X 16-Core Processor",
     "AMD Radeon Graphics", "NVIDIA RTX", "RTX 4060 Super", "RTX 4060 Ti 8GB", "NVIDIA GeForce RTX 4080 Laptop GPU",
     "NVIDIA GeForce RTX 5090 D", "RX 6700", "RX 580", "GTX 1660 Ti", "RTX 6000", "RTX PRO 5000", "H100 CNX",
     "M4 Ultra", "M4 9c", "GTX 4090", "Quadro P5000", "Ryzen AI Max 390", "GH200 144GB"],
)  # fmt: skip
def test_what_drivers_print_of_others_is_no_card(said: str) -> None:
    with pytest.raises(UserError, match="accelerator"):
        catalogued(said)
