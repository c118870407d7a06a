"""Every second between the ideal and the measured step has one name, and the drawings show them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from synthetic import make_run, write_run

from ironlaw.config import RunConfig
from ironlaw.explain.energy import energy_use
from ironlaw.explain.explanation import explain_run
from ironlaw.explain.gap import subtract_ledgers
from ironlaw.explain.roofline import roofline
from ironlaw.explain.waterfall import waterfall
from ironlaw.ledger import Estimate, Ledger, Origin
from ironlaw.machine.profile import Profile
from ironlaw.report import charts


def fall(plan: Ledger, **changes: Any) -> dict[str, Any]:
    run = make_run(plan, **changes)
    return waterfall(plan, subtract_ledgers(plan, run))


def seconds(document: dict[str, Any]) -> dict[str, float]:
    return {drop["name"]: drop["seconds"] or 0.0 for drop in document["drops"]}


@pytest.mark.parametrize("changes", [{}, {"kinds": {"matmul": 1.6}}, {"phases": {"data": 0.3}}, {"unattributed": 0.2}])
def test_it_closes(plan: Ledger, changes: dict[str, Any]) -> None:
    document = fall(plan, **changes)
    parts = document["ideal_seconds"] + sum(seconds(document).values())
    assert parts == pytest.approx(document["step_seconds"], rel=1e-9)
    assert document["mfu"] == pytest.approx(document["ideal_seconds"] / document["step_seconds"])
    assert document["hfu"] == document["mfu"]  # nothing is recomputed here
    left = [drop["utilisation_after"] for drop in document["drops"] if drop["seconds"]]
    assert left[-1] == pytest.approx(document["mfu"])


def test_each_cause_has_its_own_step(plan: Ledger) -> None:
    healthy = seconds(fall(plan))
    assert healthy["shape"] > 0 and healthy["memory"] > 0 and healthy["launch"] > 0
    data = seconds(fall(plan, phases={"data": 0.3}))
    assert data["data"] == pytest.approx(0.3) and data["shape"] == pytest.approx(healthy["shape"])
    slow = fall(plan, kinds={"matmul": 1.6})
    assert seconds(slow)["overhead"] > healthy["overhead"] + 0.01
    overhead = next(drop for drop in slow["drops"] if drop["name"] == "overhead")
    assert overhead["operations"] and overhead["measured"]
    assert seconds(fall(plan, unattributed=0.2))["unattributed"] > 10 * healthy["unattributed"]


def test_a_run_alone_has_no_utilisation(plan: Ledger) -> None:
    run = make_run(plan)
    alone = waterfall(Ledger("plan"), subtract_ledgers(Ledger("plan"), run))
    assert alone["mfu"] is None and alone["ideal_seconds"] is None
    assert sum(seconds(alone).values()) == pytest.approx(alone["step_seconds"], rel=1e-9)


def test_no_operation_is_above_the_roof_of_its_own_plan(plan: Ledger) -> None:
    roof = roofline(plan, make_run(plan))
    assert roof is not None
    for point in roof["points"]:
        ceiling = min(roof["peak_flops_per_second"], point["intensity"] * roof["copy_bytes_per_second"])
        assert 0 < point["flops_per_second"] <= 1.05 * ceiling or point["kind"] == "attention"
    assert {p["kind"] for p in roof["points"]} == {"matmul", "attention"}
    assert roofline(plan, Ledger("run")) is None


def test_energy_says_how_it_is_known(plan: Ledger) -> None:
    run = make_run(plan)
    guessed = energy_use(plan, run)
    assert guessed is not None and not guessed["measured"] and guessed["interval"][0] < guessed["joules"]
    run.totals["energy_joules"] = Estimate(3.6e6, Origin.MEASURED, "counters")
    known = energy_use(plan, run)
    assert known is not None and known["measured"] and known["kwh"] == pytest.approx(1.0)
    assert 0.2 < known["co2_kg"] < 0.8  # the world's grid


def test_the_drawings_name_what_they_show(tmp_path: Path, config: RunConfig, plan: Ledger, profile: Profile) -> None:
    line = {
        "seconds": 0.1, "lanes": ["phases", "operations"],
        "segments": [
            {"lane": "phases", "label": "forward", "style": "forward", "start": 0.0, "end": 0.04, "calls": 1},
            {"lane": "operations", "label": "blocks.*: matmul", "style": "matmul", "start": 0.0, "end": 0.03,
             "calls": 9},
        ],
    }  # fmt: skip
    run = make_run(plan, facts={"timeline": line})
    document = explain_run(write_run(tmp_path / "run", config, plan, run), profile).to_json()
    falling = str(charts.waterfall(document["waterfall"]))
    assert "memory-bound operations" in falling and "measured step" in falling and falling.count("<rect") >= 5
    assert str(charts.roofline(document["roofline"])).count("<circle") == len(document["roofline"]["points"])
    shown = str(charts.timeline(document["timeline"]))
    assert "blocks.*: matmul" in shown and 'class="part-forward"' in shown
