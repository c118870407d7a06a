"""The rules of diagnosis: each names one cause, what it looks at, from where on it speaks, and why there.

A rule's measure is a share of time that its cause costs, so that findings compare: the largest one binds.
Adding a rule is adding an entry to `RULES`; docs/explain.md says how.
"""

from __future__ import annotations

from ironlaw import units
from ironlaw.explain.evidence import Evidence
from ironlaw.explain.rule import Axis, Rule, Statement
from ironlaw.explain.rules_of_code import CODE_RULES, logging_share
from ironlaw.ledger import Kind, Phase
from ironlaw.machine.interference import MOST_OTHERS


def _off_plan(evidence: Evidence) -> float | None:
    worst = evidence.most_off_plan()
    if worst is None or evidence.step is None:
        return None
    return max(0.0, worst[1] - worst[2] - evidence.tolerance * worst[1]) / evidence.step


def _throughout(evidence: Evidence) -> float | None:
    both = evidence.slower_throughout()
    return None if both is None else max(0.0, (both[0] - both[1]) / both[0] - evidence.tolerance)


def _attention_excess(evidence: Evidence) -> float | None:
    return _beyond(evidence, evidence.excess_share(Kind.ATTENTION, evidence.rate(Kind.MATMUL)))


def _narrow_excess(evidence: Evidence) -> float | None:
    return _beyond(evidence, evidence.excess_share(Kind.MATMUL, evidence.peak_rate()))


def _beyond(evidence: Evidence, share: float | None) -> float | None:
    """In a loop that is not ours the model is given: its shape is a fault only where it costs half of the step."""
    return None if share is None else max(0.0, share - evidence.tolerance)


def _slowdown(evidence: Evidence) -> float | None:
    return None if evidence.machine_speed is None else max(0.0, 1.0 - evidence.machine_speed)


def _slow_here(evidence: Evidence) -> float | None:
    """Slow by something that can be found on this machine."""
    slowdown = _slowdown(evidence)
    return 0.0 if slowdown is not None and _neighbours(evidence) else slowdown


def _slow_host(evidence: Evidence) -> float | None:
    slowdown = _slowdown(evidence)
    return slowdown if slowdown is None or _neighbours(evidence) else 0.0


def _neighbours(evidence: Evidence) -> bool:
    """A guest of a shared host on which nothing else ran: what slowed it is out of its sight and reach, and passes."""
    return bool(evidence.fact("virtual")) and (evidence.fact("other_load") or 0.0) <= MOST_OTHERS


def _input_share(evidence: Evidence) -> float | None:
    """Waiting for a batch, and copying it to the device."""
    waiting, copying = evidence.phase_share(Phase.DATA), evidence.phase_share(Phase.TRANSFER)
    return copying if waiting is None else waiting + (copying or 0.0)


def _host_share(evidence: Evidence) -> float | None:
    """The loop's own Python and what it waits for, less what is known to be logging. Waiting for a core, beside other
    programs, or for a device is no doing of its own."""
    host, waits = evidence.phase_share(Phase.HOST), evidence.phase_share(Phase.IDLE)
    if host is None and waits is None:
        return None
    alone = evidence.fact("device") != "cuda" and (evidence.fact("other_load") or 0.0) <= MOST_OTHERS
    own = (host or 0.0) + ((waits or 0.0) if alone else 0.0)
    return max(0.0, own - (logging_share(evidence) or 0.0))


def _stage(evidence: Evidence) -> str:
    copies = (evidence.phase_share(Phase.TRANSFER) or 0.0) > (evidence.phase_share(Phase.DATA) or 0.0)
    return "copy" if copies else str(evidence.fact("data_stage"))


STAGES = {
    "workers": ": the loader's workers do not keep up",
    "tokenise": ": text is tokenised on one core while the step waits",
    "read": ": it is read while the step waits",
    "rebuilt": ": a DataLoader begins anew in every step",
    "lock": ": a thread of the same process prepares it, and shares the interpreter's lock with the loop",
    "copy": ": it is copied to the device while the step waits",
}


