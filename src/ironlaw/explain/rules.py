"""The rules of diagnosis: each names one cause, what it looks at, from where on it speaks, and why there.

A rule's measure is a share of time that its cause costs, so that findings compare: the largest one binds.
Adding a rule is adding an entry here, or to `rules_of_code.py` where it is about how a
loop is written, or to `rules_of_devices.py` where it is about what it runs on.
"""

from __future__ import annotations

from ironlaw.explain.evidence import RunEvidence
from ironlaw.explain.rule import Axis, Reading, Rule, Tier
from ironlaw.explain.rules_of_code import CODE_RULES, logging_share
from ironlaw.explain.rules_of_devices import DEVICE_RULES
from ironlaw.ledger import Kind, Phase
from ironlaw.machine.interference import MAX_OTHER_LOAD
from ironlaw.units import count, percent, rate, seconds

SHAPE, NEXT_TO = 0.25, 0.001  # of the step, that the shapes of a model cost; just below is a notice
OFF_PLAN, EVALUATIONS = 0.10, 0.10
LOOP_SECONDS = 1e-3  # per step, of a loop that does nothing unusual between its passes


def _off_plan(e: RunEvidence) -> Reading | None:
    worst = e.most_off_plan()
    if worst is None or e.step is None:
        return None
    kind, measured, planned = worst
    over = max(0.0, measured - planned - e.tolerance * measured) / e.step
    if e.tolerance:  # nobody fitted the plan to a module that is not ours
        over = min(over, OFF_PLAN - NEXT_TO)
    figure = f"{kind}: measured {seconds(measured)}, planned {seconds(planned)} at the machine's speed"
    times = f"{measured / planned:.2f} times what this machine was measured to need for them" if planned else ""
    return Reading(over, [figure], {"kind": kind, "times": times or "time that was not planned"})


def _evaluations(e: RunEvidence) -> float | None:
    """Passes without gradients; those in training mode may play what is learned from next, and are a notice."""
    share = e.wall_share("evaluation")
    return share if share is None or (e.fact("rollouts") or 0.0) < 0.5 else min(share, EVALUATIONS - NEXT_TO)


def _throughout(e: RunEvidence) -> Reading | None:
    both = e.slower_throughout()
    if both is None:
        return None
    measured, planned = both
    figure = f"step {seconds(measured)}, planned {seconds(planned)} at the speed seen; every kind is over"
    share = max(0.0, (measured - planned) / measured - e.tolerance)
    return Reading(share, [figure, *_others(e)], {"times": f"{measured / planned:.2f}"})


def _beyond(e: RunEvidence, share: float | None) -> float | None:
    """In a loop that is not ours the model is given: its shape is no fault, and a notice where it costs half of the
    step."""
    return share if share is None or not e.tolerance else min(share - e.tolerance, SHAPE - NEXT_TO)


def _slow(e: RunEvidence, neighbours: bool) -> Reading | None:
    """How much slower than planned the machine was: by what `neighbours` did, or by what can be found on it.

    A guest of a shared host on which nothing else ran: what slowed it is out of its sight and reach, and passes.
    """
    if e.machine_speed is None:
        return None
    theirs = bool(e.fact("virtual")) and (e.fact("other_load") or 0.0) <= MAX_OTHER_LOAD
    speed = percent(e.machine_speed, 0)
    figure = f"kernels repeated during the run: {speed} of their planned speed"
    share = max(0.0, 1.0 - e.machine_speed) if theirs is neighbours else 0.0
    return Reading(share, [figure, *_others(e)], {"speed": speed})


SLOW = (
    "The machine was slower than it typically is: the same kernels ran at {speed} of the speed that was planned with."
)


def _others(e: RunEvidence) -> list[str]:
    """Whose doing it was: that of programs on this machine, or of neighbours that the system cannot see."""
    share = e.fact("other_load")
    if share is None:
        return []
    whose = f"other programs used {percent(share, 0)} of the cores meanwhile"
    return [whose if share > MAX_OTHER_LOAD else f"{whose}: neighbours on the same host, or heat"]


STAGES = {
    "workers": ": the loader's workers do not keep up",
    "tokenise": ": text is tokenised on one core while the step waits",
    "read": ": it is read while the step waits",
    "rebuilt": ": a DataLoader begins anew in every step",
    "lock": ": a thread of the same process prepares it, and shares the interpreter's lock with the loop",
    "copy": ": it is copied to the device while the step waits",
}


