"""What a run costs: accelerator-hours, rent or purchase, electricity and carbon. Every figure is an Estimate.

    hours   accelerators x seconds / 3600
    rent    hours x price per accelerator-hour
    watts   accelerators x TDP x drawn share + hosts x host watts x host share
    energy  watts x seconds x PUE
    carbon  energy x kilograms of CO2 per kilowatt-hour of the grid

The functions at the top are that arithmetic alone; `budget` puts a plan and the catalogue's figures through it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from ironlaw.catalog.figures import Figure, source
from ironlaw.catalog.money import Quote, grid, price, pue
from ironlaw.catalog.nodes import Cluster, node
from ironlaw.errors import UserError
from ironlaw.ledger import Estimate, Kind, Ledger, Origin, Phase
from ironlaw.plan.request_types import Prices

JOULES_PER_KWH = 3.6e6

COMPUTING_SHARE = (0.9, 0.75, 1.0)
"""Of TDP while kernels compute: value, low, high. With `HOST_SHARE` a node of eight H100s that computes all the time
draws 8.3 kW of its rated 10.2; measured were 8.4 kW at most (arXiv 2412.08602) and 76% of the rating (2506.14551)."""

WAITING_SHARE = (0.4, 0.15, 0.7)
"""Of TDP while a device waits: for others (communication kernels poll), in a pipeline bubble, for the host. Assumed:
between idle, a tenth to a sixth of TDP, and the draw of memory-bound kernels."""

HOST_SHARE = (0.7, 0.5, 1.0)
"""Of the host's maximum (processors, memory, switches, network cards, fans, losses). Assumed, see above."""

WAITING = (Phase.COMMUNICATION, Phase.HOST, Phase.IDLE)


def break_even_hours(purchase_usd: float, usd_per_hour: float) -> float:
    """Hours of use after which one bought accelerator cost less than a rented one: power, hosts and people aside."""
    return purchase_usd / usd_per_hour


def drawn_watts(tdp_watts: float, computing: float, computing_share: float, waiting_share: float) -> float:
    """Average draw of one accelerator that computes the fraction `computing` of the time and waits otherwise."""
    return tdp_watts * (computing * computing_share + (1 - computing) * waiting_share)


def energy_joules(
    seconds: float, accelerators: int, accelerator_watts: float, hosts: int, host_watts: float, pue: float = 1.0
) -> float:
    """Joules from the grid: accelerators and hosts, times the data centre's overhead."""
    return seconds * (accelerators * accelerator_watts + hosts * host_watts) * pue


@dataclass(frozen=True)
class Budget:
    """Estimates by name, and the figures behind them."""

    estimates: dict[str, Estimate]
    facts: dict[str, Any]


def budget(ledger: Ledger, cluster: Cluster, total: Estimate, prices: Prices) -> Budget:
    """Money, energy and carbon of a run of `total` seconds whose step is `ledger`."""
    count = cluster.count
    hours = replace(
        total.scaled(count / 3600, f"accelerators ({count:,}) x total time / 3600"), origin=Origin.CALCULATED
    )
    estimates: dict[str, Estimate] = {"accelerator_hours": hours}
    facts: dict[str, Any] = {}
    _money(estimates, facts, cluster, hours, prices)
    _power(estimates, facts, ledger, cluster, total, prices)
    return Budget(estimates, facts)


def _money(
    estimates: dict[str, Estimate], facts: dict[str, Any], cluster: Cluster, hours: Estimate, prices: Prices
) -> None:
    known = price(cluster.accelerator)
    quotes = list(known.rent) if known else []
    facts["purchase"] = None
    facts["rent_quotes"] = [_quote(quote) | {"rent_usd": hours.value * quote.usd.value} for quote in quotes]
    if prices.usd_per_hour is not None:
        rate, told = prices.usd_per_hour, "--price-per-hour"
        facts["rent"] = {"usd_per_hour": rate, "provider": "given", "date": "", "source": told}
    elif quotes:
        # The quote of the node that was asked for, else the most recent one.
        of_node = (quote for quote in quotes if cluster.node.name in re.sub(r"[. ]", "-", quote.provider.lower()))
        chosen = next(of_node, max(quotes, key=lambda quote: quote.date))
        rate, told = chosen.usd.value, f"{chosen.provider}, {chosen.date}"
        facts["rent"] = _quote(chosen)
    else:
        facts["rent"] = None
        return
    basis = f"accelerator-hours x ${rate:,.2f} ({told})"
    estimates["rent_usd"] = replace(hours.scaled(rate, basis), origin=Origin.CITED)
    if known is None or known.purchase is None:
        return
    each, bought = known.purchase.usd.value, known.purchase
    facts["purchase"] = {"usd": each} | {key: value for key, value in _quote(bought).items() if key != "usd_per_hour"}
    estimates["purchase_usd"] = Estimate(
        each * cluster.count, Origin.CITED,
        f"{cluster.count:,} x ${each:,.0f} ({bought.provider}, {bought.date}); no hosts, network or building",
    )  # fmt: skip
    estimates["break_even_hours"] = Estimate(
        break_even_hours(each, rate), Origin.CALCULATED,
        f"${each:,.0f} / ${rate:,.2f} per hour of use; power, hosts and people would add to buying",
    )  # fmt: skip
    runs = estimates["purchase_usd"].value / estimates["rent_usd"].value
    low, high = (estimates["rent_usd"].high, estimates["rent_usd"].low)
    bounds = [estimates["purchase_usd"].value / bound if bound else None for bound in (low, high)]
    estimates["break_even_runs"] = Estimate(
        runs, Origin.CALCULATED, "purchase / rent of this run", bounds[0], bounds[1]
    )


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


