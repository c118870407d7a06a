"""The plan of a cluster: candidate layouts, their costs, advice, and the derivation of each number.

Reads the plan's ledger and the sections of its JSON (`more`) and calculates nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ironlaw import units
from ironlaw.ledger import Ledger
from ironlaw.report import labels
from ironlaw.report.document import Cell, Document, Print, Row, bad, dim, good, interval, quantity, strong
from ironlaw.report.plan_view import derivations, memory_inputs, model_inputs, plan_view, totals, why_view
from ironlaw.report.serving_view import serving_view

More = Mapping[str, Any]


IN_WHY_ONLY = ("mfu_palm", "mfu_6nd", "hfu", "accelerator_hours", "break_even_hours", "break_even_runs")


def cluster_view(ledger: Ledger, fits: bool, more: More) -> Document:
    """Return the whole answer: verdict, totals, candidates, terms, memory, budget, advice, assumptions."""
    view = Document()
    _title(view, ledger, more)
    _verdict(view, ledger, fits, more)
    _limits(view, ledger, more)
    _engine(view, more)
    totals(view, ledger, {k: v for k, v in labels.TOTALS.items() if k not in IN_WHY_ONLY}, absent=False)
    _hardware(view, more.get("hardware"))
    if len(more["candidates"]) > 1:
        _candidates(view, more)
    if more["ruled_out"]:
        _ruled_out(view, more)
    view.heading("Where the step time goes")
    _shares(view, more["terms"], units.seconds)
    view.heading(f"Where the memory goes, at the peak: {ledger.facts['peak_at']}")
    _shares(view, {line.component: line.bytes for line in ledger.memory if line.bytes}, units.bytes_)
    if fits:
        _money(view, ledger, more["budget"])
        _advice(view, more)
    view.extend(assumed_view(more["assumed"]))
    view.note(
        "Intervals held 80% of runs that the engine was not fitted to. MFU: exact matrix FLOPs, causal attention "
        "halved, over the dense peak; --why has the other conventions. --why shows every derivation."
    )
    return view


def _title(view: Document, ledger: Ledger, more: More) -> None:
    cluster, work = more["cluster"], more["work"]
    steps = f"{work['steps']:,} steps of {work['global_batch']:,} × {work['sequence']:,} tokens"
    arithmetic = f"{more['precision']}, {ledger.facts['optimizer']}, engine {more['engine']['name']}"
    nodes = f"{cluster['nodes']:,} × {cluster['node']}{_network(cluster)}"
    view.title(
        f"Plan of {ledger.facts['model']['name']} on {cluster['accelerators']:,} × {cluster['product']}",
        below=f"{nodes}; {units.tokens(work['tokens'])} tokens in {steps}; {arithmetic}",
    )


def _network(cluster: More) -> str:
    """Describe the network rate of each node, if there are several."""
    rate = cluster["network_bytes_per_second"]
    if cluster["nodes"] == 1 or rate is None:
        return ""
    over = f", {cluster['oversubscription']:g}:1 oversubscribed" if cluster["oversubscription"] > 1 else ""
    return f" ({units.si(8 * rate, 'bit/s')} {cluster['fabric'] or 'network'} each{over})"


def _verdict(view: Document, ledger: Ledger, fits: bool, more: More) -> None:
    margin, peak, facts = more["margin"], ledger.totals["peak_bytes"], ledger.facts
    needed = f"{units.bytes_(peak.value)} needed of {units.bytes_(margin['limit_bytes'])} usable per accelerator"
    if facts.get("host_bytes"):
        of = f"{units.bytes_(facts['host_bytes'])} of {units.bytes_(facts['host_limit_bytes'])}"
        needed += f", and {of} of its share of the host's memory"
    if not fits:
        short = margin["missing_bytes"] > 0
        missing = units.bytes_(margin["missing_bytes" if short else "missing_host_bytes"])
        view.text(bad("Does not fit: "), f"{needed}, {missing} too much{'' if short else ' on the host'}.")
        return _would_fit(view, more)
    view.text(dim("Layout  "), strong(more["layout"]["text"]))
    tail = f"; with the upper end of its interval it would need {units.bytes_(peak.high)}" if margin["tight"] else ""
    label = Cell("Fits, narrowly: ", "caution") if margin["tight"] else good("Fits: ")
    view.text(label, f"{needed}{tail}.")
    if margin["tight"] and more.get("safest"):
        sure = more["safest"]
        step = units.seconds(sure["step_seconds"]["value"])
        view.text(f"Sure to fit: {sure['layout']['text']}, {step} per step.")
    slower, choice = margin.get("slower_than_fastest"), margin["choice"]
    if slower is not None:
        other = "one that is as fast" if slower < 0.0005 else f"the fastest, {units.percent(slower)} quicker"
        view.note(f"Chosen over {other}: {choice}.")
    elif " " in choice:
        view.note(f"{choice[0].upper()}{choice[1:]}.")


def _limits(view: Document, ledger: Ledger, more: More) -> None:
    """Say whether what was asked for holds, and where it may not."""
    for name, limit in more.get("limits", {}).items():
        (label, show), planned = labels.TOTALS[name], ledger.totals[name]
        sure = planned.high is None or planned.high <= limit["limit"]
        tail = "" if sure or not limit["holds"] else f"; the upper end of its interval, {show(planned.high)}, does not"
        mark = good("Holds: ") if limit["holds"] else bad("Does not hold: ")
        view.text(mark, f"{label.lower()} {show(planned.value)}, at most {show(limit['limit'])} asked{tail}.")


def _hardware(view: Document, hardware: More | None) -> None:
    """Add the best number of accelerators of each kind that holds the limits, if several were sought."""
    if hardware is None or len(hardware["rows"]) < 2:
        return
    view.heading(f"Hardware within the limits, {hardware['sought']} first")
    view.table(
        ["<accelerators", "total time", "rent", "step", "<layout"],
        [[Cell(f"{row['accelerators']:,} × {row['product']}", "strong" if first else ""),
          units.seconds(row["total_seconds"]), units.dollars(row["rent_usd"]), units.seconds(row["step_seconds"]),
          row["layout"]] for row, first in ((row, row is hardware["rows"][0]) for row in hardware["rows"])],
    )  # fmt: skip
    walls = ", ".join(f"{count} {wall}" for wall, count in hardware["ruled_out"].items())
    if walls:
        view.note(f"Kinds ruled out: {walls}.", indent=2)


def _would_fit(view: Document, more: More) -> None:
    options = more.get("would_fit") or []
    nothing = "Nothing tried would fit: fewer tokens per sequence or a smaller model."
    view.text(f"Would fit: {' or '.join(options)}." if options else nothing)
    label = "Layout that misses by least  " if more["searched"] else "Layout  "
    view.text(dim(label), strong(more["layout"]["text"]))


def _engine(view: Document, more: More) -> None:
    """Warn if no measured run checks the engine on this generation. Show other software if none was chosen."""
    engine = more["engine"]
    if not engine["checked_runs"]:
        words = (
            f"Unchecked: no run of engine {engine['name']} on {engine['generation']} has been compared with its plan"
        )
        others = ", ".join(f"{name} ({runs} runs)" for name, runs in list(engine["checked_there"].items())[:3])
        view.text(words + (f"; checked there: {others}." if others else "."), role="caution")
    for other in engine.get("others") or []:
        words = f"Under {other['engine']} instead: {units.seconds(other['step_seconds'])} a step"
        if other["layout"] != more["layout"]["text"]:
            words += f", {other['layout']}"
        view.note(words + ("" if other["fits"] else "; it would not fit") + ".")


def _candidates(view: Document, more: More) -> None:
    view.heading("Fastest layouts that fit")
    fastest = more["candidates"][0]["step_seconds"]["value"]
    for rank, candidate in enumerate(more["candidates"], 1):
        step, memory = candidate["step_seconds"], candidate["peak_bytes"]["value"]
        bounds = interval(*map(units.seconds, step["interval"]))
        rate = units.tokens(candidate["tokens_per_second"]["value"])
        chosen = candidate["layout"]["text"] == more["layout"]["text"]
        layout = candidate["layout"]["text"] + ("  ← chosen" if chosen else "")
        view.text(f"{rank}  ", Cell(layout, "strong" if chosen else ""), indent=2)
        view.note(f"{units.seconds(step['value'])} ({bounds}), {rate} tokens/s, {units.bytes_(memory)}", indent=5)
        if rank > 1:
            slower = step["value"] / fastest - 1
            why = candidate["why_slower"] or "no single term by 0.1% of the step"
            behind = f"{units.percent(slower)} slower" if slower >= 0.0005 else "as fast"
            view.note(f"{behind}: {why}", indent=5)


def _ruled_out(view: Document, more: More) -> None:
    searched = more["searched"]
    view.heading(f"Ruled out; of {searched['planned']:,} layouts planned, {searched['fitting']:,} fit")
    rows = []
    for constraint, counted in more["ruled_out"].items():
        unit = counted["unit"].replace("s", "", 1) if counted["count"] == 1 else counted["unit"]
        rows.append([constraint, f"{counted['count']:,} {unit}"])
    view.table(["constraint", "ruled out"], rows)


def _shares(view: Document, parts: Mapping[str, float], show: Print) -> None:
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    view.shares(((name, value, "") for name, value in ordered), show, total=False, least=0.001, meanings=False)


def _money(view: Document, ledger: Ledger, budget: More) -> None:
    view.heading("Money, energy and carbon")
    figures, rent = ledger.totals, budget["rent"]
    if rent is None:
        view.text("Rent: no public price is known; give --price-per-hour.", indent=2)
    else:
        source = ", ".join(part for part in (rent["provider"], rent["date"], rent["source"]) if part)
        hours = f"{units.count(figures['accelerator_hours'].value)} accelerator-hours"
        cost = units.dollars(figures["rent_usd"].value)
        view.text(f"Rent {cost}: {hours} at ${rent['usd_per_hour']:,.2f} ({source}).", indent=2)
        for quote in (q for q in budget["rent_quotes"] if q["provider"] != rent["provider"]):
            price = f"${quote['usd_per_hour']:,.2f} ({quote['provider']}, {quote['date']})"
            view.note(f"At {price} it would be {units.dollars(quote['rent_usd'])}.", indent=2)
    if "purchase_usd" in figures:
        after = figures["break_even_hours"].value
        view.text(
            f"Buying costs {units.dollars(figures['purchase_usd'].value)} and pays after {units.count(after)} h of use "
            f"({after / 730.5:.1f} months without a pause), {figures['break_even_runs'].value:.1f} such runs; "
            "accelerators only.", indent=2,
        )  # fmt: skip
    elif rent is not None:
        view.text("Buying: no purchase price is known.", indent=2)
    if "energy_joules" not in figures:
        return view.text("Energy: the power of this accelerator is not known.", indent=2)
    power, grid = budget["power"], budget["grid"]
    view.text(
        f"Energy: {units.count(power['accelerator_watts'])} W per accelerator of {power['tdp_watts']:.0f} W TDP; "
        f"{power['host_basis']}; PUE {budget['pue']['value']:g}. "
        f"Grid {grid['title']} {grid['year']}: {grid['kg_co2_per_kwh']:g} kg CO2 per kWh ({grid['source']}).", indent=2,
    )  # fmt: skip


def _advice(view: Document, more: More) -> None:
    first = more["first_change"]
    view.heading("To get faster")
    share = units.percent(first["share"], 0)
    view.text(f"The largest term is {first['term']}, {share} of the step: {first['remedy']}.", indent=2)
    for change in first["tried"]:
        view.text(f"{change['change']}: {units.signed_percent(change['gain'], 0)} tokens per second.", indent=2)
    for saver in more.get("communication_savings", ()):
        saved, exposed = units.seconds(saver["saves_seconds"]), units.seconds(saver["exposed_seconds"])
        costs = f"costs {units.seconds(saver['costs_seconds'])} per step"
        verdict = "" if saver["pays"] else ": it does not pay"
        view.text(f"{saver['setting']} saves {saved} of {exposed} exposed, {costs}{verdict}.", indent=2)
    if more["scaling"]:
        _scaling(view, more["scaling"], more["cluster"]["accelerators"])


def _scaling(view: Document, scaling: More, here: int) -> None:
    view.heading("More accelerators, same batch")
    rows: list[Row] = []
    for row in scaling["rows"]:
        gain = "" if row["gain"] is None else units.percent(row["gain"], 0)
        count = Cell(f"{row['accelerators']:,}", "strong" if row["accelerators"] == here else "")
        rows.append([count, units.seconds(row["step_seconds"]), gain])
    view.table(["accelerators", "step time", "doubling is faster by"], rows)
    stop, reason = scaling["pays_up_to"], scaling["reason"]
    view.text(f"They stop paying at {stop:,}: {reason}." if stop else f"{reason.capitalize()}.", indent=2)


def assumed_view(assumed: Sequence[Mapping[str, str]]) -> Document:
    """Return the assumed settings, and how to set them."""
    view = Document()
    if assumed:
        view.heading("Assumed")
    for one in assumed:
        how = f"; set it with {one['how_to_set']}" if one["how_to_set"] else ""
        view.text(strong(f"{one['name']} = {one['value']}"), f": {one['reason']}{how}", indent=2)
    return view


def ranks_view(ledger: Ledger, more: More) -> Document:
    """Return the plan of local ranks: the reason for this layout, the others, and each rank's work and memory."""
    view, facts = Document(), ledger.facts
    if not facts.get("stages"):
        return view
    view.heading(f"Layout of {facts['ranks']} ranks: {facts['layout']}")
    if more.get("reason"):
        view.text(f"Chosen: {more['reason']}.", indent=2)
    if len(more.get("candidates", ())) > 1:
        view.table(
            ["layout", "step", "communication exposed", "held per rank"],
            [[one["layout"], units.seconds(one["step_seconds"]), units.seconds(one["exposed_communication_seconds"]),
              units.bytes_(one["peak_bytes"])] for one in more["candidates"]],
        )  # fmt: skip
    view.heading("Each rank of a stage, per step")
    rows = []
    for stage in facts["stages"]:
        first, last = stage["ranks"]
        head = [str(stage["position"]), f"{first}-{last}" if last > first else str(first),
                units.bytes_(stage["peak_bytes"]), stage["peak_at"]]  # fmt: skip
        for sent in stage["communication"]:
            rows.append([
                *head, f"{sent['dimension']} {sent['kind']}", units.count(sent["count"]), units.bytes_(sent["bytes"]),
                units.seconds(sent["seconds"]), units.seconds(sent["exposed_seconds"]),
            ])  # fmt: skip
            head = [""] * 4
    columns = ["stage", "ranks", "held", "<highest at", "<collective", "calls", "bytes", "takes", "exposed"]
    view.table(columns, rows)
    return view