def _input(e: RunEvidence) -> Reading | None:
    """Waiting for a batch, what the line that asks for it does besides, and copying it to the device."""
    waiting, copying = e.phase_share(Phase.DATA), e.phase_share(Phase.TRANSFER)
    share = copying if waiting is None else waiting + _own_share(e) * _at_loader(e) + (copying or 0.0)
    if share is None:
        return None
    stage = "copy" if (copying or 0.0) > (waiting or 0.0) else str(e.fact("data_stage"))
    figures = [*e.line_figures(Phase.DATA), f"data wait {_phase_seconds(e, Phase.DATA)} of a step of {seconds(e.step)}"]
    if stage == "copy":
        figures.append(f"copies {_phase_seconds(e, Phase.TRANSFER)} (pin_memory=True, non_blocking=True)")
    elif stage in STAGES:
        busy = percent(e.fact("data_cpu_fraction"), 0)
        figures.append(f"in {e.fact('data_place')}; the thread computed {busy} of the wait")
    return Reading(share, figures, {"where": STAGES.get(stage, "")})


def _at_loader(e: RunEvidence) -> float:
    """Part of the loop's own time that passes on lines that make a loader, or ask for its batches; no line of which a
    framework runs the whole loop."""
    if not e.phase_share(Phase.DATA):
        return 0.0
    loaders = {at for at, _ in e.lines(Phase.DATA)} - {at for at, _ in e.lines(Phase.BACKWARD)}
    return float(sum(share for at, share in e.lines(Phase.HOST) if at.partition(" (in ")[0] in loaders))


def _own_share(e: RunEvidence) -> float:
    """The loop's own Python and what it sleeps or waits for, of a step that waits for no core that other programs have:
    that is no doing of its own, and makes everything else longer in proportion."""
    own = e.phase_share(Phase.HOST) or 0.0
    if e.fact("device") == "cuda" or not e.step:
        return own
    own += (e.phase_share(Phase.IDLE) or 0.0) - float(e.fact("delayed_gap_seconds") or 0.0) / e.step
    return max(0.0, own) / _undelayed(e)


def _undelayed(e: RunEvidence) -> float:
    """Part of the step in which it waits for no core that other programs have."""
    return max(0.05, 1 - float(e.fact("delayed_seconds") or 0.0) / (e.step or 1.0))


def _host_share(e: RunEvidence) -> float | None:
    """The loop's own time, less what is known to be logging, input or a module beside the observed one (a teacher), and
    what any loop takes."""
    if e.phase_share(Phase.HOST) is None and e.phase_share(Phase.IDLE) is None:
        return None
    usual = LOOP_SECONDS / (e.step * _undelayed(e)) if e.step else 0.0
    known = _at_loader(e) + float(e.fact("module_fraction") or 0.0)
    return max(0.0, _own_share(e) * (1 - known) - (logging_share(e) or 0.0) - usual)


def _host_figures(e: RunEvidence) -> list[str]:
    return [*e.line_figures(Phase.HOST), f"host {_phase_seconds(e, Phase.HOST)} of a step of {seconds(e.step)}"]


def _overhead_figures(e: RunEvidence) -> list[str]:
    calls = count(e.bound_calls("overhead"))
    return [f"{calls} calls per step that take about as long as calling them", *e.line_figures(Phase.FORWARD)]


def _attention_slow(e: RunEvidence) -> Reading | None:
    share = _beyond(e, e.excess_share(Kind.ATTENTION, e.rate(Kind.MATMUL)))
    if share is None:
        return None
    flops = (e.planned_flops(Kind.ATTENTION) or 0.0) / (e.plan.flops() or 1)
    attention, products = (rate(e.rate(kind), "FLOP") for kind in (Kind.ATTENTION, Kind.MATMUL))
    words = {"taken": percent(e.kind_share(Kind.ATTENTION), 0), "flops": percent(flops, 0)}
    return Reading(share, [f"attention attains {attention}, matrix products {products}"], words)


