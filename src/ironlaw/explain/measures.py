"""Measures of rules about any run: its input, the loop's own time, the machine, and the plan beside it.

A measure is the share of time that the cause of its rule costs, so that findings compare: the largest one binds.
"""

from __future__ import annotations

from ironlaw.explain.evidence import RunEvidence
from ironlaw.explain.measures_of_code import logging_share
from ironlaw.explain.rule import Figures, Measure, Reading
from ironlaw.ledger import Kind, Phase
from ironlaw.machine.interference import MAX_OTHER_LOAD
from ironlaw.units import count, percent, rate, seconds

LARGE_KIND = 0.04  # of the planned step: smaller kinds are noise
CLEARLY_OVER = 1.15  # times the plan
LOOP_SECONDS, PASS_SECONDS = 1e-3, 1e-4  # per step and evaluation, of a loop that does nothing unusual between passes


def _off_plan(e: RunEvidence) -> Reading | None:
    """The kind of operation with the most seconds that the plan lacks.

    Nobody fitted the plan to a module that is not ours: then it is a notice. An update that is not fused is counted in
    passes there, not measured, and is left out.
    """
    speed, is_observed = e.machine_speed or 1.0, e.tolerance > 0
    known = [
        (row.measured - row.planned / speed, row.name, row.measured, row.planned / speed)
        for row in e.gap.kinds
        if row.measured is not None and row.planned is not None and not (is_observed and row.name == Kind.OPTIMIZER)
    ]
    if not known or e.step is None or e.plan_is_of_another_machine:
        return None
    over, kind, measured, planned = max(known)
    figure = f"{kind}: measured {seconds(measured)}, planned {seconds(planned)} at the machine's speed"
    times = f"{measured / planned:.2f} times what this machine was measured to need for them" if planned else ""
    share = max(0.0, over - e.tolerance * measured) / e.step
    return Reading(share, [figure], {"kind": kind, "times": times or "time that was not planned"}, is_observed)


def _evaluations(e: RunEvidence) -> Reading | None:
    """Passes without gradients; of an agent they are a notice."""
    share = e.wall_share("evaluation")
    if share is None:
        return None
    figures = [*e.line_figures(Phase.EVALUATION), *_wall(e, "evaluation")]
    return Reading(share, figures, is_notice=e.acts)


def _throughout(e: RunEvidence) -> Reading | None:
    """The step above its plan at the machine's speed, when every kind that matters is over; 0 when some kind is not:
    then the cause is not the machine as a whole."""
    planned, speed = e.gap.step.planned, e.machine_speed or 1.0
    if planned is None or e.step is None or e.plan_is_of_another_machine:
        return None
    large = [row for row in e.gap.kinds if (row.planned or 0.0) > LARGE_KIND * planned]
    ratios = [row.measured * speed / row.planned for row in large if row.measured is not None and row.planned]
    if not ratios:
        return None
    planned = planned / speed if len(ratios) >= 2 and min(ratios) > CLEARLY_OVER else e.step
    figure = f"step {seconds(e.step)}, planned {seconds(planned)} at the speed seen; every kind is over"
    share = max(0.0, (e.step - planned) / e.step - e.tolerance)
    return Reading(share, [figure, *_others(e)], {"times": f"{e.step / planned:.2f}"})


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


def _others(e: RunEvidence) -> list[str]:
    """Whose doing it was: that of programs on this machine, or of neighbours that the system cannot see."""
    share = e.fact("other_load")
    if share is None:
        return []
    whose = f"other programs used {percent(share, 0)} of the cores meanwhile"
    return [whose if share > MAX_OTHER_LOAD else f"{whose}: neighbours on the host, cores moved apart, or heat"]


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
    """The loop's own time, less what is known to be logging, input or a module beside the observed one (a teacher): all
    of it from twice what any loop takes, none of it up to that."""
    if e.phase_share(Phase.HOST) is None and e.phase_share(Phase.IDLE) is None:
        return None
    loop = LOOP_SECONDS + PASS_SECONDS * float(e.fact("evaluations_per_step") or 0.0)
    usual = loop / (e.step * _undelayed(e)) if e.step else 0.0
    known = _at_loader(e) + float(e.fact("module_fraction") or 0.0)
    own = _own_share(e) * (1 - known) - (logging_share(e) or 0.0)
    return min(own, max(0.0, 2 * (own - usual)))


def _overhead_figures(e: RunEvidence) -> list[str]:
    calls = sum(line.count or 0 for line in e.plan.select(bound="overhead") if line.kind is not Kind.HOST)
    figure = f"{count(calls)} calls per step that take about as long as calling them"
    return [figure, *e.line_figures(Phase.FORWARD)]


