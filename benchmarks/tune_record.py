"""`ironlaw tune` against a full sweep, on badly configured runs of this machine.

    python benchmarks/tune_record.py [--only NAME] [--state FILE] [--out FILE]

The sweep tries both precisions with every micro-batch that divides the batch; each run is as short as tune's own.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch

from ironlaw import __version__
from ironlaw.config import RunConfig, build_config
from ironlaw.explain import tune as tuning
from ironlaw.explain.remedies import with_settings
from ironlaw.machine import host
from ironlaw.machine.profile import load_profile

GPT = {"name": "gpt", "layers": 4, "hidden": 256, "heads": 4, "vocab": 4096, "context": 32, "positions": "rope"}
BAD: dict[str, dict[str, Any]] = {
    "fp32, one sequence at a time": {"train": {"precision": "fp32", "micro_batch": 1, "global_batch": 128}},
    "narrow, one sequence at a time": {
        "model": GPT | {"hidden": 128}, "train": {"precision": "fp32", "micro_batch": 1, "global_batch": 128},
    },
    "wide, in fp32": {
        "model": GPT | {"layers": 2, "hidden": 512, "heads": 8},
        "train": {"precision": "fp32", "micro_batch": 2, "global_batch": 128},
    },
}  # fmt: skip


def config(name: str) -> RunConfig:
    document = {"model": GPT, "data": {"mock": True}} | BAD[name]
    document["train"] = {"steps": 1000} | document["train"]
    return build_config(document)


def record(name: str) -> dict[str, Any]:
    tuning.LEAST_STEPS = 8
    profile, bad = load_profile(), config(name)
    with tempfile.TemporaryDirectory() as folder:
        runner = tuning.Runner(Path(folder), profile, trial_seconds=2.0)
        result = tuning.tune(bad, profile, budget_seconds=600, folder=Path(folder), measure=runner)
        sweep = {}
        batches = [m for m in range(1, bad.train.global_batch + 1) if bad.train.global_batch % m == 0]
        for number, (precision, micro) in enumerate(itertools.product(("fp32", "bf16"), batches)):
            tried = with_settings(bad, {"train.precision": precision, "train.micro_batch": micro})
            sweep[f"{precision}, {micro}"] = runner(tried, f"sweep-{number}").seconds_per_token
        found = runner(result.config, "tuned").seconds_per_token
    best = min(sweep, key=lambda key: sweep[key])
    return {
        "name": name, "runs": result.runs, "sweep_runs": len(sweep), "best": best, "trials": len(result.trials),
        "tuned": f"{result.config.train.precision}, {result.config.micro_batch}", "gain": result.gain,
        "behind": found / sweep[best] - 1, "worst": max(sweep.values()) / sweep[best],
    }  # fmt: skip


def report(rows: list[dict[str, Any]]) -> str:
    today = datetime.date.today().isoformat()
    lines = [
        "# Tune against a full sweep", "",
        f"{today}, ironlaw {__version__}, torch {torch.__version__}, python {platform.python_version()}, "
        f"{host.cpu_name()}, {host.usable_cores()} cores. Made by `python benchmarks/tune_record.py`.", "",
        "| badly configured | sweep's best | tuned | behind the best | runs | runs of the sweep |",
        "|---|---|---|---:|---:|---:|",
    ]  # fmt: skip
    for r in rows:
        lines.append(
            f"| {r['name']} | {r['best']} | {r['tuned']} | {100 * r['behind']:+.1f}% | {r['runs']} | "
            f"{r['sweep_runs']} |"
        )
    return "\n".join([*lines, "", "Settings are precision and micro-batch. The false-gain rate of the A/B/A test is in "
                      "`tests/explain/test_tune.py`, on simulated machines.", ""])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--state", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = json.loads(options.state.read_text()) if options.state and options.state.is_file() else []
    for name in options.only if options.only is not None else BAD:
        rows = [r for r in rows if r["name"] != name] + [record(name)]
        print(json.dumps(rows[-1]), flush=True)
        if options.state:
            options.state.write_text(json.dumps(rows))
    text = report(rows)
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
