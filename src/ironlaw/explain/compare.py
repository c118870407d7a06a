"""Compares two runs: why one is slower, by phase, by operation, by what was configured differently.

A difference must exceed what the step time of a run varies by itself. Steps that follow each other are alike, so blocks
of neighbours are compared, not single steps; and the two halves of one run are an A/A test that every run brings along.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ironlaw import units
from ironlaw.explain.explanation import Explanation
from ironlaw.explain.gap import Gap, subtract_ledgers
from ironlaw.explain.grades import Grade, graded_pair
from ironlaw.ledger import Ledger

MAX_CAUSES = 3  # causes in the sentence
COMPARED_FACTS = (
    "machine", "threads", "precision", "compile", "accumulation", "batch", "sequence", "data_workers", "versions",
    "machine_speed", "source", "model", "autocast",
)  # fmt: skip
FLOAT_TOLERANCE = 0.02
BLOCKS = 8
FLOOR = 0.02  # relative: two runs of the same thing on a quiet machine differ by as much
SIGMAS = 2.5


@dataclass(frozen=True)
class Comparison:
    """A is before, B after. All seconds per step; tokens per second where the steps differ in size."""

    before: Explanation
    after: Explanation
    gap: Gap  # "planned" reads as A, "measured" as B
    change: float | None  # relative change of the step time, of the time per token where both are known
    per_token: bool
    noise: float | None
    settings: list[dict[str, Any]]
    grade: Grade | None = None  # where B is A with one of A's remedies applied

    @property
    def real(self) -> bool | None:
        """Whether the difference is more than noise. None when the steps of a run are too few to tell."""
        return None if self.change is None or self.noise is None else abs(self.change) > self.noise

    @property
    def sentence(self) -> str:
        if self.change is None:
            return "The step of one of the runs was not timed, so they cannot be compared."
        unit = "token" if self.per_token else "step"
        if self.real is False:
            return (
                f"No difference beyond noise: the time per {unit} differs by {units.signed_percent(self.change)}, and "
                f"runs like these differ by {units.percent(self.noise)} by themselves."
            )
        slower = "slower" if self.change > 0 else "faster"
        doubt = "" if self.real else " (too few steps to know the noise)"
        causes = [f"{name} {'+' if s >= 0 else '−'}{units.seconds(abs(s))}" for name, s in self.causes()[:MAX_CAUSES]]
        because = f": {', '.join(causes)} per step" if causes else ""
        return f"B is {units.percent(abs(self.change))} {slower} per {unit}{doubt}{because}."

    def causes(self) -> list[tuple[str, float]]:
        """Returns the phases that changed in the direction of the step, the largest change first."""
        direction = 1 if (self.gap.step.missing or 0.0) >= 0 else -1
        changed = [(row.name, (row.measured or 0.0) - (row.planned or 0.0)) for row in self.gap.phases]
        noise = (self.noise or 0.0) * (self.gap.step.planned or 0.0) / 4
        return sorted((c for c in changed if c[1] * direction > noise), key=lambda c: -c[1] * direction)

    def to_json(self) -> dict[str, Any]:
        gap = self.gap
        return {
            "schema_version": 1, "before": str(self.before.run_dir), "after": str(self.after.run_dir),
            "sentence": self.sentence, "change": self.change, "per": "token" if self.per_token else "step",
            "noise": self.noise, "is_difference": self.real,
            "totals": {name: _pair(row) for name, row in gap.totals.items()},
            "phases": [_pair(row) for row in gap.phases],
            "kinds": [_pair(row) for row in gap.kinds],
            "operations": [_pair(row) | {"phase": str(row.phase), "kind": str(row.kind)} for row in gap.operations],
            "memory": [_pair(row) for row in gap.memory],
            "settings": self.settings,
            "grade": asdict(self.grade) if self.grade is not None else None,
            "bottlenecks": [self.before.diagnosis.sentence, self.after.diagnosis.sentence],
        }  # fmt: skip


def compare(before: Explanation, after: Explanation) -> Comparison:
    gap = subtract_ledgers(before.run, after.run)
    step, change, per_token = gap.step, None, False
    if step.planned and step.measured:
        change = step.measured / step.planned - 1
    rate = gap.totals.get("tokens_per_second")
    if rate is not None and rate.planned and rate.measured:
        change, per_token = rate.planned / rate.measured - 1, True
    noise = threshold(sample(before.metrics, step.planned), sample(after.metrics, step.measured))
    settings = _settings(before, after)
    remedies = [remedy.to_json() for remedy in before.remedies]
    grade = graded_pair(remedies, settings, change, str(before.run.facts.get("machine")))
    return Comparison(before, after, gap, change, per_token, noise, settings, grade)


def _settings(before: Explanation, after: Explanation) -> list[dict[str, Any]]:
    """Returns what differs: keys of the configs, then facts of the runs."""
    both, changed = (before, after), []
    configs = [_flat(e.config.model_dump(mode="json")) if e.config is not None else {} for e in both]
    for of, (one, other) in {"config": configs, "run": [_facts(e.run) for e in both]}.items():
        for key in dict.fromkeys([*one, *other]):
            a, b = one.get(key), other.get(key)
            alike = of == "run" and isinstance(a, float) and isinstance(b, float) and abs(a - b) < FLOAT_TOLERANCE
            if a != b and not alike:
                changed.append({"name": key, "before": a, "after": b, "of": of})
    return changed


def _facts(run: Ledger) -> dict[str, Any]:
    return _flat({name: run.facts[name] for name in COMPARED_FACTS if run.facts.get(name) is not None})


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            flat[prefix + key] = value
    return flat


def _pair(row: Any) -> dict[str, Any]:
    return {"name": row.name, "before": row.planned, "after": row.measured, "difference": row.missing}


@dataclass(frozen=True)
class Sample:
    """Seconds per step of one run: its typical value, the error of that, and how far its halves lie apart."""

    seconds: float
    error: float
    drift: float  # relative


def sample(metrics: Sequence[Mapping[str, Any]], typical: float | None = None) -> Sample | None:
    """Returns the sample of the steps of `metrics.jsonl` without recorded ones and the first eighth; None below 8."""
    seconds = [m["seconds"] for m in metrics if m.get("seconds") and not m.get("recorded")]
    seconds = seconds[min(10, len(seconds) // 8) :]
    if len(seconds) < BLOCKS:
        return None
    size = len(seconds) // BLOCKS
    blocks = [statistics.median(seconds[i * size : (i + 1) * size]) for i in range(BLOCKS)]
    middle = typical if typical is not None else statistics.mean(blocks)
    error = statistics.stdev(blocks) / len(blocks) ** 0.5
    half = len(seconds) // 2
    first, second = statistics.median(seconds[:half]), statistics.median(seconds[half:])
    return Sample(middle, error, abs(second - first) / middle)


def threshold(before: Sample | None, after: Sample | None) -> float | None:
    """Returns the relative difference from which on two runs differ; None if one of them has too few steps."""
    if before is None or after is None:
        return None
    error = (before.error**2 + after.error**2) ** 0.5 / before.seconds
    return max(FLOOR, SIGMAS * error, before.drift, after.drift)