def _model_narrow(e: RunEvidence) -> Reading | None:
    attained, peak = e.rate(Kind.MATMUL), e.peak_rate()
    share = _beyond(e, e.excess_share(Kind.MATMUL, peak))
    if share is None or attained is None or peak is None:
        return None
    figure = f"matrix products {rate(attained, 'FLOP')} of {rate(peak, 'FLOP')} measured on large ones"
    return Reading(share, [figure], {"part": percent(attained / peak, 0)})


def _compute_figures(e: RunEvidence) -> list[str]:
    mfu, attained = e.run.totals.get("mfu"), e.rate(Kind.MATMUL)
    figures = [f"matrix products attain {rate(attained, 'FLOP')}"] if attained else []
    return figures + ([f"MFU {percent(mfu.value)} of the machine's measured matmul rate"] if mfu is not None else [])


def _memory_figures(e: RunEvidence) -> list[str]:
    slowest, share = e.slowest_of("memory"), percent(e.bound_share("memory"))
    largest = f"; the largest is {slowest.name} ({slowest.phase}) with {seconds(slowest.measured)}" if slowest else ""
    return [f"operations limited by memory bandwidth: {share} of the step{largest}"]


def _phase_seconds(e: RunEvidence, phase: Phase) -> str:
    return seconds(next((row.measured for row in e.gap.phases if row.name == str(phase)), None))


def _wall(e: RunEvidence, name: str) -> list[str]:
    wall = e.fact("wall_seconds") or {}
    return [f"{name} {seconds(wall.get(name))}, training steps {seconds(wall.get('training'))}"]


