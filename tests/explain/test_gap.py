"""The subtraction: it closes, absent stays absent, and the profiler's slowness is taken out."""

from __future__ import annotations

import pytest
from synthetic import make_run

from ironlaw.explain.gap import GapRow, reconcile, subtract_ledgers
from ironlaw.ledger import Estimate, Kind, Ledger, Line, MemoryLine, Origin, Phase


def by_name(rows: list[GapRow]) -> dict[str, GapRow]:
    return {row.name: row for row in rows}


@pytest.mark.parametrize("unattributed", [0.0, 0.01, 0.4, -0.02])
def test_phases_and_unattributed_are_the_step(plan: Ledger, unattributed: float) -> None:
    gap = subtract_ledgers(plan, make_run(plan, unattributed=unattributed))
    assert gap.unattributed_seconds is not None
    assert sum(row.measured or 0 for row in gap.phases) + gap.unattributed_seconds == pytest.approx(gap.step.measured)
    assert gap.unattributed_fraction == pytest.approx(unattributed, abs=1e-9)


@pytest.mark.parametrize("profiler", [1.0, 1.3, 4.0])
def test_operations_and_kinds_close_however_slow_the_profiler(plan: Ledger, profiler: float) -> None:
    gap = subtract_ledgers(plan, make_run(plan, profiler=profiler))
    phases = sum(row.measured or 0 for row in gap.phases)
    assert sum(row.measured or 0 for row in gap.kinds) == pytest.approx(phases)
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
        operations = sum(row.measured or 0 for row in gap.operations if row.phase is phase)
        assert operations == pytest.approx(by_name(gap.phases)[phase].measured)
        assert gap.scale[phase] == pytest.approx(1 / profiler)


def test_planned_side_is_the_plan_unchanged(plan: Ledger) -> None:
    gap = subtract_ledgers(plan, make_run(plan, profiler=1.5))
    assert sum(row.planned or 0 for row in gap.operations) == pytest.approx(plan.totals["step_seconds"].value)
    assert sum(row.planned or 0 for row in gap.memory) == plan.totals["peak_bytes"].value


def test_error_is_relative_to_the_measurement() -> None:
    assert GapRow("x", 9.0, 10.0).error == pytest.approx(-0.1)
    assert GapRow("x", 9.0, 10.0).missing == pytest.approx(1.0)


@pytest.mark.parametrize(("planned", "measured"), [(None, 1.0), (1.0, None), (None, None), (1.0, 0.0)])
def test_no_error_where_a_side_is_absent_or_zero(planned: float | None, measured: float | None) -> None:
    assert GapRow("x", planned, measured).error is None


def test_absent_is_never_zero() -> None:
    plan = Ledger("plan", memory=[MemoryLine("weights", 10), MemoryLine("activations", None)])
    plan.lines = [Line(Phase.FORWARD, Kind.MATMUL, "qkv", seconds=1.0), Line(Phase.FORWARD, Kind.NORM, "n")]
    run = Ledger("run", memory=[MemoryLine("weights", None)], phase_seconds={Phase.DATA: 0.0})
    gap = subtract_ledgers(plan, run)
    assert by_name(gap.memory)["weights"].measured is None
    assert "activations" not in by_name(gap.memory)
    assert by_name(gap.phases)["data"].measured == 0.0
    assert by_name(gap.phases)["data"].planned is None
    assert by_name(gap.phases)["forward"].measured is None
    assert by_name(gap.kinds)["matmul"].measured is None
    assert {row.name: (row.planned, row.measured) for row in gap.operations} == {"qkv": (1.0, None), "n": (None, None)}
    assert gap.unattributed_seconds is None and gap.unattributed_fraction is None


def test_without_a_profile_the_phases_still_compare(plan: Ledger) -> None:
    run = make_run(plan)
    run.lines = []
    gap = subtract_ledgers(plan, run)
    assert all(row.measured is None for row in gap.kinds)
    assert by_name(gap.phases)["forward"].error is not None
    assert gap.unattributed_fraction == pytest.approx(0.01)


def test_evaluation_is_not_part_of_the_step() -> None:
    run = Ledger("run", phase_seconds={Phase.FORWARD: 1.0, Phase.EVALUATION: 9.0})
    run.totals["step_seconds"] = Estimate(1.25, Origin.MEASURED, "median")
    gap = subtract_ledgers(Ledger("plan"), run)
    assert [row.name for row in gap.phases] == ["forward"]
    assert gap.unattributed_fraction == pytest.approx(0.2)


def test_operations_are_ranked_by_missing_seconds() -> None:
    def ledger(side: str, **seconds: float) -> Ledger:
        return Ledger(side, lines=[Line(Phase.FORWARD, Kind.MATMUL, n, seconds=s) for n, s in seconds.items()])

    gap = subtract_ledgers(ledger("plan", a=1.0, b=5.0, c=2.0), ledger("run", a=1.1, b=3.0, d=2.5))
    assert [row.name for row in gap.operations] == ["d", "b", "c", "a"]


def test_unmatched_operations_keep_their_seconds(plan: Ledger) -> None:
    run = make_run(plan)
    run.lines.append(Line(Phase.FORWARD, Kind.OTHER, "other", seconds=0.001))
    gap = subtract_ledgers(plan, run)
    other = by_name(gap.kinds)["other"]
    assert other.planned == 0 and other.measured  # a plan lists all that it knows
    assert sum(row.measured or 0 for row in gap.kinds) == pytest.approx(sum(row.measured or 0 for row in gap.phases))


def test_reconcile_leaves_the_given_ledger_alone(plan: Ledger) -> None:
    run = make_run(plan, profiler=2.0)
    before = [line.seconds for line in run.lines]
    scaled, _ = reconcile(run)
    assert [line.seconds for line in run.lines] == before
    assert scaled.lines[0].seconds == pytest.approx((before[0] or 0) / 2)


def test_two_runs_compare_like_a_plan_and_a_run(plan: Ledger) -> None:
    before, after = make_run(plan, profiler=1.5), make_run(plan, profiler=1.1, kinds={"matmul": 0.8})
    kinds = by_name(subtract_ledgers(before, after).kinds)
    assert kinds["norm"].error == pytest.approx(0.0)
    assert kinds["matmul"].error == pytest.approx(0.25)


def test_what_a_profiler_costs_comes_off_the_host(plan: Ledger) -> None:
    forward, kinds = Phase.FORWARD, ((Kind.MATMUL, 0.06), (Kind.HOST, 0.05))
    run = Ledger("run", [Line(forward, kind, str(kind), seconds=s) for kind, s in kinds], phase_seconds={forward: 0.08})
    assert [line.seconds for line in reconcile(run)[0].lines] == pytest.approx([0.06, 0.02])
    run.phase_seconds[forward] = 0.03  # quicker than what was recorded without any of the host
    assert reconcile(run)[0].lines[1].seconds == pytest.approx(0.03 * 0.005 / 0.065)
    run.phase_seconds[forward] = 0.22  # slower: nothing is known of where
    assert [line.seconds for line in reconcile(run)[0].lines] == pytest.approx([0.12, 0.1])
