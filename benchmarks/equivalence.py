"""Every layout of the tests against one process: `python benchmarks/equivalence.py [--only 4] [--record]`.

The cases are those of `tests/train/parallel/test_equivalence.py` and `test_settings.py`, their limits too; 20 steps
each, all ranks of a group in one launch. `--record` writes benchmarks/results/equivalence.md: what is run takes its
group's place there, the other groups stay as they were recorded.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests" / "train" / "parallel"
RESULTS = HERE / "results" / "equivalence.md"
LIMITS = {"loss": 1e-5, "weights": 1e-4, "norm": 1e-3}


def cases_of(module: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(module, TESTS / f"{module}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def groups() -> Iterator[tuple[str, int, list[dict[str, Any]]]]:
    """(name, ranks, cases)."""
    layouts = cases_of("test_equivalence")
    yield "2 ranks, each kind of parallelism", 2, layouts.QUICK
    yield "2 ranks", 2, layouts.TWO
    yield "4 ranks", 4, layouts.FOUR
    yield "8 ranks", 8, layouts.EIGHT
    yield "2 ranks, experts", 2, layouts.EXPERTS_TWO
    yield "4 ranks, experts", 4, layouts.EXPERTS_FOUR
    yield "8 ranks, experts", 8, layouts.EXPERTS_EIGHT
    settings = cases_of("test_settings")
    yield "2 ranks, documents, recomputation, loss, precision and average", 2, settings.QUICK + settings.LONG


def run(size: int, cases: list[dict[str, Any]]) -> list[dict[str, float] | str]:
    """Per case the largest differences over the ranks; words for those that did not end."""
    environment = os.environ | {"PYTHONPATH": str(HERE.parent / "src"), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", str(TESTS / "job.py"), str(size)]
        batch = json.dumps({"folder": folder, "cases": cases, "environment": {}}) + "\n"
        done = subprocess.run(command, input=batch, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr[-3000:], file=sys.stderr)
        found: list[dict[str, float] | str] = []
        for number in range(len(cases)):
            path = Path(folder) / f"result{number}.json"
            if not path.exists():
                found += ["failed" if len(found) == number else "not run"]
                found += ["not run"] * (len(cases) - len(found))
                break
            ranks = json.loads(path.read_text(encoding="utf-8"))
            found.append({key: max(rank[key] for rank in ranks) for key in ranks[0]})
    return found


def words(case: dict[str, Any]) -> str:
    """What a case sets, as the config would."""
    tables = {f"{table}.{key}": value for table, keys in case.get("tables", {}).items() for key, value in keys.items()}
    settings = case["layout"] | case["train"] | case["model"] | tables
    return " ".join(f"{key}={str(value).lower() if value is True else value}" for key, value in settings.items())


def table(rows: list[tuple[dict[str, Any], dict[str, float] | str]]) -> list[str]:
    lines = [
        "| model | settings | loss, relative | norm, relative | weights, absolute | |",
        "|---|---|---|---|---|---|",
    ]
    for case, found in rows:
        if isinstance(found, str):
            lines.append(f"| {case['family']} | {words(case)} | | | | {found} |")
            continue
        limits = case.get("limits") or LIMITS
        verdict = "within" if all(found[key] < limit for key, limit in limits.items()) else "**OUTSIDE**"
        numbers = " | ".join(f"{found[key]:.1e}" for key in ("loss", "norm", "weights"))
        lines.append(f"| {case['family']} | {words(case)} | {numbers} | {verdict} |")
    return lines


HEAD = """# Layouts against one process

`python benchmarks/equivalence.py --record`, on gloo ranks. 20 steps of each from the same seed; the largest difference
over steps (losses, norms), elements of the final weights, and ranks. Limits: losses 1e-5, norms 1e-3, weights 1e-4,
unless the case has its own (bf16 and fp16, which round in other places when a product is divided). Groups not listed
were not run."""


def sections() -> dict[str, str]:
    """What is recorded of each group."""
    text = RESULTS.read_text(encoding="utf-8") if RESULTS.is_file() else ""
    parts = [part.partition("\n") for part in text.split("\n## ")[1:]]
    return {name: content.strip() for name, _, content in parts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="groups whose name has this")
    parser.add_argument("--record", action="store_true")
    wanted = parser.parse_args()
    git = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    ran = (
        f"{date.today()}, commit {commit}, PyTorch {torch.__version__}, {os.cpu_count()} cores of {platform.machine()}"
    )
    recorded = sections()
    outside = 0
    for name, size, cases in groups():
        if wanted.only not in name:
            continue
        began = time.perf_counter()
        lines = table(list(zip(cases, run(size, cases), strict=True)))
        recorded[name] = "\n".join([f"{ran}.", "", *lines])
        outside += sum(not line.endswith("| within |") for line in lines[2:])
        print(f"{name}, {time.perf_counter() - began:.0f} s", *lines, sep="\n", flush=True)
        if wanted.record:
            known = [name for name, _, _ in groups() if name in recorded]
            text = "\n".join([HEAD, *(f"\n## {name}\n\n{recorded[name]}" for name in known)])
            RESULTS.write_text(text + "\n", encoding="utf-8")
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
