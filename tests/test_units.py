"""Quantities as people read them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironlaw import units


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (0, "0 FLOP"), (1, "1.00 FLOP"), (999, "999 FLOP"), (1000, "1.00 kFLOP"), (3.2e12, "3.20 TFLOP"),
        (12.3e12, "12.3 TFLOP"), (123e12, "123 TFLOP"), (-3.2e12, "-3.20 TFLOP"), (3.14e23, "314 ZFLOP"),
    ],
)  # fmt: skip
def test_decimal_multiples(value: float | None, text: str) -> None:
    assert units.si(value, "FLOP") == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536, "1.50 KiB"), (80 * 2**30, "80.0 GiB"),
        (5 * 2**40, "5.00 TiB"), (-2048, "-2.00 KiB"), (math.inf, "inf TiB"), (math.nan, "nan B"),
    ],
)  # fmt: skip
def test_bytes_are_binary(value: float | None, text: str) -> None:
    assert units.bytes_(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (0, "0 s"), (2e-9, "2.00 ns"), (1.5e-6, "1.50 µs"), (0.0423, "42.3 ms"), (1, "1.00 s"),
        (90, "90.0 s"), (150, "2.50 min"), (3600 * 3, "3.00 h"), (86400 * 3, "3.00 days"),
        (31557600 * 3, "3.00 years"), (-0.5, "-500 ms"),
    ],
)  # fmt: skip
def test_seconds_in_the_unit_a_person_would_use(value: float | None, text: str) -> None:
    assert units.seconds(value) == text


@pytest.mark.parametrize(
    ("text", "value"), [("1,536", 1536), ("1,000,000.5", 1000000.5), ("2e12", 2e12), ("1_000", 1000)]
)
def test_numbers(text: str, value: float) -> None:
    assert units.parse_number(text) == value


@pytest.mark.parametrize("text", ["1,5", "1,00,000", "1.5,000", ",5", "", "lots"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(ValueError):
        units.parse_number(text)


def test_the_others() -> None:
    assert units.rate(2e9, "B") == "2.00 GB/s"
    assert units.rate(None, "B") == units.energy(None) == units.count(None) == units.percent(None) == "–"
    assert units.signed_percent(None) == "–"
    assert (units.tokens(999_999), units.dollars(999_999), units.mass(999.9)) == ("1.00M", "$1.00M", "1.00 t")
    assert units.energy(1800) == "0.500 Wh"
    assert units.energy(7200) == "2.00 Wh"
    assert units.count(1234567) == "1,234,567"
    assert units.percent(0.1234) == "12.3%"
    assert units.signed_percent(0.05) == "+5.0%"
    assert units.signed_percent(-0.05, 0) == "-5%"


@given(st.floats(min_value=1e-9, max_value=1e25))
def test_what_is_printed_is_the_number_to_three_digits(value: float) -> None:
    number, _, prefix = units.si(value).replace(",", "").partition(" ")
    factor = {p: f for f, p in units._DECIMAL}.get(prefix, 1.0)
    assert float(number) * factor == pytest.approx(value, rel=6e-3)


@pytest.mark.parametrize(
    ("value", "text"), [(999.7, "1.00 k"), (0.99996, "1.00"), (9.996, "10.0"), (99.97, "100"), (999_999, "1.00 M")]
)
def test_rounding_up_carries_into_the_next_digit_and_prefix(value: float, text: str) -> None:
    assert units.si(value) == text


def test_rounding_up_carries_in_time_and_bytes() -> None:
    assert units.seconds(0.9999) == "1.00 s"
    assert units.bytes_(2**20 - 1) == "1.00 MiB"