def cluster_why_view(ledger: Ledger, more: More) -> Document:
    """Return every total with its formula and inputs, the engine, and what is assumed instead of measured."""
    view, facts, work = Document(), ledger.facts, more["work"]
    view.heading("Where each number comes from")
    batch = [f"{work['global_batch']:,} sequences of {work['sequence']:,} tokens per step [asked or assumed]"]
    step = ledger.totals["step_seconds"].value
    terms = [f"{t} {units.seconds(s)} [calculated]" for t, s in more["terms"].items() if s >= 0.001 * step]
    inputs = {
        "parameters": model_inputs(facts["model"], "model config"), "flops_per_step": batch, "step_seconds": terms,
        "tokens_per_second": batch, "peak_bytes": memory_inputs(line for line in ledger.memory if line.bytes),
        "total_seconds": [f"{work['steps']:,} steps, {units.tokens(work['tokens'])} tokens [asked or assumed]"],
    }  # fmt: skip
    derivations(view, ledger, labels.TOTALS, inputs)
    view.heading(f"Engine {more['engine']['name']}")
    view.text(more["engine"]["source"], indent=2)
    if facts["low_precision"]:
        view.text(f"memory in {facts['precision']}: {facts['low_precision']}", indent=2)
        view.text(f"products in {facts['precision']}: {facts['low_precision_products']}", indent=2)
    if facts["context_parallel"]:
        view.text(f"context parallel attention: {facts['context_parallel']}", indent=2)
    if facts["assumptions"]:
        view.heading("Constants of this accelerator that nobody measured here")
        for line in facts["assumptions"]:
            view.text(line, indent=2)
    view.heading("Linear layers of a block: one rank and micro-batch, kernels alone, before the engine's slowdown")
    columns = ["layer", "<in", "m", "n", "k", "times", "FLOPs forward", "forward", "backward", "rate"]
    view.table(columns, map(_product, facts["products"]))
    view.heading("Lines of the step: seconds of the busiest stage, FLOPs of all accelerators")
    view.table(
        ["operation", "<phase", "FLOPs", "time", "<bound"],
        [[line.operation, str(line.phase), quantity(line.flops, lambda v: units.si(v, "FLOP"), units.NOT_KNOWN),
          quantity(line.seconds, units.seconds), line.bound or ""]
         for line in sorted(ledger.lines, key=lambda line: -(line.seconds or 0.0)) if line.seconds],
    )  # fmt: skip
    return view


def _product(product: More) -> list[str]:
    forward, backward = product["forward_seconds"], product["backward_seconds"]
    return [
        product["name"], product["precision"], *(f"{product[key]:,.6g}" for key in ("m", "n", "k", "times")),
        units.si(product["flops"], "FLOP"), units.seconds(forward), units.seconds(backward),
        units.rate(3 * product["flops"] / (forward + backward), "FLOP"),
    ]  # fmt: skip


def plan_views(outcome: Any, why: bool = False) -> list[Document]:
    """Return the views of a `PlanOutcome`: of training on this machine or a cluster, or of serving."""
    ledger, more = outcome.ledger, outcome.more
    assumed = assumed_view(more.get("assumed", []))
    fits = outcome.fits or "limits" in more  # which are held against what fits
    if "served" in more:
        return [serving_view(ledger, more), assumed]
    if "cluster" in more:
        return [cluster_view(ledger, fits, more), *([cluster_why_view(ledger, more)] if why else [])]
    view = plan_view(ledger, fits)
    if "budget" in more:
        _limits(view, ledger, more)
        _hardware(view, more.get("hardware"))
        _money(view, ledger, more["budget"])
    return [view, ranks_view(ledger, more), assumed, *([why_view(ledger)] if why else [])]