RULES: tuple[Rule, ...] = (
    Rule(
        "input_bound", Axis.DATA, 0.10, _input,
        "The step waits for data: {share} of it passes before the next batch is there{where}.",
        "put data.cache on faster storage; `--set data.mock=true` trains on random tokens and shows what data costs",
        "prefetched batches wait under 1%; 10% is where a faster input pays more than any kernel here", noticed=0.05,
    ),
    Rule(
        "host_bound", Axis.MACHINE, 0.10, _host_share,
        "The training loop's own Python holds the step up: {share} of it is neither data nor compute.",
        "move what these lines do out of the step, or do it every so many steps; close what else uses the cores",
        "the loop and its log line measure well under 2% of a step of 50 ms", _host_figures, noticed=0.05, symptom=True,
        eased_by="batch_small",
    ),
    Rule(
        "module_again", Axis.ALGORITHM, 0.05,
        lambda e: _own_share(e) * (e.fact("module_again") or {"part": 0.0})["part"]
        if "module_again" in e.run.facts else None,
        "A module computes again what it has computed before: {share} of the step.",
        "call it once, before the loop, and keep what it gives",
        "the same tensors and weights as the last time, without gradients, in the recorded steps; 5% as for checks",
        placed="module_again",
    ),
    Rule(
        "overhead_bound", Axis.ALGORITHM, 0.25, lambda e: e.bound_share("overhead"),
        "Dispatch binds: {share} of the step goes to calling operations, and to ones too short to matter.",
        "more work per call: a larger train.micro_batch, or train.compile = \"on\"",
        "dispatch itself, and operations that take under four dispatches of a tiny one, as measured here",
        _overhead_figures, tier=Tier.OFFER,
    ),
    Rule(
        "machine_slow", Axis.MACHINE, 0.07, lambda e: _slow(e, neighbours=False), SLOW,
        "look for other processes, a power limit or heat; `ironlaw measure` again if it stays so",
        "the plan already allows for the interference that is typical here; what is left over stays under 7%",
        tier=Tier.BEYOND,
    ),
    Rule(
        "host_shared", Axis.MACHINE, 0.07, lambda e: _slow(e, neighbours=True), SLOW,
        "nothing in the training; if it stays so, the plan learns it from the next runs, or `ironlaw measure` again",
        "as machine_slow, on a virtual machine where no other program ran: its neighbours' doing",
        tier=Tier.CEILING,
    ),
    Rule(
        "slower_throughout", Axis.MACHINE, 0.15, _throughout,
        "Everything ran slower than this machine can: the step took {times} times its plan, in every kind of "
        "operation.",
        "look for other programs on the same cores (`top`), and for more threads than free cores",
        "no single operation explains it, and it is more than what plan and machine vary by",
        tier=Tier.BEYOND,
    ),
    Rule(
        "irregular_steps", Axis.MACHINE, 0.10, lambda e: e.fact("slow_steps_fraction"),
        "Some steps are far slower than the typical one: their excess is {share} of the wall time.",
        "look at when they happen (the step-time chart): other processes come in bursts, checkpoints at intervals",
        "shared machines without competing work stay under 5%",
        lambda e: [f"typical step {seconds(e.step)}; wall time above it {percent(e.fact('slow_steps_fraction'))}"],
        tier=Tier.BEYOND,
    ),
    Rule(
        "unattributed", Axis.UNKNOWN, 0.05, lambda e: None if e.unattributed is None else abs(e.unattributed),
        "{share} of the step has no name: the phases do not sum to the step.",
        "train longer: with few steps the mean of the phases and the typical step differ",
        "Ironlaw's own limit for an explanation that holds",
        lambda e: [f"unattributed {seconds(e.gap.unattributed_seconds)} of {seconds(e.step)}"],
        tier=Tier.BEYOND,
    ),
    Rule(
        "evaluation_frequent", Axis.ALGORITHM, EVALUATIONS, _evaluations,
        "Evaluation takes {share} of the time: it runs more often, or on more batches, than training can afford.",
        "raise evaluation.every or lower evaluation.batches; in a loop of your own, under torch.no_grad() as well",
        "a tenth of the budget buys a loss curve of dozens of points in any run worth watching",
        lambda e: [*e.line_figures(Phase.EVALUATION), *_wall(e, "evaluation")], noticed=EVALUATIONS - NEXT_TO,
    ),
    Rule(
        "checkpoint_frequent", Axis.ALGORITHM, 0.05, lambda e: e.wall_share("checkpoint"),
        "Saving checkpoints takes {share} of the time.", "raise checkpoint.every",
        "above 5% the insurance costs more than the work it saves, unless failures come every few minutes",
        lambda e: _wall(e, "checkpoint"),
    ),
    Rule(
        "attention_slow", Axis.ALGORITHM, SHAPE, _attention_slow,
        "Attention binds: it takes {taken} of the step for {flops} of the FLOPs.",
        "fewer and wider heads, shorter sequences, or a precision in which attention is fast here",
        "time above what the same FLOPs take as matrix products of this run", tier=Tier.OFFER,
        noticed=SHAPE - NEXT_TO,
    ),
    Rule(
        "model_narrow", Axis.ALGORITHM, SHAPE, _model_narrow,
        "The model is too narrow for this machine: its matrix products attain {part} of what large ones do.",
        "a wider model.hidden with fewer layers, or a larger train.micro_batch",
        "time above what the same FLOPs take at the rate of large products on this machine",
        tier=Tier.OFFER, noticed=SHAPE - NEXT_TO,
    ),
    Rule(
        "precision", Axis.ALGORITHM, 0.10, lambda e: e.gains.get("precision"),
        "Another precision would shorten the run by {percent}.",
        "set train.precision as the remedy says", "below 10% a gain is inside the planner's own error",
        lambda e: [f"run in {e.fact('precision') or e.plan.facts.get('precision')}; see the remedy"], tier=Tier.OFFER,
    ),
    Rule(
        "off_plan", Axis.MACHINE, OFF_PLAN, _off_plan, "Operations of kind {kind} take {times}.",
        "measure the machine again; if it stays, the profile does not cover these shapes",
        "the plan is wanted within 10%", tier=Tier.BEYOND, noticed=OFF_PLAN - NEXT_TO,
    ),
    Rule(
        "compute_bound", Axis.ALGORITHM, 0.30, lambda e: e.bound_share("compute"),
        "Arithmetic binds: matrix products and attention take {percent} of the step, and nothing holds them up.",
        "only less arithmetic or a faster machine shortens the step",
        "the largest of the ceilings when no fault is found", _compute_figures, tier=Tier.CEILING,
    ),
    Rule(
        "memory_bound", Axis.ALGORITHM, 0.30, lambda e: e.bound_share("memory"),
        "Memory traffic binds: operations that stream tensors take {percent} of the step.",
        "fuse the streaming operations (train.compile = \"on\") or use a wider model: traffic grows slower than FLOPs",
        "the largest of the ceilings when no fault is found", _memory_figures, tier=Tier.CEILING,
    ),
    *CODE_RULES,
    *DEVICE_RULES,
)  # fmt: skip
