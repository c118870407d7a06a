"""Names the bottleneck in one sentence, with its evidence; or none, and why.

The rules are read from rules.toml, with the functions that measure them. Adding a rule is adding an entry there; where
nothing declared measures it, a function under its name in `measures.py`, in `measures_of_code.py` if it is about how a
loop is written, or in `measures_of_devices.py` if it is about what it runs on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ironlaw import units
from ironlaw.explain import measures, measures_of_code, measures_of_devices
from ironlaw.explain.evidence import NOTICED, RunEvidence
from ironlaw.explain.rule import Axis, Measure, Rule, Tier
from ironlaw.files import read_toml
from ironlaw.ledger import Phase

MIN_STEPS = 10  # medians over fewer steps say more about the warm-up than about the run
EXPLAINED = 0.5  # of a symptom's share: a cause in the same phases that was measured to cost as much stands before it
MAX_UNATTRIBUTED = 0.30  # with more than this unnamed, any named cause may be the smaller one
MEASURES = measures.MEASURES | measures_of_code.MEASURES | measures_of_devices.MEASURES
FIGURES = measures.FIGURES | measures_of_code.FIGURES | measures_of_devices.FIGURES


def _part_of_phases(e: RunEvidence, phases: Sequence[str], fact: str) -> float | None:
    """Of these phases, or of the whole step, the fact has the part; in one of them alone, where it tells of each."""
    if fact not in e.run.facts:
        return None
    found: dict[str, Any] = e.fact(fact) or {}
    parts = ((phase, found.get(phase, found.get("part", 0.0))) for phase in phases)
    whole = {"step": 1.0}
    return float(sum(part * (whole.get(phase) or e.phase_share(Phase(phase)) or 0.0) for phase, part in parts))


def _rule(
    name: str, axis: str = "algorithm", tier: str = "fault", part_of: Sequence[str] = (), present: float = 0.0,
    gain: str = "", fact: str = "", place: str = "", remedy: str = "", saves: bool = True, figure: str = "",
    phases: Sequence[str] = (), **entry: Any,
) -> Rule:  # fmt: skip
    figures = FIGURES.get(name)
    if figure:
        figures = lambda e: [figure.format(**e.run.facts | (e.fact(place or name) or {}))]  # noqa: E731
    measure: Measure
    if part_of:
        measure, place = partial(_part_of_phases, phases=part_of, fact=name), name
    elif present:
        measure, place = partial(RunEvidence.found, fact=fact or name, value=present), "" if fact else name
        figures = figures or (None if "facts" in entry else lambda e: [])
        entry = {"threshold": 0.5, "noticed": NOTICED} | entry
    elif gain:
        measure = partial(RunEvidence.gain, remedy=gain, fact=fact)
    else:
        measure = MEASURES[name]
    return Rule(
        name, Axis(axis), measure=measure, figures=figures, place=place, tier=Tier[tier.upper()],
        remedy=remedy or gain, saves=saves and not present, phases=tuple(phases or part_of), **entry,
    )  # fmt: skip


RULES: tuple[Rule, ...] = tuple(
    _rule(name, **entry) for name, entry in read_toml(Path(__file__).with_name("rules.toml")).items()
)


@dataclass(frozen=True)
class Finding:
    """A rule that fired. `share` is the fraction of time its cause costs."""

    cause: Rule
    share: float
    sentence: str
    evidence: list[str]
    is_explained: bool = False  # a symptom, by a cause

    @property
    def rule(self) -> str:
        return self.cause.name

    @property
    def slight(self) -> bool:
        return self.share < self.cause.threshold

    @property
    def tier(self) -> Tier:
        return Tier.NOTICE if self.slight and self.cause.tier is Tier.FAULT else self.cause.tier

    @property
    def fault(self) -> bool:
        return self.tier in (Tier.FAULT, Tier.BEYOND) and not self.slight

    @property
    def weight(self) -> float:
        return self.share * (EXPLAINED if self.is_explained else 1.0)

    def explains(self, symptom: Finding) -> bool:
        """Whether it is a cause of half of what the symptom costs, in phases that both may be in."""
        known = self.cause.phases and symptom.cause.phases
        is_apart = known and set(self.cause.phases).isdisjoint(symptom.cause.phases)
        may_be = symptom.cause.symptom and not self.cause.symptom and self.tier is symptom.tier
        return bool(may_be and not is_apart and self.share >= EXPLAINED * symptom.share)

    def to_json(self) -> dict[str, Any]:
        cause = self.cause
        return {
            "rule": cause.name, "axis": str(cause.axis), "share": self.share, "threshold": cause.threshold,
            "sentence": self.sentence, "evidence": self.evidence, "advice": cause.advice, "source": cause.source,
            "fault": self.fault,
        }  # fmt: skip


@dataclass(frozen=True)
class Diagnosis:
    """`healthy`: no fault found. `abstained`: the evidence does not carry a verdict; the sentence says why."""

    sentence: str
    axis: Axis
    confidence: str  # "high", "medium", "low" or "none"
    evidence: list[str] = field(default_factory=list)
    advice: str = ""
    healthy: bool = False
    abstained: bool = False
    findings: list[Finding] = field(default_factory=list)  # the one that binds first
    not_tested: list[str] = field(default_factory=list)  # rules whose evidence the run lacks

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "axis": str(self.axis), "findings": [finding.to_json() for finding in self.findings]}


def diagnose(evidence: RunEvidence, rules: Sequence[Rule] = RULES) -> Diagnosis:
    """Try every rule, and name first what the first tier has the most of.

    A symptom (where time is lost, not why) counts half where a cause explains half of it, which says more.
    """
    findings, not_tested = _findings(evidence, rules)
    reason = _insufficient(evidence)
    if reason is None and not findings:
        reason = "no cause reaches its threshold" if len(not_tested) < len(rules) else "no rule has its evidence"
    if reason is not None:
        return Diagnosis(
            f"No bottleneck is named: {reason}.", Axis.UNKNOWN, "none", abstained=True,
            findings=findings, not_tested=not_tested,
        )  # fmt: skip
    first = findings[0]
    return Diagnosis(
        first.sentence, first.cause.axis, _confidence(evidence, findings), first.evidence, first.cause.advice,
        healthy=not any(f.fault for f in findings), findings=findings, not_tested=not_tested,
    )  # fmt: skip


def _findings(evidence: RunEvidence, rules: Sequence[Rule]) -> tuple[list[Finding], list[str]]:
    findings, not_tested = [], []
    for rule in rules:
        reading = rule.read(evidence)
        if reading is None:
            not_tested.append(rule.name)
        elif reading.share >= rule.minimum:
            findings.append(Finding(rule, reading.share, *rule.describe(evidence, reading)))

    findings = [replace(f, is_explained=any(cause.explains(f) for cause in findings)) for f in findings]

    def order(finding: Finding) -> tuple[Any, ...]:
        eases = (f for f in findings if f.rule == finding.cause.eased_by and f.share - finding.share > finding.share)
        eased = finding.slight or finding.cause.noticed is None  # what is a notice when slight is a fault otherwise
        ahead = next(eases, finding) if eased else finding
        return ahead.tier, ahead.slight, ahead.slight and ahead.cause.symptom, -ahead.weight, ahead is not finding

    return sorted(findings, key=order), not_tested


def _insufficient(evidence: RunEvidence) -> str | None:
    """Returns why no verdict may be given, None if it may."""
    if evidence.step is None:
        return "the step was not timed"
    if all(row.measured is None for row in evidence.gap.phases):
        return "the phases of the step were not timed"
    recorded = evidence.fact("source") == "trace"  # whoever traces has chosen the steps
    if not recorded and evidence.steps is not None and evidence.steps < MIN_STEPS:
        return f"the run has {evidence.steps} steps, and fewer than {MIN_STEPS} are mostly warm-up"
    if evidence.unattributed is not None and abs(evidence.unattributed) > MAX_UNATTRIBUTED:
        return f"{units.percent(evidence.unattributed, 0)} of the step has no name"
    return None


def _confidence(evidence: RunEvidence, findings: Sequence[Finding]) -> str:
    """High: well over its threshold, clear of the next cause, and the phases close. Each doubt is a step down."""
    first = findings[0]
    rivals = [f.weight for f in findings[1:] if f.tier is first.tier]
    doubts = [
        first.fault and first.share < 1.3 * first.cause.threshold,
        bool(rivals) and first.weight < 1.2 * max(rivals),
        evidence.unattributed is None or abs(evidence.unattributed) > 0.05,
        not first.fault and evidence.machine_speed is None,
    ]
    return ("high", "medium", "low")[min(2, sum(doubts))]
