"""`report.html`: one explained run as one file that opens offline, for reading and printing."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from ironlaw import units
from ironlaw.files import write_text
from ironlaw.report import run_charts, svg, words
from ironlaw.report.data_view import loaded_words, supply_words

Document = Mapping[str, Any]
# Two drawings of each chart, because text in a scaled one would be unreadable on a phone; CSS shows one of them.
SIZES = {"wide": (760, 260), "narrow": (350, 240)}
SLOWEST_SHOWN = 2.5  # times the typical step: one hiccup of the machine must not flatten the rest of the chart


def render_run(document: Document, metrics: Sequence[Document], config_text: str) -> str:
    """The page, from the document of `Explanation.to_json`, the steps of `metrics.jsonl` and the resolved config."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "seconds": units.seconds, "bytes": units.bytes_, "percent": units.percent,
        "error": words.error, "ticks": _ticks,
    }  # fmt: skip
    environment.globals |= {"words": words, "units": units, "bar_pair": svg.bar_pair}
    time = document["time"]
    return environment.get_template("run.html.j2").render(
        d=document,
        config=config_text,
        cards=_cards(document),
        totals=_totals(document),
        composition=_composition(time),
        phases=[*time["phases"], _unattributed(time)],
        kinds=[*time["kinds"], _unattributed(time)] if time["kinds"] else [],
        operations=[row for row in time["operations"] if row["measured"] is not None] or time["operations"],
        loss_charts=_loss_charts(document, metrics),
        time_charts=_time_charts(document, metrics),
        provenance=_provenance(document),
        drawings=_drawings(document),
    )


def write_run(path: Path, document: Document, metrics: Sequence[Document], config_text: str) -> Path:
    """Render and write the page whole: an old report stays until the new one is complete."""
    write_text(path, render_run(document, metrics, config_text))
    return path


def _ticks(text: str) -> Markup:
    """Text with `code` in backticks, as notes and advice have it."""
    parts = [escape(part) for part in text.split("`")]
    return Markup("").join(Markup("<code>%s</code>") % part if i % 2 else part for i, part in enumerate(parts))


def _unattributed(time: Document) -> dict[str, Any]:
    return {"name": "unattributed", "planned": None, "measured": time["unattributed_seconds"], "error": None}


def _cards(document: Document) -> list[tuple[str, str, str, str]]:
    """Heading figures: name, measured number, its unit, and the plan beside it."""
    cards = []
    for name in ("step_seconds", "tokens_per_second", "mfu", "peak_bytes"):
        row = words.dig(document, dict(words.EXPLAINED)[name]) or {}
        planned = row.get("planned")
        beside = f"planned {words.quantity(name, planned)}" if planned is not None else words.NOT_PLANNED
        number, unit = _split(words.quantity(name, row.get("measured")))
        cards.append((words.label(name), number, unit, words.unbroken(beside)))
    losses = document["losses"]
    unigram = losses.get("unigram")
    beside = f"unigram model {unigram:.3f}" if unigram is not None else "unigram model not measured"
    loss = losses.get("validation")
    shown = ("", words.NOT_MEASURED) if loss is None else (f"{loss:.3f}", "nats/token")
    cards.append(("Validation loss", *shown, words.unbroken(beside)))
    return cards


def _split(quantity: str) -> tuple[str, str]:
    """ "205 ms" as number and unit; words for an absent figure are all unit."""
    if quantity == words.NOT_MEASURED:
        return "", quantity
    number, _, unit = quantity.partition(" ")
    return number, unit


def _totals(document: Document) -> list[dict[str, str]]:
    rows = []
    for name, path in words.EXPLAINED:
        row = words.dig(document, path)
        if row is None or (row["planned"] is None and row["measured"] is None):
            continue
        rows.append({
            "name": words.label(name),
            "counts": words.COUNTS.get(name, ""),
            "planned": words.unbroken(words.quantity(name, row["planned"], words.NOT_PLANNED)),
            "planned_interval": words.unbroken(words.interval(name, row.get("planned_interval"))),
            "measured": words.unbroken(words.quantity(name, row["measured"])),
            "measured_interval": words.unbroken(words.interval(name, row.get("measured_interval"))),
            "error": words.error(row["error"]),
        })  # fmt: skip
    return rows


def _composition(time: Document) -> dict[str, Any] | None:
    """The step as one bar per side: kinds where operations were timed, phases otherwise."""
    rows = time["kinds"] if any(row["measured"] is not None for row in time["kinds"]) else time["phases"]
    whole = max((time["step"][side] or 0.0 for side in ("planned", "measured")), default=0.0)
    if not whole:
        return None
    bars = []
    for side in ("planned", "measured"):
        parts = [(row["name"], row[side]) for row in rows if row[side] is not None and row[side] > 0]
        rest = time["unattributed_seconds"]
        if side == "measured" and rest is not None and rest > 0:
            parts.append(("unattributed", rest))
        if parts:
            total = units.seconds(time["step"][side])
            drawing = svg.stacked(parts, whole, f"The {side} step of {total} by its parts", units.seconds)
            bars.append({"side": side, "total": total, "drawing": drawing})
    names = [row["name"] for row in rows if any(row[side] is not None for side in ("planned", "measured"))]
    return {"bars": bars, "names": [*names, "unattributed"]}


