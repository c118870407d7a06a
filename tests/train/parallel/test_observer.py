"""What ranks saw, put together: phases of a mean rank, collectives as lines, the slowest rank by phase."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ironlaw.explain.ranks import ranks_document
from ironlaw.ledger import Kind, Ledger, Line, Phase
from ironlaw.observe.clock import StepClock
from ironlaw.train.parallel.observer import OTHER, RankObserver, merge


def rank(number: int, forward: float, waited: float, position: int = 0) -> dict[str, Any]:
    return {
        "rank": number, "position": position, "step_seconds": 1.0, "peak_bytes": 100 + number,
        "phase_seconds": {"forward": forward, "communication": waited},
        "communication": [
            {"dimension": "shard", "kind": "all_gather", "count": 2.0, "bytes": 64.0, "seconds": waited + 0.1,
             "exposed_seconds": waited - 0.05}
        ],
    }  # fmt: skip


def test_phases_are_those_of_a_mean_rank_and_close() -> None:
    ledger = Ledger("run", phase_seconds={Phase.FORWARD: 0.8, Phase.COMMUNICATION: 0.2})
    merge(ledger, [rank(0, 0.8, 0.2), rank(1, 0.4, 0.6)])
    assert ledger.phase_seconds[Phase.FORWARD] == pytest.approx(0.6)
    assert ledger.phase_seconds[Phase.COMMUNICATION] == pytest.approx(0.4)
    lines = {line.operation: line for line in ledger.select(phase=Phase.COMMUNICATION)}
    assert lines["shard all_gather"].seconds == pytest.approx(0.35)
    assert lines[OTHER].seconds == pytest.approx(0.05)
    assert ledger.totals["peak_bytes"].value == 101
    (forward,) = [row for row in ledger.facts["spread"] if row["phase"] == "forward"]
    assert (forward["slowest_rank"], forward["fastest_rank"]) == (0, 1)


def test_explained_beside_the_plan() -> None:
    run = Ledger("run", phase_seconds={Phase.COMMUNICATION: 0.2})
    merge(run, [rank(0, 0.8, 0.2), rank(1, 0.4, 0.6)])
    planned = Line(Phase.COMMUNICATION, Kind.COLLECTIVE, "shard all_gather", 2, None, 64.0, 0.3)
    plan = Ledger("plan", lines=[planned], facts={"stages": [{"position": 0, "peak_bytes": 110.0}]})
    document = ranks_document(plan, run)
    assert document is not None
    (row,) = [row for row in document["communication"] if row["name"] == "shard all_gather"]
    assert (row["planned_bytes"], row["bytes"]) == (64.0, 64.0)
    assert row["hidden_seconds"] == pytest.approx(0.15)
    assert document["memory"][0]["error"] == pytest.approx(110 / 101 - 1)
    assert ranks_document(plan, Ledger("run")) is None


def test_waiting_inside_a_phase_is_not_that_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("ironlaw.observe.clock.time", SimpleNamespace(perf_counter=lambda: now[0]))
    clock = StepClock()
    with clock.step() as times, clock.phase(Phase.HOST):
        with clock.phase(Phase.FORWARD):
            now[0] += 3.0
            clock.waited("tp all_reduce", 1.0)
        now[0] += 0.5
    assert times.phase_seconds == {Phase.COMMUNICATION: 1.0, Phase.FORWARD: 2.0, Phase.HOST: 0.5}
    assert times.wall_seconds == 3.5 and times.waited_seconds == {"tp all_reduce": 1.0}


def test_collectives_overlap_again_after_a_recording_that_a_spike_has_ended() -> None:
    observer: Any = RankObserver.__new__(RankObserver)
    observer.traffic = SimpleNamespace(synchronous=False, reset=lambda: None)
    with pytest.raises(KeyError), observer.recording():
        assert observer.traffic.synchronous
        raise KeyError("back to an earlier step")
    assert not observer.traffic.synchronous
