"""Explains a run: reads its directory, subtracts plan from measurement, names the bottleneck, proposes changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ironlaw import units
from ironlaw.config import RunConfig, load_config
from ironlaw.errors import UserError, shortened
from ironlaw.explain.diagnose import Diagnosis, diagnose
from ironlaw.explain.energy import energy_use
from ironlaw.explain.evidence import RunEvidence
from ironlaw.explain.gap import Gap, GapRow, subtract_ledgers
from ironlaw.explain.ranks import ranks_document
from ironlaw.explain.remedies import REMEDIES, find_remedies, situation
from ironlaw.explain.remedy import Remedy, RemedyKind
from ironlaw.explain.roofline import roofline
from ironlaw.explain.waterfall import waterfall
from ironlaw.files import read_json_lines, read_text
from ironlaw.ledger import Ledger, relative_error
from ironlaw.machine.profile import Profile, load_profile

SCHEMA_VERSION = 1
NUMBERS = ("loss", "train_loss", "validation_loss", "lr", "grad_norm", "tokens")  # of a step, and all seconds
NOT_PLANNED = "No remedy was planned"
# What Ironlaw holds itself to, and reports when it falls short.
STEP_TIME_LIMIT, PEAK_MEMORY_LIMIT, UNATTRIBUTED_LIMIT = 0.10, 0.05, 0.05


@dataclass(frozen=True)
class Check:
    """One promise about accuracy: the absolute error must stay within the limit. `met` is None when not measured."""

    name: str
    error: float | None
    limit: float

    @property
    def met(self) -> bool | None:
        return None if self.error is None else abs(self.error) <= self.limit

    def to_json(self) -> dict[str, Any]:
        return {"met": self.met, "error": self.error, "limit": self.limit}


@dataclass(frozen=True)
class Explanation:
    """Everything about one run that a report shows. `to_json` is what scripts and renderers read."""

    run_dir: Path
    config: RunConfig | None  # None: the user's own loop, which has no config of ours
    config_text: str
    plan: Ledger
    run: Ledger
    gap: Gap
    diagnosis: Diagnosis
    remedies: list[Remedy]
    remedies_note: str
    metrics: list[dict[str, Any]] = field(default_factory=list)

    @property
    def checks(self) -> list[Check]:
        memory = self.gap.totals.get("peak_bytes")
        return [
            Check("step_time", self.gap.step.error, STEP_TIME_LIMIT),
            Check("peak_memory", memory.error if memory else None, PEAK_MEMORY_LIMIT),
            Check("unattributed", self.gap.unattributed_fraction, UNATTRIBUTED_LIMIT),
        ]

    @property
    def losses(self) -> dict[str, float | None]:
        """Nats per token; `below_unigram` is positive when the model has learned more than token frequencies."""
        totals = self.run.totals
        values = {
            name: totals[f"{name}_loss"].value if f"{name}_loss" in totals else None
            for name in ("train", "validation", "unigram")
        }
        validation, unigram = values["validation"], values["unigram"]
        below = None if validation is None or unigram is None else unigram - validation
        return values | {"below_unigram": below}

    @property
    def notes(self) -> list[str]:
        """Notes that a reader needs to interpret the figures."""
        notes = list(self.run.facts.get("unknown", []))
        if self.run.facts.get("not_planned"):
            notes.append(f"There is no plan beside this run: {self.run.facts['not_planned']}.")
        if self.run.facts.get("interrupted") and self.config is not None:
            notes.append(
                f"The run was interrupted after step {self.run.facts.get('steps_done')} of {self.config.train.steps}: "
                f"finish it with `ironlaw train {self.run_dir / 'config.toml'} --out {self.run_dir} --resume`."
            )
        again, step = self.run.facts.get("planned_again"), self.gap.step.measured
        if again and step:
            off = units.signed_percent(relative_error(step, again["step_seconds"]))
            notes.append(
                f"The plan beside this run is from before it; planned again after {again['after_steps']} steps, the "
                f"step was {units.seconds(again['step_seconds'])} ({off})."
            )
        changed = {p: f for p, f in self.gap.scale.items() if abs(f - 1) > 0.01}
        if changed:
            shown = ", ".join(f"{phase} × {factor:.2f}" for phase, factor in changed.items())
            profiled = self.run.facts.get("profiled_step_seconds")
            seen = f" (a profiled step took {units.seconds(profiled)})" if profiled is not None else ""
            notes.append(
                f"A profiler slows the steps it records{seen}, between operations: the host's seconds are less "
                f"that, and operations are scaled so that each phase sums to what was measured without it: {shown}."
            )
        if not self.run.lines and self.run.facts.get("source") != "trace":
            notes.append(
                "No step was recorded in detail (profile_steps = 0, or too few steps), so kinds and operations are not "
                "measured."
            )
        speed = self.run.facts.get("machine_speed")
        if speed is not None and abs(1 - speed) > 0.02:
            slower = "slower" if speed < 1 else "faster"
            notes.append(
                f"The machine was {slower} during the run than it typically is ({units.percent(speed, 0)} of that "
                f"speed, by kernels repeated now and then); at the speed it had, the planned step is "
                f"{units.seconds((self.gap.step.planned or 0.0) / speed)}."
            )
        return notes + [
            f"{LABELS[check.name]} misses its limit: {units.signed_percent(check.error)}, "
            f"where ±{units.percent(check.limit, 0)} is promised."
            for check in self.checks
            if check.met is False
        ]

    def to_json(self) -> dict[str, Any]:
        """One document; its keys are stable within a schema version. SI units, fractions, nats per token."""
        gap, totals = self.gap, self.gap.totals
        checks = self.checks
        met = [check.met for check in checks]
        return {
            "schema_version": SCHEMA_VERSION, "run": str(self.run_dir),
            "bottleneck": self.diagnosis.sentence, "diagnosis": self.diagnosis.to_json(),
            "time": {
                "step": _row(totals, "step_seconds"), "tokens_per_second": _row(totals, "tokens_per_second"),
                "total": _row(totals, "total_seconds"), "unattributed_seconds": gap.unattributed_seconds,
                "unattributed_fraction": gap.unattributed_fraction,
                "phases": [row.to_json() for row in gap.phases],
                "kinds": [row.to_json() for row in gap.kinds],
                "operations": [row.to_json() for row in gap.operations],
                "profile_scale": {str(phase): factor for phase, factor in gap.scale.items()},
                "machine_speed": self.run.facts.get("machine_speed"),
                "slow_steps_fraction": self.run.facts.get("slow_steps_fraction"),
                "wall": self.run.facts.get("wall_seconds"),
            },
            "memory": {
                "peak": _row(totals, "peak_bytes"), "resident": _row(totals, "resident_bytes"),
                "components": [row.to_json() for row in gap.memory],
            },
            "waterfall": waterfall(self.plan, gap), "roofline": roofline(self.plan, self.run),
            "ranks": ranks_document(self.plan, self.run),
            **{name: self.run.facts.get(name) for name in ("timeline", "memory_groups", "memory_curve")},
            "energy_use": energy_use(self.plan, self.run),
            "mfu": _row(totals, "mfu"), "energy": _row(totals, "energy_joules"),
            "parameters": _row(totals, "parameters"), "flops_per_step": _row(totals, "flops_per_step"),
            "losses": self.losses,
            "accuracy_met": {check.name: check.to_json() for check in checks}
            | {"all": None if None in met else all(met)},
            "remedies": [remedy.to_json() for remedy in self.remedies], "remedies_note": self.remedies_note,
            "notes": self.notes,
            "facts": {"plan": self.plan.facts, "run": {k: v for k, v in self.run.facts.items() if k not in OWN_KEYS}},
        }  # fmt: skip


# Facts that have keys of their own in the document.
OWN_KEYS = ("timeline", "memory_groups", "memory_curve", "by_rank", "spread")
LABELS = {"step_time": "Step time", "peak_memory": "Peak memory", "unattributed": "Unattributed step time"}


def explained(
    run_dir: Path, plan: Ledger, run: Ledger, gap: Gap, found: tuple[list[Remedy], str],
    kinds: Iterable[RemedyKind] = (), config: tuple[RunConfig | None, str] = (None, ""),
) -> Explanation:  # fmt: skip
    """`found`: the remedies that pay, and a note; of the `kinds` that were tried, one that is not found gains 0."""
    remedies, note = found
    gains = {kind.name: 0.0 for kind in kinds} | {remedy.name: remedy.gain for remedy in remedies}
    diagnosis = diagnose(RunEvidence(plan, run, gap, gains))
    metrics = read_metrics(run_dir / "metrics.jsonl") if run_dir.is_dir() else []
    return Explanation(run_dir, *config, plan, run, gap, diagnosis, remedies, note, metrics)


def explain_run(run_dir: Path, profile: Profile | None = None) -> Explanation:
    """Read a finished run and explain it. `profile`: the machine to plan remedies on; this machine's by default."""
    if not run_dir.is_dir():
        raise UserError(f"no run directory at {run_dir}: give the one that `ironlaw train` printed, like runs/NAME")
    config_path, plan_path, run_path = (run_dir / name for name in ("config.toml", "plan.json", "ledger.json"))
    if not config_path.is_file():
        raise UserError(f"{run_dir} has no config.toml, so it is not a run: give the directory `ironlaw train` printed")
    config = load_config(config_path)
    if not run_path.is_file():
        raise UserError(
            f"{run_dir} is not finished (no ledger.json): finish it with "
            f"`ironlaw train {config_path} --out {run_dir} --resume`"
        )
    if not plan_path.is_file():
        raise UserError(
            f"{run_dir} has no plan.json to compare with (training writes it at its start): train again with "
            f"`ironlaw train {config_path} --out NEW_DIR`"
        )
    plan, run = Ledger.load(plan_path), Ledger.load(run_path)
    found = _remedies(config, plan, run, profile)
    tried = () if found[1].startswith(NOT_PLANNED) else REMEDIES
    gap = subtract_ledgers(plan, run)
    return explained(run_dir, plan, run, gap, found, tried, (config, read_text(config_path)))