def _module_again(e: RunEvidence) -> float | None:
    if "module_again" not in e.run.facts:
        return None
    return _own_share(e) * (e.fact("module_again") or {"part": 0.0})["part"]


def _of_shape(e: RunEvidence, share: float, figure: str, words: dict[str, str]) -> Reading:
    """In a loop that is not ours the model is given: its shape is no fault, and a notice where it costs half of the
    step."""
    return Reading(share - e.tolerance, [figure], words, is_notice=e.tolerance > 0)


def _attention_slow(e: RunEvidence) -> Reading | None:
    share = e.excess_share(Kind.ATTENTION, e.rate(Kind.MATMUL))
    if share is None:
        return None
    flops = (e.planned_flops(Kind.ATTENTION) or 0.0) / (e.plan.flops() or 1)
    attention, products = (rate(e.rate(kind), "FLOP") for kind in (Kind.ATTENTION, Kind.MATMUL))
    words = {"taken": percent(e.kind_share(Kind.ATTENTION), 0), "flops": percent(flops, 0)}
    return _of_shape(e, share, f"attention attains {attention}, matrix products {products}", words)


def _model_narrow(e: RunEvidence) -> Reading | None:
    attained, peak = e.rate(Kind.MATMUL), e.peak_rate()
    share = e.excess_share(Kind.MATMUL, peak)
    if share is None or attained is None or peak is None:
        return None
    figure = f"matrix products {rate(attained, 'FLOP')} of {rate(peak, 'FLOP')} measured on large ones"
    return _of_shape(e, share, figure, {"part": percent(attained / peak, 0)})


def _compute_figures(e: RunEvidence) -> list[str]:
    mfu, attained = e.run.totals.get("mfu"), e.rate(Kind.MATMUL)
    figures = [f"matrix products attain {rate(attained, 'FLOP')}"] if attained else []
    return figures + ([f"MFU {percent(mfu.value)} of the machine's measured matmul rate"] if mfu is not None else [])


def _memory_figures(e: RunEvidence) -> list[str]:
    timed = [(row.measured, row) for row in e.gap.operations if row.bound == "memory" and row.measured is not None]
    took, slowest = max(timed, key=lambda one: one[0], default=(None, None))
    largest = f"; the largest is {slowest.name} ({slowest.phase}) with {seconds(took)}" if slowest else ""
    return [f"operations limited by memory bandwidth: {percent(e.bound_share('memory'))} of the step{largest}"]


def _phase_seconds(e: RunEvidence, phase: Phase) -> str:
    return seconds(next((row.measured for row in e.gap.phases if row.name == str(phase)), None))


def _wall(e: RunEvidence, name: str) -> list[str]:
    wall = e.fact("wall_seconds") or {}
    return [f"{name} {seconds(wall.get(name))}, training steps {seconds(wall.get('training'))}"]


MEASURES: dict[str, Measure] = {
    "input_bound": _input,
    "host_bound": _host_share,
    "module_again": _module_again,
    "overhead_bound": lambda e: e.bound_share("overhead"),
    "machine_slow": lambda e: _slow(e, neighbours=False),
    "host_shared": lambda e: _slow(e, neighbours=True),
    "slower_throughout": _throughout,
    "irregular_steps": lambda e: e.fact("slow_steps_fraction"),
    "unattributed": lambda e: None if e.unattributed is None else abs(e.unattributed),
    "evaluation_frequent": _evaluations,
    "checkpoint_frequent": lambda e: e.wall_share("checkpoint"),
    "attention_slow": _attention_slow,
    "model_narrow": _model_narrow,
    "off_plan": _off_plan,
    "compute_bound": lambda e: e.bound_share("compute"),
    "memory_bound": lambda e: e.bound_share("memory"),
}
FIGURES: dict[str, Figures] = {
    "host_bound": lambda e: [
        *e.line_figures(Phase.HOST),
        f"host {_phase_seconds(e, Phase.HOST)} of a step of {seconds(e.step)}",
    ],
    "overhead_bound": _overhead_figures,
    "irregular_steps": lambda e: [
        f"typical step {seconds(e.step)}; wall time above it {percent(e.fact('slow_steps_fraction'))}"
    ],
    "unattributed": lambda e: [f"unattributed {seconds(e.gap.unattributed_seconds)} of {seconds(e.step)}"],
    "checkpoint_frequent": lambda e: _wall(e, "checkpoint"),
    "precision": lambda e: [f"run in {e.fact('precision') or e.plan.facts.get('precision')}; see the remedy"],
    "compute_bound": _compute_figures,
    "memory_bound": _memory_figures,
}
