"""The cluster plan on a terminal: complete, nothing cut off, units everywhere."""

import io

import pytest
from rich.console import Console

from ironlaw.plan.request import plan_request
from ironlaw.plan.request_types import Options
from ironlaw.report.cluster_view import assumed_view, cluster_view, cluster_why_view
from ironlaw.report.terminal import show


def shown(answer, width, why=False):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show(console, cluster_view(answer.ledger, answer.fits, answer.more))
    if why:
        show(console, cluster_why_view(answer.ledger, answer.more))
    return console.file.getvalue()


@pytest.fixture(scope="module")
def answer():
    return plan_request("llama3-70b", on="64xh100-sxm-80gb", options=Options("1T", 8192, 1024))


@pytest.fixture(scope="module")
def too_big():
    return plan_request("llama3-405b", on="8xh100-sxm-80gb", options=Options("1T", 8192, 1024))


@pytest.mark.parametrize("width", [60, 80, 100])
def test_nothing_is_cut_off(answer, width):
    text = shown(answer, width, why=True)
    assert all(len(line) <= width for line in text.splitlines())
    assert "…" not in text
    joined = " ".join(text.split())
    for words in ("Layout", "Fits", "tokens/s", "accelerator-hours", "Buying costs", "kg CO2 per kWh", "ruled out"):
        assert words in joined, words


def test_every_assumption_and_wall_is_there(answer):
    text = " ".join(shown(answer, 100).split())
    for assumption in answer.more["assumed"]:
        assert assumption["how_to_set"] in text
    for reason in answer.more["ruled_out"]:
        assert reason in text


def test_why_gives_every_total_with_its_basis(answer):
    text = " ".join(shown(answer, 100, why=True).split())
    for name, estimate in answer.ledger.totals.items():
        assert " ".join(estimate.basis.split()) in text, name


def test_an_unchecked_engine_is_said_once():
    old = plan_request("gpt2", on="8xv100-sxm-32gb")
    assert shown(old, 80).count("Unchecked") == 1
    assert "Unchecked" not in shown(plan_request("gpt2", on="8xh100-sxm-80gb"), 80)


def test_what_does_not_fit(too_big):
    text = " ".join(shown(too_big, 80).split())
    assert "Does not fit" in text and "too much" in text and "Would fit: --on" in text


def test_a_run_without_a_known_price_says_so():
    answer = plan_request("gpt2", on="mi325x")
    assert "give --price-per-hour" in " ".join(shown(answer, 80).split())


def test_no_assumption_prints_nothing():
    assert assumed_view([]).blocks == []
