"""Views of serving: a plan (fit, speed, bottleneck, cost), a measured server, and a load test."""

from __future__ import annotations

from typing import Any

from ironlaw import units
from ironlaw.ledger import Ledger
from ironlaw.report.document import BAR, NOT_PLANNED, Bar, Cell, Document, Row, bad, between, dim, good, quantity

_PARTS = {
    "weights": "read weights", "cache": "read keys and values", "collectives": "sums over ranks",
    "launches": "launches and small kernels", "draft": "draft model",
    "prompts": "prompts", "host": "host: schedule and sample",
}  # fmt: skip
_LIMITS = {"ttft": "first token (90th percentile)", "tpot": "per token", "rate": "requests per second"}
_TOTALS = {
    "ttft_seconds": ("first token, median", units.seconds),
    "ttft_p99_seconds": ("first token, 99th percentile", units.seconds),
    "tpot_seconds": ("per output token, mean", units.seconds),
    "output_tokens_per_second": ("output tokens per second", units.count),
    "most_tokens_per_second": ("and at most, waiting not limited", units.count),
    "single_tpot_seconds": ("per token, one request alone", units.seconds),
    "pass_tokens": ("tokens of a pass, speculated", "{:.2f}".format),
    "speculation_gain": ("times as fast by speculation", "{:.2f}".format),
    "kv_transfer_seconds": ("cache of a prompt to who decodes", units.seconds),
    "kv_tokens": ("tokens the cache holds, per copy", "{:,.0f}".format),
    "most_requests": ("requests at once, per copy", "{:,.0f}".format),
}
_PHASES = {
    "prefill": "prompts", "decode": "next tokens", "sampling": "choice of tokens", "host": "host: schedule, text",
    "idle": "nobody asked",
}  # fmt: skip
_MEASURED = {
    "ttft_seconds": ("first token, median", units.seconds), "tpot_seconds": ("per token, median", units.seconds),
    "output_tokens_per_second": ("output tokens per second", units.count),
    "decode_batch": ("requests that decode, mean", units.count),
}  # fmt: skip
_TIMES = {
    "ttft_seconds": "to the first token", "tpot_seconds": "per token after it",
    "inter_token_seconds": "between pieces", "e2e_seconds": "whole answer",
}  # fmt: skip


def serving_view(ledger: Ledger, more: dict[str, Any]) -> Document:
    view, served = Document(), more["served"]
    asked = ", ".join(f"{key} {_asked(key, value)}" for key, value in ledger.facts["request"].items() if value)
    title = f"{ledger.facts['name']} served by {served['engine']} on {served['devices']} × {served['product']}"
    title += f": {served['layout']}, weights {served['weights']}, cache {served['kv']}"
    view.title(title, below=asked)
    if not ledger.facts["fits"]:
        needed, tokens = ledger.totals["weight_bytes"].value, ledger.totals["kv_tokens"].value
        has, request = ledger.facts["memory_bytes"], ledger.facts["request"]
        view.text(
            f"does not fit: weights take {units.bytes_(needed)} of {units.bytes_(has)}, which leaves a cache of "
            f"{tokens:,.0f} tokens for requests of {request['input'] + request['output']:,}"
        )
        return view
    _limits(view, ledger)
    _totals(view, ledger, more["cost"])
    _step(view, ledger)
    held = ", ".join(f"{line.component} {units.bytes_(line.bytes)}" for line in ledger.memory)
    view.text(f"Memory of a copy: {held}", indent=2)
    _frontier(view, more["frontier"])
    if more.get("candidates"):
        _candidates(view, more)
    return view


def _asked(key: str, value: float) -> str:
    if key in ("ttft", "tpot"):
        return f"at most {units.seconds(value)}"
    return f"{value:g}/s" if key == "rate" else f"{value:,}"


def _limits(view: Document, ledger: Ledger) -> None:
    for name, limit in ledger.facts["limits"].items():
        if name == "rate":
            said = f"{limit['planned']:.3g} of {limit['limit']:g} asked for"
        else:
            said = f"{units.seconds(limit['planned'])}, at most {units.seconds(limit['limit'])} asked for"
        mark = good("holds  ") if limit["holds"] else bad("broken ")
        view.text(mark, f"{_LIMITS[name]}: {said}", indent=2)


def _totals(view: Document, ledger: Ledger, cost: dict[str, Any]) -> None:
    rows: list[Row] = []
    for name, (label, show) in _TOTALS.items():
        if name not in ledger.totals:
            continue
        found = ledger.totals[name]
        bounds = between((found.low, found.high), show)
        figure = Cell(show(found.value), "strong", found.value, why=found.basis)
        rows.append([label, figure, bounds, dim(found.basis)])
    if cost["usd_per_million_tokens"] is not None:
        price = quantity(cost["usd_per_million_tokens"], units.dollars, role="strong")
        hour = f"{units.dollars(cost['usd_per_hour'])} an hour, {cost['source']}"
        rows.append(["per million output tokens", price, "", dim(hour)])
    if cost["joules_per_million_tokens"] is not None:
        joules = quantity(cost["joules_per_million_tokens"], units.energy, role="strong")
        rows.append(["energy of a million tokens", joules, "", dim("devices alone, 90% of their power limit")])
    view.table(["", "value", "80% interval", "<"], rows)


