"""The page while training: drawn when asked for, from what the terminal's line is told."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from ironlaw import units
from ironlaw.ledger import Estimate, Ledger, Origin
from ironlaw.report.console import recorder
from ironlaw.report.live import LiveRun, serve_page

ENTRY = {"steps": 100, "loss": 3.0, "seconds": 0.2, "data_seconds": 0.02, "resident_bytes": 2**30, "attention": None}


def plan() -> Ledger:
    values = {"step_seconds": 0.1, "tokens_per_second": 10_000.0, "mfu": 0.5, "parameters": 1e6}
    values |= {"flops_per_step": 1e9, "total_seconds": 10.0, "peak_bytes": 1e6}
    facts = {"model": {"name": "tiny"}, "precision": "fp32", "precision_reason": "fastest"}
    return Ledger("plan", totals={n: Estimate(v, Origin.CALCULATED, "") for n, v in values.items()}, facts=facts)


def data() -> Any:
    part = SimpleNamespace(tokens=[0])
    return SimpleNamespace(train=part, validation=part, vocab=300, reused=True, skipped={})


def address(run: LiveRun) -> str:
    return str(run.console.export_text()).split()[1]


def test_the_page_is_there_before_the_first_step_and_follows_the_run(tmp_path: Path) -> None:
    with LiveRun(recorder(), tmp_path / "<run>", dashboard=True) as run:
        page = address(run)
        first = urlopen(page).read().decode()
        assert "none yet" in first and "&lt;run&gt;" in first and "<svg" not in first
        run.planned(plan(), data())
        for number in range(1, 31):
            validated = {"validation_loss": 2.5} if number == 20 else {}
            run.step(ENTRY | {"step": number, "loss": 5 - number / 10} | validated)
        text = urlopen(page).read().decode()
        plain = re.sub("<[^>]+>", "", text)
        times = units.seconds(0.2), units.count(5000), units.seconds(14.0)
        for shown in ("30", "of 100", "2.000", "2.500", "25%", *times):
            assert shown in plain, shown
        assert text.count("<svg") == 2 and 'http-equiv="refresh"' in text and "<script" not in text
        with pytest.raises(HTTPError):
            urlopen(page + "config.toml")


def test_two_runs_at_once_have_a_page_each_and_nothing_listens_afterwards() -> None:
    with serve_page(lambda: "one") as one, serve_page(lambda: "other") as other:
        assert one != other
        assert urlopen(one).read() == b"one" and urlopen(other).read() == b"other"
    with pytest.raises(OSError):
        urlopen(one, timeout=2)
