"""The page while training: drawn when asked for, from what the terminal's line is told."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from ironlaw import units
from ironlaw.ledger import Estimate, Ledger, Origin
from ironlaw.report.live import Dashboard

ENTRY = {"steps": 100, "loss": 3.0, "seconds": 0.2, "data_seconds": 0.02, "resident_bytes": 2**30, "attention": None}


def plan() -> Ledger:
    values = {"step_seconds": 0.1, "tokens_per_second": 10_000.0, "mfu": 0.5}
    return Ledger("plan", totals={name: Estimate(v, Origin.CALCULATED, "") for name, v in values.items()})


def test_the_page_is_there_before_the_first_step_and_follows_the_run(tmp_path: Path) -> None:
    with Dashboard(tmp_path / "<run>", port=0) as page:
        first = urlopen(page.address).read().decode()
        assert "none yet" in first and "&lt;run&gt;" in first and "<svg" not in first
        page.planned(plan())
        for number in range(1, 31):
            validated = {"validation_loss": 2.5} if number == 20 else {}
            page.step(ENTRY | {"step": number, "loss": 5 - number / 10} | validated)
        text = urlopen(page.address).read().decode()
        plain = re.sub("<[^>]+>", "", text)
        for shown in (
            "30",
            "of 100",
            "2.000",
            "2.500",
            units.seconds(0.2),
            units.count(5000),
            "25%",
            units.seconds(14.0),
        ):
            assert shown in plain, shown
        assert text.count("<svg") == 4 and 'http-equiv="refresh"' in text and "<script" not in text
        with pytest.raises(HTTPError):
            urlopen(page.address + "config.toml")


def test_two_runs_at_once_have_a_page_each(tmp_path: Path) -> None:
    with Dashboard(tmp_path / "a") as one, Dashboard(tmp_path / "b") as other:
        assert one.address != other.address
        assert "/a" in urlopen(one.address).read().decode() and "/b" in urlopen(other.address).read().decode()


def test_nothing_listens_after_the_run(tmp_path: Path) -> None:
    with Dashboard(tmp_path, port=0) as page:
        address = page.address
    with pytest.raises(OSError):
        urlopen(address, timeout=2)
