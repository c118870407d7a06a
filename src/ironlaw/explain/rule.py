"""Defines a rule of diagnosis: a measure, a threshold, and the words for what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Any

from ironlaw.explain.evidence import NOTICED, RunEvidence
from ironlaw.units import percent, seconds


class Axis(StrEnum):
    """The taxonomy: what would have to change for the run to be faster."""

    DATA = "data"  # how batches come
    ALGORITHM = "algorithm"  # what is computed: model, batch, precision, schedule
    MACHINE = "machine"  # what it is computed on, and what else runs there
    UNKNOWN = "unknown"


class Tier(IntEnum):
    """The order in which findings are named; within a tier the one that costs the most comes first. A slow machine
    slows everything, including what the code does, and a faster one leaves that as large a share of the step."""

    FAULT = 0  # a fault that shows in the run itself
    NOTICE = 1  # one that costs little here
    OFFER = 2  # no fault: what another precision, batch, kernel or model would take
    BEYOND = 3  # time beyond a plan, or a machine that was slow
    CEILING = 4  # what a healthy run is bound by


@dataclass(frozen=True)
class Reading:
    """The share of time that a rule measured, with the words of its sentence and the figures behind it."""

    share: float
    figures: list[str] = field(default_factory=list)
    words: dict[str, Any] = field(default_factory=dict)
    is_notice: bool = False  # however large the share is


Measure = Callable[[RunEvidence], float | Reading | None]
Figures = Callable[[RunEvidence], list[str]]


@dataclass(frozen=True)
class Rule:
    """`measure` is None when the run does not tell; the rule fires at `threshold` and above. With nothing but offers,
    notices and ceilings the run is healthy.

    In a `sentence`, `{share}` is the value with a decimal, `{percent}` without, and the words of a `Reading` and the
    fields of the fact that `place` names (the worst, of several) have their names. Without a `Reading` and `figures`
    the figures are the facts named and the value.
    """

    name: str
    axis: Axis
    threshold: float
    measure: Measure
    sentence: str
    advice: str
    source: str  # why the threshold is where it is
    figures: Figures | None = None
    facts: tuple[str, ...] = ()
    place: str = ""  # a fact with a line of code, which becomes the first figure
    tier: Tier = Tier.FAULT
    symptom: bool = False  # says where time is lost, not why: a cause that explains half of it is named before it
    phases: tuple[str, ...] = ()  # of the step in which the cost lies; without any it may be anywhere
    remedy: str = ""  # that takes the cost away; without one the advice does, and saves the whole share
    saves: bool = True  # the share is time
    eased_by: str = ""  # a rule whose remedy takes this cost away too: named first where what else it saves is more
    noticed: float | None = None  # from here on, below the threshold, a notice: it would cost more elsewhere

    @property
    def minimum(self) -> float:
        """The value from which on it is named at all."""
        return self.threshold if self.noticed is None else self.noticed

    def read(self, evidence: RunEvidence) -> Reading | None:
        """Measures the run; the reading of a notice stays just below the threshold."""
        found = self.measure(evidence)
        if found is None:
            return None
        if isinstance(found, Reading):
            return replace(found, share=min(found.share, self.threshold - NOTICED)) if found.is_notice else found
        if self.figures is not None:
            return Reading(found, self.figures(evidence) if found >= self.minimum else [])
        known = [(name, evidence.fact(name)) for name in self.facts]
        figures = [f"{name.replace('_', ' ')}: {fact}" for name, fact in known if fact is not None]
        return Reading(found, [*figures, f"{percent(found)}, of a step of {seconds(evidence.step)}"])

    def describe(self, evidence: RunEvidence, reading: Reading) -> tuple[str, list[str]]:
        """Returns the sentence, and the figures behind it."""
        found = evidence.fact(self.place) if self.place else {}
        found = max(found, key=lambda one: one["saved"]) if isinstance(found, list) else found
        place = found.get("place") or (evidence.fact("places") or {}).get(self.name)
        figures = [*([place] if place else []), *found.get("lines", []), *reading.figures]
        shares = {"share": percent(reading.share), "percent": percent(reading.share, 0)}
        return self.sentence.format(**found | reading.words | shares), figures