def _remedies(config: RunConfig, plan: Ledger, run: Ledger, profile: Profile | None) -> tuple[list[Remedy], str]:
    """Returns the remedies that pay and a sentence about them; without a profile of the run's machine, the sentence."""
    try:
        profile = profile or load_profile()
    except UserError as error:
        return [], f"{NOT_PLANNED}: {error}."
    machine = (plan.facts.get("machine"), plan.facts.get("device"))
    if machine != (profile.name, profile.device):
        return [], (
            f"{NOT_PLANNED}: the run was on {machine[0]} ({machine[1]}), the profile here is of {profile.name} "
            f"({profile.device}). Explain it where it ran."
        )
    try:
        remedies = find_remedies(situation(config, profile, run))
    except UserError as error:
        return [], f"{NOT_PLANNED}: {error}."
    if not remedies:
        return [], "Nothing pays: no change that Ironlaw can plan saves 2% or more on this machine."
    return remedies, (
        "Gains are planned on this machine for the same number of tokens, not measured. "
        "To apply one, add its --set to `ironlaw train CONFIG --out NEW_RUN`."
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the steps of a run. A half-written last line (an interruption) is skipped; a missing file is no steps."""
    entries = [entry for entry in read_json_lines(path) if isinstance(entry.get("step"), int)]
    for entry in entries:
        for name, value in entry.items():
            if (name in NUMBERS or name.endswith("seconds")) and not _is_number(value):
                raise UserError(
                    f"step {entry['step']} of {path} is damaged: {name} holds {shortened(repr(value), 40)}, no number; "
                    "remove the line"
                )
    return entries


def _is_number(value: Any) -> bool:
    """As `train/jsonl.py` writes them: what is not finite is text, what is not known is null."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number or value is None or value in ("nan", "inf", "-inf")


def _row(totals: dict[str, GapRow], name: str) -> dict[str, Any]:
    row = totals.get(name, GapRow(name, None, None)).to_json()
    return {key: value for key, value in row.items() if key != "name"}