def _power(
    estimates: dict[str, Estimate], facts: dict[str, Any], ledger: Ledger, cluster: Cluster, total: Estimate,
    prices: Prices,
) -> None:  # fmt: skip
    overhead, overhead_words = _overhead(prices.pue)
    chosen = grid(prices.grid or "world")
    facts["grid"] = {
        "name": chosen.name, "title": chosen.title, "kg_co2_per_kwh": chosen.kg_co2_per_kwh.value,
        "year": chosen.year, "source": source(chosen.kg_co2_per_kwh.source).title,
    }  # fmt: skip
    facts["pue"] = {"value": overhead, "basis": overhead_words}
    tdp = cluster.accelerator.tdp_watts
    if tdp is None:
        facts["power"] = None
        return
    waiting = sum(line.seconds or 0.0 for line in ledger.lines if line.phase in WAITING or line.kind is Kind.HOST)
    computing = 1 - min(1.0, waiting / ledger.totals["step_seconds"].value)
    host, host_words = _host_watts(cluster)

    def joules(index: int, seconds: float) -> float:
        each = drawn_watts(tdp.value, computing, COMPUTING_SHARE[index], WAITING_SHARE[index])
        return energy_joules(seconds, cluster.count, each, cluster.nodes, host * HOST_SHARE[index], overhead)

    each = drawn_watts(tdp.value, computing, COMPUTING_SHARE[0], WAITING_SHARE[0])
    facts["power"] = {
        "tdp_watts": tdp.value, "computing": computing, "accelerator_watts": each,
        "hosts": cluster.nodes, "host_watts": host * HOST_SHARE[0], "host_basis": host_words,
    }  # fmt: skip
    assert total.low is not None and total.high is not None
    basis = (
        f"(accelerators {cluster.count:,} x {each:,.0f} W + hosts {cluster.nodes:,} x {host * HOST_SHARE[0]:,.0f} W) x "
        "total time x "
        f"PUE {overhead:g}; an accelerator computes {100 * computing:.0f}% of the time at {COMPUTING_SHARE[0]:.0%} of "
        f"{tdp.value:.0f} W and waits at {WAITING_SHARE[0]:.0%}; {host_words}; {overhead_words}"
    )
    energy = Estimate(joules(0, total.value), Origin.CALCULATED, basis, joules(1, total.low), joules(2, total.high))
    estimates["energy_joules"] = energy
    per_joule = chosen.kg_co2_per_kwh.value / JOULES_PER_KWH
    words = f"energy x {chosen.kg_co2_per_kwh.value:g} kg CO2 per kWh, grid {chosen.title} {chosen.year}"
    estimates["carbon_kg"] = replace(energy.scaled(per_joule, words), origin=Origin.CITED)


def _host_watts(cluster: Cluster) -> tuple[float, str]:
    """Watts of one host at its maximum, of the usual node of the accelerator where this one's is not known."""
    usual = node(cluster.accelerator.default_node)
    for candidate in (cluster.node, usual):
        if candidate.host_watts is not None:
            share = min(1.0, cluster.count / candidate.accelerators)  # a part of a host is billed its part
            words = f"hosts at {HOST_SHARE[0]:.0%} of {candidate.host_watts.value:,.0f} W ({candidate.product})"
            return candidate.host_watts.value * share, words
    return 0.0, f"hosts are not counted: what a {cluster.node.product} draws is not known"


def _overhead(text: str | None) -> tuple[float, str]:
    """Power usage effectiveness from a number or a kind of data centre."""
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
