"""The one table: in and out of JSON, sums that keep absent apart from zero, and subtraction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ironlaw.errors import UserError
from ironlaw.ledger import (
    SCHEMA_VERSION,
    Estimate,
    Kind,
    Ledger,
    Line,
    MemoryLine,
    Origin,
    Phase,
    relative_error,
    subtract,
)


def a_ledger() -> Ledger:
    return Ledger(
        side="plan",
        lines=[
            Line(Phase.FORWARD, Kind.MATMUL, "qkv", 4, 1000, 200.0, 0.5, None, "compute"),
            Line(Phase.FORWARD, Kind.NORM, "ffn_norm", 4, None, 300.0, 0.25, bound="memory"),
            Line(Phase.BACKWARD, Kind.MATMUL, "qkv", 8, 2000, 400.0, 1.0, origin=Origin.MEASURED),
            Line(Phase.COMMUNICATION, Kind.COLLECTIVE, "all_reduce"),
        ],
        memory=[
            MemoryLine("weights", 400.0),
            MemoryLine("activations", None, note="not measured"),
            MemoryLine("batch", 0),
        ],
        totals={
            "parameters": Estimate(100, Origin.CALCULATED, "sum over shapes"),
            "step_seconds": Estimate(1.75, Origin.CALCULATED, "curves", 1.5, 2.0),
        },
        phase_seconds={},
        facts={"model": {"name": "x"}, "threads": 2, "nothing": None},
    )


def test_json_round_trip(tmp_path: Path) -> None:
    ledger = a_ledger()
    text = json.dumps(ledger.to_json(), allow_nan=False)
    assert Ledger.from_json(json.loads(text)) == ledger
    assert json.loads(text)["schema_version"] == SCHEMA_VERSION
    ledger.phase_seconds = {Phase.FORWARD: 0.8, Phase.DATA: 0.0}
    ledger.save(tmp_path / "ledger.json")
    assert Ledger.load(tmp_path / "ledger.json") == ledger


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1, "1", None])
def test_another_schema_version_is_refused(version: object) -> None:
    with pytest.raises(UserError, match=f"schema version {version}"):
        Ledger.from_json(a_ledger().to_json() | {"schema_version": version})


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"schema_version": 1}', '{"schema_version": 1, "side": "run"}'])
def test_what_is_no_ledger_is_a_user_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ledger.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="ledger"):
        Ledger.load(path)
    a_ledger().save(path)
    path.write_text(path.read_text(encoding="utf-8").replace('"measured"', '"guessed"'), encoding="utf-8")
    with pytest.raises(UserError, match=r"no ledger that this Ironlaw wrote.*guessed"):
        Ledger.load(path)


def test_keys_of_a_later_minor_version_are_passed_over() -> None:
    document = a_ledger().to_json()
    document["lines"][0]["colour"] = "blue"
    assert Ledger.from_json(document) == a_ledger()


def test_absent_is_not_zero_in_sums() -> None:
    ledger = a_ledger()
    assert ledger.seconds_by_phase() == {Phase.FORWARD: 0.75, Phase.BACKWARD: 1.0}  # communication: nobody knows
    assert ledger.seconds_by_kind() == {Kind.MATMUL: 1.5, Kind.NORM: 0.25}
    assert ledger.memory_bytes() == {"weights": 400.0, "batch": 0}  # 0 was looked at, activations were not
    assert ledger.flops() == 3000


def test_a_zero_among_absent_ones_is_known() -> None:
    lines = [Line(Phase.DATA, Kind.DATA, name, seconds=s) for name, s in (("a", None), ("b", 0.0), ("c", None))]
    assert Ledger("run", lines=lines).seconds_by_phase() == {Phase.DATA: 0.0}


def test_measured_phases_go_before_sums_of_lines() -> None:
    ledger = a_ledger()
    ledger.phase_seconds = {Phase.FORWARD: 0.9}
    assert ledger.seconds_by_phase() == {Phase.FORWARD: 0.9}


def test_subtraction_keeps_absent() -> None:
    assert subtract(3.0, 1.0) == 2.0
    assert subtract(0.0, 1.0) == -1.0
    assert subtract(None, 1.0) is None and subtract(1.0, None) is None
    assert relative_error(2.0, 3.0) == 0.5  # positive: planned too much
    assert relative_error(2.0, 0.0) == -1.0
    assert relative_error(0.0, 1.0) is None and relative_error(None, 1.0) is None and relative_error(1.0, None) is None


def test_select_by_fields() -> None:
    ledger = a_ledger()
    assert [line.flops for line in ledger.select(operation="qkv")] == [1000, 2000]
    assert [line.flops for line in ledger.select(operation="qkv", phase=Phase.BACKWARD)] == [2000]
    assert list(ledger.select(operation="none")) == []


def test_an_interval_scales_with_its_value_and_exact_stays_exact() -> None:
    totals = a_ledger().totals
    scaled = totals["step_seconds"].scaled(10, "ten steps")
    assert (scaled.value, scaled.low, scaled.high, scaled.basis) == (17.5, 15.0, 20.0, "ten steps")
    assert totals["parameters"].scaled(2).to_json()["interval"] is None
