"""View of an explained run: bottleneck, remedies, plan beside run, and reliability.

Built from the document of `Explanation.to_json`, so that users see what scripts read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ironlaw import units
from ironlaw.report import charts, labels
from ironlaw.report.data_view import loaded_words, supply_words
from ironlaw.report.document import (
    BAR,
    NOT_MEASURED,
    NOT_PLANNED,
    Bar,
    Cards,
    Cell,
    Chart,
    Document,
    Listing,
    Print,
    Row,
    bad,
    between,
    dim,
    good,
    quantity,
    strong,
)

Found = Mapping[str, Any]
MAX_OPERATIONS, MAX_GROUPS = 8, 12
CARDS = ("step_seconds", "tokens_per_second", "mfu", "peak_bytes")


def run_view(found: Found, metrics: Sequence[Found] = (), config: str = "") -> Document:
    """Return the whole explanation, the most important first. `metrics`: steps of `metrics.jsonl`, for the curves."""
    footer = "Made by Ironlaw. The same figures for scripts: `ironlaw explain RUN --json`."
    view, time = Document(f"{_model(found)}: Ironlaw run report", footer), found["time"]
    _headline(view, found)
    _remedies(view, found)
    _waterfall(view, found.get("waterfall"))
    view.heading("Plan beside run")
    _totals(view, found)
    view.heading("Step time by phase")
    unnamed = {"name": "unattributed", "planned": None, "measured": time["unattributed_seconds"], "error": None}
    _parts(view, [*time["phases"], unnamed], time["step"], units.seconds)
    view.heading("Step time by kind of operation")
    _parts(view, [*time["kinds"], unnamed] if time["kinds"] else [], time["step"], units.seconds)
    _operations(view, time["operations"])
    _recorded(view, found)
    _memory(view, found)
    _ranks(view, found.get("ranks"))
    _wall(view, time.get("wall"))
    _how(view, found["facts"])
    _energy(view, found.get("energy_use"))
    _curves(view, found, metrics)
    _accuracy(view, found)
    _provenance(view, found, config)
    return view


def _model(found: Found) -> str:
    return str((found["facts"]["plan"].get("model") or {}).get("name", "a model"))


def _headline(view: Document, found: Found) -> None:
    diagnosis, run = found["diagnosis"], found["facts"]["run"]
    finished = f", {run['finished'][:16].replace('T', ' ')}" if run.get("finished") else ""
    where = f" on {run['machine']}" if run.get("machine") else ""
    style = "strong" if diagnosis["healthy"] or diagnosis["abstained"] else "caution"
    above = f"Run {found['run']}: {_model(found)}{where}{finished}"
    view.title(strong("Bottleneck: "), Cell(found["bottleneck"], style), above=above)
    others = [f["sentence"] for f in diagnosis["findings"] if f["fault"] and f["sentence"] != found["bottleneck"]]
    helps = [f"What helps: {diagnosis['advice']}."] if diagnosis["advice"] else []
    view.items([*diagnosis["evidence"], *helps, *(f"Also: {sentence}" for sentence in others)])
    if not diagnosis["abstained"]:
        healthy = " No fault found." if diagnosis["healthy"] else ""
        view.note(f"Axis: {diagnosis['axis']}. Confidence: {diagnosis['confidence']}.{healthy}", indent=2)
    cards = []
    for name in CARDS:
        row, (label, show) = _dig(found, labels.EXPLAINED[name][0]) or {}, labels.TOTALS[name]
        beside = NOT_PLANNED if row.get("planned") is None else f"planned {show(row['planned'])}"
        cards.append((label, quantity(row.get("measured"), show).text, beside))
    loss, unigram = (quantity(found["losses"].get(name), "{:.3f}".format) for name in ("validation", "unigram"))
    cards.append(("Validation loss", loss.text, f"nats/token; unigram model {unigram.text}"))
    view.add(Cards(cards))


def _dig(found: Found, path: tuple[str, ...]) -> Any:
    """Return a nested value, or None if any level is missing."""
    value: Any = found
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _remedies(view: Document, found: Found) -> None:
    view.heading("What to change next")
    view.text(found["remedies_note"], indent=2, role="dim" if found["remedies"] else "")
    for number, remedy in enumerate(found["remedies"], 1):
        view.text(strong(f"{number}. {remedy['title']}"), indent=2)
        view.text("; ".join(_gains(remedy)) + f" ({remedy['basis']})", indent=5)
        view.text(f"Risk: {remedy['risk']}.", indent=5)
        view.text(Cell(remedy["apply"], "code"), indent=5)


def _gains(remedy: Found) -> list[str]:
    """Describe the planned savings of a remedy in seconds and bytes, and its effect."""

    def saved(value: float, show: Print) -> str:
        return f"saves {show(value)}" if value > 0 else f"costs {show(-value)}"

    share = "" if remedy["name"] == "memory" else f" ({units.percent(remedy['gain'])})"
    facts = [f"{saved(remedy['total_seconds_saved'], units.seconds)} of the run{share}"]
    if remedy["step_seconds_saved"]:
        facts.append(f"{saved(remedy['step_seconds_saved'], units.seconds)} per step")
    if abs(remedy["bytes_saved"]) >= 2**20:
        facts.append(f"{saved(remedy['bytes_saved'], units.bytes_)} at the peak")
    return [*facts, remedy["effect"]]


def _waterfall(view: Document, fall: Found | None) -> None:
    """Add the time lost to each cause, from the step at the hardware's peak to the measured one, if it is known."""
    if not fall or not fall["step_seconds"] or not any(d["seconds"] for d in fall["drops"]):
        return
    view.heading("From the hardware's ceiling to this step")
    step, ideal = fall["step_seconds"], fall["ideal_seconds"]
    peak = units.rate(fall["peak_flops_per_second"], "FLOP")
    caption = "No plan: where the measured step went."
    if ideal:
        caption = f"The model's FLOPs at {peak} would take {units.seconds(ideal)}; every bar adds what one cause costs."
    view.add(Chart(charts.waterfall(fall), caption))
    rows: list[Row] = []
    if ideal is not None:
        cells = (units.seconds(ideal), units.percent(ideal / step), "100.0%", Bar(ideal / step))
        rows.append([f"model FLOPs at {peak}", *cells])
    for drop in (d for d in fall["drops"] if d["seconds"] is not None):
        behind = "".join(f"; {op['name']} {units.seconds(op['seconds'])}" for op in drop["operations"])
        name = charts.DROPS[drop["name"]] + ("" if drop["measured"] else " (derived)")
        share = drop["seconds"] / step
        rows.append([Cell(name, note=drop["meaning"] + behind), _difference(drop["seconds"]), units.percent(share),
                     units.percent(drop["utilisation_after"]), Bar(max(0.0, share))])  # fmt: skip
    total: Row = [strong("measured step"), units.seconds(step), "100.0%", units.percent(fall["mfu"]), ""]
    rates = "" if fall["mfu"] is None else (
        f"MFU {units.percent(fall['mfu'])}, HFU {units.percent(fall['hfu'])} (recomputation counted). "
    )  # fmt: skip
    why = "Derived: from the plan's curves for these shapes; the others are read off clocks and the profile."
    view.table(["", "seconds", "~of the step", "utilisation left", BAR], rows, total, caption=rates + why)


