"""Subtracts one ledger from another, key by key, so that every missing second and byte has a name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ironlaw.ledger import STEP_PHASES, Estimate, Kind, Ledger, Line, Phase, relative_error, subtract, summed
from ironlaw.workload.recompute import RECOMPUTED_SUFFIX

# End the name of a forward operation that the backward pass runs again.
RECOMPUTED_SUFFIXES = (RECOMPUTED_SUFFIX, "_recomputed")
MIN_HOST = 0.1  # of the host's profiled seconds: some calling there always is
# Phases that a profiler records as no operation: in the table of kinds they stand for themselves.
PHASE_KINDS = {Phase.DATA: Kind.DATA, Phase.HOST: Kind.HOST}


@dataclass(frozen=True)
class GapRow:
    """One quantity on both sides, in SI units. What is unknown is None, never 0."""

    name: str
    planned: float | None
    measured: float | None
    planned_interval: tuple[float, float] | None = None
    measured_interval: tuple[float, float] | None = None

    @property
    def error(self) -> float | None:
        """(planned - measured) / measured: positive means the plan was too high."""
        return relative_error(self.measured, self.planned)

    @property
    def missing(self) -> float | None:
        """Measured minus planned: positive is time (or memory) that the plan did not foresee."""
        return subtract(self.measured, self.planned)

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "name": self.name, "planned": self.planned, "measured": self.measured, "error": self.error,
        }  # fmt: skip
        if self.planned_interval or self.measured_interval:
            document["planned_interval"] = list(self.planned_interval) if self.planned_interval else None
            document["measured_interval"] = list(self.measured_interval) if self.measured_interval else None
        return document


@dataclass(frozen=True)
class OperationRow(GapRow):
    """Seconds per step of one operation in one phase; `bound` is the ceiling that the plan says sets its time."""

    phase: Phase = Phase.IDLE
    kind: Kind = Kind.OTHER
    bound: str | None = None

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"phase": str(self.phase), "kind": str(self.kind), "bound": self.bound}


@dataclass(frozen=True)
class Gap:
    """Two ledgers side by side. Seconds are per optimizer step; phases + unattributed = the measured step."""

    totals: dict[str, GapRow]
    phases: list[GapRow]
    kinds: list[GapRow]
    operations: list[OperationRow]  # by absolute missing seconds, the largest first
    memory: list[GapRow]
    unattributed_seconds: float | None
    scale: dict[Phase, float]  # what the profiled lines of a phase were multiplied by to sum to its measured seconds

    @property
    def step(self) -> GapRow:
        return self.totals.get("step_seconds", GapRow("step_seconds", None, None))

    @property
    def unattributed_fraction(self) -> float | None:
        """Of the measured step. Negative when the phases, each a mean, sum to more than the typical step."""
        if self.unattributed_seconds is None or not self.step.measured:
            return None
        return self.unattributed_seconds / self.step.measured


def subtract_ledgers(plan: Ledger, run: Ledger) -> Gap:
    """Returns rows for everything that either side knows. Both may be runs: then "planned" means "before"."""
    run, scale = reconcile(run)
    plan, _ = reconcile(plan)  # changes nothing in a plan; another run was profiled too
    totals = {}
    for name in dict.fromkeys((*plan.totals, *run.totals)):
        two = plan.totals.get(name), run.totals.get(name)
        planned, measured = (None if side is None else side.value for side in two)
        totals[name] = GapRow(name, planned, measured, *map(_interval, two))
    planned_phases, phases = _step_phases(plan), _step_phases(run)
    step = run.totals.get("step_seconds")
    unattributed = step.value - sum(phases.values()) if step is not None and phases else None
    if unattributed is not None and step is not None and abs(unattributed) < 1e-9 * step.value:
        unattributed = 0.0  # what rounding leaves of phases that close
    components = dict.fromkeys(line.component for line in (*plan.memory, *run.memory))
    return Gap(
        totals=totals,
        phases=_rows((p for p in Phase if p in STEP_PHASES), planned_phases, phases),
        kinds=_rows(Kind, _kinds(plan), _kinds(run)),
        operations=_operations(plan, run),
        memory=_rows(components, plan.memory_bytes(), run.memory_bytes()),
        unattributed_seconds=unattributed,
        scale=scale,
    )


def reconcile(run: Ledger) -> tuple[Ledger, dict[Phase, float]]:
    """Scale profiled lines so that those of each phase sum to its seconds measured with the profiler off.

    What a profiler costs, 20% and more of a step of small operations, it costs at every call, between the operations:
    it comes off the host's seconds first. What is more than those, or less than measured, is shared by all.
    """
    operations, host = _profiled(run, of_host=False), _profiled(run, of_host=True)
    scale: dict[Phase, float] = {}
    of_host: dict[Phase, float] = {}
    for phase, seconds in run.phase_seconds.items():
        work, calling = operations.get(phase) or 0.0, host.get(phase) or 0.0
        if work + calling > 0:
            left = min(calling, max(MIN_HOST * calling, seconds - work)) if seconds < work + calling else calling
            scale[phase] = seconds / (work + left)
            of_host[phase] = scale[phase] * left / calling if calling else 1.0

    def scaled(line: Line) -> Line:
        factor = (of_host if line.kind is Kind.HOST else scale).get(line.phase)
        return line if line.seconds is None or factor is None else replace(line, seconds=line.seconds * factor)

    return replace(run, lines=[scaled(line) for line in run.lines]), scale


def _profiled(run: Ledger, of_host: bool) -> dict[Phase, float | None]:
    return summed((x for x in run.lines if (x.kind is Kind.HOST) is of_host), lambda line: line.phase)


def recomputed_seconds(run: Ledger) -> float:
    """Returns seconds per step of operations that run again, with the Python between them if a recording has it."""
    lines, scale = reconcile(run)
    operations = sum(line.seconds or 0.0 for line in lines.lines if line.operation.endswith(RECOMPUTED_SUFFIXES))
    whole = run.facts.get("recomputed_seconds") or 0.0
    return max(operations, float(whole) * scale.get(Phase.BACKWARD, 1.0))


def _interval(estimate: Estimate | None) -> tuple[float, float] | None:
    if estimate is None or estimate.low is None or estimate.high is None:
        return None
    return estimate.low, estimate.high


def _step_phases(ledger: Ledger) -> dict[Phase, float]:
    """Returns the phases of a step: evaluation and checkpoints happen between steps."""
    return {phase: s for phase, s in ledger.seconds_by_phase().items() if phase in STEP_PHASES}


def _of_step(ledger: Ledger) -> list[Line]:
    return [line for line in ledger.lines if line.phase in STEP_PHASES]


def _kinds(ledger: Ledger) -> dict[Kind, float]:
    """Returns seconds by kind within the step; none if no operation was timed: phases alone say nothing of kinds."""
    timed = [line for line in _of_step(ledger) if line.seconds is not None]
    sums: dict[Kind, Any] = summed(timed, lambda line: line.kind)
    covered = {line.phase for line in timed}
    for phase, kind in PHASE_KINDS.items():
        if timed and phase in ledger.phase_seconds and phase not in covered:
            sums[kind] = sums.get(kind, 0.0) + ledger.phase_seconds[phase]
    return sums


def _rows(names: Iterable[Any], planned: Mapping[Any, float], measured: Mapping[Any, float]) -> list[GapRow]:
    """Returns a row for each name that at least one side knows, in the order of the names."""
    return [
        GapRow(str(name), planned.get(name), measured.get(name))
        for name in names
        if name in planned or name in measured
    ]


def _operations(plan: Ledger, run: Ledger) -> list[OperationRow]:
    planned, measured = (summed(_of_step(side), lambda line: line.key) for side in (plan, run))
    bounds = {line.key: line.bound for line in (*run.lines, *plan.lines) if line.bound is not None}
    rows = [
        OperationRow(key[2], planned.get(key), measured.get(key), None, None, key[0], key[1], bounds.get(key))
        for key in dict.fromkeys((*planned, *measured))
    ]
    # By the seconds that plan and run disagree by; an operation only one side has counts whole.
    return sorted(rows, key=lambda row: abs((row.measured or 0.0) - (row.planned or 0.0)), reverse=True)
