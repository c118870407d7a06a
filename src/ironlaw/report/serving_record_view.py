"""The serving planner's record on the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from ironlaw.report.tables import heading, paragraph, show, table

_WORDS = {
    "tpot_seconds": "Time per output token", "ttft_seconds": "Time to the first token",
    "prefill_tokens_per_second": "Prompt tokens per second", "output_tokens_per_second": "Output tokens per second",
    "kv_tokens": "Tokens the cache holds",
}  # fmt: skip


def show_serving_record(console: Console, document: dict[str, Any]) -> None:
    for name, title in _WORDS.items():
        groups = {g: found[name] for g, found in document["groups"].items() if name in found}
        if not groups:
            continue
        heading(console, f"{title}, planned against measured: error in percent")
        rows = table("group", "rows", "median", "mean", "p90", "bias", "baseline: median", "in interval")
        for group, found in [*groups.items(), ("all", document["overall"][name])]:
            simple = found["baseline_median"]
            rows.add_row(
                group, f"{found['n']:,}", *(f"{100 * found[key]:.1f}" for key in ("median", "mean", "p90")),
                f"{100 * found['bias']:+.1f}", "" if simple is None else f"{100 * simple:.1f}",
                f"{100 * found['in_interval']:.0f}",
            )  # fmt: skip
        show(console, rows)
    paragraph(
        console,
        "Baseline: weight bytes over 60% of the memory's rate; 2 N FLOPs a prompt token over 40% of the dense peak. "
        "In interval: measurements inside the plan's 80% interval.", indent=2, style="dim",
    )  # fmt: skip
    missing = document["not_planned"]
    if missing:
        heading(console, f"{len(missing)} rows could not be planned")
        for one in missing[:8]:
            paragraph(console, f"{one['id']}: {one['reason']}", indent=2)
