"""What a rule of diagnosis is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from ironlaw.explain.evidence import Evidence


class Axis(StrEnum):
    """The taxonomy: what would have to change for the run to be faster."""

    DATA = "data"  # how batches come
    ALGORITHM = "algorithm"  # what is computed: model, batch, precision, schedule
    MACHINE = "machine"  # what it is computed on, and what else runs there
    UNKNOWN = "unknown"


# The sentence, and the figures behind it.
Statement = tuple[str, list[str]]


@dataclass(frozen=True)
class Rule:
    """`measure` is None when the run does not tell; the rule fires at `threshold` and above."""

    name: str
    axis: Axis
    threshold: float
    measure: Callable[[Evidence], float | None]
    says: Callable[[Evidence, float], Statement]
    advice: str
    source: str  # why the threshold is where it is
    fault: bool = True  # False: what a healthy run is bound by, or a notice
    symptom: bool = False  # says where time is lost, not why: a cause that explains half of it is named before it
    notice: bool = False  # costs nothing here, and would elsewhere: named before a ceiling, and the run is healthy