def _difference(seconds: float, least: float = 0.0) -> str:
    """Return the difference with its sign, or zero if it is less than `least`."""
    sign = "" if abs(seconds) < least else "+" if seconds >= 0 else "−"
    return sign + units.seconds(0.0 if abs(seconds) < least else abs(seconds))


def _totals(view: Document, found: Found) -> None:
    rows: list[Row] = []
    for name, (path, counted) in labels.EXPLAINED.items():
        row, (label, show) = _dig(found, path), labels.TOTALS[name]
        if row is None or (row["planned"] is None and row["measured"] is None):
            continue
        planned, measured = (
            quantity(row[side], show, absent, "strong", between(row.get(f"{side}_interval"), show))
            for side, absent in (("planned", NOT_PLANNED), ("measured", NOT_MEASURED))
        )
        rows.append([Cell(label, note=counted), planned, measured, labels.error(row["error"])])
    view.table(
        ["", "planned", "measured", "plan error"], rows,
        caption="Plan error = (planned − measured) / measured. Below a figure: 80% of comparable runs (planned), 80% "
        "of the steps (measured). MFU: model FLOPs as a share of the machine's measured matmul rate. Total time: "
        "planned for steps and evaluations, measured for the whole command.",
    )  # fmt: skip


def _parts(view: Document, rows: Sequence[Found], whole: Found, show: Print) -> None:
    """Add the parts of a whole, planned and measured, with their shares of the measured (or planned) whole."""
    side = "measured" if whole["measured"] is not None else "planned"
    cells: list[Row] = []
    for row in rows:
        share = row[side] / whole[side] if row[side] is not None and whole[side] else None
        name = Cell(row["name"], note=labels.meaning(row["name"], show))
        cells.append([name, *_both(row, show), units.percent(share), Bar(share)])
    total: Row = [strong("total"), *_both(whole, show), "", ""]
    view.table(["part", "planned", "measured", "plan error", "~share", BAR], cells, total)


