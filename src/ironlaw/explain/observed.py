"""Explains an observed loop: plans it from the operations that were traced when it ended, then as any other run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ironlaw import units
from ironlaw.catalog.accelerators import accelerator, catalogued, peak
from ironlaw.errors import UserError
from ironlaw.explain.explanation import NOT_PLANNED, Explanation, explained
from ironlaw.explain.gap import Gap, subtract_ledgers
from ironlaw.explain.observed_remedies import REMEDIES, ObservedPlans, remedies_of_faults
from ironlaw.explain.remedy import Remedy, find
from ironlaw.explain.waterfall import PRODUCTS
from ironlaw.files import read_json
from ironlaw.ledger import STEP_PHASES, Estimate, Kind, Ledger, Line, Origin, Phase, merge_unnamed
from ironlaw.machine.profile import Profile, load_profile
from ironlaw.observe.measured import machine_speed, measured_mfu
from ironlaw.observe.observed_run import OPERATIONS_FILE, larger_by
from ironlaw.observe.trials import score_products
from ironlaw.workload.updates import Loop, Update

WAITING_PHASES = (Phase.DATA, Phase.TRANSFER, Phase.HOST, Phase.IDLE)
OWN_PHASES = (*WAITING_PHASES, Phase.FORWARD)  # without waiting for other ranks
GAINS = "Gains are per step, for the same samples; each says what it rests on."
NOTHING_PAYS = "Nothing pays: no change that Ironlaw knows of saves 2% or more here."


def is_observed(run_dir: Path) -> bool:
    return (run_dir / "ledger.json").is_file() and not (run_dir / "config.toml").is_file()


def explain_observed(run_dir: Path, profile: Profile | None = None) -> Explanation:
    """Explains what `ironlaw.observe` wrote. `profile`: the machine to plan on; this machine's by default."""
    run = Ledger.load(run_dir / "ledger.json")
    plan = _plan(run_dir, run, profile)
    if plan.lines:
        _add_missing_keys(plan, run)
    _add_rates(plan, run)
    _add_ranks(run_dir, run)
    if not run.facts.get("machine_speed"):
        run.facts["machine_speed"] = machine_speed(plan, run)
    gap = subtract_ledgers(plan, run)
    remedies = _remedies(run_dir, plan, run, gap, profile)
    found = explained(run_dir, plan, run, gap, (remedies, NOTHING_PAYS), REMEDIES)
    remedies = remedies_of_faults(found.diagnosis.findings, remedies, ObservedPlans(plan, run, gap))
    return replace(found, remedies=remedies, remedies_note=GAINS) if remedies else found


def _add_missing_keys(plan: Ledger, run: Ledger) -> None:
    """Add to the plan the keys of what the loop does beside its module, without figures."""
    known = {line.key for line in plan.lines}
    plan.lines += [Line(*line.key) for line in run.lines if line.key not in known]
    run.lines = merge_unnamed(run.lines, plan.lines)


def _remedies(run_dir: Path, plan: Ledger, run: Ledger, gap: Gap, profile: Profile | None) -> list[Remedy]:
    profile = profile or _profile_of(run)
    plans: tuple[Ledger, Ledger] | None = None
    operations = run_dir / OPERATIONS_FILE
    if operations.is_file():
        document = read_json(operations)
        where = document["columns"].index("matmul")
        run.facts["product_shapes"] = [row[where] for row in document["operations"] if row[where]]
        run.facts["score_products"] = score_products(document)
        if profile is not None and "step_seconds" in plan.totals:
            plans = _plan_batches(document, run, profile)
    return find(ObservedPlans(plan, run, gap, batches=plans), REMEDIES)


def _plan_batches(document: dict[str, Any], run: Ledger, profile: Profile) -> tuple[Ledger, Ledger] | None:
    """Plans of the run as it was, and with the larger micro-batch for the same samples. Both are made now: what is
    known of this machine may have changed since the plan was kept."""
    from ironlaw.plan.module import plan_trace
    from ironlaw.workload.trace_store import trace_from_json

    larger = document.get("variants", {}).get("larger_batch")
    if larger is None:
        return None
    accumulation, loop = int(run.facts.get("accumulation") or 1), _loop(run)
    now = plan_trace(trace_from_json(document), profile, accumulation=accumulation, loop=loop)
    then = plan_trace(trace_from_json(larger), profile, accumulation=1, loop=loop)
    then.totals["step_seconds"] = then.totals["step_seconds"].scaled(accumulation / larger_by(run.facts))
    return now, then


