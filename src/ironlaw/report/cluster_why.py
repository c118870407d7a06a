"""`--why` for a cluster plan: formula, inputs and origin of every total, then every line of the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from ironlaw import units
from ironlaw.ledger import Ledger
from ironlaw.report.cluster_view import SHOWN, interval
from ironlaw.report.tables import heading, paragraph, show, table

DERIVED = {
    "tokens_per_second": ("step_seconds",),
    "mfu": ("flops_per_step", "step_seconds"),
    "mfu_palm": ("parameters", "step_seconds"),
    "mfu_6nd": ("parameters", "step_seconds"),
    "hfu": ("step_seconds",),
    "total_seconds": ("step_seconds",),
    "accelerator_hours": ("total_seconds",),
    "rent_usd": ("accelerator_hours",),
    "break_even_runs": ("purchase_usd", "rent_usd"),
    "energy_joules": ("total_seconds",),
    "carbon_kg": ("energy_joules",),
}
"""Which totals go into a total."""


def show_cluster_why(console: Console, ledger: Ledger, more: Mapping[str, Any]) -> None:
    """Every total with its formula and inputs, the engine, and what is not measured but assumed."""
    console.print()
    paragraph(console, "Where each number comes from", style="bold")
    for name, (label, print_) in SHOWN.items():
        estimate = ledger.totals.get(name)
        if estimate is None:
            continue
        bounds = f"  {interval(print_(estimate.low), print_(estimate.high))}" if estimate.low is not None else ""
        title = Text(f"{label}: {print_(estimate.value)}", style="bold")
        console.print()
        paragraph(console, title.append(f"  [{estimate.origin}]{bounds}", "not bold dim"))
        paragraph(console, f"= {estimate.basis}", 2)
        for line in _inputs(ledger, more, name):
            paragraph(console, f"· {line}", 4, style="dim")
    heading(console, f"Engine {more['engine']['name']}")
    paragraph(console, more["engine"]["source"], 2)
    if ledger.facts["low_precision"]:
        paragraph(console, f"memory in {ledger.facts['precision']}: {ledger.facts['low_precision']}", 2)
    if ledger.facts["context_parallel"]:
        paragraph(console, f"context parallel attention: {ledger.facts['context_parallel']}", 2)
    if ledger.facts["assumptions"]:
        heading(console, "Constants of this accelerator that nobody measured here")
        for line in ledger.facts["assumptions"]:
            paragraph(console, line, 2)
    heading(console, "Linear layers of a block: one rank and micro-batch, kernels alone, before the engine's slowdown")
    _products(console, ledger)
    heading(console, "Lines of the step: seconds of the busiest stage, FLOPs of all accelerators")
    _lines(console, ledger)


def _inputs(ledger: Ledger, more: Mapping[str, Any], name: str) -> list[str]:
    totals, facts, work = ledger.totals, ledger.facts, more["work"]
    lines = [
        f"{SHOWN[other][0]} {SHOWN[other][1](totals[other].value)} [{totals[other].origin}]"
        for other in DERIVED.get(name, ())
        if other in totals
    ]
    batch = [f"{work['global_batch']:,} sequences of {work['sequence']:,} tokens per step [asked or assumed]"]
    own: dict[str, list[str]] = {
        "parameters": [
            f"{key} {facts['model'][key]} [model config]"
            for key in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "context", "tied")
            if key in facts["model"]
        ]
        + [f"latent.{key} {size} [model config]" for key, size in (facts["model"].get("latent") or {}).items()],
        "flops_per_step": batch,
        "step_seconds": [
            f"{term} {units.seconds(seconds)} [calculated]"
            for term, seconds in more["terms"].items()
            if seconds >= 0.001 * totals["step_seconds"].value
        ],
        "tokens_per_second": batch,
        "peak_bytes": [
            f"{line.component} {units.bytes_(line.bytes)} [{line.origin}]" + (f", {line.note}" if line.note else "")
            for line in ledger.memory
            if line.bytes
        ],
        "total_seconds": [f"{work['steps']:,} steps, {units.tokens(work['tokens'])} tokens [asked or assumed]"],
    }
    return lines + own.get(name, [])


def _products(console: Console, ledger: Ledger) -> None:
    made = table("layer", "m", "n", "k", "times", "FLOPs forward", "forward", "backward", "rate", tight=True)
    for product in ledger.facts["products"]:
        m, n, k, times = (f"{product[key]:,.6g}" for key in ("m", "n", "k", "times"))
        rate = 3 * product["flops"] / (product["forward_seconds"] + product["backward_seconds"])
        made.add_row(
            product["name"], m, n, k, times, units.si(product["flops"], "FLOP"),
            units.seconds(product["forward_seconds"]), units.seconds(product["backward_seconds"]),
            units.rate(rate, "FLOP"),
        )  # fmt: skip
    show(console, made)


def _lines(console: Console, ledger: Ledger) -> None:
    made = table("operation", "phase", "FLOPs", "time", "bound", left=("phase", "bound"), tight=True)
    for line in sorted(ledger.lines, key=lambda line: -(line.seconds or 0.0)):
        if line.seconds:
            flops = units.si(line.flops, "FLOP")
            made.add_row(line.operation, str(line.phase), flops, units.seconds(line.seconds), line.bound or "")
    show(console, made)