def _input_says(evidence: Evidence, value: float) -> Statement:
    stage = STAGES.get(_stage(evidence), "")
    figures = [f"data wait {_phase_seconds(evidence, Phase.DATA)} of a step of {units.seconds(evidence.step)}"]
    if stage and _stage(evidence) == "copy":
        figures.append(f"copies {_phase_seconds(evidence, Phase.TRANSFER)} (pin_memory=True, non_blocking=True)")
    elif stage:
        busy = evidence.fact("data_cpu_fraction")
        figures.append(f"in {evidence.fact('data_place')}; the thread computed {units.percent(busy, 0)} of the wait")
    return (
        f"The step waits for data: {units.percent(value)} of it passes before the next batch is there{stage}.",
        figures,
    )


def _host_says(evidence: Evidence, value: float) -> Statement:
    return (
        f"The training loop's own Python holds the step up: {units.percent(value)} of it is neither data nor compute.",
        [*_lines_of(evidence, Phase.HOST),
         f"host {_phase_seconds(evidence, Phase.HOST)} of a step of {units.seconds(evidence.step)}"],
    )  # fmt: skip


def _lines_of(evidence: Evidence, phase: Phase) -> list[str]:
    """Where the user's code spends a phase, as far as it was looked at: what takes a tenth of it and more."""
    lines = (evidence.fact("lines") or {}).get(str(phase), [])
    return [f"{place}: {units.percent(share, 0)} of it" for place, share in lines if share >= 0.1 and place != "?"]


def _overhead_says(evidence: Evidence, value: float) -> Statement:
    calls = evidence.bound_calls("overhead")
    return (
        f"Dispatch binds: {units.percent(value)} of the step goes to calling operations, and to ones too short to "
        "matter.",
        [
            f"{units.count(calls)} calls per step that take about as long as calling them",
            *_lines_of(evidence, Phase.FORWARD),
        ],
    )


def _slow_machine_says(evidence: Evidence, value: float) -> Statement:
    return (
        f"The machine was slower than it typically is: the same kernels ran at "
        f"{units.percent(evidence.machine_speed, 0)} of the speed that was planned with.",
        [
            f"kernels repeated during the run: {units.percent(evidence.machine_speed, 0)} of their planned speed",
            *_others(evidence),
        ],
    )


def _others(evidence: Evidence) -> list[str]:
    """Whose doing it was: that of programs on this machine, or of neighbours that the system cannot see."""
    share = evidence.fact("other_load")
    if share is None:
        return []
    whose = f"other programs used {units.percent(share, 0)} of the cores meanwhile"
    return [whose if share > MOST_OTHERS else f"{whose}: neighbours on the same host, or heat"]


def _throughout_says(evidence: Evidence, value: float) -> Statement:
    measured, planned = evidence.slower_throughout() or (0.0, 1.0)
    return (
        f"Everything ran slower than this machine can: the step took {measured / planned:.2f} times its plan, in every "
        "kind of operation.",
        [
            f"step {units.seconds(measured)}, planned {units.seconds(planned)} at the speed seen; every kind is over",
            *_others(evidence),
        ],
    )


def _irregular_says(evidence: Evidence, value: float) -> Statement:
    return (
        f"Some steps are far slower than the typical one: their excess is {units.percent(value)} of the wall time.",
        [f"typical step {units.seconds(evidence.step)}; wall time above it {units.percent(value)}"],
    )


def _unattributed_says(evidence: Evidence, value: float) -> Statement:
    return (
        f"{units.percent(value)} of the step has no name: the phases do not sum to the step.",
        [f"unattributed {units.seconds(evidence.gap.unattributed_seconds)} of {units.seconds(evidence.step)}"],
    )


def _evaluation_says(evidence: Evidence, value: float) -> Statement:
    return (
        f"Evaluation takes {units.percent(value)} of the time: it runs more often, or on more batches, than training "
        "can afford.",
        [_wall(evidence, "evaluation")],
    )


