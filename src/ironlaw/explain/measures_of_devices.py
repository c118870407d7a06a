"""Measures of rules about what a loop runs on: cores and their threads, ranks, matrix units, memory, clocks.

Most need a trace, or several ranks; a run without them lists these rules as not tested.
"""

from __future__ import annotations

from ironlaw.explain.evidence import NOTICED, RunEvidence
from ironlaw.explain.rule import Figures, Measure
from ironlaw.ledger import Kind, Phase
from ironlaw.units import percent

TILE = 128  # rows and columns of a tile of matrix units


def _traced(*phases: Phase) -> Measure:
    """Share of a traced step on a device in these phases."""

    def measure(e: RunEvidence) -> float | None:
        if e.fact("device") != "cuda" or e.fact("source") != "trace":
            return None
        return sum(e.phase_share(phase) or 0.0 for phase in phases)

    return measure


def _communication(e: RunEvidence) -> float | None:
    """Less what has a cause of its own: waiting for a rank that is slower, or that itself waits for a core which other
    programs have, and exchanges that nothing needs."""
    share, ranks, rank = e.phase_share(Phase.COMMUNICATION), e.fact("rank_own_seconds"), int(e.fact("rank") or 0)
    if share is None:
        return None
    behind = float(max(ranks) - ranks[rank]) if ranks and len(ranks) > rank else 0.0
    delays = max(e.fact("rank_delayed_seconds") or [0.0])
    return max(0.0, share - (behind + delays) / (e.step or 1.0)) * (1 - useless_exchanges(e))


def useless_exchanges(e: RunEvidence) -> float:
    """Share of the gradient exchanges of a step after which it accumulates further."""
    per_step = float(e.fact("gradient_syncs_per_step") or 0.0)
    return max(0.0, per_step - 1) / per_step if per_step else 0.0


def _extra_syncs(e: RunEvidence) -> float | None:
    """Exposed communication that is for exchanges in the middle of accumulation."""
    share = e.phase_share(Phase.COMMUNICATION)
    return None if share is None or not e.fact("gradient_syncs_per_step") else share * useless_exchanges(e)


def _straggler(e: RunEvidence) -> float | None:
    """How much longer the slowest rank works before it meets the others, as a share of the step."""
    ranks = sorted(e.fact("rank_own_seconds") or [])
    if len(ranks) < 2 or not e.step:
        return None
    return float(ranks[-1] - ranks[(len(ranks) - 1) // 2]) / e.step


def _busy_figures(e: RunEvidence) -> list[str]:
    kinds = sorted(e.gap.kinds, key=lambda row: -(row.measured or 0.0))
    return [f"{row.name} {percent((row.measured or 0.0) / (e.step or 1.0), 0)}" for row in kinds[:3]]


def _skipped(e: RunEvidence) -> float | None:
    skipped, steps = e.fact("skipped_updates"), e.steps
    return None if skipped is None or not steps else float(skipped) / steps


def _fragmentation(e: RunEvidence) -> float | None:
    reserved, peak = e.fact("reserved_bytes"), e.run.totals.get("peak_bytes")
    return None if not reserved or peak is None else max(0.0, 1 - peak.value / float(reserved))


def _quantisation(e: RunEvidence) -> float | None:
    """Time that products spend on parts of tiles and waves without work."""
    shapes, units = e.fact("product_shapes"), e.fact("compute_units")
    if not shapes or not units:
        return None
    useful = launched = 0.0
    for m, n, k in shapes:
        waves = -(-(-(-m // TILE) * -(-n // TILE)) // units)
        useful += m * n * k
        launched += waves * units * TILE * TILE * k
    return 1 - useful / launched


def _throttled(e: RunEvidence) -> float | None:
    """By the board's mean clock during the steps; a processor's, by its speed, where the system counted heat."""
    clock, highest = e.fact("clock_hertz"), e.fact("clock_highest_hertz")
    if clock and highest:
        return max(0.0, 1 - float(clock) / float(highest))
    events, speed = e.fact("processor_throttled"), e.machine_speed
    if events is None or speed is None:
        return None
    return max(0.0, 1 - speed) if events else 0.0


def _matrix_units(e: RunEvidence) -> float | None:
    """fp32 products on a device that has matrix units for 16 bits."""
    if e.fact("device") != "cuda" or e.fact("precision") is None:
        return None
    return (e.kind_share(Kind.MATMUL) or 0.0) if e.fact("precision") == "fp32" else 0.0


def _unfused(e: RunEvidence) -> float | None:
    flag = e.fact("unfused_attention")
    return None if flag is None else (e.kind_share(Kind.ATTENTION) or 0.0) + 0.01 if flag else 0.0


def _threads(more: bool) -> Measure:
    """Gain of as many threads as cores, where there are more, or fewer."""

    def measure(e: RunEvidence) -> float | None:
        threads, cores, gain = e.fact("threads"), e.fact("cores"), e.gains.get("threads")
        if gain is None or threads is None or cores is None:
            return None
        return max(gain, NOTICED) if (threads > cores) is more and threads != cores else 0.0

    return measure


def _waiting_for_thread(e: RunEvidence) -> float | None:
    """What the loop's thread waits, for the interpreter's lock, while another thread computes; and for cores, by that
    thread's part of what others compute."""
    if "busy_thread" not in e.run.facts or e.fact("device") != "cpu" or not e.step:
        return None
    if not e.fact("busy_thread"):
        return 0.0
    own, others = e.fact("busy_thread")["part"], float(e.fact("other_load") or 0.0) * (e.fact("cores") or 1)
    waited = float(e.fact("delayed_seconds") or 0.0) * own / (own + others)
    return (float(e.fact("paused_seconds") or 0.0) + waited) / e.step


def _programs_beside(e: RunEvidence) -> float | None:
    """What other programs used of the cores, where the loop uses all of them; else what its thread waited for one."""
    if "programs_beside" not in e.run.facts or not e.step:
        return None
    cores = e.fact("cores") or 1
    used = min((e.fact("programs_beside") or {"part": 0.0})["part"], float(e.fact("other_load") or 0.0))
    waited = float(e.fact("delayed_seconds") or 0.0) / e.step
    return used if (e.fact("threads") or 1) >= cores else min(waited, used * cores)


MEASURES: dict[str, Measure] = {
    "oversubscribed": _threads(more=True),
    "threads_few": _threads(more=False),
    "programs_beside": _programs_beside,
    "thread_busy": _waiting_for_thread,
    "attention_unfused_trace": _unfused,
    "sync_in_accumulation": _extra_syncs,
    "communication_bound": _communication,
    "bubble": lambda e: e.plan.facts.get("bubble_fraction") or e.fact("bubble_fraction"),
    "straggler": _straggler,
    "launch_bound": _traced(Phase.HOST, Phase.IDLE),
    "no_matrix_units": _matrix_units,
    "tile_quantisation": _quantisation,
    "fragmentation": _fragmentation,
    "throttled": _throttled,
    "updates_skipped": _skipped,
    "device_busy": _traced(Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER),
}
FIGURES: dict[str, Figures] = {
    "communication_bound": lambda e: [
        *e.line_figures(Phase.COMMUNICATION), f"{percent(_communication(e))} of the step",
    ],
    "device_busy": _busy_figures,
}  # fmt: skip
