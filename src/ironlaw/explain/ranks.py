"""Compares communication and memory of the ranks of a job with their plan."""

from __future__ import annotations

from typing import Any

from ironlaw.ledger import Ledger, Phase, relative_error


def ranks_document(plan: Ledger, run: Ledger) -> dict[str, Any] | None:
    """Returns figures of a mean rank and step; None for a run of one process. What was not measured is None."""
    by_rank = run.facts.get("by_rank")
    if not by_rank:
        return None
    stages = plan.facts.get("stages", [])
    return {
        "ranks": len(by_rank),
        "layout": plan.facts.get("layout"),
        "communication": _communication(plan, run, by_rank),
        "spread": run.facts.get("spread", []),
        "memory": [_memory(stage, by_rank) for stage in stages],
        "by_rank": by_rank,
    }


def _communication(plan: Ledger, run: Ledger, by_rank: list[dict[str, Any]]) -> list[dict[str, Any]]:
    planned = {line.operation: line for line in plan.select(phase=Phase.COMMUNICATION)}
    found = {line.operation: line for line in run.select(phase=Phase.COMMUNICATION)}
    rows = []
    for name in sorted({*planned, *found}):
        there, here = planned.get(name), found.get(name)
        takes = [t["seconds"] for one in by_rank for t in one["communication"]
                 if f"{t['dimension']} {t['kind']}" == name]  # fmt: skip
        known = [seconds for seconds in takes if seconds is not None]
        seconds = sum(known) / len(by_rank) if known and len(known) == len(takes) else None
        exposed = here.seconds if here else None
        rows.append({
            "name": name, "planned_bytes": there.bytes_moved if there else None,
            "bytes": here.bytes_moved if here else None, "count": here.count if here else None,
            "planned_exposed_seconds": there.seconds if there else None, "exposed_seconds": exposed,
            "seconds": seconds,
            "hidden_seconds": None if seconds is None or exposed is None else max(0.0, seconds - exposed),
        })  # fmt: skip
    return rows


def _memory(stage: dict[str, Any], by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    held = [one["peak_bytes"] for one in by_rank
            if one["position"] == stage["position"] and one["peak_bytes"] is not None]  # fmt: skip
    most = max(held, default=None)
    return {
        "position": stage["position"], "planned": stage["peak_bytes"], "measured": most,
        "error": relative_error(most, stage["peak_bytes"]),
    }  # fmt: skip
