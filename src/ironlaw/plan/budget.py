"""The cost of a run: accelerator-hours, rent or purchase, electricity and carbon. Every figure is an Estimate.

    hours   accelerators x seconds / 3600
    rent    hours x price per accelerator-hour
    watts   accelerators x TDP x drawn share + hosts x host watts x host share
    energy  watts x seconds x PUE
    carbon  energy x kilograms of CO2 per kilowatt-hour of the grid

`add_costs` applies these to a plan and the figures of the catalogue.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from ironlaw.catalog.accelerators import Accelerator
from ironlaw.catalog.figures import Figure, source
from ironlaw.catalog.money import Quote, grid, price, pue
from ironlaw.catalog.nodes import Cluster, node
from ironlaw.errors import UserError
from ironlaw.ledger import Estimate, Kind, Ledger, Origin, Phase
from ironlaw.plan.request_types import Prices

JOULES_PER_KWH = 3.6e6

COMPUTING_SHARE = (0.9, 0.75, 1.0)
"""Share of TDP drawn while kernels compute: value, low, high. With `HOST_SHARE`, a node of eight busy H100s draws
8.3 of its rated 10.2 kW; measured: at most 8.4 kW (arXiv 2412.08602) and 76% of the rating (2506.14551)."""

WAITING_SHARE = (0.4, 0.15, 0.7)
"""Share of TDP drawn while a device waits for other devices (communication kernels poll), in a pipeline bubble, or for
the host. Assumed: between the idle draw, a tenth to a sixth of TDP, and that of memory-bound kernels."""

HOST_SHARE = (0.7, 0.5, 1.0)
"""Share of the host's maximum power (processors, memory, switches, network cards, fans, losses). Assumed, see above."""

WAITING = (Phase.COMMUNICATION, Phase.HOST, Phase.IDLE)


def run_seconds(step: Estimate, steps: int) -> Estimate:
    """Returns the time of a run of `steps` steps."""
    return step.scaled(steps, f"{steps:,} steps x step time; no data loading, checkpoints, failures or restarts")


def add_costs(ledger: Ledger, cluster: Cluster, prices: Prices) -> dict[str, Any]:
    """Adds money, energy and carbon of the ledger's total time to its totals; returns them as JSON with facts."""
    total, count = ledger.totals["total_seconds"], cluster.count
    hours = total.scaled(count / 3600, f"accelerators ({count:,}) x total time / 3600")
    found = {"accelerator_hours": replace(hours, origin=Origin.CALCULATED)}
    facts = _add_money(found, cluster, prices) | _add_power(found, ledger, cluster, prices)
    ledger.totals |= found
    return {name: estimate.to_json() for name, estimate in found.items()} | facts


def _add_money(found: dict[str, Estimate], cluster: Cluster, prices: Prices) -> dict[str, Any]:
    """Adds rent, purchase and break-even to the estimates; returns their facts."""
    known, hours = price(cluster.accelerator), found["accelerator_hours"]
    bought, quotes = (known.purchase, known.rent) if known else (None, ())
    quote = hourly_rent(cluster.accelerator, prices.usd_per_hour, cluster.node.name)
    facts: dict[str, Any] = {
        "purchase": None, "rent": quote,
        "rent_quotes": [_quote(q) | {"rent_usd": hours.value * q.usd.value} for q in quotes],
    }  # fmt: skip
    if quote is None:
        return facts
    rate, basis = quote["usd_per_hour"], ", ".join((quote["provider"], quote["date"] or quote["source"]))
    found["rent_usd"] = rent = replace(
        hours.scaled(rate, f"accelerator-hours x ${rate:,.2f} ({basis})"), origin=Origin.CITED
    )
    if bought is None:
        return facts
    each, paid = bought.usd.value, bought.usd.value * cluster.count
    facts["purchase"] = {"usd": each} | {key: value for key, value in _quote(bought).items() if key != "usd_per_hour"}
    found["purchase_usd"] = Estimate(
        paid, Origin.CITED,
        f"{cluster.count:,} x ${each:,.0f} ({bought.provider}, {bought.date}); no hosts, network or building",
    )  # fmt: skip
    found["break_even_hours"] = Estimate(
        each / rate, Origin.CALCULATED,
        f"${each:,.0f} / ${rate:,.2f} per hour of use; power, hosts and people would add to buying",
    )  # fmt: skip
    found["break_even_runs"] = Estimate(
        paid / rent.value, Origin.CALCULATED, "purchase / rent of this run",
        *(paid / bound if bound else None for bound in (rent.high, rent.low)),
    )  # fmt: skip
    return facts