def _checkpoint_says(evidence: Evidence, value: float) -> Statement:
    return f"Saving checkpoints takes {units.percent(value)} of the time.", [_wall(evidence, "checkpoint")]


def _attention_says(evidence: Evidence, value: float) -> Statement:
    flops, all_flops = evidence.planned_flops(Kind.ATTENTION) or 0.0, evidence.plan.flops() or 1
    return (
        f"Attention binds: it takes {units.percent(evidence.kind_share(Kind.ATTENTION), 0)} of the step for "
        f"{units.percent(flops / all_flops, 0)} of the FLOPs.",
        [
            f"attention attains {units.rate(evidence.rate(Kind.ATTENTION), 'FLOP')}, "
            f"matrix products {units.rate(evidence.rate(Kind.MATMUL), 'FLOP')}"
        ],
    )


def _narrow_says(evidence: Evidence, value: float) -> Statement:
    attained, peak = evidence.rate(Kind.MATMUL) or 0.0, evidence.peak_rate() or 1.0
    return (
        f"The model is too narrow for this machine: its matrix products attain {units.percent(attained / peak, 0)} "
        "of what large ones do.",
        [f"matrix products {units.rate(attained, 'FLOP')} of {units.rate(peak, 'FLOP')} measured on large ones"],
    )


def _off_plan_says(evidence: Evidence, value: float) -> Statement:
    kind, measured, planned = evidence.most_off_plan() or ("", 0.0, 0.0)
    return (
        f"Operations of kind {kind} take {measured / planned:.2f} times what this machine was measured to need "
        "for them."
        if planned
        else f"Operations of kind {kind} take time that was not planned.",
        [f"{kind}: measured {units.seconds(measured)}, planned {units.seconds(planned)} at the machine's speed"],
    )


def _precision_says(evidence: Evidence, value: float) -> Statement:
    return (
        f"The precision costs time: another one is planned to shorten the run by {units.percent(value, 0)}.",
        [f"run in {evidence.plan.facts.get('precision')}; see the remedy"],
    )


def _compute_says(evidence: Evidence, value: float) -> Statement:
    mfu = evidence.run.totals.get("mfu")
    attained = evidence.rate(Kind.MATMUL)
    figures = [f"matrix products attain {units.rate(attained, 'FLOP')}"] if attained else []
    if mfu is not None:
        figures.append(f"MFU {units.percent(mfu.value)} of the machine's measured matmul rate")
    return (
        f"Arithmetic binds: matrix products and attention take {units.percent(value, 0)} of the step, and nothing "
        "holds them up.",
        figures,
    )


def _memory_says(evidence: Evidence, value: float) -> Statement:
    slowest = evidence.slowest_of("memory")
    largest = (
        f"; the largest is {slowest.name} ({slowest.phase}) with {units.seconds(slowest.measured)}" if slowest else ""
    )
    return (
        f"Memory traffic binds: operations that stream tensors take {units.percent(value, 0)} of the step.",
        [f"operations limited by memory bandwidth: {units.percent(value)} of the step{largest}"],
    )


def _phase_seconds(evidence: Evidence, phase: Phase) -> str:
    return units.seconds(next((row.measured for row in evidence.gap.phases if row.name == str(phase)), None))


def _wall(evidence: Evidence, name: str) -> str:
    wall = evidence.fact("wall_seconds") or {}
    return f"{name} {units.seconds(wall.get(name))}, training steps {units.seconds(wall.get('training'))}"


