"""The plan of a cluster on the terminal: the layouts found, what they cost, and what to change.

Reads the plan's ledger and the sections of its JSON (`more`); calculates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from ironlaw import units
from ironlaw.ledger import Ledger
from ironlaw.report.tables import bar, heading, paragraph, show, table

More = Mapping[str, Any]


def _hours(value: float | None) -> str:
    return units.NOT_KNOWN if value is None else f"{units.count(value)} h"


SHOWN: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "parameters": ("Parameters", units.count),
    "flops_per_step": ("FLOPs per step", lambda v: units.si(v, "FLOP")),
    "step_seconds": ("Step time", units.seconds),
    "tokens_per_second": ("Throughput", lambda v: f"{units.tokens(v)} tokens/s"),
    "mfu": ("MFU", units.percent),
    "mfu_palm": ("MFU, PaLM's convention", units.percent),
    "mfu_6nd": ("MFU, 6 N D", units.percent),
    "hfu": ("HFU", units.percent),
    "peak_bytes": ("Peak memory", units.bytes_),
    "total_seconds": ("Total time", units.seconds),
    "accelerator_hours": ("Accelerator-hours", _hours),
    "rent_usd": ("Rent", units.dollars),
    "purchase_usd": ("Purchase", units.dollars),
    "break_even_hours": ("Buying pays after", _hours),
    "break_even_runs": ("Buying pays after", lambda v: f"{v:.1f} such runs" if v is not None else units.NOT_KNOWN),
    "energy_joules": ("Energy", lambda v: units.NOT_KNOWN if v is None else units.si(v / 3600, "Wh")),
    "carbon_kg": ("Carbon", lambda v: f"{units.mass(v)} CO2"),
}
"""Totals in the order of the table: what people call them, how they are printed."""


def interval(low: str, high: str) -> str:
    """`22.6 to 30.5 s`: a unit that both share is printed once."""
    number, _, unit = low.partition(" ")
    return f"{number if unit and high.endswith(' ' + unit) else low} to {high}"


IN_WHY_ONLY = ("mfu_palm", "mfu_6nd", "hfu", "accelerator_hours", "break_even_hours", "break_even_runs")
MFU_WORDS = "MFU: exact matrix FLOPs, causal attention halved, over the dense peak; --why has the other conventions."


def show_cluster_plan(console: Console, ledger: Ledger, fits: bool, more: More) -> None:
    """The whole answer: verdict, totals, candidates, terms, memory, budget, advice, assumptions."""
    _title(console, ledger, more)
    _verdict(console, ledger, fits, more)
    _caution(console, more["engine"])
    _other_software(console, more)
    _totals(console, ledger)
    if len(more["candidates"]) > 1:
        _candidates(console, more)
    if more["ruled_out"]:
        _ruled_out(console, more)
    heading(console, "Where the step time goes")
    _shares(console, more["terms"], units.seconds)
    heading(console, f"Where the memory goes, at the peak: {ledger.facts['peak_at']}")
    _shares(console, {line.component: line.bytes for line in ledger.memory if line.bytes}, units.bytes_)
    if fits:
        _money(console, ledger, more["budget"])
        _advice(console, more)
    show_assumed(console, more["assumed"])
    console.print()
    words = f"Intervals held 80% of runs that the engine was not fitted to. {MFU_WORDS} --why shows every derivation."
    paragraph(console, words, style="dim")


def _title(console: Console, ledger: Ledger, more: More) -> None:
    cluster, work = more["cluster"], more["work"]
    model = ledger.facts["model"]
    paragraph(console, f"Plan of {model['name']} on {cluster['accelerators']:,} × {cluster['product']}", style="bold")
    nodes = f"{cluster['nodes']:,} × {cluster['node']}{_network(cluster)}"
    work_words = (
        f"{units.tokens(work['tokens'])} tokens in {work['steps']:,} steps of {work['global_batch']:,} × "
        f"{work['sequence']:,} tokens"
    )
    arithmetic = f"{more['precision']}, {ledger.facts['optimizer']}, engine {more['engine']['name']}"
    paragraph(console, f"{nodes}; {work_words}; {arithmetic}", style="dim")
    console.print()


def _network(cluster: More) -> str:
    """What leaves each of several nodes."""
    rate = cluster["network_bytes_per_second"]
    if cluster["nodes"] == 1 or rate is None:
        return ""
    over = f", {cluster['oversubscription']:g}:1 oversubscribed" if cluster["oversubscription"] > 1 else ""
    return f" ({units.si(8 * rate, 'bit/s')} {cluster['fabric'] or 'network'} each{over})"


def _verdict(console: Console, ledger: Ledger, fits: bool, more: More) -> None:
    margin, peak = more["margin"], ledger.totals["peak_bytes"]
    needed = f"{units.bytes_(peak.value)} needed of {units.bytes_(margin['limit_bytes'])} usable per accelerator"
    if ledger.facts.get("host_bytes"):
        needed += (
            f", and {units.bytes_(ledger.facts['host_bytes'])} of {units.bytes_(ledger.facts['host_limit_bytes'])} "
            "of its share of the host's memory"
        )
    if not fits and margin["missing_bytes"] <= 0:
        missing = units.bytes_(margin["missing_host_bytes"])
        words = f"{needed}, {missing} too much on the host."
        paragraph(console, Text("Does not fit: ", style="bold red").append(words, "not bold default"))
        return _would_fit(console, more)
    if not fits:
        missing = units.bytes_(margin["missing_bytes"])
        verdict = Text("Does not fit: ", style="bold red").append(f"{needed}, {missing} too much.", "not bold default")
        paragraph(console, verdict)
        return _would_fit(console, more)
    paragraph(console, Text("Layout  ", style="dim").append(more["layout"]["text"], style="bold"))
    tail = f"; with the upper end of its interval it would need {units.bytes_(peak.high)}" if margin["tight"] else ""
    label, style = ("Fits, narrowly: ", "bold yellow") if margin["tight"] else ("Fits: ", "bold green")
    paragraph(console, Text(label, style=style).append(f"{needed}{tail}.", "not bold default"))
    if margin["tight"] and more.get("safest"):
        sure = more["safest"]
        paragraph(
            console,
            f"Sure to fit: {sure['layout']['text']}, {units.seconds(sure['step_seconds']['value'])} per step.",
        )
    slower = margin.get("slower_than_fastest")
    if slower is not None:
        other = "one that is as fast" if slower < 0.0005 else f"the fastest, {units.percent(slower)} quicker"
        paragraph(console, f"Chosen over {other}: {margin['choice']}.", style="dim")
    elif " " in margin["choice"]:
        paragraph(console, f"{margin['choice'][0].upper()}{margin['choice'][1:]}.", style="dim")


def _would_fit(console: Console, more: More) -> None:
    options = more.get("would_fit") or []
    nothing = "Nothing tried would fit: fewer tokens per sequence or a smaller model."
    paragraph(console, f"Would fit: {' or '.join(options)}." if options else nothing)
    label = "Layout that misses by least  " if more["searched"] else "Layout  "
    paragraph(console, Text(label, style="dim").append(more["layout"]["text"], style="bold"))


def _caution(console: Console, engine: More) -> None:
    """Said when no measured run backs the engine on this generation."""
    if engine["checked_runs"]:
        return
    words = f"Unchecked: no run of engine {engine['name']} on {engine['generation']} has been compared with its plan"
    others = ", ".join(f"{name} ({runs} runs)" for name, runs in list(engine["checked_there"].items())[:3])
    paragraph(console, words + (f"; checked there: {others}." if others else "."), style="yellow")


def _other_software(console: Console, more: More) -> None:
    """What the same work would take under other software, where none was said."""
    for other in more["engine"].get("others") or []:
        words = f"Under {other['engine']} instead: {units.seconds(other['step_seconds'])} a step"
        if other["layout"] != more["layout"]["text"]:
            words += f", {other['layout']}"
        paragraph(console, words + ("" if other["fits"] else "; it would not fit") + ".", style="dim")


def _totals(console: Console, ledger: Ledger) -> None:
    console.print()
    made = table("", "planned", "80% interval", "origin", left=("origin",))
    for name, (label, print_) in SHOWN.items():
        estimate = ledger.totals.get(name)
        if estimate is None or name in IN_WHY_ONLY:
            continue
        exact = "exact" if name in ("parameters", "flops_per_step") else ""
        bounds = exact if estimate.low is None else interval(print_(estimate.low), print_(estimate.high))
        made.add_row(label, Text(print_(estimate.value), style="bold"), bounds, Text(str(estimate.origin), style="dim"))
    show(console, made)


def _candidates(console: Console, more: More) -> None:
    heading(console, "Fastest layouts that fit")
    fastest = more["candidates"][0]["step_seconds"]["value"]
    for rank, candidate in enumerate(more["candidates"], 1):
        step, memory = candidate["step_seconds"], candidate["peak_bytes"]["value"]
        low, high = step["interval"]
        facts = (
            f"{units.seconds(step['value'])} ({interval(units.seconds(low), units.seconds(high))}), "
            f"{units.tokens(candidate['tokens_per_second']['value'])} tokens/s, {units.bytes_(memory)}"
        )
        chosen = candidate["layout"]["text"] == more["layout"]["text"]
        mark = "  ← chosen" if chosen else ""
        paragraph(console, Text(f"{rank}  ").append(candidate["layout"]["text"] + mark, "bold" if chosen else ""), 2)
        paragraph(console, facts, 5, style="dim")
        if rank > 1:
            slower = units.percent(step["value"] / fastest - 1)
            why = candidate["why_slower"] or "no single term by 0.1% of the step"
            tail = f"{slower} slower: {why}" if step["value"] / fastest >= 1.0005 else f"as fast: {why}"
            paragraph(console, tail, 5, style="dim")


def _ruled_out(console: Console, more: More) -> None:
    searched = more["searched"]
    heading(console, f"Ruled out, of {searched['planned']:,} layouts planned {searched['fitting']:,} fit")
    made = table("wall", "ruled out")
    for wall, counted in more["ruled_out"].items():
        unit = counted["unit"].replace("s", "", 1) if counted["count"] == 1 else counted["unit"]
        made.add_row(wall, f"{counted['count']:,} {unit}")
    show(console, made)


def _shares(console: Console, parts: Mapping[str, float], print_: Callable[[float | None], str]) -> None:
    whole = sum(parts.values())
    made = table("", "planned", "share", " ", left=(" ",))
    for name, value in sorted(parts.items(), key=lambda item: -item[1]):
        if value >= 0.001 * whole:
            made.add_row(name, print_(value), units.percent(value / whole), bar(value / whole))
    show(console, made)


def _money(console: Console, ledger: Ledger, budget: More) -> None:
    heading(console, "Money, energy and carbon")
    totals, rent = ledger.totals, budget["rent"]
    if rent is None:
        paragraph(console, "Rent: no public price is known; give --price-per-hour.", 2)
    else:
        told = ", ".join(part for part in (rent["provider"], rent["date"], rent["source"]) if part)
        hours = f"{units.count(totals['accelerator_hours'].value)} accelerator-hours"
        words = f"Rent {units.dollars(totals['rent_usd'].value)}: {hours} at ${rent['usd_per_hour']:,.2f} ({told})."
        paragraph(console, words, 2)
        others = [q for q in budget["rent_quotes"] if q["provider"] != rent["provider"]]
        for quote in others:
            price = f"${quote['usd_per_hour']:,.2f} ({quote['provider']}, {quote['date']})"
            paragraph(console, f"At {price} it would be {units.dollars(quote['rent_usd'])}.", 2, style="dim")
    if "purchase_usd" in totals:
        after = totals["break_even_hours"].value
        paragraph(
            console,
            f"Buying costs {units.dollars(totals['purchase_usd'].value)} and pays after {units.count(after)} h of use "
            f"({after / 730.5:.1f} months without a pause), {totals['break_even_runs'].value:.1f} such runs; "
            "accelerators only.",
            2,
        )
    elif rent is not None:
        paragraph(console, "Buying: no purchase price is known.", 2)
    if "energy_joules" not in totals:
        paragraph(console, "Energy: the power of this accelerator is not known.", 2)
        return
    power, grid = budget["power"], budget["grid"]
    paragraph(
        console,
        f"Energy: {units.count(power['accelerator_watts'])} W per accelerator of {power['tdp_watts']:.0f} W TDP; "
        f"{power['host_basis']}; PUE {budget['pue']['value']:g}. "
        f"Grid {grid['title']} {grid['year']}: {grid['kg_co2_per_kwh']:g} kg CO2 per kWh ({grid['source']}).",
        2,
    )


def _advice(console: Console, more: More) -> None:
    first = more["first_change"]
    heading(console, "To get faster")
    share = units.percent(first["share"], 0)
    paragraph(console, f"The largest term is {first['term']}, {share} of the step: {first['remedy']}.", 2)
    for change in first["tried"]:
        paragraph(console, f"{change['change']}: {units.signed_percent(change['gain'], 0)} tokens per second.", 2)
    for saver in more.get("communication_savings", ()):
        paragraph(console, saver_words(saver), 2)
    if more["scaling"]:
        _scaling(console, more["scaling"], more["cluster"]["accelerators"])


def saver_words(saver: More) -> str:
    """`communication.gradients = "powersgd", rank = 4 saves 8 ms of 9 ms exposed, costs 2 ms per step.`"""
    saved, exposed = units.seconds(saver["saves_seconds"]), units.seconds(saver["exposed_seconds"])
    verdict = "" if saver["pays"] else ": it does not pay"
    costs = units.seconds(saver["costs_seconds"])
    return f"{saver['setting']} saves {saved} of {exposed} exposed, costs {costs} per step{verdict}."


def _scaling(console: Console, scaling: More, here: int) -> None:
    heading(console, "More accelerators, same batch")
    made = table("accelerators", "step time", "doubling is faster by")
    for row in scaling["rows"]:
        style = "bold" if row["accelerators"] == here else ""
        gain = "" if row["gain"] is None else units.percent(row["gain"], 0)
        made.add_row(Text(f"{row['accelerators']:,}", style), units.seconds(row["step_seconds"]), gain)
    show(console, made)
    stop = scaling["pays_up_to"]
    words = f"They stop paying at {stop:,}: {scaling['reason']}." if stop else f"{scaling['reason'].capitalize()}."
    paragraph(console, words, 2)


def show_assumed(console: Console, assumed: Sequence[Mapping[str, str]]) -> None:
    """What nobody said, and how to say it."""
    if not assumed:
        return
    heading(console, "Assumed")
    for one in assumed:
        text = Text(f"{one['name']} = {one['value']}", style="bold")
        how = f"; set it with {one['how_to_set']}" if one["how_to_set"] else ""
        paragraph(console, text.append(f": {one['reason']}{how}", "not bold default"), 2)
