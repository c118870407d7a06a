"""How far the plan of this machine is from what it measures, over configurations that the demo is not one of.

    ironlaw measure && python benchmarks/plan_error.py --write benchmarks/results/plan_error.md

Each configuration trains some seconds on mock data. The interval that a plan states before a machine has runs of its
own (`plan/totals.py`) is the middle 80% of measured / planned of this table.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from pathlib import Path

import numpy as np

from ironlaw import __version__
from ironlaw.config import build_config
from ironlaw.machine.profile import load_profile
from ironlaw.train.session import run_training

LLAMA = {"norm": "rmsnorm", "positions": "rope", "gated_ffn": True, "activation": "silu", "bias": False}
SMALL = {"layers": 4, "hidden": 256, "heads": 4, "vocab": 4096, "context": 256}
# name, model fields over SMALL, global batch, micro-batch, precision
CASES: list[tuple[str, dict[str, object], int, int, str]] = [
    ("narrow, short", {"hidden": 128, "context": 64}, 12, 12, "fp32"),
    ("narrow, short", {"hidden": 128, "context": 64}, 12, 12, "bf16"),
    ("wide", {"hidden": 512, "heads": 8, "layers": 3}, 2, 2, "fp32"),
    ("wide", {"hidden": 512, "heads": 8, "layers": 3}, 4, 4, "bf16"),
    ("long", {"context": 1024, "layers": 2}, 1, 1, "fp32"),
    ("long", {"context": 1024, "layers": 2}, 2, 2, "bf16"),
    ("llama", LLAMA | {"kv_heads": 2}, 4, 4, "fp32"),
    ("llama", LLAMA | {"kv_heads": 2}, 8, 8, "bf16"),
    ("many heads", {"heads": 16}, 4, 4, "bf16"),
    ("large vocabulary", {"vocab": 16384, "layers": 2}, 4, 4, "bf16"),
    ("accumulation", {"layers": 3}, 8, 2, "fp32"),
    ("deep, narrow", {"layers": 12, "hidden": 128}, 4, 4, "bf16"),
]
SECONDS = 8.0


def measure_case(name: str, model: dict[str, object], batch: int, micro: int, precision: str) -> dict[str, object]:
    profile = load_profile()
    document = {
        "model": SMALL | model | {"name": name},
        "data": {"mock": True},
        "train": {
            "steps": 1, "global_batch": batch, "micro_batch": micro, "precision": precision, "profile_steps": 0,
        },
        "schedule": {"warmup_steps": 1},
        "evaluation": {"every": 0, "batches": 1},
        "checkpoint": {"every": 0},
    }  # fmt: skip
    from ironlaw.plan.step import plan_run

    planned_seconds = plan_run(build_config(document), profile).totals["step_seconds"].value
    document["train"]["steps"] = max(24, min(400, int(SECONDS / planned_seconds)))  # type: ignore[index]
    config = build_config(document)
    with tempfile.TemporaryDirectory() as folder:
        totals = run_training(config, Path(folder) / "run", profile).ledger.totals
    measured = totals["step_seconds"].value
    return {"case": name, "precision": precision, "planned": planned_seconds, "measured": measured}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    rows = [measure_case(*case) for case in CASES]
    ratios = np.array([row["measured"] / row["planned"] for row in rows])  # type: ignore[operator]
    errors = np.abs(1 / ratios - 1)
    profile = load_profile()
    lines = [
        f"# Plan against measurement on {profile.name}, {profile.threads} threads",
        "",
        f"Ironlaw {__version__}, PyTorch {profile.versions['torch']}, Python {platform.python_version()}, "
        f"machine measured {profile.created[:10]}. Made by `python benchmarks/plan_error.py`.",
        "",
        "| configuration | precision | planned ms | measured ms | error |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['case']} | {row['precision']} | {1e3 * row['planned']:.1f} | {1e3 * row['measured']:.1f} | "  # type: ignore[operator]
        f"{100 * (row['planned'] / row['measured'] - 1):+.1f}% |"  # type: ignore[operator]
        for row in rows
    ]
    low, high = np.percentile(ratios, [10, 90])
    lines += [
        "",
        f"Median error {100 * np.median(errors):.1f}%, mean {100 * errors.mean():.1f}%; "
        f"measured / planned between {low:.2f} and {high:.2f} in the middle 80%.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
