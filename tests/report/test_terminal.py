"""Terminal reports: whole words at 80 columns, units on every figure, words for what is absent."""

from __future__ import annotations

import copy
import io
import re
from typing import Any

import pytest
from rich.console import Console
from synthetic import make_profile

from ironlaw import units
from ironlaw.ledger import Estimate, Ledger, Origin
from ironlaw.report.document import Document
from ironlaw.report.plan_view import plan_view, why_view
from ironlaw.report.profile_view import profile_view
from ironlaw.report.run_view import run_view
from ironlaw.report.terminal import show


def printed(view: Document, width: int = 80, **options: Any) -> str:
    out = io.StringIO()
    show(Console(file=out, width=width, **options), view)
    return out.getvalue()


def flat(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@pytest.fixture
def views(plan: Ledger, document: dict[str, Any]) -> dict[str, Document]:
    return {
        "plan": plan_view(plan, True),
        "why": why_view(plan),
        "explanation": run_view(document),
        "profile": profile_view(make_profile(), {"compute": 1.12, "memory": 1.05}),
    }


@pytest.mark.parametrize("name", ["plan", "why", "explanation", "profile"])
@pytest.mark.parametrize("width", [72, 80, 120])
def test_nothing_is_cut_off(views: dict[str, Document], name: str, width: int) -> None:
    text = printed(views[name], width)
    assert "…" not in text and "..." not in text
    assert all(len(line) <= width for line in text.splitlines())
    # No word is broken in two: everything that a wide console shows is there, word by word.
    wide = set(printed(views[name], 400).split())
    missing = {word for word in wide - set(text.split()) if not set(word) <= set("─━█▏▎▍▌▋▊▉")}
    assert not missing


@pytest.mark.parametrize("name", ["plan", "why", "explanation", "profile"])
def test_no_escape_codes_when_not_a_terminal(views: dict[str, Document], name: str) -> None:
    assert "\x1b" not in printed(views[name])
    assert "\x1b[" in printed(views[name], force_terminal=True)


def test_plan_shows_every_total_with_interval_and_origin(plan: Ledger) -> None:
    text = printed(plan_view(plan, True))
    for name, text_of in (("peak_bytes", units.bytes_), ("step_seconds", units.seconds), ("parameters", units.count)):
        assert text_of(plan.totals[name].value) in text
    step = plan.totals["step_seconds"]
    assert step.low is not None and units.seconds(step.low).split()[0] in text
    assert "exact" in text and "calculated" in text and "cited" in text
    assert "Fits:" in text and "Precision: fp32" in text
    assert all(component.component in text for component in plan.memory)


def test_plan_that_does_not_fit_says_so(plan: Ledger) -> None:
    assert "Does not fit:" in printed(plan_view(plan, False))


def test_absent_totals_are_words(plan: Ledger) -> None:
    poor = copy.deepcopy(plan)
    del poor.totals["energy_joules"]
    line = next(x for x in printed(plan_view(poor, True)).splitlines() if "Energy" in x)
    assert "not planned" in line


def test_why_marks_every_origin(plan: Ledger) -> None:
    text = flat(printed(why_view(plan)))
    for estimate in plan.totals.values():
        assert flat(estimate.basis) in text
    assert all(mark in text for mark in ("[calculated]", "[measured]", "[cited]", "[config]"))
    assert all(line.operation in text for line in plan.lines)


def test_explanation_says_the_same_as_the_document(document: dict[str, Any]) -> None:
    text = flat(printed(run_view(document)))
    assert document["bottleneck"] in text
    assert units.seconds(document["time"]["step"]["measured"]) in text
    assert "--set train.precision=bf16" in text
    assert "unattributed" in text and "Validation loss 5.210 nats/token" in text
    for note in document["notes"]:
        assert flat(note) in text


def test_explanation_of_a_bare_run(document: dict[str, Any]) -> None:
    bare = copy.deepcopy(document)
    for rows in (bare["time"]["phases"], bare["time"]["kinds"], bare["time"]["operations"]):
        for row in rows:
            row["measured"] = row["error"] = None
    bare["time"]["unattributed_seconds"] = bare["time"]["wall"] = None
    bare["time"]["step"] |= {"measured": None, "error": None}
    bare["losses"] = dict.fromkeys(bare["losses"])
    bare["remedies"] = []
    for check in ("step_time", "peak_memory", "unattributed"):
        bare["accuracy_met"][check] |= {"met": None, "error": None}
    text = printed(run_view(bare))
    assert "not measured" in text and "None" not in text and "nan" not in text
    assert not re.search(r"forward +[\d.]+ ms +0", text)


def test_missed_promises_are_words_not_only_colour(document: dict[str, Any]) -> None:
    missed = copy.deepcopy(document)
    missed["accuracy_met"]["step_time"] |= {"met": False, "error": 0.31}
    assert "MISSED" in printed(run_view(missed))


def test_profile_rates_carry_units() -> None:
    text = printed(profile_view(make_profile(bf16_factor=5), {"compute": 1.12}))
    assert re.search(r"(100(\.0)?|99\.\d) GFLOP/s", text) and re.search(r"(500|49\d) GFLOP/s", text)
    assert "20.0 GB/s" in text and "1.00M tokens/s" in text and "1.12 x" in text
    assert "120 GB/s" in text  # add: three fp32 tensors of 1e7 elements in 1 ms


def test_what_the_profile_lacks_is_said() -> None:
    profile = make_profile()
    profile.storage_bytes_per_second = None
    line = next(x for x in printed(profile_view(profile, {})).splitlines() if "Storage" in x)
    assert "not measured" in line


def test_unknown_totals_in_a_plan_do_not_break_why() -> None:
    ledger = Ledger("plan", totals={"peak_bytes": Estimate(2.0**20, Origin.CALCULATED, "a sum")})
    assert "1.00 MiB" in printed(why_view(ledger))