def _step(view: Document, ledger: Ledger) -> None:
    total = sum(line.seconds or 0.0 for line in ledger.lines)
    view.heading(f"A step takes {units.seconds(total)}, {ledger.totals['decode_batch'].value:.3g} requests decode")
    lines = sorted(ledger.lines, key=lambda line: -(line.seconds or 0.0))
    parts = ((_PARTS[line.operation], line.seconds or 0.0, "") for line in lines)
    view.shares(parts, units.seconds, total=False, meanings=False)
    view.text(f"Binds: {ledger.facts['binds']['words']}", indent=2)
    if not ledger.facts["measured"]:
        view.note("No measured run of this engine on such devices: intervals are wider.", indent=2)


def _frontier(view: Document, points: list[dict[str, Any]]) -> None:
    view.heading("More at once, longer each")
    best = max(point["tokens_per_second"] for point in points)
    rows: list[Row] = [
        [str(point["requests_at_once"]), quantity(point["tpot_seconds"], units.seconds),
         quantity(point["ttft_seconds"], units.seconds), quantity(point["tokens_per_second"], units.count),
         Bar(point["tokens_per_second"] / best)]
        for point in points
    ]  # fmt: skip
    view.table(["at once", "per token", "first token", "tokens/s", BAR], rows)


def _candidates(view: Document, more: dict[str, Any]) -> None:
    view.heading("Next cheapest, each loaded as far as the limits allow")
    rows = [
        [f"{one['devices']} × {one['device']}", one["weights"], one["layout"], units.dollars(one["usd_per_hour"]),
         units.dollars(one["usd_per_million_tokens"]), units.seconds(one["tpot_seconds"])]
        for one in [more["chosen"], *more["candidates"]]
    ]  # fmt: skip
    view.table(["devices", "<weights", "<layout", "USD/hour", "per million", "per token"], rows)
    constraints = ", ".join(f"{count} by {name}" for name, count in more["ruled_out"].items())
    if constraints:
        view.note(f"Ruled out: {constraints}.", indent=2)


def server_view(found: dict[str, Any]) -> Document:
    """Return a measured server: its phases beside the plan's, bottlenecks and remedies."""
    view, totals, facts = Document(), found["totals"], found["facts"]
    view.title(f"{facts.get('name', 'a model')} served by {facts.get('engine', 'an engine')}")
    for name, (label, show) in _MEASURED.items():
        if name in totals:
            planned = found["planned_totals"].get(name)
            beside = f" ({show(planned)} planned)" if planned else ""
            view.text(f"{label}: {show(totals[name]['value'])}{beside}", indent=2)
    view.heading("A mean engine step, measured beside planned")
    whole = sum(row["measured_seconds"] or 0.0 for row in found["phases"])
    rows: list[Row] = []
    for row in found["phases"]:
        measured, planned = row["measured_seconds"], row["planned_seconds"]
        ratio = f"{measured / planned:.2f}" if measured and planned else ""
        rows.append([_PHASES[row["phase"]], quantity(measured, units.seconds),
                     quantity(planned, units.seconds, NOT_PLANNED), ratio, Bar((measured or 0.0) / whole)])  # fmt: skip
    view.table(["", "measured", "planned", "measured / planned", BAR], rows, caption=found["plan_note"] or "")
    view.heading("What binds")
    for finding in found["findings"]:
        gain = f" (gain about {finding['gain']:.0%}, {finding['basis']})" if finding["gain"] else ""
        view.text(f"{finding['name']}: {finding['says']}", indent=2)
        if finding["remedy"]:
            view.note(f"{finding['remedy']}{gain}", indent=4)
    return view


def load_view(found: dict[str, Any]) -> Document:
    """Return the measurements of a load test."""
    view = Document()
    parts = [f"{found['completed']} of {found['requests']} requests answered in {found['seconds']:.1f} s"]
    parts += [f"{found[what]} {word}" for what, word in (("refused", "refused"), ("errors", "failed")) if found[what]]
    parts += ["then interrupted"] if found.get("interrupted") else []
    view.text(", ".join(parts))
    for message, count in list(found["error_messages"].items())[:3]:
        view.text(f"{count} x {message}", indent=2)
    view.text(
        f"{found['output_tokens_per_second']:.1f} output tokens/s, {found['requests_per_second']:.2f} requests/s, "
        f"goodput {100 * found['goodput_share']:.0f}%"
    )
    if found["prompt_tokens"] is None:
        view.text("The server tells no usage: each piece of an answer counts as a token", indent=2)
    percentiles = ("p50", "p90", "p99", "mean")
    view.table(
        ["milliseconds", *percentiles],
        [[label, *(f"{1000 * found[key][name]:.1f}" for name in percentiles)]
         for key, label in _TIMES.items() if found[key] is not None],
    )  # fmt: skip
    return view
