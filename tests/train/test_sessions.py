"""The ledger of a run is of all its sessions, and says what was done twice."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ironlaw.config import RunConfig
from ironlaw.errors import UserError
from ironlaw.machine import host
from ironlaw.train.history import Journal, read_sessions
from ironlaw.train.result import Outcome
from ironlaw.train.run_directory import RunDirectory

Config = Callable[..., RunConfig]
Train = Callable[..., Outcome]


def sums(metrics: list[dict[str, Any]], *names: str) -> float:
    return sum(entry.get(name, 0.0) for entry in metrics for name in names)


@pytest.mark.parametrize("killed", [False, True])
def test_a_resumed_run_has_one_ledger_of_all_its_sessions(
    tiny_config: Config, train: Train, train_until: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool,
    read_metrics: Callable[[Path], list[dict[str, Any]]],
) -> None:  # fmt: skip
    config = tiny_config(train={"steps": 40, "profile_steps": 2}, checkpoint={"every": 10}, evaluation={"every": 15})
    run = tmp_path / "run"
    falling = itertools.count(10**9, -1000)  # the process was largest in its first step, which is a warm-up
    monkeypatch.setattr(host, "resident_bytes", lambda: next(falling))
    with monkeypatch.context() as patch:
        if killed:  # a killed process writes no last line
            patch.setattr(Journal, "abandon", lambda *arguments: None)
        train_until(33, config, run)
    before, profile = read_metrics(run), (run / "profile.json").read_text()
    (run / "profile.json").write_text(profile.replace('"forward"', '"onward"', 1))
    with pytest.raises(UserError, match=r"profile\.json is no ledger"):
        train(config, run, resume=True)
    assert read_metrics(run) == before  # refused before a step is taken, not when all are
    (run / "profile.json").write_text(profile)
    outcome = train(config, run, resume=True)
    ledger, facts = outcome.ledger, outcome.ledger.facts
    first, second = facts["sessions"]
    assert (first["from_step"], first["to_step"], first["repeated_steps"]) == (0, 33, 3)
    assert first["how"] == ("killed" if killed else "Interruption: pulled the plug")
    assert (second["from_step"], second["to_step"], second["how"]) == (30, 40, "done")
    assert facts["started"] == first["started"] and first["started"] <= second["started"]

    wall = facts["wall_seconds"]
    entries = read_metrics(run)
    # Steps 31 to 33 were done twice; everything the first session spent is there, once.
    assert wall["repeated"] == pytest.approx(sums(before[30:], "seconds", "evaluation_seconds", "checkpoint_seconds"))
    unrecorded = [entry for entry in entries if not entry.get("recorded")]
    assert wall["training"] == pytest.approx(sums(unrecorded, "seconds"))
    assert wall["evaluation"] == pytest.approx(sums(entries, "evaluation_seconds"))
    assert ledger.totals["total_seconds"].value == pytest.approx(sum(wall.values()))
    # The mean step is over the steps of both, warm-up and recorded ones apart.
    counted = [e for e in entries if not e.get("recorded") and not e.get("warmup")]
    assert {e["step"] for e in counted} >= {20, 39}
    assert f"of {len(counted)} steps" in ledger.totals["step_seconds"].basis
    assert ledger.totals["resident_bytes"].value == max(e["resident_bytes"] for e in entries)
    # The second session was too short to record steps: what the first one recorded is kept.
    assert [e["step"] for e in entries if e.get("recorded")] == [6, 7]
    assert any(line.operation == "qkv" for line in ledger.lines)


def test_sessions_on_another_setting_are_not_averaged(tiny_config: Config, train: Train, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tiny_config(train={"steps": 20}), run)
    outcome = train(tiny_config(train={"steps": 40, "micro_batch": 2}), run, resume=True)
    assert "of 15 steps" in outcome.ledger.totals["step_seconds"].basis  # 20 less its warm-up
    assert len(outcome.ledger.facts["sessions"]) == 2
    assert outcome.ledger.totals["total_seconds"].value > outcome.ledger.facts["sessions"][1]["seconds"]


def test_a_run_killed_before_its_first_checkpoint(
    tiny_config: Config, train: Train, train_until: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "abandon", lambda *arguments: None)
        for step in (2, 3):
            train_until(step, tiny_config(), tmp_path / "run", resume=True)
    outcome = train(tiny_config(), tmp_path / "run", resume=True)
    sessions = read_sessions(tmp_path / "run" / "sessions.jsonl")
    assert [(s.from_step, s.to_step, s.repeated_steps) for s in sessions] == [(0, 2, 2), (0, 3, 3), (0, 12, 0)]
    assert outcome.ledger.facts["wall_seconds"]["repeated"] > 0


@pytest.mark.parametrize("line", [
    '{"session": 1, "started": 5, "from_step": 0, "setting": {}}',
    '{"session": 1, "started": "now", "from_step": "a", "setting": {}}', '{"session": [], "started": "now"}',
])  # fmt: skip
def test_a_line_of_no_session_is_said(tmp_path: Path, line: str) -> None:
    (tmp_path / "sessions.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match="a line of no session"):
        read_sessions(tmp_path / "sessions.jsonl")


@pytest.mark.parametrize("change", ['"loss": []', '"loss": "low"', '"forward_seconds": null', '"step": 1.5'])
def test_a_line_of_no_step_is_said(tmp_path: Path, change: str) -> None:
    run = RunDirectory(tmp_path)
    run.metrics_file.write_text('{"step": 1, "seconds": 0.1, "loss": "nan"}\n')
    assert len(run.metrics()) == 1
    run.metrics_file.write_text(f'{{"step": 1, "seconds": 0.1, "loss": 2.0, {change}}}\n')
    with pytest.raises(UserError, match="of no step"):
        run.metrics()
