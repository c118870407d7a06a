"""The demo's load on fresh servers, measured over planned: does the plan of a served model hold?

    python benchmarks/serve_plan.py runs/demo --servers 8

Every server is started anew, so that its plan is made of its own warm-up; its first load is 20 requests at once of 64
tokens in and 64 out, as in `make demo`. Median and range of measured over planned are printed for the clients' totals
and for each phase of a mean engine step, and the largest share of a step that no phase has. About 15 s a server.
Exit code 1 where a median of the totals is further than 15% from 1, or more than 5% is unattributed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

IRONLAW = [sys.executable, "-m", "ironlaw"]
LOAD = ["--concurrency", "20", "--requests", "20", "--input", "64", "--output", "64"]


def first_load(run: Path, out: Path) -> dict[str, Any]:
    server = subprocess.Popen(
        [*IRONLAW, "serve", str(run), "--port", "0", "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert server.stdout is not None
    url = json.loads(server.stdout.readline())["url"]
    subprocess.run([*IRONLAW, "bench", url, *LOAD, "--out", str(out)], check=True, capture_output=True)
    server.terminate()
    server.wait()
    return json.loads(subprocess.run([*IRONLAW, "explain", str(out), "--json"], capture_output=True, text=True).stdout)


def ratios(found: dict[str, Any]) -> dict[str, float]:
    totals = {name: found["totals"][name]["value"] / planned for name, planned in found["planned_totals"].items()}
    phases = {row["phase"]: row["measured_seconds"] / row["planned_seconds"]
              for row in found["phases"] if row["planned_seconds"]}  # fmt: skip
    return totals | phases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--servers", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        found = [first_load(arguments.run, Path(place) / str(n)) for n in range(arguments.servers)]
    unattributed = max(one["unattributed"] for one in found)
    every, off = [ratios(one) for one in found], 0.0
    for name in every[0]:
        values = sorted(one[name] for one in every if name in one)
        middle = statistics.median(values)
        off = max(off, abs(middle - 1) if name in found[0]["planned_totals"] else 0.0)
        print(f"{name:26s} {middle:.2f}   {values[0]:.2f} to {values[-1]:.2f}")
    print(f"unattributed at most {unattributed:.1%}")
    return int(off > 0.15 or unattributed > 0.05)


if __name__ == "__main__":
    sys.exit(main())
