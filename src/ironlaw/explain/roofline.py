"""Places the run's operations under the two ceilings of the machine: arithmetic and memory traffic.

A point: FLOPs per byte of least traffic (the plan knows both exactly) against the FLOP/s that were measured. Operations
without FLOPs have no place under a roofline of arithmetic; they are listed with the bandwidth that they attain.
"""

from __future__ import annotations

from typing import Any

from ironlaw.explain.gap import reconcile
from ironlaw.ledger import Ledger, summed


def roofline(plan: Ledger, run: Ledger) -> dict[str, Any] | None:
    """Returns None if the plan has no ceilings or the run no timed operations."""
    peak, copy = plan.facts.get("matmul_peak_flops_per_second"), plan.facts.get("copy_bytes_per_second")
    if not peak or not copy or not run.lines:
        return None
    seconds = summed(reconcile(run)[0].lines, lambda line: line.key)
    points, streams = [], []
    for line in plan.lines:
        took = seconds.get(line.key)
        if not took or not line.bytes_moved:
            continue
        point = {
            "name": line.operation, "phase": str(line.phase), "kind": str(line.kind), "seconds": took,
            "bytes_per_second": line.bytes_moved / took,
        }  # fmt: skip
        if line.flops:
            points.append(point | {"intensity": line.flops / line.bytes_moved, "flops_per_second": line.flops / took})
        else:
            streams.append(point)
    if not points:
        return None
    return {
        "peak_flops_per_second": peak, "copy_bytes_per_second": copy, "ridge": peak / copy,
        "points": sorted(points, key=lambda p: -p["seconds"]), "streams": sorted(streams, key=lambda p: -p["seconds"]),
    }  # fmt: skip