def _loss_charts(document: Document, metrics: Sequence[Document]) -> dict[str, Markup]:
    steps = [m for m in metrics if m.get("loss") is not None]
    evaluated = [m for m in metrics if m.get("validation_loss") is not None]
    if not steps:
        return {}
    series = [svg.Series("training", [m["step"] for m in steps], [m["loss"] for m in steps], "measured")]
    if evaluated:
        xs, ys = [m["step"] for m in evaluated], [m["validation_loss"] for m in evaluated]
        series.append(svg.Series("validation", xs, ys, "validation", dots=True))
    unigram = document["losses"].get("unigram")
    levels = [svg.Level("unigram", unigram, "unigram")] if unigram is not None else []
    description = f"Training loss from {steps[0]['loss']:.2f} to {steps[-1]['loss']:.2f} nats per token"
    if evaluated:
        description += f", validation loss {evaluated[-1]['validation_loss']:.2f} at the last evaluation"
    if unigram is not None:
        description += f", unigram model {unigram:.2f}"
    return {
        name: svg.line_chart(
            "Loss over the run", description, series, levels, width=w, height=h, y_text=lambda y: f"{y:.4g}"
        )
        for name, (w, h) in SIZES.items()
    }


def _time_charts(document: Document, metrics: Sequence[Document]) -> dict[str, Any]:
    timed = [m for m in metrics if m.get("seconds") is not None and not m.get("recorded")]
    if not timed:
        return {}
    step = document["time"]["step"]
    seconds = [m["seconds"] for m in timed]
    top = SLOWEST_SHOWN * statistics.median(seconds)
    beyond = sum(s > top for s in seconds)
    series = [svg.Series("step time", [m["step"] for m in timed], seconds, "measured")]
    low, high = step.get("planned_interval") or (None, None)
    levels = [svg.Level("planned", step["planned"], "planned", low, high)] if step["planned"] is not None else []
    description = f"Typical step {units.seconds(step['measured'])}, planned {units.seconds(step['planned'])}"
    charts: dict[str, Any] = {
        name: svg.line_chart(
            "Step time over the run", description, series, levels, width=w, height=h, from_zero=True, top=top,
            y_text=units.seconds,
        )
        for name, (w, h) in SIZES.items()
    }  # fmt: skip
    shown = f"{beyond} steps" if beyond != 1 else "1 step"
    note = f"{shown} above {units.seconds(top)}, up to {units.seconds(max(seconds))}, drawn at the edge."
    notes = [note] if beyond else []
    if len(timed) < len(metrics):
        notes.append("Steps that were profiled are left out: the profiler slows them.")
    return charts | {"note": " ".join(notes)}


def _drawings(document: Document) -> dict[str, dict[str, Markup]]:
    """Each in two sizes; a drawing whose figures are not there is left out."""
    made = {
        "waterfall": {n: run_charts.waterfall_chart(document.get("waterfall"), w) for n, (w, _) in SIZES.items()},
        "roofline": {n: run_charts.roofline_chart(document.get("roofline"), w) for n, (w, _) in SIZES.items()},
        "timeline": {n: run_charts.timeline_chart(document.get("timeline"), w) for n, (w, _) in SIZES.items()},
        "memory": {n: run_charts.memory_chart(document.get("memory_curve"), w) for n, (w, _) in SIZES.items()},
    }
    return {name: charts for name, charts in made.items() if charts["wide"]}


def _provenance(document: Document) -> list[tuple[str, str]]:
    """Where, when and with what the run was made; what is not recorded is left out."""
    plan, run = document["facts"]["plan"], document["facts"]["run"]
    versions = run.get("versions") or {}
    pairs = [
        ("Run", document["run"]),
        ("Machine", run.get("machine") or plan.get("machine")),
        ("Device", run.get("device")),
        ("Threads", run.get("threads")),
        ("Precision", run.get("precision")),
        ("Why this precision", plan.get("precision_reason")),
        ("torch.compile", run.get("compile")),
        ("Attention", run.get("attention")),
        ("Data, planned", supply_words(plan["data_supply"]) if plan.get("data_supply") else None),
        ("Data", loaded_words(run["data"]) if (run.get("data") or {}).get("tokens_per_second") else None),
        ("Steps", run.get("steps")),
        ("Started", run.get("started")),
        ("Finished", run.get("finished")),
        ("Machine measured", plan.get("measured")),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("Machine speed in the run", units.percent(run.get("machine_speed"), 0) if run.get("machine_speed") else None),
    ]
    shown = [(name, {True: "on", False: "off"}[v] if isinstance(v, bool) else v) for name, v in pairs]
    return [(name, str(value)) for name, value in shown if value not in (None, "")]