def _both(row: Found, show: Print) -> list[Cell]:
    """Return planned value, measured value and the plan's error."""
    error = Cell(labels.error(row["error"]), "caution" if row["error"] is not None and abs(row["error"]) > 0.1 else "")
    return [quantity(row["planned"], show, NOT_PLANNED), quantity(row["measured"], show), error]


def _operations(view: Document, operations: Sequence[Found]) -> None:
    timed = [row for row in operations if row["measured"] is not None]
    rows = [_operation(row) for row in timed]
    columns = ["operation", "<~kind", "<phase", "planned", "measured", "difference"]
    if rows:
        view.heading(f"The {len(rows[:MAX_OPERATIONS])} operations furthest from the plan, per step")
        view.table(columns, rows[:MAX_OPERATIONS])
    if len(rows) > MAX_OPERATIONS or (operations and not timed):
        listed = view.fold(f"All {len(operations)} operations")
        listed.table(columns, rows or [_operation(row) for row in operations])


def _operation(row: Found) -> Row:
    planned, measured, _ = _both(row, units.seconds)
    gap = NOT_MEASURED
    if row["measured"] is not None:  # the other columns would not show a difference below a thousandth
        gap = _difference(row["measured"] - (row["planned"] or 0.0), least=1e-3 * row["measured"])
    name = Cell(row["name"], note=f"{row['bound']}-bound" if row.get("bound") else "")
    return [name, row["kind"], row["phase"], planned, measured, gap]


def _recorded(view: Document, found: Found) -> None:
    line, roof, page = found.get("timeline"), found.get("roofline"), view.fold()
    if line and line["segments"]:
        page.heading(f"One recorded step, {units.seconds(line['seconds'])} under the profiler")
        caption = "The profiler slows small steps: read what follows what, not how long it takes."
        page.add(Chart(charts.timeline(line), caption))
    if roof:
        page.heading("Roofline")
        ceilings = " and ".join(
            (units.rate(roof["peak_flops_per_second"], "FLOP"), units.rate(roof["copy_bytes_per_second"], "B"))
        )
        caption = f"Each operation under the machine's two ceilings: {ceilings}. Larger circles take more time."
        page.add(Chart(charts.roofline(roof), caption))


def _memory(view: Document, found: Found) -> None:
    if not found["memory"]["components"]:
        return
    at = found["facts"]["plan"].get("peak_at")
    view.heading("Memory at the peak" + (f", planned at: {at}" if at else ""))
    _parts(view, found["memory"]["components"], found["memory"]["peak"], units.bytes_)
    groups, curve = found.get("memory_groups") or {}, found.get("memory_curve")
    page = view.fold()
    if groups:
        page.table(
            ["part of the model", "bytes"],
            [[name, quantity(size, units.bytes_)] for name, size in list(groups.items())[:MAX_GROUPS]],
            caption="Allocated in the step and alive at the peak, by the part of the model that allocated it.",
        )
    if curve:
        page.add(Chart(charts.memory(curve), "Tensors alive over the recorded steps."))


def _ranks(view: Document, ranks: Found | None) -> None:
    """Add communication by collective and dimension, memory by stage, and the slowest rank of each phase."""
    if not ranks:
        return
    view.heading(f"Communication of {ranks['ranks']} ranks, of a mean rank and step")
    view.table(
        ["collective", "bytes planned", "bytes sent", "exposed planned", "exposed", "hidden", "calls"],
        [
            [row["name"], quantity(row["planned_bytes"], units.bytes_, NOT_PLANNED),
             quantity(row["bytes"], units.bytes_),
             quantity(row["planned_exposed_seconds"], units.seconds, NOT_PLANNED),
             quantity(row["exposed_seconds"], units.seconds), quantity(row["hidden_seconds"], units.seconds),
             quantity(row["count"], "{:,.0f}".format)]
            for row in ranks["communication"]
        ],
        caption="Exposed: the rank only waited, for the transfer or for a rank that was not there yet. Hidden: under "
        "way while it computed. Waiting for a neighbour's message includes a pipeline's idle time.",
    )  # fmt: skip
    view.table(
        ["phase", "fastest rank", "took", "slowest rank", "took "],
        [
            [row["phase"], str(row["fastest_rank"]), units.seconds(row["fastest_seconds"]), str(row["slowest_rank"]),
             units.seconds(row["slowest_seconds"])]
            for row in ranks["spread"]
        ],
    )  # fmt: skip
    if ranks["memory"]:
        rows: list[Row] = [[str(row["position"]), *_both(row, units.bytes_)] for row in ranks["memory"]]
        view.table(["stage", "held, planned", "held", "plan error"], rows)


