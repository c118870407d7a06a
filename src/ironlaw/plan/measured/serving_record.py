"""The serving planner's record: errors by group and measure beside the trivial baseline, and how often intervals hold.

    record = serving_record(runs, rejected)
    record["groups"]["gpt-fast"]["tpot_seconds"]["median"]

The baseline of decoding is weight bytes over 60% of the memory's rate, of prompts 2 N FLOPs over 40% of the dense peak.
Errors are relative to the measurement; bias is the median signed error, above 0 where planned too large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ironlaw.plan.measured.inference import MEASURES, ServingRun, predict
from ironlaw.plan.measured.validate import errors
from ironlaw.plan.serving.rates import interval_of
from ironlaw.plan.serving.timing import room_error

BASELINE_MEMORY, BASELINE_PEAK = 0.6, 0.4

KINDS = {
    "ttft_seconds": ("prompt", 1), "tpot_seconds": ("decode", 1), "prefill_tokens_per_second": ("prompt", -1),
    "output_tokens_per_second": ("requests", -1), "requests_per_second": ("requests", -1), "kv_tokens": ("", 1),
}  # fmt: skip
"""Whose interval a measure has, and whether it is seconds (1) or a rate (-1)."""


def serving_record(runs: Sequence[ServingRun], rejected: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
    rows = [_row(run) for run in runs]
    groups: dict[str, Any] = {}
    for group in sorted({run.group for run in runs}):
        groups[group] = _errors([row for row in rows if row["group"] == group])
    missing = [{"id": i, "group": g, "reason": reason} for i, g, reason in rejected]
    return {"kind": "serving", "groups": groups, "overall": _errors(rows), "rows": rows, "not_planned": missing}


def _row(run: ServingRun) -> dict[str, Any]:
    planned = predict(run)
    intervals = {
        name: _between(value, name, run) for name, value in planned.items() if value is not None and name in KINDS
    }
    return {
        "id": run.id, "group": run.group, "engine": run.engine.name, "accelerator": run.device.name,
        "scenario": run.scenario, **{f"predicted_{name}": planned[name] for name in MEASURES},
        "interval": intervals, "measured": run.measured, "baseline": _baseline(run), "suspect": run.suspect,
        "assumed": list(run.assumed),
    }  # fmt: skip


def _between(value: float, name: str, run: ServingRun) -> list[float]:
    kind, sign = KINDS[name]
    if not kind:
        off = room_error(run.system, value)
        return [value * max(0.0, 1 - off), value * (1 + off)]
    if name in ("output_tokens_per_second", "requests_per_second"):
        if run.scenario == "decode" and not run.whole:
            kind = "decode"
        elif run.scenario in ("offline", "server"):
            kind = "unlimited"
    if kind == "prompt" and not run.together:
        kind = "first"
    ends = sorted(value * math.exp(sign * end) for end in interval_of(run.engine, run.device, kind))
    return [float(end) for end in ends]


def _baseline(run: ServingRun) -> dict[str, float]:
    """One constant each: what a line on the back of an envelope gives."""
    s = run.system
    read_seconds = float(s.weight_bytes) / float(s.tp) / (BASELINE_MEMORY * float(s.bandwidth))
    prompt_rate = BASELINE_PEAK * float(s.peak) * float(s.tp) / (2 * float(s.demand.active))
    found = {"tpot_seconds": read_seconds, "prefill_tokens_per_second": prompt_rate}
    if run.inputs:
        found["ttft_seconds"] = run.inputs * run.concurrency / prompt_rate
    if run.scenario == "decode":
        found["output_tokens_per_second"] = run.concurrency / read_seconds
    elif run.scenario == "fixed-concurrency" and run.outputs:
        seconds = run.concurrency * run.inputs / prompt_rate + run.outputs * read_seconds
        found["output_tokens_per_second"] = run.concurrency * run.outputs / seconds
    return found


def _errors(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"rows": len(rows)}
    for name in MEASURES:
        pairs = [
            (row[f"predicted_{name}"], row["measured"][name], row["interval"][name], row["baseline"].get(name))
            for row in rows
            if name in row["measured"] and row[f"predicted_{name}"] is not None and row["measured"][name] > 0
        ]
        if not pairs:
            continue
        planned, measured = (np.array(column) for column in list(zip(*pairs, strict=True))[:2])
        simple = [abs(base / seen - 1) for _, seen, _, base in pairs if base is not None]
        inside = [low <= seen <= high for _, seen, (low, high), _ in pairs]
        found[name] = errors(planned, measured) | {
            "baseline_median": float(np.median(simple)) if simple else None, "in_interval": float(np.mean(inside)),
        }  # fmt: skip
    return found