FIRST_RULES: tuple[Rule, ...] = (
    Rule(
        "input_bound", Axis.DATA, 0.10, _input_share, _input_says,
        "put data.cache on faster storage; `--set data.mock=true` trains on random tokens and shows what data costs",
        "prefetched batches wait under 1%; 10% is where a faster input pays more than any kernel here",
    ),
    Rule(
        "host_bound", Axis.MACHINE, 0.10, _host_share, _host_says,
        "move what these lines do out of the step, or do it every so many steps; close what else uses the cores",
        "the loop and its log line measure well under 2% of a step of 50 ms",
    ),
    Rule(
        "overhead_bound", Axis.ALGORITHM, 0.25, lambda e: e.bound_share("overhead"), _overhead_says,
        "more work per call: a larger train.micro_batch, or train.compile = \"on\"",
        "dispatch itself, and operations that take under four dispatches of a tiny one, as measured here",
    ),
    Rule(
        "machine_slow", Axis.MACHINE, 0.07, _slow_here, _slow_machine_says,
        "look for other processes, a power limit or heat; `ironlaw measure` again if it stays so",
        "the plan already allows for the interference that is typical here; what is left over stays under 7%",
    ),
    Rule(
        "host_shared", Axis.MACHINE, 0.07, _slow_host, _slow_machine_says,
        "nothing in the training; if it stays so, the plan learns it from the next runs, or `ironlaw measure` again",
        "as machine_slow, on a virtual machine where no other program ran: its neighbours' doing", fault=False,
    ),
    Rule(
        "slower_throughout", Axis.MACHINE, 0.15, _throughout, _throughout_says,
        "look for other programs on the same cores (`top`), and for more threads than free cores",
        "no single operation explains it, and it is more than what plan and machine vary by", symptom=True,
    ),
    Rule(
        "irregular_steps", Axis.MACHINE, 0.10, lambda e: e.fact("slow_steps_fraction"), _irregular_says,
        "look at when they happen (the step-time chart): other processes come in bursts, checkpoints at intervals",
        "shared machines without competing work stay under 5%", symptom=True,
    ),
    Rule(
        "unattributed", Axis.UNKNOWN, 0.05, lambda e: None if e.unattributed is None else abs(e.unattributed),
        _unattributed_says,
        "train longer: with few steps the mean of the phases and the typical step differ",
        "Ironlaw's own limit for an explanation that holds", symptom=True,
    ),
    Rule(
        "evaluation_frequent", Axis.ALGORITHM, 0.10, lambda e: e.wall_share("evaluation"), _evaluation_says,
        "raise evaluation.every or lower evaluation.batches",
        "a tenth of the budget buys a loss curve of dozens of points in any run worth watching",
    ),
    Rule(
        "checkpoint_frequent", Axis.ALGORITHM, 0.05, lambda e: e.wall_share("checkpoint"), _checkpoint_says,
        "raise checkpoint.every",
        "above 5% the insurance costs more than the work it saves, unless failures come every few minutes",
    ),
    Rule(
        "attention_slow", Axis.ALGORITHM, 0.25, _attention_excess, _attention_says,
        "fewer and wider heads, shorter sequences, or a precision in which attention is fast here",
        "time above what the same FLOPs take as matrix products of this run",
    ),
    Rule(
        "model_narrow", Axis.ALGORITHM, 0.25, _narrow_excess, _narrow_says,
        "a wider model.hidden with fewer layers, or a larger train.micro_batch",
        "time above what the same FLOPs take at the rate of large products on this machine",
    ),
    Rule(
        "precision", Axis.ALGORITHM, 0.10, lambda e: e.gains.get("precision"), _precision_says,
        "set train.precision as the remedy says",
        "below 10% a gain is inside the planner's own error",
    ),
    Rule(
        "off_plan", Axis.MACHINE, 0.10, _off_plan, _off_plan_says,
        "measure the machine again; if it stays, the profile does not cover these shapes",
        "the plan is wanted within 10%", symptom=True,
    ),
    Rule(
        "compute_bound", Axis.ALGORITHM, 0.30, lambda e: e.bound_share("compute"), _compute_says,
        "only less arithmetic or a faster machine shortens the step",
        "the largest of the ceilings when no fault is found", fault=False,
    ),
    Rule(
        "memory_bound", Axis.ALGORITHM, 0.30, lambda e: e.bound_share("memory"), _memory_says,
        "fuse the streaming operations (train.compile = \"on\") or use a wider model: traffic grows slower than FLOPs",
        "the largest of the ceilings when no fault is found", fault=False,
    ),
)  # fmt: skip


RULES = FIRST_RULES + CODE_RULES
