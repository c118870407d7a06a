"""A served plan on the terminal: does it fit, how fast, what binds, what it costs, the frontier."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from ironlaw import units
from ironlaw.ledger import Estimate, Ledger
from ironlaw.report.tables import bar, heading, paragraph, show, table

_PART_WORDS = {
    "weights": "read weights", "cache": "read keys and values", "collectives": "sums over ranks",
    "launches": "launches and small kernels", "prompts": "prompts", "host": "host: schedule and sample",
}  # fmt: skip


def show_serving(console: Console, ledger: Ledger, fits: bool, more: dict[str, Any]) -> None:
    served, request = more["served"], ledger.facts["request"]
    asked = ", ".join(f"{key} {_asked(key, value)}" for key, value in request.items() if value)
    title = f"{ledger.facts['name']} served by {served['engine']} on {served['devices']} x {served['product']}"
    paragraph(console, f"{title}: {served['layout']}, weights {served['weights']}, cache {served['kv']}", style="bold")
    paragraph(console, asked, style="dim")
    if not ledger.facts["fits"]:
        needed, has = ledger.totals["weight_bytes"].value, ledger.memory[-1].bytes
        paragraph(
            console, f"does not fit: weights take {units.bytes_(needed)} of all devices ({units.bytes_(has)} free)"
        )
        return
    _limits(console, ledger, fits)
    _totals(console, ledger, more)
    _step(console, ledger)
    _memory(console, ledger)
    _frontier(console, more)
    _candidates(console, more)


def _asked(key: str, value: float) -> str:
    if key in ("ttft", "tpot"):
        return f"at most {units.seconds(value)}"
    return f"{value:g}/s" if key == "rate" else f"{value:,}"


def _limits(console: Console, ledger: Ledger, fits: bool) -> None:
    words = {"ttft": "first token (90th percentile)", "tpot": "per token", "rate": "requests per second"}
    for name, limit in ledger.facts["limits"].items():
        if name == "rate":
            said = f"{limit['planned']:.3g} of {limit['limit']:g} asked for"
        else:
            said = f"{units.seconds(limit['planned'])}, at most {units.seconds(limit['limit'])} asked for"
        mark = Text("holds  " if limit["holds"] else "broken ", style="green" if limit["holds"] else "red")
        paragraph(console, mark + Text(f"{words[name]}: {said}"), indent=2)


def _totals(console: Console, ledger: Ledger, more: dict[str, Any]) -> None:
    rows = table("", "value", "80% interval", "", left=("",))
    for name, words, printer in (
        ("ttft_seconds", "first token, median", units.seconds),
        ("ttft_p99_seconds", "first token, 99th percentile", units.seconds),
        ("tpot_seconds", "per output token, mean", units.seconds),
        ("output_tokens_per_second", "output tokens per second", lambda v: units.count(v)),
        ("most_tokens_per_second", "and at most, waiting not limited", lambda v: units.count(v)),
        ("single_tpot_seconds", "per token, one request alone", units.seconds),
        ("kv_tokens", "tokens the cache holds, per copy", lambda v: f"{v:,.0f}"),
        ("most_requests", "requests at once, per copy", lambda v: f"{v:,.0f}"),
    ):
        found: Estimate = ledger.totals[name]
        low, high = found.low, found.high
        between = "" if low is None else f"{printer(low)} to {printer(high)}"
        rows.add_row(words, Text(printer(found.value), style="bold"), between, Text(found.basis, style="dim"))
    cost = more["cost"]
    if cost["usd_per_million_tokens"] is not None:
        rows.add_row("per million output tokens", Text(units.dollars(cost["usd_per_million_tokens"]), style="bold"), "",
                     Text(f"{units.dollars(cost['usd_per_hour'])} an hour, {cost['source']}", style="dim"))  # fmt: skip
    if cost["joules_per_million_tokens"] is not None:
        rows.add_row("energy of a million tokens", Text(units.energy(cost["joules_per_million_tokens"]), style="bold"),
                     "", Text("devices alone, 90% of their power limit", style="dim"))  # fmt: skip
    show(console, rows)


def _step(console: Console, ledger: Ledger) -> None:
    total = sum(line.seconds or 0.0 for line in ledger.lines)
    heading(console, f"A step takes {units.seconds(total)}, {ledger.totals['decode_batch'].value:.3g} requests decode")
    rows = table("", "time", "share", "", left=("",))
    for line in sorted(ledger.lines, key=lambda line: -(line.seconds or 0.0)):
        share = (line.seconds or 0.0) / total
        rows.add_row(_PART_WORDS[line.operation], units.seconds(line.seconds), units.percent(share), bar(share))
    show(console, rows)
    binds = ledger.facts["binds"]
    paragraph(console, f"Binds: {binds['words']}", indent=2)
    if not ledger.facts["measured"]:
        paragraph(
            console, "No measured run of this engine on such devices: intervals are wider.", indent=2, style="dim"
        )


def _memory(console: Console, ledger: Ledger) -> None:
    held = ", ".join(f"{line.component} {units.bytes_(line.bytes)}" for line in ledger.memory)
    paragraph(console, f"Memory of a copy: {held}", indent=2)


def _frontier(console: Console, more: dict[str, Any]) -> None:
    heading(console, "More at once, longer each")
    rows = table("at once", "per token", "first token", "tokens/s", "", tight=False, left=("",))
    points = more["frontier"]
    best = max(point["tokens_per_second"] for point in points)
    for point in points:
        rows.add_row(
            str(point["requests_at_once"]), units.seconds(point["tpot_seconds"]), units.seconds(point["ttft_seconds"]),
            units.count(point["tokens_per_second"]), bar(point["tokens_per_second"] / best),
        )  # fmt: skip
    show(console, rows)


def _candidates(console: Console, more: dict[str, Any]) -> None:
    if not more.get("candidates"):
        return
    heading(console, "Next cheapest")
    rows = table("devices", "weights", "layout", "USD/hour", "per million", "per token", left=("weights", "layout"))
    for one in [more["chosen"], *more["candidates"]]:
        rows.add_row(
            f"{one['devices']} x {one['device']}", one["weights"], one["layout"], units.dollars(one["usd_per_hour"]),
            units.dollars(one["usd_per_million_tokens"]), units.seconds(one["tpot_seconds"]),
        )  # fmt: skip
    show(console, rows)
    walls = ", ".join(f"{count} by {wall}" for wall, count in more["ruled_out"].items())
    if walls:
        paragraph(console, f"Ruled out: {walls}.", indent=2, style="dim")