def hourly_rent(device: Accelerator, given: float | None = None, node: str = "") -> dict[str, Any] | None:
    """Returns the rent of an accelerator and its source, in training and in serving: the given one, else the quote for
    `node`, else the most recent one; None if none is known."""
    if given is not None:
        return {"usd_per_hour": given, "provider": "given", "date": "", "source": "--price-per-hour"}
    known = price(device)
    if known is None or not known.rent:
        return None
    of_node = (q for q in known.rent if node and node in re.sub(r"[. ]", "-", q.provider.lower()))
    return _quote(next(of_node, max(known.rent, key=lambda quote: quote.date)))


def _quote(quote: Quote) -> dict[str, Any]:
    cited = source(quote.usd.source)
    return {
        "usd_per_hour": quote.usd.value,
        "provider": quote.provider,
        "date": quote.date,
        "source": cited.title,
        "url": cited.url,
        "note": quote.usd.note,
    }


def _add_power(found: dict[str, Estimate], ledger: Ledger, cluster: Cluster, prices: Prices) -> dict[str, Any]:
    """Adds energy and carbon to the estimates, if the accelerator's power is known; returns their facts."""
    overhead, overhead_words = _overhead(prices.pue)
    chosen, tdp = grid(prices.grid or "world"), cluster.accelerator.tdp_watts
    facts: dict[str, Any] = {
        "grid": {
            "name": chosen.name, "title": chosen.title, "kg_co2_per_kwh": chosen.kg_co2_per_kwh.value,
            "year": chosen.year, "source": source(chosen.kg_co2_per_kwh.source).title,
        },
        "pue": {"value": overhead, "basis": overhead_words}, "power": None,
    }  # fmt: skip
    if tdp is None:
        return facts
    waiting = sum(line.seconds or 0.0 for line in ledger.lines if line.phase in WAITING or line.kind is Kind.HOST)
    computing, total = 1 - min(1.0, waiting / ledger.totals["step_seconds"].value), ledger.totals["total_seconds"]
    host, host_words = _host_watts(cluster)
    each = [
        tdp.value * (computing * busy + (1 - computing) * idle)
        for busy, idle in zip(COMPUTING_SHARE, WAITING_SHARE, strict=True)
    ]
    hosts = [host * share for share in HOST_SHARE]
    facts["power"] = {
        "tdp_watts": tdp.value, "computing": computing, "accelerator_watts": each[0],
        "hosts": cluster.nodes, "host_watts": hosts[0], "host_basis": host_words,
    }  # fmt: skip
    assert total.low is not None and total.high is not None
    value, low, high = (
        seconds * (cluster.count * watts + cluster.nodes * of_host) * overhead
        for seconds, watts, of_host in zip((total.value, total.low, total.high), each, hosts, strict=True)
    )
    basis = (
        f"(accelerators {cluster.count:,} x {each[0]:,.0f} W + hosts {cluster.nodes:,} x {hosts[0]:,.0f} W) x total "
        f"time x PUE {overhead:g}; an accelerator computes {100 * computing:.0f}% of the time at "
        f"{COMPUTING_SHARE[0]:.0%} of {tdp.value:.0f} W and waits at {WAITING_SHARE[0]:.0%}; {host_words}; "
        f"{overhead_words}"
    )
    found["energy_joules"] = energy = Estimate(value, Origin.CALCULATED, basis, low, high)
    words = f"energy x {chosen.kg_co2_per_kwh.value:g} kg CO2 per kWh, grid {chosen.title} {chosen.year}"
    found["carbon_kg"] = replace(
        energy.scaled(chosen.kg_co2_per_kwh.value / JOULES_PER_KWH, words), origin=Origin.CITED
    )
    return facts


def _host_watts(cluster: Cluster) -> tuple[float, str]:
    """Returns the maximum watts of one host and their basis, from the accelerator's default node if unknown."""
    for candidate in (cluster.node, node(cluster.accelerator.default_node)):
        if candidate.host_watts is not None:
            share = min(1.0, cluster.count / candidate.accelerators)  # a job on part of a host counts that part
            words = f"hosts at {HOST_SHARE[0]:.0%} of {candidate.host_watts.value:,.0f} W ({candidate.product})"
            return candidate.host_watts.value * share, words
    return 0.0, f"hosts are not counted: the power of {cluster.node.product} is not known"


def _overhead(text: str | None) -> tuple[float, str]:
    """Returns the PUE for a number (UserError outside 1 to 3) or a kind of data centre, and its basis."""
    try:
        given = float(text) if text is not None else None
    except ValueError:
        given = None
    if given is not None:
        if not 1 <= given <= 3:
            raise UserError(f"--pue {text} is not possible: a data centre draws 1 to 3 times what its machines do")
        return given, "PUE given"
    found: Figure = pue(text or "average")
    return found.value, f"PUE of {'a ' + text if text else 'the average'} data centre ({source(found.source).title})"