def _loop(run: Ledger) -> Loop | None:
    """Returns what the loop does around its micro-batches; None for runs observed before this was recorded."""
    updates = run.facts.get("updates")
    if not updates:
        return None
    clips = any(line.phase is Phase.OPTIMIZER and line.operation == "clip" and line.count for line in run.lines)
    gradients = str(run.facts.get("gradients_found") or "none")
    return Loop(
        TypeAdapter(tuple[Update, ...]).validate_python(updates), clips, run.facts["device"] != "cpu", gradients
    )


def _add_ranks(run_dir: Path, run: Ledger) -> None:
    """Add how long each rank works in a step before it meets the others: all wait for the slowest."""
    ranks = [run, *(Ledger.load(path) for path in sorted(run_dir.glob("rank*/ledger.json")))]
    if len(ranks) < 2:
        return
    # With the exchange of gradients told apart, everything else is a rank's own; else the backward pass has it in it.
    apart = all(Phase.COMMUNICATION in r.phase_seconds for r in ranks)
    phases: tuple[Phase, ...] = OWN_PHASES
    if apart:
        phases = tuple(phase for phase in STEP_PHASES if phase is not Phase.COMMUNICATION)
    own = [sum(r.phase_seconds.get(phase, 0.0) for phase in phases) for r in ranks]
    run.facts["rank_own_seconds"], run.facts["slowest_rank"] = own, own.index(max(own))
    run.facts["rank_delayed_seconds"] = [float(r.facts.get("delayed_seconds") or 0.0) for r in ranks]
    if _share_cores(ranks):
        phases = WAITING_PHASES
    run.facts["rank_removable_seconds"] = [sum(r.phase_seconds.get(phase, 0.0) for phase in phases) for r in ranks]


def _share_cores(ranks: list[Ledger]) -> bool:
    """Whether ranks are on one processor with the same work. They compute at different speeds only because one comes
    late and the other has the cores to itself meanwhile: without the delay, only the delay is gained."""
    places = {(r.facts.get("host"), r.facts.get("device")) for r in ranks}
    work = {(r.facts.get("tokens_per_micro_batch"), r.facts.get("accumulation")) for r in ranks}
    return len(places) == len(work) == 1 and ranks[0].facts.get("device") == "cpu"


def _profile_of(run: Ledger) -> Profile | None:
    """Returns this machine's profile, if the run was on it."""
    try:
        profile = load_profile()
    except UserError:
        return None
    return profile if profile.name == run.facts["machine"] else None


def _plan(run_dir: Path, run: Ledger, profile: Profile | None) -> Ledger:
    """Returns the plan kept beside the run, else one made now on its machine, else an empty one and the reason."""
    if (run_dir / "plan.json").is_file():
        return Ledger.load(run_dir / "plan.json")
    empty = Ledger("plan", facts={"model": run.facts.get("model", {})})
    operations = run_dir / OPERATIONS_FILE
    if not operations.is_file():
        return empty
    try:
        plan = _planned(read_json(operations), run, profile)
    except UserError as error:
        run.facts["not_planned"] = str(error)
        return empty
    plan.save(run_dir / "plan.json")
    return plan


def _planned(operations: dict[str, Any], run: Ledger, profile: Profile | None) -> Ledger:
    from ironlaw.plan.module import plan_trace
    from ironlaw.workload.trace_store import trace_from_json

    traced, facts = trace_from_json(operations), run.facts
    again = {"accumulation": facts.get("accumulation", 1), "name": facts["model"]["name"], "loop": _loop(run)}
    if facts["device"] != "cpu":
        return plan_trace(traced, None, catalogued(facts["machine"]), **again)
    profile = profile or load_profile()
    if profile.name != facts["machine"]:
        raise UserError(f"the run was on {facts['machine']}, the profile here is of {profile.name}")
    plan = plan_trace(traced, profile, **again)
    # Ranks share the machine's cores: each is planned as if they were its own. More threads than cores help nobody, and
    # are planned as they should be.
    alone = facts.get("world_size", 1) == 1
    too_many = facts["threads"] > (facts.get("cores") or profile.threads) == profile.threads
    return _on_threads(plan, run, profile) if alone and profile.threads != facts["threads"] and not too_many else plan


