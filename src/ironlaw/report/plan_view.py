"""Views of a plan: its totals with their uncertainty, and on request the derivation of each number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ironlaw import units
from ironlaw.ledger import Ledger, Line, MemoryLine, Phase
from ironlaw.report import labels
from ironlaw.report.data_view import supply_words
from ironlaw.report.document import NOT_PLANNED, Cell, Document, Print, Row, bad, between, dim, good

PLANNED = (
    "parameters", "flops_per_step", "step_seconds", "tokens_per_second", "mfu", "peak_bytes", "resident_bytes",
    "total_seconds", "energy_joules",
)  # fmt: skip
ON_ACCELERATORS = (*PLANNED[:-1], "rent_usd", "energy_joules", "carbon_kg")
MODEL = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "context", "tied")
# Total -> the totals it is calculated from.
DERIVED = {
    "tokens_per_second": ("step_seconds",), "mfu": ("flops_per_step", "step_seconds"),
    "mfu_palm": ("parameters", "step_seconds"), "mfu_6nd": ("parameters", "step_seconds"), "hfu": ("step_seconds",),
    "resident_bytes": ("peak_bytes",), "total_seconds": ("step_seconds",), "accelerator_hours": ("total_seconds",),
    "rent_usd": ("accelerator_hours",), "break_even_runs": ("purchase_usd", "rent_usd"),
    "energy_joules": ("total_seconds",), "carbon_kg": ("energy_joules",),
}  # fmt: skip


def plan_view(ledger: Ledger, fits: bool) -> Document:
    """Return parameters, FLOPs, memory, time and energy of a planned run, each with its interval and origin."""
    view, facts = Document(), ledger.facts
    _title(view, facts)
    catalogued = "accelerators" in facts
    shown = {name: labels.TOTALS[name] for name in (ON_ACCELERATORS if catalogued else PLANNED)}
    totals(view, ledger, shown, absent=not catalogued)
    view.heading("Memory at the peak" + (f": {facts['peak_at']}" if facts.get("peak_at") else ""))
    noted = ((line.component, line.bytes, line.note) for line in ledger.memory)
    view.shares(((name, held, note or labels.meaning(name, units.bytes_)) for name, held, note in noted), units.bytes_)
    view.heading("Step time by phase")
    _shares(view, ledger.seconds_by_phase(), units.seconds)
    view.heading("Step time by kind of operation")
    kinds = sorted(ledger.seconds_by_kind().items(), key=lambda item: -item[1])
    _shares(view, dict(kinds), units.seconds)
    resident = ledger.totals.get("resident_bytes")
    needed = units.bytes_(resident.value if resident else None)
    verdict = good("Fits: ") if fits else bad("Does not fit: ")
    view.text(verdict, f"{needed} needed of {units.bytes_(facts.get('memory_bytes'))}.")
    if facts.get("precision"):
        view.text(f"Precision: {facts['precision']} ({facts.get('precision_reason', 'as configured')}).")
    if facts.get("attention") == "native":
        view.text(f"Attention: Ironlaw's own kernel ({facts['attention_reason']}).")
    if facts.get("finetune"):
        view.text(f"Fine-tuning: {facts['finetune']}.")
    if facts.get("data_supply"):
        view.text(f"Data: {supply_words(facts['data_supply'])}")
    view.note(
        f"{facts.get('intervals', 'Intervals held 80% of comparable runs')}. MFU: model FLOPs as a share of "
        f"{facts.get('peak_basis', 'the measured matmul rate of this machine')}. --why shows where each number comes "
        "from."
    )
    return view


def _title(view: Document, facts: Mapping[str, Any]) -> None:
    model = facts.get("model") or {}
    shape = [
        f"{model['layers']} layers × {model['hidden']}" if "layers" in model else "",
        f"{facts['steps']:,} steps" if "steps" in facts else "",
        f"{facts['global_batch']} × {facts['sequence']} tokens per step" if "sequence" in facts else "",
        f"{facts['accumulation']} micro-batches of {facts['micro_batch']}" if facts.get("accumulation", 1) > 1 else "",
        f"{facts['threads']} threads" if facts.get("device") == "cpu" and "threads" in facts else "",
        f"machine measured {facts['measured'][:10]}" if facts.get("measured") else "",
    ]
    count = f"{facts['accelerators']:,} × " if facts.get("accelerators", 1) > 1 else ""
    name = f"Plan of {model.get('name', 'a model')} on {count}{facts.get('machine', 'this machine')}"
    view.title(name, below=", ".join(filter(None, shape)))


def totals(view: Document, ledger: Ledger, shown: Mapping[str, tuple[str, Print]], absent: bool = True) -> None:
    """Add totals by name, (label, print format), with interval and origin. `absent`: also those not planned."""
    rows: list[Row] = []
    for name, (label, show) in shown.items():
        estimate = ledger.totals.get(name)
        if estimate is not None:
            exact = "exact" if estimate.low is None and (absent or name in ("parameters", "flops_per_step")) else ""
            bounds = between((estimate.low, estimate.high), show) or exact
            figure = Cell(show(estimate.value), "strong", estimate.value, why=estimate.basis)
            rows.append([label, figure, bounds, dim(str(estimate.origin))])
        elif absent:
            rows.append([label, dim(NOT_PLANNED), "", ""])
    view.table(["", "planned", "80% interval", "<origin"], rows)


def _shares(view: Document, parts: Mapping[Any, float | None], show: Print) -> None:
    view.shares(((str(name), value, labels.meaning(str(name), show)) for name, value in parts.items()), show)


def why_view(ledger: Ledger) -> Document:
    """Return every total with its formula, inputs and origin, then every operation behind the step time."""
    view, facts = Document(), ledger.facts
    view.heading("Where each number comes from")
    shown = {name: labels.TOTALS[name] for name in ledger.totals}
    derivations(view, ledger, shown, _inputs(ledger))
    for name, key in (("Precision", "precision"), ("Attention", "attention")):
        if facts.get(f"{key}_reason"):
            view.heading(f"{name}: {facts[key]}")
            view.text(facts[f"{key}_reason"], indent=2)
    for phase in Phase:
        lines = sorted(ledger.select(phase=phase), key=lambda line: -(line.seconds or 0.0))
        if lines:
            view.heading(f"Operations of the {phase} phase, per step")
            columns = ["operation", "<kind", "calls", "FLOPs", "moved", "time", "<bound"]
            view.table(columns, map(_operation, lines))
    view.note("bound: the ceiling that sets the time. FLOPs count matrix products only.")
    return view


def derivations(
    view: Document, ledger: Ledger, shown: Mapping[str, tuple[str, Print]], inputs: Mapping[str, Iterable[str]]
) -> None:
    """Add for `--why` the formula, source totals and other inputs of every total, each with its origin."""
    for name, (label, show) in shown.items():
        estimate = ledger.totals.get(name)
        if estimate is None:
            continue
        others = [
            f"{shown[other][0]} {shown[other][1](ledger.totals[other].value)} [{ledger.totals[other].origin}]"
            for other in DERIVED.get(name, ())
            if other in ledger.totals
        ]
        bounds = between((estimate.low, estimate.high), show)
        tail = f"  [{estimate.origin}]" + (f"  {bounds}" if bounds else "")
        view.heading(f"{label}: {show(estimate.value)}", level=3, tail=tail)
        view.text(f"= {estimate.basis}", indent=2)
        view.items([*others, *inputs.get(name, ())], indent=4, role="dim")


def model_inputs(model: Mapping[str, Any], origin: str) -> list[str]:
    sizes = {key: model[key] for key in MODEL if key in model}
    sizes |= {f"latent.{key}": size for key, size in (model.get("latent") or {}).items()}
    return [f"{key} {size} [{origin}]" for key, size in sizes.items()]


def memory_inputs(lines: Iterable[MemoryLine]) -> list[str]:
    return [
        f"{line.component} {units.bytes_(line.bytes)} [{line.origin}]" + (f", {line.note}" if line.note else "")
        for line in lines
    ]


def _inputs(ledger: Ledger) -> dict[str, list[str]]:
    """Return the other inputs of each total, each marked with its origin."""
    facts = ledger.facts

    def fact(key: str, text: str, origin: str, show: Callable[[Any], str] = str) -> list[str]:
        return [f"{text} {show(facts[key])} [{origin}]"] if facts.get(key) is not None else []

    batch = fact("global_batch", "sequences per step", "config") + fact("sequence", "tokens per sequence", "config")
    timed_on = fact("measured", "this machine's kernels, timed on", "measured", lambda d: d[:16].replace("T", " "))
    peak = fact("matmul_peak_flops_per_second", "matmul rate", "measured", lambda r: units.rate(r, "FLOP"))
    return {
        "parameters": model_inputs(facts.get("model") or {}, "config"), "flops_per_step": batch,
        "step_seconds": [f"{len(ledger.lines)} operations, listed below [calculated]", *timed_on],
        "tokens_per_second": batch, "mfu": peak, "peak_bytes": memory_inputs(ledger.memory),
        "total_seconds": fact("steps", "steps", "config"), "energy_joules": fact("threads", "cores", "measured"),
    }  # fmt: skip


def _operation(line: Line) -> list[str]:
    return [
        line.operation, str(line.kind), units.count(line.count), units.si(line.flops, "FLOP"),
        units.bytes_(line.bytes_moved), units.seconds(line.seconds), line.bound or units.NOT_KNOWN,
    ]  # fmt: skip
