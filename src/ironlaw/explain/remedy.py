"""Defines remedies and finds those that pay: of a config by the planner, of code by what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

MIN_GAIN = 0.02  # below this a gain is within the noise of two runs of the same config
EVALUATION_SHARE = 0.05
CHECKPOINT_SHARE = 0.05

Settings = dict[str, Any]  # "train.precision" -> "bf16"


class Effect(IntEnum):
    """What a remedy does to the result, the harmless first."""

    NONE = 0  # the same training, up to the order of summation
    ROUNDING = 1  # the same training in other arithmetic
    TRAINING = 2  # other updates: the loss curve changes
    MODEL = 3  # another model


EFFECTS = {
    Effect.NONE: "same training",
    Effect.ROUNDING: "changes rounding",
    Effect.TRAINING: "changes the training",
    Effect.MODEL: "changes the model",
}


@dataclass(frozen=True)
class Proposal:
    """A change and what it brings. Seconds and bytes are positive when saved."""

    settings: Settings = field(default_factory=dict)
    gain: float = 0.0  # fraction of the planned total time; for a memory remedy, of the planned peak
    total_seconds_saved: float = 0.0  # over the run, for the same number of tokens
    step_seconds_saved: float = 0.0
    bytes_saved: float = 0.0
    basis: str = "planned"
    how: str = ""  # in words or code, where there is no config of ours to change
    title: str = ""  # where it says more than its kind's

    @property
    def apply(self) -> str:
        """The command-line arguments that apply it, or the change of code."""
        return self.how or " ".join(f"--set {key}={_toml(value)}" for key, value in self.settings.items())


@dataclass(frozen=True, kw_only=True)
class Remedy(Proposal):
    """The proposal of its kind that gains most."""

    name: str
    effect: Effect
    risk: str
    precondition: str

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "title": self.title, "effect": EFFECTS[self.effect],
            "changes_numerics": self.effect > Effect.NONE, "risk": self.risk, "precondition": self.precondition,
            "settings": self.settings, "apply": self.apply, "gain": self.gain,
            "total_seconds_saved": self.total_seconds_saved, "step_seconds_saved": self.step_seconds_saved,
            "bytes_saved": self.bytes_saved, "basis": self.basis,
        }  # fmt: skip


@dataclass(frozen=True)
class RemedyKind:
    """`propose` is given what is known of the run, and returns settings to plan with, or proposals that were measured;
    none if its precondition does not hold. The best of them is the remedy."""

    name: str
    title: str
    precondition: str
    effect: Effect
    risk: str
    propose: Callable[[Any], Iterable[Settings | Proposal]]
    saves_memory: bool = False  # judged by bytes, and allowed to cost time
    min_gain: float = MIN_GAIN  # gain from which on it is worth a line


def find(
    now: Any, kinds: Iterable[RemedyKind], judge: Callable[[RemedyKind, Settings], Proposal | None] | None = None
) -> list[Remedy]:
    """Returns remedies that pay, by gain: first those that leave the training as it is, then those that change it.
    `judge` returns what settings gain, None if they are not valid or do not fit."""
    found = []
    for kind in kinds:
        judged = (p if isinstance(p, Proposal) else judge(kind, p) if judge else None for p in kind.propose(now))
        best = max((p for p in judged if p is not None and p.gain >= kind.min_gain), key=lambda p: p.gain, default=None)
        if best is not None:
            own = {"title": best.title or kind.title, "name": kind.name, "effect": kind.effect, "risk": kind.risk}
            found.append(Remedy(**vars(best) | own, precondition=kind.precondition))
    return sorted(found, key=lambda r: (r.effect >= Effect.TRAINING, -r.gain))


def _toml(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)
