"""Energy of a run and the carbon of it: measured by the processor's counters where they can be read, else estimated."""

from __future__ import annotations

from typing import Any

from ironlaw.catalog import cpu_power, grid
from ironlaw.ledger import Ledger

JOULES_PER_KWH = 3.6e6
GRID = "world"


def energy_use(plan: Ledger, run: Ledger) -> dict[str, Any] | None:
    """Joules, kWh and kg of CO2 of the whole command; `measured` says which kind of number it is.

    An estimate is a range: what a core draws is only known between bounds. None when nothing is known of the power.
    """
    total = run.totals.get("total_seconds")
    measured = run.totals.get("energy_joules")
    intensity = grid(GRID)
    if measured is not None:
        joules, low, high, basis = measured.value, None, None, measured.basis
    else:
        power = cpu_power(str(run.facts.get("machine"))) if run.facts.get("device") == "cpu" else None
        if power is None or total is None:
            return None
        threads = int(run.facts.get("threads") or 1)
        low, high = (float(w) * threads * total.value for w in (power.low, power.high))
        joules = (low * high) ** 0.5
        basis = f"estimated: {threads} cores of {power.family}, {power.low} to {power.high} W each ({power.source})"
    kg_per_kwh = float(intensity.kg_co2_per_kwh.value)
    return {
        "joules": joules, "interval": [low, high] if low is not None else None, "kwh": joules / JOULES_PER_KWH,
        "co2_kg": joules / JOULES_PER_KWH * kg_per_kwh, "measured": measured is not None, "basis": basis,
        "co2_basis": f"{kg_per_kwh * 1e3:.0f} g/kWh, the {GRID} average of {intensity.year}; "
                     "processor only, no cooling",
    }  # fmt: skip
