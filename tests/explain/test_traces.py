"""`ironlaw explain trace.json`: as far as it goes, and what it cannot know is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from ironlaw.explain.runs import explain_path

TRACES = Path(__file__).parents[1] / "observe" / "traces"


def test_a_device_trace_has_rates_and_says_what_is_unknown() -> None:
    document = explain_path(TRACES / "gpu_synthetic.json.gz").to_json()
    # 2 products of 275 GFLOP in 10 ms, on a device whose dense bf16 peak the catalogue has.
    assert document["mfu"]["measured"] == pytest.approx(2 * 275e9 / 0.01 / 989e12, rel=0.01)
    fall = document["waterfall"]
    assert sum(d["seconds"] or 0 for d in fall["drops"]) == pytest.approx(0.010 - (fall["ideal_seconds"] or 0))
    assert document["time"]["unattributed_seconds"] == 0
    assert any("one trace is one rank" in note for note in document["notes"])


def test_a_trace_without_shapes_claims_no_rate() -> None:
    document = explain_path(TRACES / "cpu_plain.json.gz").to_json()
    assert document["mfu"]["measured"] is None and document["flops_per_step"]["measured"] is None
    assert any("record_shapes=True" in note for note in document["notes"])


@pytest.mark.parametrize(
    ("name", "rule"),
    [("gpu_eager", "launch_bound"), ("gpu_ddp", "communication_bound"), ("gpu_compiled", None)],
)
def test_a_gpu_trace_gets_a_verdict(name: str, rule: str | None) -> None:
    document = explain_path(TRACES / f"{name}.json.gz").to_json()
    assert document["time"]["unattributed_seconds"] == pytest.approx(0.0, abs=1e-12)
    first = next((f for f in document["diagnosis"]["findings"] if f["fault"]), None)
    assert (first["rule"] if first else None) == rule
    assert first is None or first["advice"]
