"""Rules about the devices that a loop runs on: cores and their threads, ranks, matrix units, memory, clocks.

Most need a trace, or several ranks; a run without them lists these rules as not tested.
"""

from __future__ import annotations

from collections.abc import Callable

from ironlaw.explain.evidence import RunEvidence
from ironlaw.explain.rule import Axis, Rule, Tier
from ironlaw.ledger import Kind, Phase
from ironlaw.units import percent

NOTICED = 0.001  # the value of what is named though it costs nothing here
TILE = 128  # rows and columns of a tile of matrix units


def _traced(*phases: Phase) -> Callable[[RunEvidence], float | None]:
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


def _bubble(e: RunEvidence) -> float | None:
    return e.plan.facts.get("bubble_fraction") or e.fact("bubble_fraction")


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


def _threads(more: bool) -> Callable[[RunEvidence], float | None]:
    """Gain of as many threads as cores, where there are more, or fewer."""

    def measure(e: RunEvidence) -> float | None:
        threads, cores, gain = e.fact("threads"), e.fact("cores"), e.gains.get("threads")
        if gain is None or threads is None or cores is None:
            return None
        return max(gain, NOTICED) if (threads > cores) is more and threads != cores else 0.0

    return measure


def _beside(e: RunEvidence) -> float | None:
    """What the loop's thread waits, for the interpreter's lock, while another thread computes; and for cores, by that
    thread's part of what others compute."""
    if "busy_thread" not in e.run.facts or e.fact("device") != "cpu" or not e.step:
        return None
    if not e.fact("busy_thread"):
        return 0.0
    own, others = e.fact("busy_thread")["part"], float(e.fact("other_load") or 0.0) * (e.fact("cores") or 1)
    waited = float(e.fact("delayed_seconds") or 0.0) * own / (own + others)
    return (float(e.fact("paused_seconds") or 0.0) + waited) / e.step


DEVICE_RULES: tuple[Rule, ...] = (
    Rule(
        "oversubscribed", Axis.MACHINE, 0.05, _threads(more=True),
        "There are more threads than cores: they take turns, which costs {share} of the step.",
        "torch.set_num_threads(number of cores)",
        "as many threads as cores is what compute-bound kernels want; 5% is above the noise of the experiment",
        facts=("threads", "cores"), noticed=NOTICED,
    ),
    Rule(
        "threads_few", Axis.MACHINE, 0.05, _threads(more=False),
        "There are fewer threads than cores: {share} of the step would be saved by using all.",
        "torch.set_num_threads(number of cores), and no OMP_NUM_THREADS below it",
        "kernels timed both ways at the end of the run; 5% is above the noise of the experiment",
        facts=("threads", "cores"), noticed=NOTICED,
    ),
    Rule(
        "thread_busy", Axis.MACHINE, 0.10, _beside,
        "Another thread of the process computes beside the loop, which waits for it: {share} of the step.",
        "give it a process of its own, or let it sleep: a thread in Python holds the interpreter's lock",
        "the thread had a tenth of a core and more; a loop alone waits for nothing but data",
        lambda e: [f"it computes {percent(e.fact('busy_thread')['part'], 0)} of the time"], placed="busy_thread",
    ),
    Rule(
        "attention_unfused_trace", Axis.ALGORITHM, 0.005, _unfused,
        "Attention is not fused: products and a softmax where one kernel would do.",
        "torch.nn.functional.scaled_dot_product_attention, without masks or dropout that no fused kernel takes",
        "a softmax between two batched products: there is always a fused kernel for it",
    ),
    Rule(
        "sync_in_accumulation", Axis.ALGORITHM, 0.05, _extra_syncs,
        "Gradients are exchanged for every micro-batch: {share} of the step waits for useless exchanges.",
        "with model.no_sync(): around all micro-batches but the last",
        "one exchange per step is enough; 5% as for other things that are left out for free",
        facts=("gradient_syncs_per_step", "accumulation"),
    ),
    Rule(
        "communication_bound", Axis.MACHINE, 0.10, _communication,
        "Waiting for other devices binds: {share} of the step is communication that nothing hides.",
        "larger buckets or micro-batches, less sharding, or a layout that `ironlaw plan` finds",
        "10% is where layouts differ more than kernels do (PyTorch's own advisor warned from there)",
        lambda e: [*e.line_figures(Phase.COMMUNICATION), f"{percent(_communication(e))} of the step"],
    ),
    Rule(
        "bubble", Axis.ALGORITHM, 0.10, _bubble, "Pipeline stages wait: {share} of the step is bubble.",
        "more micro-batches per step, or an interleaved schedule", "(p - 1) / m with m = 8 p is 12%",
    ),
    Rule(
        "straggler", Axis.MACHINE, 0.10, _straggler,
        "One rank is slower than the others, and all wait for it: {share} of the step.",
        "look at that rank's machine: other programs, storage, heat; or at uneven batches",
        "ranks of one job differ by a few percent; a tenth is a cause", facts=("slowest_rank", "rank_own_seconds"),
    ),
    Rule(
        "launch_bound", Axis.MACHINE, 0.20, _traced(Phase.HOST, Phase.IDLE),
        "Launching binds: the device idles {share} of the step while the host calls operations.",
        "torch.compile, CUDA graphs, a fused optimizer, larger micro-batches", "a device that is fed idles under 10%",
        facts=("launches_per_step",),
    ),
    Rule(
        "no_matrix_units", Axis.ALGORITHM, 0.10, _matrix_units,
        "Matrix products run in fp32 and leave the matrix units for 16 bits unused: {share} of the step.",
        "autocast to bf16, or torch.set_float32_matmul_precision('high')", "16 bits run 8 to 16 times faster there",
    ),
    Rule(
        "tile_quantisation", Axis.ALGORITHM, 0.25, _quantisation,
        "Products leave {share} of their tiles and waves without work.",
        "sizes that are multiples of the tile, and batches that fill whole waves", "tiles of 128 x 128, one per unit",
    ),
    Rule(
        "fragmentation", Axis.MACHINE, 0.15, _fragmentation,
        "The allocator holds memory that nothing uses: {share} of what it reserves.",
        "PYTORCH_ALLOC_CONF=expandable_segments:True", "caches of a steady loop stay under 10%",
    ),
    Rule(
        "throttled", Axis.MACHINE, 0.10, _throttled, "The device runs below its clock: {share} slower.",
        "look at its power limit and cooling", "boards vary by a few percent",
        facts=("clock_hertz", "clock_highest_hertz", "clock_held_down_by", "processor_throttled"),
    ),
    Rule(
        "updates_skipped", Axis.ALGORITHM, 0.05, _skipped,
        "Loss scaling skips updates: {share} of the steps did nothing.",
        "bf16, which needs no scaling, or a lower initial scale", "a scale that has settled skips one in 2,000",
        facts=("skipped_updates",),
    ),
    Rule(
        "device_busy", Axis.ALGORITHM, 0.70, _traced(Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER),
        "The device computes {percent} of the step: nothing holds it up.",
        "only less work or faster kernels shorten the step", "a device that is fed and does not wait for others",
        _busy_figures, tier=Tier.CEILING,
    ),
)  # fmt: skip
