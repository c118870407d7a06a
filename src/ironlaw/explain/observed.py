"""An observed loop explained: planned from the operations that were traced when it ended, then as any other run."""

from __future__ import annotations

import json
from pathlib import Path

from ironlaw import units
from ironlaw.errors import UserError
from ironlaw.explain.diagnose import diagnose
from ironlaw.explain.evidence import Evidence
from ironlaw.explain.explanation import NOT_PLANNED, Explanation, load_ledger, read_metrics
from ironlaw.explain.gap import subtract_ledgers
from ironlaw.ledger import Estimate, Ledger, Origin
from ironlaw.machine.profile import Profile, load_profile

OPERATIONS_FILE = "operations.json"


def is_observed(run_dir: Path) -> bool:
    return (run_dir / "ledger.json").is_file() and not (run_dir / "config.toml").is_file()


def explain_observed(run_dir: Path, profile: Profile | None = None) -> Explanation:
    """What `ironlaw.observe` wrote. `profile`: the machine to plan on; this machine's by default."""
    run = load_ledger(run_dir / "ledger.json")
    plan = _plan(run_dir, run, profile)
    _add_rates(plan, run)
    gap = subtract_ledgers(plan, run)
    diagnosis = diagnose(Evidence(plan, run, gap))
    note = f"{NOT_PLANNED}: the loop is the user's own, so Ironlaw has no config to change."
    return Explanation(run_dir, None, "", plan, run, gap, diagnosis, [], note, read_metrics(run_dir / "metrics.jsonl"))


def _plan(run_dir: Path, run: Ledger, profile: Profile | None) -> Ledger:
    """The plan kept beside the run, else one made now where it ran; else an empty one, and the reason."""
    if (run_dir / "plan.json").is_file():
        return load_ledger(run_dir / "plan.json")
    empty = Ledger("plan", facts={"model": run.facts.get("model", {})})
    operations = run_dir / OPERATIONS_FILE
    if not operations.is_file():
        return empty
    try:
        plan = _planned(json.loads(operations.read_text(encoding="utf-8")), run, profile)
    except UserError as error:
        run.facts["not_planned"] = str(error)
        return empty
    plan.save(run_dir / "plan.json")
    return plan


def _planned(operations: dict[str, object], run: Ledger, profile: Profile | None) -> Ledger:
    from ironlaw.plan.traced import plan_trace
    from ironlaw.workload.trace_store import trace_from_json

    traced, facts = trace_from_json(operations), run.facts
    again = {"accumulation": facts.get("accumulation", 1), "name": facts["model"]["name"]}
    if facts["device"] != "cpu":
        return plan_trace(traced, None, _catalogued(facts["machine"]), **again)
    profile = profile or load_profile()
    if profile.name != facts["machine"]:
        raise UserError(f"the run was on {facts['machine']}, the profile here is of {profile.name}")
    if profile.threads != facts["threads"]:
        raise UserError(
            f"the run used {facts['threads']} threads, this machine was measured with {profile.threads}: "
            f"`ironlaw measure --threads {facts['threads']}` and explain again"
        )
    return plan_trace(traced, profile, **again)


def _catalogued(name: str) -> str:
    """The catalogue's name of a device as its driver calls it: "NVIDIA H100 80GB HBM3" holds "h100"."""
    from ironlaw.catalog import accelerator_names

    words = name.lower().replace("-", " ").split()
    known = [entry for entry in accelerator_names() if entry.lower().split("-")[0] in words]
    if not known:
        raise UserError(f"the catalogue has no {name}, so there is nothing to plan with")
    return known[0]


def _add_rates(plan: Ledger, run: Ledger) -> None:
    """FLOPs are the plan's; with them the run has a rate."""
    flops, step = plan.totals.get("flops_per_step"), run.totals.get("step_seconds")
    peak = plan.facts.get("matmul_peak_flops_per_second")
    if flops is None or step is None or not peak:
        return
    run.totals["flops_per_step"] = flops
    low, high = step.low or step.value, step.high or step.value
    run.totals["mfu"] = Estimate(
        flops.value / step.value / peak, Origin.MEASURED, f"FLOPs / step time / {units.rate(peak, 'FLOP')}",
        flops.value / high / peak, flops.value / low / peak,
    )  # fmt: skip
