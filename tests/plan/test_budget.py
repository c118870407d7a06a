"""Money, energy and carbon, from Ironlaw's own functions. The arithmetic is in each docstring."""

import pytest

from ironlaw.catalog.money import grid
from ironlaw.catalog.nodes import parse_cluster
from ironlaw.errors import UserError
from ironlaw.ledger import Estimate, Kind, Ledger, Line, Origin, Phase
from ironlaw.plan.budget import add_costs
from ironlaw.plan.request_types import Prices


def budget(ledger, cluster, total, prices):
    ledger.totals["total_seconds"] = total
    facts = add_costs(ledger, cluster, prices)
    return ledger.totals, facts


def test_llama2_70b_on_1024_h100_rented_or_bought():
    """8.4e23 FLOP / (1,024 x 989e12 x 50%) = 19.2 days: 1,024 x 460.8 h x $3 = $1.42M, a 21.7th of $30.7M."""
    seconds = 6 * 70e9 * 2e12 / (1024 * 989e12 * 0.5)
    total = Estimate(seconds, Origin.CALCULATED, "", seconds, seconds)
    found, _ = budget(ledger(), parse_cluster("1024xh100-sxm-80gb"), total, Prices(usd_per_hour=3.0))
    assert found["rent_usd"].value == pytest.approx(1.42e6, rel=5e-3)
    assert found["break_even_hours"].value == 10_000
    assert found["break_even_runs"].value == pytest.approx(21.7, rel=5e-3)


def ledger(computing=8.0, waiting=2.0):
    lines = [
        Line(Phase.FORWARD, Kind.MATMUL, "block_linear", seconds=computing),
        Line(Phase.COMMUNICATION, Kind.COLLECTIVE, "data_parallel", seconds=waiting),
    ]
    step = Estimate(computing + waiting, Origin.CALCULATED, "a test")
    return Ledger("plan", lines=lines, totals={"step_seconds": step})


TOTAL = Estimate(3600.0, Origin.CALCULATED, "an hour", 3000.0, 4000.0)


def test_a_plan_through_the_catalogue():
    cluster = parse_cluster("16xh100-sxm-80gb")
    found, facts = budget(ledger(), cluster, TOTAL, Prices(grid="france", pue="1.2"))
    hours, rent, energy = (found[k] for k in ("accelerator_hours", "rent_usd", "energy_joules"))
    assert hours.value == 16 and hours.low == pytest.approx(16 * 3000 / 3600)
    assert rent.value == pytest.approx(16 * facts["rent"]["usd_per_hour"]) and rent.origin is Origin.CITED
    assert facts["rent"]["date"] in rent.basis
    # 80% of the time at 90% of 700 W, 20% at 40%; two hosts at 70% of 4,600 W; PUE 1.2
    watts = 16 * 700 * (0.8 * 0.9 + 0.2 * 0.4) + 2 * 0.7 * 4600
    assert energy.value == pytest.approx(watts * 3600 * 1.2)
    assert energy.low < energy.value < energy.high
    carbon = found["carbon_kg"].value
    assert carbon == pytest.approx(energy.value / 3.6e6 * grid("france").kg_co2_per_kwh.value)


def test_the_users_price_wins_and_the_named_node_picks_its_own_quote():
    given, _ = budget(ledger(), parse_cluster("8xh100-sxm-80gb"), TOTAL, Prices(usd_per_hour=1.0))
    assert given["rent_usd"].value == pytest.approx(8.0)
    assert "--price-per-hour" in given["rent_usd"].basis
    amazon, facts = budget(ledger(), parse_cluster("8xh100-sxm-80gb@p5-48xlarge"), TOTAL, Prices())
    assert facts["rent"]["provider"].startswith("aws")
    assert amazon["energy_joules"].value > 8 * 700 * 0.5 * 3600  # host of the accelerator's usual node


def test_what_is_not_known_is_absent():
    cluster = parse_cluster("8xmi300x")
    found, facts = budget(ledger(), cluster, TOTAL, Prices())
    assert "purchase_usd" not in found
    assert "hosts are not counted" in facts["power"]["host_basis"]
    assert "usd_per_hour" not in (facts.get("purchase") or {})


def test_impossible_overhead_is_refused():
    for pue in ("0.5", "9", "arctic"):
        with pytest.raises(UserError):
            budget(ledger(), parse_cluster("h200"), TOTAL, Prices(pue=pue))
