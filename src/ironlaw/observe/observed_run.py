"""Writes the run directory of an observed loop: ledger.json, metrics.jsonl, and operations.json to plan it by."""

from __future__ import annotations

import json
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ironlaw.errors import UserError
from ironlaw.files import write_json, write_text
from ironlaw.ledger import STEP_PHASES, Estimate, Ledger, Origin, Phase
from ironlaw.observe.clock import StepTimes
from ironlaw.observe.habits import LOOKED_AT
from ironlaw.observe.measured import add_memory, add_steps, typical, warmup_steps
from ironlaw.observe.module_profile import ModuleProfile
from ironlaw.observe.trials import attention_seconds, fused_calls, score_products
from ironlaw.workload.module_source import Input

OPERATIONS_FILE = "operations.json"
BATCH_FACTOR = 8  # of the micro-batch: what a larger one would be worth, where there are none to merge


@dataclass
class Observed:
    """All that a watch knows at the end."""

    steps: list[StepTimes]
    recorded: set[int]  # steps, counted from 1, that were slowed by the profiler
    metrics: list[dict[str, Any]]
    profile: ModuleProfile | None
    held: dict[str, int]
    resident_peak_bytes: int
    cuda_peak_bytes: int | None
    joules: float | None
    joules_basis: str
    seconds: float
    profiling_seconds: float
    facts: dict[str, Any]
    module: nn.Module | None
    signature: list[Input] | None

    @property
    def recorded_seconds(self) -> list[float]:
        return [step.wall_seconds for number, step in enumerate(self.steps, 1) if number in self.recorded]


def write_observed(out: Path, observed: Observed) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "metrics.jsonl", "".join(json.dumps(entry) + "\n" for entry in observed.metrics))
    reason = _write_operations(out / OPERATIONS_FILE, observed)
    ledger = observed_ledger(observed)
    if reason is not None:
        ledger.facts["not_planned"] = reason
    ledger.save(out / "ledger.json")


def _write_operations(path: Path, observed: Observed) -> str | None:
    """Trace one micro-batch, and a larger one: what that is worth is the difference of two plans. Returns why not, if
    it cannot be traced."""
    from ironlaw.workload.trace import trace
    from ironlaw.workload.trace_store import trace_to_json

    module, inputs, facts = observed.module, observed.signature, observed.facts
    if module is None:
        return "observe(..., plan=False)"
    if not inputs:
        return "the module takes something that is no tensor, so it cannot be traced"
    on_cpu = facts["device"] == "cpu"

    def traced(inputs: list[Input]) -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return trace_to_json(trace(module, inputs, precision=facts["autocast"] or "as is", cpu=on_cpu))

    try:
        document = traced(inputs) | {"variants": {}}
    except UserError as error:
        return str(error)
    if len({i.shape[0] for i in inputs if i.shape}) == 1:  # else it is no batch: nodes and edges of one graph
        factor = larger_by(facts)
        larger = [replace(i, shape=(factor * i.shape[0], *i.shape[1:])) if i.shape else i for i in inputs]
        with suppress(UserError):
            document["variants"]["larger_batch"] = traced(larger)
    write_json(path, document)
    if on_cpu:
        facts["attention_seconds"] = attention_seconds(score_products(document), facts.get("precision"))
        facts["fused_calls_seconds"] = attention_seconds(fused_calls(document), facts.get("precision"))
    return None


def larger_by(facts: dict[str, Any]) -> int:
    """Returns how many micro-batches the larger one holds: those of a step merged, else eight."""
    accumulation = int(facts.get("accumulation") or 1)
    return accumulation if accumulation > 1 else BATCH_FACTOR


def observed_ledger(observed: Observed) -> Ledger:
    """The run's side of the table. What was not measured stays absent."""
    ledger, measured = Ledger("run", facts=dict(observed.facts)), Origin.MEASURED
    slowed = {LOOKED_AT + 1, *observed.recorded}
    slowed |= {max(observed.recorded) + 1} if observed.recorded else set()  # the profiler's end falls into it
    usable = [t for number, t in enumerate(observed.steps, 1) if number not in slowed]
    kept = usable[warmup_steps(len(usable)) :] or usable or observed.steps
    phases = {phase for phase in STEP_PHASES if any(step.phase_seconds.get(phase) for step in typical(kept))}
    tokens = (observed.facts.get("tokens_per_micro_batch") or 0) * observed.facts["accumulation"]
    add_steps(ledger, kept, phases, tokens)
    for name in ("delayed_seconds", "delayed_gap_seconds", "paused_seconds"):
        ledger.facts[name] = float(np.mean([getattr(step, name) for step in typical(kept)]))
    ledger.facts["steps_done"] = len(observed.steps)
    parameters, resident = observed.facts["model"]["parameters"], observed.resident_peak_bytes
    ledger.totals |= {
        "parameters": Estimate(parameters, Origin.CALCULATED, "of the module, once"),
        "total_seconds": Estimate(observed.seconds, measured, "wall time inside `with ironlaw.observe`"),
        "resident_bytes": Estimate(
            resident, measured, "largest resident size of the process, sampled twice a second"
        ),
    }  # fmt: skip
    if observed.joules is not None:
        ledger.totals["energy_joules"] = Estimate(observed.joules, measured, observed.joules_basis)
    for name in ("loss", "train_loss"):
        losses = [m[name] for m in observed.metrics if isinstance(m.get(name), float)]
        if losses:
            ledger.totals["train_loss"] = Estimate(losses[-1], measured, "the last that the loop logged")
    ledger.facts["wall_seconds"] = _wall(observed)
    _add_profile(ledger, observed)
    return ledger


def _wall(observed: Observed) -> dict[str, float]:
    between = {
        str(phase): sum(step.phase_seconds.get(phase, 0.0) for step in observed.steps)
        for phase in (Phase.EVALUATION, Phase.CHECKPOINT)
    }
    recorded = sum(observed.recorded_seconds)
    training = sum(step.wall_seconds for step in observed.steps) - recorded
    wall = {"training": training, **between, "profiling": recorded + observed.profiling_seconds}
    return wall | {"other": max(0.0, observed.seconds - sum(wall.values()))}


def _add_profile(ledger: Ledger, observed: Observed) -> None:
    profile = observed.profile
    peak = profile.memory if profile is not None else None
    add_memory(
        ledger, observed.held, peak.parts if peak else {}, observed.cuda_peak_bytes, peak.bytes if peak else None,
        "highest moment of the recorded steps' allocations, and what was there before",
    )  # fmt: skip
    if profile is None:
        return
    ledger.lines = profile.lines
    ledger.facts |= {
        "profiled_step_seconds": float(np.mean(observed.recorded_seconds)), "timeline": profile.timeline,
        "launches_per_step": profile.launches, "recomputed_seconds": profile.recomputed_seconds,
    }  # fmt: skip
    if peak is not None:
        ledger.facts |= {"memory_groups": peak.groups, "memory_curve": peak.curve}