def _wall(view: Document, wall: Found | None) -> None:
    if not wall:
        return
    view.heading("Wall time of the training command")
    parts = ((labels.WALL.get(name, name), seconds, "") for name, seconds in wall.items())
    view.shares(parts, units.seconds, side="measured", meanings=False)


def _how(view: Document, facts: Found) -> None:
    """Add the attention kernel that ran, and the loader's possible rate."""
    run, supply = facts["run"], facts["plan"].get("data_supply")
    data = run.get("data") or {}
    if not run.get("attention") and not data.get("tokens_per_second"):
        return
    view.heading("How it ran")
    if run.get("attention"):
        view.text(f"Attention: {run['attention']}.", indent=2)
    if data.get("tokens_per_second"):
        view.text(f"Data: {loaded_words(data)}.", indent=2)
    if supply:
        view.note(f"Planned: {supply_words(supply)}", indent=2)


def _energy(view: Document, use: Found | None) -> None:
    if not use:
        return
    view.heading("Energy")
    bounds, how = use["interval"], "measured" if use["measured"] else "estimated"
    spread = f" (between {units.energy(bounds[0])} and {units.energy(bounds[1])})" if bounds else ""
    used = f"{units.energy(use['joules'])} {how}{spread}, {units.mass(use['co2_kg'])} of CO2."
    view.text(f"{used} {use['basis']}; {use['co2_basis']}.", indent=2)


def _curves(view: Document, found: Found, metrics: Sequence[Found]) -> None:
    losses = found["losses"]
    validation, unigram, below = (losses.get(k) for k in ("validation", "unigram", "below_unigram"))
    known = any(value is not None for value in losses.values())
    target = view if known else view.fold()
    target.heading("What it learned")
    if validation is None or unigram is None or below is None:
        target.text("The validation loss was not measured.", indent=2)
    else:
        than = f"a model that knows only how often each token occurs ({unigram:.3f})"
        verdict = f"{below:.3f} below {than}." if below > 0 else f"not below {than}: nothing was learned yet."
        target.text(f"Validation loss {validation:.3f} nats/token, {verdict}", indent=2)
    page = view.fold()
    drawn = [charts.losses(metrics, unigram), charts.step_times(metrics, found["time"]["step"])]
    for chart in filter(None, drawn):
        page.add(chart)
    if not any(drawn):
        page.note("No steps were recorded in metrics.jsonl.")


def _accuracy(view: Document, found: Found) -> None:
    view.heading("How far to trust this")
    rows: list[Row] = []
    for name, text in labels.CHECKS.items():
        check = found["accuracy_met"][name]
        verdict = {True: good("met"), False: bad("MISSED"), None: dim(NOT_MEASURED)}[check["met"]]
        rows.append([text, labels.error(check["error"]), f"within {units.percent(check['limit'], 0)}", verdict])
    view.table(["", "error", "promised", "<"], rows)
    view.items(found["notes"], role="dim")
    if found["diagnosis"]["not_tested"]:
        names = ", ".join(found["diagnosis"]["not_tested"]).replace("_", " ")
        view.fold().note(f"Causes that this run has no evidence on: {names}.")


def _provenance(view: Document, found: Found, config: str) -> None:
    """Add where, when and with which versions the run was made; unrecorded values are left out."""
    plan, run = found["facts"]["plan"], found["facts"]["run"]
    versions = run.get("versions") or {}
    speed = run.get("machine_speed")
    pairs = [
        ("Run", found["run"]), ("Machine", run.get("machine") or plan.get("machine")), ("Device", run.get("device")),
        ("Threads", run.get("threads")), ("Precision", run.get("precision")),
        ("Why this precision", plan.get("precision_reason")), ("torch.compile", run.get("compile")),
        ("Steps", run.get("steps")), ("Started", run.get("started")), ("Finished", run.get("finished")),
        ("Machine measured", plan.get("measured")),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("Machine speed in the run", units.percent(speed, 0) if speed else None),
    ]  # fmt: skip
    shown = [(name, {True: "on", False: "off"}[v] if isinstance(v, bool) else v) for name, v in pairs]
    page = view.fold()
    page.heading("Provenance")
    page.facts((name, str(value)) for name, value in shown if value not in (None, ""))
    if config:
        page.heading("Configuration")
        page.note("The resolved config.toml of this run; training with it reproduces the run.")
        page.add(Listing(config))
