"""A plan on the terminal: what will be needed, how sure that is, and on request where each number comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from ironlaw import units
from ironlaw.ledger import Estimate, Ledger, Phase
from ironlaw.report import words
from ironlaw.report.data_view import supply_words
from ironlaw.report.tables import bar, heading, paragraph, show, table

PLANNED = (
    "parameters", "flops_per_step", "step_seconds", "tokens_per_second", "mfu", "peak_bytes", "resident_bytes",
    "total_seconds", "energy_joules",
)  # fmt: skip


def show_plan(console: Console, ledger: Ledger, fits: bool) -> None:
    """Parameters, FLOPs, memory, time and energy of a planned run, each with its interval and origin."""
    facts = ledger.facts
    _title(console, facts)
    _totals(console, ledger)
    heading(console, "Memory at the peak" + (f": {facts['peak_at']}" if facts.get("peak_at") else ""))
    _shares(console, {line.component: line.bytes for line in ledger.memory}, units.bytes_)
    heading(console, "Step time by phase")
    _shares(console, {str(phase): s for phase, s in ledger.seconds_by_phase().items()}, units.seconds)
    heading(console, "Step time by kind of operation")
    kinds = sorted(ledger.seconds_by_kind().items(), key=lambda item: -item[1])
    _shares(console, {str(kind): s for kind, s in kinds}, units.seconds)
    console.print()
    resident = ledger.totals.get("resident_bytes")
    needed = units.bytes_(resident.value if resident else None)
    room = f"{needed} needed of {units.bytes_(facts.get('memory_bytes'))}"
    verdict = Text("Fits: " if fits else "Does not fit: ", style="bold green" if fits else "bold red")
    paragraph(console, verdict.append(room + ".", style="not bold default"))
    if facts.get("precision"):
        paragraph(console, f"Precision: {facts['precision']} ({facts.get('precision_reason', 'as configured')}).")
    if facts.get("attention") == "blocked":
        paragraph(console, f"Attention: in blocks of queries ({facts['attention_reason']}).")
    if facts.get("finetune"):
        paragraph(console, f"Fine-tuning: {facts['finetune']}.")
    if facts.get("data_supply"):
        paragraph(console, f"Data: {supply_words(facts['data_supply'])}")
    paragraph(
        console,
        f"{facts.get('intervals', 'Intervals held 80% of comparable runs')}. MFU: model FLOPs as a share of "
        f"{facts.get('peak_basis', 'the measured matmul rate of this machine')}. --why shows where each number comes "
        "from.",
        style="dim",
    )


def _title(console: Console, facts: Mapping[str, Any]) -> None:
    model = facts.get("model") or {}
    paragraph(
        console, f"Plan of {model.get('name', 'a model')} on {facts.get('machine', 'this machine')}", style="bold"
    )
    shape = [
        f"{model['layers']} layers × {model['hidden']}" if "layers" in model else "",
        f"{facts['steps']:,} steps" if "steps" in facts else "",
        f"{facts['global_batch']} × {facts['sequence']} tokens per step" if "sequence" in facts else "",
        f"{facts['accumulation']} micro-batches of {facts['micro_batch']}" if facts.get("accumulation", 1) > 1 else "",
        f"{facts['threads']} threads" if facts.get("device") == "cpu" and "threads" in facts else "",
        f"machine measured {facts['measured'][:10]}" if facts.get("measured") else "",
    ]
    paragraph(console, ", ".join(part for part in shape if part), style="dim")
    console.print()


def _totals(console: Console, ledger: Ledger) -> None:
    made = table("", "planned", "80% interval", "origin", left=("origin",))
    for name in PLANNED:
        estimate = ledger.totals.get(name)
        if estimate is None:
            made.add_row(words.label(name), words.NOT_PLANNED, "", "")
            continue
        bounds = words.interval(name, (estimate.low, estimate.high)) or "exact"
        shown = Text(words.quantity(name, estimate.value), style="bold")
        made.add_row(words.label(name), shown, bounds, Text(str(estimate.origin), style="dim"))
    show(console, made)


def _shares(console: Console, parts: Mapping[str, float | None], print_: Callable[[float | None], str]) -> None:
    """Parts of a whole with their shares; an absent part is shown as such and not counted."""
    whole = sum(part for part in parts.values() if part is not None)
    made = table("", "planned", "share", " ", "what it is", left=(" ", "what it is"))
    for name, value in parts.items():
        share = None if value is None or not whole else value / whole
        meaning = words.MEANINGS.get("optimizer state" if print_ is units.bytes_ and name == "optimizer" else name, "")
        amount = words.NOT_PLANNED if value is None else print_(value)
        made.add_row(name, amount, units.percent(share), bar(share), Text(meaning, style="dim"))
    made.add_row(Text("total", style="bold"), Text(print_(whole), style="bold"), "", "", "")
    show(console, made)


def show_why(console: Console, ledger: Ledger) -> None:
    """Every total with its formula, its inputs and its origin; then every operation behind the step time."""
    paragraph(console, "Where each number comes from", style="bold")
    for name, estimate in ledger.totals.items():
        _derivation(console, ledger, name, estimate)
    if ledger.facts.get("precision_reason"):
        heading(console, f"Precision: {ledger.facts['precision']}")
        paragraph(console, ledger.facts["precision_reason"], indent=2)
    if ledger.facts.get("attention_reason"):
        heading(console, f"Attention: {ledger.facts['attention']}")
        paragraph(console, ledger.facts["attention_reason"], indent=2)
    for phase in Phase:
        lines = list(ledger.select(phase=phase))
        if lines:
            heading(console, f"Operations of the {phase} phase, per step")
            _operations(console, lines)
    paragraph(console, "bound: the ceiling that sets the time. FLOPs count matrix products only.", style="dim")


def _derivation(console: Console, ledger: Ledger, name: str, estimate: Estimate) -> None:
    title = Text(f"{words.label(name)}: {words.quantity(name, estimate.value)}", style="bold")
    bounds = words.interval(name, (estimate.low, estimate.high))
    title.append(f"  [{estimate.origin}]" + (f"  {bounds}" if bounds else ""), style="not bold dim")
    console.print()
    paragraph(console, title)
    paragraph(console, f"= {estimate.basis}", indent=2)
    for line in _inputs(ledger, name):
        paragraph(console, f"· {line}", indent=4, style="dim")


def _inputs(ledger: Ledger, name: str) -> list[str]:
    """What went into a total, each marked with its origin."""
    facts, totals = ledger.facts, ledger.totals

    def total(other: str) -> str:
        return f"{words.label(other)} {words.quantity(other, totals[other].value)} [{totals[other].origin}]"

    def fact(key: str, text: str, origin: str, print_: Callable[[Any], str] = str) -> list[str]:
        return [f"{text} {print_(facts[key])} [{origin}]"] if facts.get(key) is not None else []

    batch = [
        *fact("global_batch", "sequences per step", "config"),
        *fact("sequence", "tokens per sequence", "config"),
    ]
    measured_on = fact(
        "measured", "this machine's kernels, timed on", "measured", lambda d: str(d)[:16].replace("T", " ")
    )
    peak = fact("matmul_peak_flops_per_second", "matmul rate", "measured", lambda r: units.rate(r, "FLOP"))
    memory = [
        f"{line.component} {units.bytes_(line.bytes)} [{line.origin}]" + (f", {line.note}" if line.note else "")
        for line in ledger.memory
    ]
    inputs = {
        "parameters": [
            f"{key} {facts['model'][key]} [config]"
            for key in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "context", "tied")
            if key in (facts.get("model") or {})
        ]
        + [f"latent.{key} {size} [config]" for key, size in ((facts.get("model") or {}).get("latent") or {}).items()],
        "flops_per_step": batch,
        "step_seconds": [f"{len(ledger.lines)} operations, listed below [calculated]", *measured_on],
        "tokens_per_second": batch,
        "mfu": [*peak],
        "peak_bytes": memory,
        "total_seconds": fact("steps", "steps", "config"),
        "energy_joules": fact("threads", "cores", "measured"),
    }
    derived = {
        "tokens_per_second": ["step_seconds"], "mfu": ["flops_per_step", "step_seconds"],
        "resident_bytes": ["peak_bytes"], "total_seconds": ["step_seconds"], "energy_joules": ["total_seconds"],
    }  # fmt: skip
    return [total(other) for other in derived.get(name, []) if other in totals] + inputs.get(name, [])


def _operations(console: Console, lines: list[Any]) -> None:
    made = table("operation", "kind", "calls", "FLOPs", "moved", "time", "bound", left=("kind", "bound"), tight=True)
    for line in sorted(lines, key=lambda line: -(line.seconds or 0.0)):
        made.add_row(
            line.operation, str(line.kind), units.count(line.count), units.si(line.flops, "FLOP"),
            units.bytes_(line.bytes_moved),
            units.seconds(line.seconds), line.bound or units.NOT_KNOWN,
        )  # fmt: skip
    console.print(made)
