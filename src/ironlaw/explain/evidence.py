"""Evidence of a diagnosis: shares and rates computed from a plan, a run and their gap. Unknown values are None."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ironlaw.explain.gap import Gap
from ironlaw.ledger import Kind, Ledger, Phase
from ironlaw.machine.interference import MAX_OTHER_LOAD
from ironlaw.units import percent

NOTICED = 0.001  # the value of what is named though it costs nothing here


@dataclass(frozen=True)
class RunEvidence:
    """All shares are fractions of the measured step unless their name says wall (of the training command)."""

    plan: Ledger
    run: Ledger
    gap: Gap
    gains: Mapping[str, float] = field(default_factory=dict)  # remedy -> planned gain, fraction of the planned run

    @property
    def step(self) -> float | None:
        return self.gap.step.measured or None

    @property
    def steps(self) -> int | None:
        """Finished; an interrupted run has fewer than its config says."""
        facts = self.run.facts
        return facts.get("steps_done", facts.get("steps"))

    @property
    def unattributed(self) -> float | None:
        return self.gap.unattributed_fraction

    @property
    def machine_speed(self) -> float | None:
        """Speed relative to what the plan expects of this machine; below 1 it was slower during the run."""
        return self.run.facts.get("machine_speed")

    @property
    def tolerance(self) -> float:
        """Share by which a plan may be off: one by tracing was not fitted to this module."""
        return 0.25 if self.run.facts.get("source") == "observe" else 0.0

    @property
    def acts(self) -> bool:
        """Whether most passes without gradients are in training mode: an agent plays what it learns from next."""
        return float(self.fact("rollouts") or 0.0) >= 0.5

    @property
    def plan_is_of_another_machine(self) -> bool:
        """Whether exceeding the plan means nothing. Ranks on one processor share its cores, and each one's plan has all
        of them; with more threads than cores the plan has as many as cores; other programs slow a loop."""
        ranks, threads, cores = (self.fact(name) or 1 for name in ("world_size", "threads", "cores"))
        shared = self.fact("source") == "observe" and (self.fact("other_load") or 0.0) > MAX_OTHER_LOAD
        crowded = ranks > 1 or (self.fact("cores") is not None and threads > cores)
        return self.fact("device") == "cpu" and (shared or crowded)

    def fact(self, name: str) -> Any:
        return self.run.facts.get(name)

    def found(self, fact: str, value: float) -> float | None:
        """The value if the run has such a thing, 0 if it was looked for, None if it was not."""
        return None if fact not in self.run.facts else value if self.fact(fact) else 0.0

    def gain(self, remedy: str, fact: str = "") -> float | None:
        """The planned gain of a remedy; with `fact` at least a notice, where the run has what it is for."""
        gain = self.gains.get(remedy)
        return self.found(fact, max(gain or 0.0, NOTICED)) if fact else gain

    def lines(self, phase: Phase) -> list[tuple[str, float]]:
        """Returns lines of the user's code with their share of the phase, the largest first."""
        return [(place, share) for place, share in (self.fact("lines") or {}).get(str(phase), []) if place != "?"]

    def line_figures(self, phase: Phase) -> list[str]:
        """Returns the lines that take a tenth of the phase and more, as figures."""
        return [f"{place}: {percent(share, 0)} of it" for place, share in self.lines(phase) if share >= 0.1]

    def phase_share(self, phase: Phase) -> float | None:
        return self._share(row.measured for row in self.gap.phases if row.name == str(phase))

    def kind_share(self, kind: Kind) -> float | None:
        return self._share(row.measured for row in self.gap.kinds if row.name == str(kind))

    def bound_share(self, bound: str) -> float | None:
        """Returns the share of operations whose time this ceiling sets; None if no operation was timed."""
        if not self._timed():
            return None
        return self._share([0.0, *(row.measured for row in self.gap.operations if row.bound == bound)])

    def wall_share(self, *names: str) -> float | None:
        """Returns the share of wall seconds of training, evaluation and checkpoints together (startup is paid once)."""
        wall = self.run.facts.get("wall_seconds") or {}
        loop = [wall[name] for name in ("training", "evaluation", "checkpoint") if wall.get(name) is not None]
        if any(wall.get(name) is None for name in names) or not sum(loop):
            return None
        return float(sum(wall[name] for name in names) / sum(loop))

    def planned_flops(self, kind: Kind) -> float | None:
        flops = [line.flops for line in self.plan.select(kind=kind) if line.flops is not None]
        return float(sum(flops)) if flops else None

    def _explained_seconds(self, kind: Kind) -> float | None:
        """Returns seconds of a kind that its shapes explain: measured, at most as planned for the machine's speed.

        What the measurement exceeds the plan by is another matter (`off_plan`), with another remedy.
        """
        row = next((row for row in self.gap.kinds if row.name == str(kind)), None)
        if row is None or row.measured is None or row.planned is None:
            return None if row is None else row.measured
        return min(row.measured, row.planned / (self.machine_speed or 1.0))

    def peak_rate(self) -> float | None:
        """Returns FLOP/s of large matrix products at the run's precision and the machine's speed during the run."""
        peak = self.plan.facts.get("matmul_peak_flops_per_second")
        typical_slowdown = (self.plan.facts.get("slowdown") or {}).get("compute", 1.0)
        return None if peak is None else float(peak) * (self.machine_speed or 1.0) / typical_slowdown

    def rate(self, kind: Kind) -> float | None:
        """Returns FLOP/s that a kind attains by its shapes."""
        flops, seconds = self.planned_flops(kind), self._explained_seconds(kind)
        return flops / seconds if flops is not None and seconds else None

    def excess_share(self, kind: Kind, reference_rate: float | None) -> float | None:
        """Returns time of a kind above what its FLOPs take at a reference rate, as a share of the step."""
        flops, seconds = self.planned_flops(kind), self._explained_seconds(kind)
        if flops is None or seconds is None or not reference_rate or self.step is None:
            return None
        return max(0.0, seconds - flops / reference_rate) / self.step

    def _timed(self) -> bool:
        return any(row.measured is not None for row in self.gap.operations)

    def _share(self, seconds: Iterable[float | None]) -> float | None:
        known = [s for s in seconds if s is not None]
        return sum(known) / self.step if known and self.step else None
