"""Devices for serving that have no file of their own: one line each, in `devices/*.toml`.

    device_names()                     # ("a100-80gb", "a100-sxm-80gb-330w", "a30", ...)
    entry("rtx-3060")                  # content that its file in `accelerators/` would have
    aliases()["a100-80gb"]             # ("a100-sxm-80gb", "the form is not said; ...")

A line gives `memory` (GiB), `rate` (of the memory, GB/s), `units` (SMs, CUs, cores), `watts`, `link` (GB/s, one
direction), and dense peaks in TFLOP/s by dtype, all from `source`. Matrix-unit peaks not published for each
card are the fp32 rate times the chip's `ratios`, from the source given there. `like` takes other values from another
device. `[taken]` maps aliases to devices, with the reason if there was a choice. Unknown figures are absent.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from ironlaw.catalog.figures import read_toml, stems

FOLDER = "devices"
COLUMNS = {
    "memory": ("memory_bytes", 2.0**30),
    "rate": ("memory_bytes_per_second", 1e9),
    "units": ("compute_units", 1.0),
    "watts": ("tdp_watts", 1.0),
    "link": ("link_bytes_per_second", 1e9),
}
"""Column of a line -> (figure of an accelerator, factor from the column's unit to the figure's unit)."""

PCIE_BYTES_PER_SECOND = {"pascal": 15.75e9, "turing": 15.75e9, "volta": 15.75e9, "blackwell": 63e9}
"""Rates of cards with sixteen PCIe lanes of generation 3 or 5, by chip generation; all others have generation 4."""

_PLAIN = {"product", "vendor", "generation", "constants", "memory_kind", "note"}
_WORDS = {"gtx": "GeForce GTX", "titan": "TITAN", "rx": "Radeon RX", "xt": "XT", "xtx": "XTX", "gre": "GRE"}


def device_names() -> tuple[str, ...]:
    """Return all names, aliases included, sorted."""
    return tuple(sorted({*lines(), *aliases()}))


def entry(name: str) -> dict[str, Any]:
    """Return the content that a file of `accelerators/` would have for this device."""
    line, ratios = lines()[name]
    found: dict[str, Any] = {"product": _product(name), "default_node": line.get("node", "pcie-workstation")}
    if base := line.get("like"):
        found = entry(base) if base in lines() else dict(read_toml("accelerators", f"{base}.toml"))
        found["peak_flops_per_second"] = dict(found["peak_flops_per_second"])
        if "node" in line:
            found["default_node"] = line["node"]
            if not line["node"].startswith("dgx"):  # a single card has no scale-up links
                found = {key: value for key, value in found.items() if not key.startswith("link")}
    found |= {key: line[key] for key in _PLAIN if key in line}
    if "unified" in line:
        found["unified_memory"] = line["unified"]
    source, note = line["source"], "derived from another device" if base else ""
    for column, (key, scale) in COLUMNS.items():
        if column in line:
            found[key] = {"value": line[column] * scale, "source": source, "note": note}
    peaks = found.setdefault("peak_flops_per_second", {})
    peaks |= _peaks(line, ratios)
    if "like" not in line and found["default_node"].startswith("pcie"):
        rate = PCIE_BYTES_PER_SECOND.get(line["generation"], 31.5e9)
        found["pcie_bytes_per_second"] = {"value": rate, "source": "pcie-base-specification", "note": "16 lanes"}
    return found


def _peaks(line: dict[str, Any], ratios: dict[str, Any]) -> dict[str, Any]:
    """Return the dense peaks of the line, and those derived from fp32."""
    found = {}
    kind = line.get("ratio", line.get("generation", ""))
    if "fp32" in line and kind in ratios:
        times = dict(ratios[kind])
        cited = times.pop("source")
        for dtype, ratio in times.items():
            note = f"{ratio} x fp32, the rate of the chip's matrix units clock for clock"
            found[dtype] = {"value": line["fp32"] * ratio * 1e12, "source": cited, "note": note}
    dtypes = [key for key in line if key in ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4")]
    return found | {dtype: {"value": line[dtype] * 1e12, "source": line["source"]} for dtype in dtypes}


def _product(name: str) -> str:
    words = ["(laptop)" if word == "laptop" else _WORDS.get(word, word) for word in name.split("-")]
    words = [word.upper() if word[0].isdigit() or word in ("rtx", "xt") else word for word in words]
    if words[0] == "RTX" and words[1][0].isdigit() and "ada" not in words:
        words[0] = "GeForce RTX"
    return " ".join(word if word[0].isupper() or word[0] == "(" else word.capitalize() for word in words)


@cache
def lines() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return each device's line with defaults filled in, and the ratios of its file, by name."""
    found = {}
    for data in _files():
        for name, line in data["devices"].items():
            assert name not in found, f"{name} is listed twice"
            found[name] = (data["defaults"] | line, data.get("ratios", {}))
    return found


@cache
def aliases() -> dict[str, tuple[str, str]]:
    """Return the device that each alias stands for, and why it was chosen if others were possible."""
    return {
        name: (line["name"], line.get("why", "")) for data in _files() for name, line in data.get("taken", {}).items()
    }


def _files() -> Iterator[dict[str, Any]]:
    return (read_toml(FOLDER, f"{stem}.toml") for stem in stems(FOLDER))