def _on_threads(plan: Ledger, run: Ledger, profile: Profile) -> Ledger:
    """Returns a plan for other threads than were measured, by their effect in this run, timed at its end. Without that
    products are assumed to scale with the threads, streams not. The interval spans no effect and a full one."""
    threads, gains = int(run.facts["threads"]), run.facts.get("thread_gain")
    proportional = profile.threads / threads
    known = gains if gains and run.facts.get("cores") == profile.threads else None
    factors = {
        "matmul": 1 / (1 - min(0.95, known["matmul"])) if known else proportional,
        "elementwise": 1 / (1 - min(0.95, known["elementwise"])) if known else 1.0,
    }
    before = plan.totals["step_seconds"]
    plan.lines = [
        line if line.kind is Kind.HOST or line.seconds is None
        else replace(line, seconds=line.seconds * factors["matmul" if line.kind in PRODUCTS else "elementwise"])
        for line in plan.lines
    ]  # fmt: skip
    step, (least, most) = sum(line.seconds or 0.0 for line in plan.lines), sorted((1.0, proportional))
    how = "timed both ways at the end of the run" if known else "assumed: products in proportion"
    plan.totals["step_seconds"] = Estimate(
        step, before.origin, f"{before.basis}; measured with {profile.threads} threads, run with {threads}: {how}",
        min(step, (before.low or before.value) * least), max(step, (before.high or before.value) * most),
    )  # fmt: skip
    peak = plan.facts["matmul_peak_flops_per_second"] / factors["matmul"]
    plan.facts |= {"matmul_peak_flops_per_second": peak, "threads": threads, "threads_measured": profile.threads}
    flops = plan.totals["flops_per_step"].value
    plan.totals["mfu"] = Estimate(flops / step / peak, before.origin, "FLOPs / step time / peak with these threads")
    return plan


def _add_rates(plan: Ledger, run: Ledger) -> None:
    """Add FLOPs, which are the plan's, and their rate."""
    flops, step = plan.totals.get("flops_per_step"), run.totals.get("step_seconds")
    peak = plan.facts.get("matmul_peak_flops_per_second")
    if flops is None or step is None or not peak:
        return
    run.totals["flops_per_step"] = flops
    basis = f"FLOPs / step time / {units.rate(peak, 'FLOP')}"
    run.totals["mfu"] = measured_mfu(flops.value, step, peak, basis)


def explain_trace(path: Path) -> Explanation:
    from ironlaw.observe.foreign_trace import trace_ledger
    from ironlaw.observe.trace_file import read_trace

    run = trace_ledger(read_trace(path))
    plan = Ledger("plan", facts={"model": run.facts["model"]})
    _add_peak(plan, run)
    run.facts["unknown"] = _unknown(run)
    note = f"{NOT_PLANNED}: a trace has no config to change; what helps stands with each cause."
    return explained(path, plan, run, subtract_ledgers(plan, run), ([], note))


def _add_peak(plan: Ledger, run: Ledger) -> None:
    """Add the peak of a device in the catalogue, and the FLOPs of products whose shapes were recorded."""
    flops = run.flops()
    try:
        device = accelerator(catalogued(str(run.facts["machine"])))
        rate = float(peak(device, run.facts["precision"] or "bf16").value)
    except UserError:
        return
    plan.facts["matmul_peak_flops_per_second"] = rate
    if device.memory_bytes_per_second is not None:
        plan.facts["copy_bytes_per_second"] = float(device.memory_bytes_per_second.value)
    if flops:
        step = run.totals["step_seconds"].value
        run.totals["flops_per_step"] = Estimate(
            flops, Origin.CALCULATED, "matrix products of the trace, by their shapes"
        )
        run.totals["mfu"] = Estimate(flops / step / rate, Origin.MEASURED, f"FLOPs / step time / peak of {device.name}")


def _unknown(run: Ledger) -> list[str]:
    """Returns what this trace cannot tell, and how to record one that does."""
    unknown = ["The profiler slows what it records, by a fifth and more where operations are short: read shares."]
    if not run.facts["shapes_recorded"]:
        unknown.append("FLOPs, MFU and precision: no shapes were recorded (record_shapes=True).")
    if not run.facts["stacks_recorded"]:
        unknown.append("Lines of code: no stacks were recorded (with_stack=True).")
    if "marks no steps" in run.facts["steps_inferred"]:
        unknown.append("Steps: the trace marks none (call profiler.step() once per step); the whole is taken as one.")
    unknown.append("Memory, energy and evaluation between steps: not in a trace. A plan: the module is not known.")
    if run.facts["world_size"] > 1:
        unknown.append("Other ranks: one trace is one rank; a straggler shows in the others as waiting for it.")
    return unknown
