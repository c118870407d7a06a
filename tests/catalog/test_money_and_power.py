"""Grids, prices, overhead and CPU power: sourced, dated, and absent where nobody knows."""

import re
from pathlib import Path

import pytest

import ironlaw.catalog
from ironlaw.catalog.accelerators import accelerator, accelerator_names, cpu_power
from ironlaw.catalog.figures import read_toml, source, sources
from ironlaw.catalog.money import grid, grids, price, pue, pues
from ironlaw.errors import UserError


@pytest.mark.parametrize("name", sorted(grids()))
def test_every_grid_is_sourced_and_plausible(name: str) -> None:
    it = grid(name)
    assert source(it.kg_co2_per_kwh.source).title
    assert 0.01 < it.kg_co2_per_kwh.value < 1.0
    assert 2015 <= it.year <= 2026


def test_grids_answer_to_codes() -> None:
    assert grid("fr") == grid("France") == grid("fra")
    assert grid("us").name == "united-states"
    assert grid("world").kg_co2_per_kwh.value == pytest.approx(0.48)


def test_carbon_of_the_worked_example() -> None:
    """31,784 kWh at the textbook's 0.43 kg per kWh are 13.7 tonnes."""
    assert 31_784 * grid("textbook").kg_co2_per_kwh.value / 1000 == pytest.approx(13.7, abs=0.05)


def test_unknown_grid_is_one_line_with_near_names() -> None:
    with pytest.raises(UserError, match="unknown power grid 'germny': did you mean germany"):
        grid("germny")


def test_every_price_is_sourced_dated_and_of_a_known_accelerator() -> None:
    prices = read_toml("prices.toml")
    assert set(prices) <= set(accelerator_names())
    for name in prices:
        it = price(name)
        assert it is not None and (it.rent or it.purchase)
        for quote in (*it.rent, *([it.purchase] if it.purchase else [])):
            assert source(quote.usd.source).title
            assert re.fullmatch(r"20\d\d(-\d\d(-\d\d)?)?", quote.date)
            assert quote.provider
        assert all(0.1 < quote.usd.value < 30 for quote in it.rent)


def test_h100_price() -> None:
    h100 = price(accelerator("h100-sxm-80gb"))
    assert h100 is not None and h100.purchase is not None
    assert h100.purchase.usd.value == 30_000
    rents = [quote.usd.value for quote in h100.rent]
    assert min(rents) < 3 < max(rents)


def test_an_unknown_price_is_none() -> None:
    assert price("gb300") is None


def test_pue() -> None:
    for name in pues():
        assert 1.0 <= pue(name).value < 2 and source(pue(name).source).title
    with pytest.raises(UserError, match="unknown PUE"):
        pue("moon")


@pytest.mark.parametrize(
    ("model", "family", "watts_per_core"),
    [
        ("AMD EPYC 7763 64-Core Processor", "AMD EPYC 7003", 280 / 64),
        ("AMD EPYC 9654 96-Core Processor", "AMD EPYC 9004", 360 / 96),
        ("AMD EPYC 9755 128-Core Processor", "AMD EPYC 9005", 500 / 128),
        ("AMD EPYC 7B12", "AMD EPYC 7002", None),
        ("AMD EPYC", "AMD EPYC, model hidden", 280 / 64),
        ("AMD EPYC-Milan Processor", "AMD EPYC, model hidden", None),
        ("Intel(R) Xeon(R) Platinum 8380 CPU @ 2.30GHz", "Intel Xeon Scalable 3rd generation", 270 / 40),
        ("Intel(R) Xeon(R) Platinum 8480+", "Intel Xeon Scalable 4th generation, Max", 350 / 56),
        ("INTEL(R) XEON(R) PLATINUM 8570", "Intel Xeon Scalable 5th generation", 350 / 56),
        ("Intel(R) Xeon(R) 6980P", "Intel Xeon 6 (performance cores)", 500 / 128),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "Intel Xeon, model hidden", None),
        ("AMD Ryzen 9 7950X 16-Core Processor", "AMD Ryzen 7000 desktop", 170 / 16),
        ("AMD Ryzen 9 5950X 16-Core Processor", "AMD Ryzen 5000 desktop", 105 / 16),
        ("13th Gen Intel(R) Core(TM) i9-13900K", "Intel Core 12th to 14th generation desktop", 125 / 24),
        ("Apple M2 Pro", "Apple M", None),
    ],
)
def test_cpu_power(model: str, family: str, watts_per_core: float | None) -> None:
    power = cpu_power(model)
    assert power is not None and power.family == family
    assert source(power.source).title
    assert 0 < power.low < power.high < 40
    if watts_per_core is not None:
        assert power.low * 0.99 <= watts_per_core <= power.high * 1.01


@pytest.mark.parametrize("model", ["Neoverse-V1", "", "Graviton3", "VIA Nano"])
def test_a_cpu_nobody_prints_a_power_for_is_none(model: str) -> None:
    assert cpu_power(model) is None


def test_sources_have_addresses_and_are_all_used() -> None:
    folder = Path(ironlaw.catalog.__file__).parent
    data = "".join(path.read_text() for path in folder.rglob("*.toml") if path.name != "sources.toml")
    for key in sources():
        assert key == "ironlaw-convention" or source(key).url.startswith("https://"), key
        assert key in data, f"{key} is not used"
    with pytest.raises(UserError, match="unknown source"):
        source("nobody")
