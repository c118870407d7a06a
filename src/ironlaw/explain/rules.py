"""The rules of diagnosis: read from rules.toml, with the functions that measure them.

Adding a rule is adding an entry to rules.toml; where nothing declared there measures it, a function under its name in
`measures.py`, in `measures_of_code.py` if it is about how a loop is written, or in `measures_of_devices.py` if it is
about what it runs on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ironlaw.explain import measures, measures_of_code, measures_of_devices
from ironlaw.explain.evidence import NOTICED, RunEvidence
from ironlaw.explain.rule import Axis, Measure, Rule, Tier
from ironlaw.files import read_toml
from ironlaw.ledger import Phase

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
    gain: str = "", fact: str = "", place: str = "", remedy: str = "", saves: bool = True, **entry: Any,
) -> Rule:  # fmt: skip
    figures = FIGURES.get(name)
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
        remedy=remedy or gain, saves=saves and not present, **entry,
    )  # fmt: skip


RULES: tuple[Rule, ...] = tuple(
    _rule(name, **entry) for name, entry in read_toml(Path(__file__).with_name("rules.toml")).items()
)
