"""Costs of energy and time: carbon of power grids, rent and purchase prices, data-centre overhead.

Prices age within months, so that each has a date, and a plan that uses one prints it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from ironlaw.catalog.accelerators import Accelerator, resolve
from ironlaw.catalog.figures import Figure, figure, lookup, read_toml


@dataclass(frozen=True, slots=True)
class Grid:
    """A power grid."""

    name: str  # country or region, lower case with dashes
    title: str  # the usual spelling
    # Kilograms of CO2 per kilowatt-hour generated; the note says whether life-cycle CO2 equivalent or stack emissions
    # only.
    kg_co2_per_kwh: Figure
    year: int  # the year the figure describes


@dataclass(frozen=True, slots=True)
class Quote:
    """A price that a provider asked."""

    usd: Figure  # US dollars; per accelerator-hour for rent (its share of the host included), else per unit
    date: str  # of the offer, as precise as known: 2025-06, 2026-05-22
    provider: str


@dataclass(frozen=True, slots=True)
class Price:
    """Rent and purchase prices of an accelerator; either may be unknown."""

    accelerator: str
    rent: tuple[Quote, ...] = ()
    purchase: Quote | None = None


def grid(name: str) -> Grid:
    """Return the grid with this name or ISO code (`france`, `fr`, `world`)."""
    typed = name.strip().lower().replace("_", "-").replace(" ", "-")
    typed = next(
        (of for of, entry in read_toml("grids.toml")["grid"].items() if typed in entry.get("codes", ())), typed
    )
    return lookup("power grid", typed, grids())


def price(accelerator: Accelerator | str) -> Price | None:
    """Return the known prices of an accelerator; `None` if there are none."""
    name = accelerator.name if isinstance(accelerator, Accelerator) else resolve(accelerator)
    entry = read_toml("prices.toml").get(name)
    if entry is None:
        return None
    bought = entry.get("purchase")
    return Price(name, tuple(map(_quote, entry.get("rent", ()))), _quote(bought) if bought else None)


def pue(name: str = "average") -> Figure:
    """Return a power usage effectiveness: watts drawn from the grid per watt of computing equipment."""
    return lookup("PUE", name, pues())


def _quote(entry: dict[str, Any]) -> Quote:
    return Quote(figure(entry, "usd"), entry["date"], entry["provider"])


@cache
def grids() -> dict[str, Grid]:
    """Return all grids by name."""
    return {
        name: Grid(name, entry["title"], figure(entry, "kg_co2_per_kwh"), entry["year"])
        for name, entry in read_toml("grids.toml")["grid"].items()
    }


@cache
def pues() -> dict[str, Figure]:
    """Return the power usage effectiveness of each kind of data centre."""
    return {name: figure(entry) for name, entry in read_toml("grids.toml")["pue"].items()}
