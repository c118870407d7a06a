"""Computes energy and carbon of a run: measured if the hardware's counters can be read, else estimated."""

from __future__ import annotations

from typing import Any

from ironlaw.catalog.accelerators import accelerator, catalogued, cpu_power
from ironlaw.catalog.money import grid
from ironlaw.errors import UserError
from ironlaw.ledger import Ledger
from ironlaw.plan.budget import JOULES_PER_KWH

GRID = "world"
MIN_POWER_SHARE = 0.5  # of a board's power limit: a training step that waits a lot still draws about half of it


def energy_use(plan: Ledger, run: Ledger) -> dict[str, Any] | None:
    """Returns joules, kWh and kg of CO2 of the whole command; `measured` says which kind of number it is.

    An estimate is a range: what a core draws is only known between bounds. None when nothing is known of the power.
    """
    total = run.totals.get("total_seconds")
    measured = run.totals.get("energy_joules")
    intensity = grid(GRID)
    if measured is not None:
        joules, low, high, basis = measured.value, None, None, measured.basis
    else:
        power = _watts(run)
        if power is None or total is None:
            return None
        low, high = power[0] * total.value, power[1] * total.value
        joules, basis = (low * high) ** 0.5, f"estimated: {power[2]}"
    kg_per_kwh = float(intensity.kg_co2_per_kwh.value)
    return {
        "joules": joules, "interval": [low, high] if low is not None else None, "kwh": joules / JOULES_PER_KWH,
        "co2_kg": joules / JOULES_PER_KWH * kg_per_kwh, "measured": measured is not None, "basis": basis,
        "co2_basis": f"{kg_per_kwh * 1e3:.0f} g/kWh, the {GRID} average of {intensity.year}; "
                     f"{'processor' if run.facts.get('device') == 'cpu' else 'accelerator'} only, no cooling",
    }  # fmt: skip


def _watts(run: Ledger) -> tuple[float, float, str] | None:
    """Returns (low, high, source) of the watts the run drew, if only its hardware is known."""
    name = str(run.facts.get("machine"))
    if run.facts.get("device") == "cpu":
        power = cpu_power(name)
        if power is None:
            return None
        threads = int(run.facts.get("threads") or 1)
        words = f"{threads} cores of {power.family}, {power.low} to {power.high} W each ({power.source})"
        return threads * float(power.low), threads * float(power.high), words
    try:
        board = accelerator(catalogued(name))
    except UserError:
        return None
    if board.tdp_watts is None:
        return None
    limit = float(board.tdp_watts.value)
    return MIN_POWER_SHARE * limit, limit, f"a board of {board.name}, {MIN_POWER_SHARE * limit:.0f} to {limit:.0f} W"
