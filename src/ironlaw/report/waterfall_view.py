"""The descent from the hardware's ceiling, the timeline and energy, on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from ironlaw import units
from ironlaw.report.tables import bar, heading, paragraph, show, table

Document = Mapping[str, Any]
DROPS = {
    "shape": "shapes", "memory": "memory-bound operations", "launch": "launch and host",
    "communication": "exposed communication", "bubble": "pipeline bubble", "data": "data",
    "recomputation": "recomputation", "overhead": "overhead", "unattributed": "unattributed",
}  # fmt: skip
LANE_WIDTH = 72
LETTERS = {
    "forward": "F", "backward": "B", "optimizer": "O", "data": "D", "transfer": "T", "communication": "C",
    "host": "h", "idle": ".", "evaluation": "E", "checkpoint": "K",
}  # fmt: skip


def show_waterfall(console: Console, document: Document) -> None:
    """Peak at the top, what was attained at the bottom; nothing when neither is known."""
    fall = document.get("waterfall")
    if not fall or not fall["step_seconds"] or not any(d["seconds"] for d in fall["drops"]):
        return
    heading(console, "From the hardware's ceiling to this step")
    made = table("", "seconds", "of the step", "utilisation left", " ", left=(" ",))
    step, ideal = fall["step_seconds"], fall["ideal_seconds"]
    if ideal is not None:
        peak = units.rate(fall["peak_flops_per_second"], "FLOP")
        made.add_row(f"model FLOPs at {peak}", units.seconds(ideal), units.percent(ideal / step), "100.0%",
                     bar(ideal / step))  # fmt: skip
    for drop in fall["drops"]:
        if drop["seconds"] is None:
            continue
        share = drop["seconds"] / step
        sign = "+" if drop["seconds"] >= 0 else "−"
        how = "" if drop["measured"] else " (derived)"
        made.add_row(DROPS[drop["name"]] + how, f"{sign}{units.seconds(abs(drop['seconds']))}", units.percent(share),
                     units.percent(drop["utilisation_after"]), bar(max(0.0, share)))  # fmt: skip
    made.add_row(Text("measured step", style="bold"), units.seconds(step), "100.0%", units.percent(fall["mfu"]), "")
    show(console, made)
    if fall["mfu"] is not None:
        console.print()
        paragraph(
            console,
            f"MFU {units.percent(fall['mfu'])}, HFU {units.percent(fall['hfu'])} (recomputation counted). Derived: "
            "from the plan's curves for these shapes; the others are read off clocks and the profile.",
            indent=2, style="dim",
        )  # fmt: skip


def show_timeline(console: Console, document: Document) -> None:
    """One recorded step as letters: what a person sees at a glance."""
    line = document.get("timeline")
    if not line:
        return
    cells = [" "] * LANE_WIDTH
    for segment in line["segments"]:
        if segment["lane"] != "phases":
            continue
        first = int(LANE_WIDTH * segment["start"] / line["seconds"])
        last = max(first + 1, round(LANE_WIDTH * segment["end"] / line["seconds"]))
        for i in range(first, min(last, LANE_WIDTH)):
            cells[i] = LETTERS.get(segment["style"], "?")
    heading(console, f"One recorded step, {units.seconds(line['seconds'])} under the profiler")
    console.print(f"  {''.join(cells)}")
    used = [f"{LETTERS[name]} {name}" for name in LETTERS if LETTERS[name] in cells]
    paragraph(console, ", ".join(used), indent=2, style="dim")


def show_energy(console: Console, document: Document) -> None:
    use = document.get("energy_use")
    if not use:
        return
    heading(console, "Energy")
    bounds = use["interval"]
    between = f" (between {units.energy(bounds[0])} and {units.energy(bounds[1])})" if bounds else ""
    how = "measured" if use["measured"] else "estimated"
    paragraph(
        console, f"{units.energy(use['joules'])} {how}{between}, {use['kwh']:.3g} kWh, {units.mass(use['co2_kg'])} "
        f"of CO2. {use['basis']}; {use['co2_basis']}.", indent=2,
    )  # fmt: skip
