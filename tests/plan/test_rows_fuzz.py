"""Rows of any content: each is planned with finite figures inside its interval, or listed with a reason."""

import csv
import math
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ironlaw.plan.measured.validate import validate

SIZES = ["", "1", "2.0", "7", "8", "12", "64", "96", "-1", "0", "1e9", "2.5", "many", "nan", "inf", "1,024"]
FLAGS = ["", "True", "false", "1.0", "yes", "maybe"]
CELLS = {
    "framework": ["", "nemo 26", "DeepSpeed", "Megatron-LM", "MaxText", "llm-foundry", "torchtitan 1", "パ", "x" * 99],
    "params": ["", "7e9", "0", "-3", "7B"],
    "layers": ["1", "3", "32", "", "126", "0", "2e5"],
    "hidden": ["64", "4096", "5120", "100", "", "1e4"],
    "heads": SIZES, "kv_heads": SIZES,
    "ffn": ["", "1", "11008", "16384.0", "x"],
    "vocab": ["", "1", "50257", "128256"],
    "gated_ffn": FLAGS, "tied": FLAGS, "sequence_parallel": FLAGS,
    "seq": ["1", "128", "2048", "131072", "", "1e12"],
    "global_batch": ["", "1", "8", "256", "1000", "3.5"],
    "micro_batch": ["", "1", "3", "16", "64"],
    "accelerator": [
        "h100-sxm-80gb", "A100", "v100-sxm-32gb", "a100-pcie-80gb", "l40s", "mi250x", "mi300x", "mi355x", "b200",
        "gb200", "b300", "gb300", "tpu-v5p", "gaudi2", "t4", "rtx-4090", "apple-m4", "h20", "h800", "", "abacus",
    ],
    "accelerators": ["1", "2", "6", "8", "64", "100", "4096", "", "16384", "0"],
    "per_node": ["", "1", "3", "4", "8", "16", "72", "0", "-8"],
    "interconnect": [
        "", "8x NDR400 IB per node", "EFAv2 3200 Gb/s per node", "RoCE 400G", "4x Slingshot-11 200 Gb/s", "100GbE",
        "NVL72", "ethernet", "tcpx 200 Gbps/GPU", "0 Gb/s IB", "?", "999999999 Tb/s ib", "ICI",
    ],
    "tp": SIZES, "pp": SIZES, "virtual_stages": SIZES, "cp": ["", "1", "2", "4", "5"], "dp": SIZES,
    "ep": ["", "1", "8", "1.0"],
    "zero": ["", "0", "1.0", "2", "3", "fsdp", "hsdp", "5"],
    "recompute": ["", "none", "selective", "full", "block", "sometimes"],
    "attention": ["", "flash", "standard", "sliding window 4096", "sdpa"],
    "precision": ["", "bf16", "fp16", "fp32", "tf32", "fp8", "mxfp8", "nvfp4", "int3"],
    "step_seconds": ["", "1.5", "0", "-1", "soon"],
    "peak_bytes": ["", "5e10", "nan"],
    "status": ["", "ok", "fail", "oom"],
    "checks": ["", "time", "memory", "memory+time", "feasibility"],
}  # fmt: skip

PLAIN = {
    "framework": "NeMo", "layers": "32", "hidden": "4096", "heads": "32", "seq": "4096", "global_batch": "1024",
    "micro_batch": "1", "accelerator": "h100-sxm-80gb", "accelerators": "64",
}  # fmt: skip

changes = st.fixed_dictionaries({}, optional={name: st.sampled_from(cells) for name, cells in CELLS.items()})
few = st.lists(st.sampled_from(sorted(CELLS)), max_size=6, unique=True)


def rows(draws: list[tuple[dict[str, str], list[str]]]) -> list[dict[str, str]]:
    """Half of the rows a plain run with a few cells changed, half whatever was drawn."""
    result = []
    for number, (change, names) in enumerate(draws):
        chosen = change if number % 2 else {name: cell for name, cell in change.items() if name in names}
        result.append({"id": f"r{number}"} | PLAIN | chosen)
    return result


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(draws=st.lists(st.tuples(changes, few), min_size=4, max_size=8))
def test_any_row_is_planned_or_listed(draws, tmp_path: Path):
    made = rows(draws)
    path = tmp_path / "runs.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, ["id", *CELLS])
        writer.writeheader()
        writer.writerows(made)
    document = validate(path).to_json()
    listed = {entry["id"]: entry["reason"] for entry in document["not_planned"]}
    planned = {entry["id"]: entry for entry in document["rows"]}
    assert sorted([*listed, *planned]) == sorted(row["id"] for row in made)
    assert all(reason.strip() for reason in listed.values())
    for entry in planned.values():
        seconds, peak = entry["predicted_step_seconds"], entry["predicted_peak_bytes"]
        assert math.isfinite(seconds) and seconds > 0 and math.isfinite(peak) and peak > 0
        assert entry["step_interval"][0] < seconds < entry["step_interval"][1]
        assert entry["peak_interval"][0] < peak < entry["peak_interval"][1]
    assert document["overall"]["n"] == len(made)
