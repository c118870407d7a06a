"""Rules about how a loop is written: threads, precision, attention, sizes, synchronisation, recomputation, ranks.

Most need facts that `ironlaw.observe` collects, or a trace; a run without them lists these rules as not tested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ironlaw import units
from ironlaw.explain.evidence import Evidence
from ironlaw.explain.gap import recomputed_seconds
from ironlaw.explain.rule import Axis, Rule, Statement
from ironlaw.ledger import Kind, Phase

ROOM = 0.85  # of the memory


def _gain(name: str) -> Callable[[Evidence], float | None]:
    return lambda evidence: evidence.gains.get(name)


def _per_step(fact: str) -> Callable[[Evidence], float | None]:
    def measure(evidence: Evidence) -> float | None:
        value = evidence.fact(fact)
        return None if value is None or evidence.step is None else float(value) / evidence.step

    return measure


def _launch_gaps(evidence: Evidence) -> float | None:
    """Of a step on a device: it idles while the host calls operations."""
    if evidence.fact("device") != "cuda" or evidence.fact("source") != "trace":
        return None
    return (evidence.phase_share(Phase.HOST) or 0.0) + (evidence.phase_share(Phase.IDLE) or 0.0)


def logging_share(evidence: Evidence) -> float | None:
    """Of the step: the loop's own time, as far as a logger was on the stack."""
    fraction, host = evidence.fact("logging_fraction"), evidence.phase_share(Phase.HOST)
    if fraction is None:
        return None
    return float(fraction) * ((host or 0.0) + (evidence.phase_share(Phase.IDLE) or 0.0))


def _communication(evidence: Evidence) -> float | None:
    """Less what has a cause of its own: waiting for a rank that is slower, and exchanges that nothing needs."""
    share = evidence.phase_share(Phase.COMMUNICATION)
    if share is None:
        return None
    return max(0.0, share - (_behind(evidence) or 0.0)) * (1 - _useless(evidence))


def _behind(evidence: Evidence) -> float | None:
    """How long this rank waits for the slowest one to come, as a share of the step."""
    ranks, rank = evidence.fact("rank_own_seconds"), int(evidence.fact("rank") or 0)
    if not ranks or len(ranks) <= rank or not evidence.step:
        return None
    return float(max(ranks) - ranks[rank]) / evidence.step


def _useless(evidence: Evidence) -> float:
    """Share of the gradient exchanges of a step after which it accumulates further."""
    per_step = float(evidence.fact("gradient_syncs_per_step") or 0.0)
    return max(0.0, per_step - 1) / per_step if per_step else 0.0


def _bubble(evidence: Evidence) -> float | None:
    bubble = evidence.plan.facts.get("bubble_fraction") or evidence.fact("bubble_fraction")
    return None if bubble is None else float(bubble)


def _straggler(evidence: Evidence) -> float | None:
    """How much longer the slowest rank works before it meets the others, as a share of the step."""
    ranks = evidence.fact("rank_own_seconds")
    if not ranks or len(ranks) < 2 or not evidence.step:
        return None
    ordered = sorted(ranks)
    return float(ordered[-1] - ordered[(len(ordered) - 1) // 2]) / evidence.step


def _sync_calls(evidence: Evidence) -> list[dict[str, Any]] | None:
    points = evidence.fact("sync_points")
    return None if points is None else [p for p in points if p["per_step"] > MOST_SYNCS]


MOST_SYNCS = 1.5  # per step: one reading of the loss is how most loops log


def _syncs(evidence: Evidence) -> float | None:
    """Its time, and never less than the threshold: what it costs shows on an accelerator only."""
    calls = _sync_calls(evidence)
    if calls is None or evidence.step is None:
        return None
    cost = sum(p["seconds"] for p in calls) / evidence.step
    return max(cost, SYNC_THRESHOLD) if calls else 0.0


SYNC_THRESHOLD = 0.001
MODE_COSTS = 0.03


def _syncs_costly(evidence: Evidence) -> float | None:
    calls = _sync_calls(evidence)
    if calls is None or evidence.step is None:
        return None
    return float(sum(p["seconds"] for p in calls)) / evidence.step


def _extra_syncs(evidence: Evidence) -> float | None:
    """Exposed communication that is for exchanges in the middle of accumulation."""
    share = evidence.phase_share(Phase.COMMUNICATION)
    if share is None or not evidence.fact("gradient_syncs_per_step"):
        return None
    return share * _useless(evidence)


def _recomputes(evidence: Evidence) -> float | None:
    if not evidence.run.lines or not evidence.step:
        return None
    spent = recomputed_seconds(evidence.run)
    resident, have = evidence.run.totals.get("resident_bytes"), evidence.fact("memory_bytes")
    kept = evidence.plan.memory_bytes().get("activations") or 0.0
    if resident is not None and have and resident.value + kept > ROOM * have:
        return 0.0  # memory needs it
    return spent / evidence.step


def _device_busy(evidence: Evidence) -> float | None:
    """Of a traced step: the device computes."""
    if evidence.fact("device") != "cuda" or evidence.fact("source") != "trace":
        return None
    return sum(evidence.phase_share(phase) or 0.0 for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER))


def _busy_says(evidence: Evidence, value: float) -> Statement:
    kinds = sorted(evidence.gap.kinds, key=lambda row: -(row.measured or 0.0))
    shares = [f"{row.name} {units.percent((row.measured or 0.0) / (evidence.step or 1.0), 0)}" for row in kinds[:3]]
    return f"The device computes {units.percent(value, 0)} of the step: nothing holds it up.", shares


def _skipped(evidence: Evidence) -> float | None:
    skipped, steps = evidence.fact("skipped_updates"), evidence.steps
    return None if skipped is None or not steps else float(skipped) / steps


def _fragmentation(evidence: Evidence) -> float | None:
    reserved, peak = evidence.fact("reserved_bytes"), evidence.run.totals.get("peak_bytes")
    return None if not reserved or peak is None else max(0.0, 1 - peak.value / float(reserved))


def _quantisation(evidence: Evidence) -> float | None:
    """Time that products spend on parts of tiles and waves without work, by the catalogue's tile of 128."""
    shapes, units_ = evidence.fact("product_shapes"), evidence.fact("compute_units")
    if not shapes or not units_:
        return None
    useful = launched = 0.0
    for m, n, k in shapes:
        tiles = -(-m // 128) * -(-n // 128)
        waves = -(-tiles // units_)
        useful += m * n * k
        launched += waves * units_ * 128 * 128 * k
    return 1 - useful / launched


def _throttled(evidence: Evidence) -> float | None:
    """By the board's mean clock during the steps; a processor's, by its speed, where the system counted heat."""
    clock, highest = evidence.fact("clock_hertz"), evidence.fact("clock_highest_hertz")
    if clock and highest:
        return max(0.0, 1 - float(clock) / float(highest))
    events, speed = evidence.fact("processor_throttled"), evidence.machine_speed
    if events is None or speed is None:
        return None
    return max(0.0, 1 - speed) if events else 0.0


def _matrix_units(evidence: Evidence) -> float | None:
    """fp32 products on a device that has matrix units for 16 bits."""
    if evidence.fact("device") != "cuda" or evidence.fact("precision") is None:
        return None
    return (evidence.kind_share(Kind.MATMUL) or 0.0) if evidence.fact("precision") == "fp32" else 0.0


def _unfused_trace(evidence: Evidence) -> float | None:
    flag = evidence.fact("unfused_attention")
    if flag is None:
        return None
    return (evidence.kind_share(Kind.ATTENTION) or 0.0) + 0.01 if flag else 0.0


def _says(sentence: str, *facts: str) -> Callable[[Evidence, float], Statement]:
    """`{share}` is the value; each fact that is known becomes a figure."""

    def says(evidence: Evidence, value: float) -> Statement:
        figures = [
            f"{name.replace('_', ' ')}: {evidence.fact(name)}" for name in facts if evidence.fact(name) is not None
        ]
        figures.append(f"{units.percent(value)}, of a step of {units.seconds(evidence.step)}")
        return sentence.format(share=units.percent(value)), figures

    return says


def _syncs_say(evidence: Evidence, value: float) -> Statement:
    calls = _sync_calls(evidence) or []
    places = [f"{p['place']} ({p['call']}): {p['per_step']:.0f} per step, {units.seconds(p['seconds'])}" for p in calls]
    total = sum(p["per_step"] for p in calls)
    return f"The host waits for values of tensors {total:.0f} times per step, inside the loop.", places[:4]


def _align_says(evidence: Evidence, value: float) -> Statement:
    figures = [
        f"{e['module']}: {e['shape'][0]} × {e['shape'][1]} takes {units.seconds(e['seconds'])}, "
        f"{e['aligned'][0]} × {e['aligned'][1]} {units.seconds(e['aligned_seconds'])}"
        for e in evidence.fact("misaligned") or []
    ]
    figures += [f"{name}: {size:,}, not a multiple of 8" for name, size in (evidence.fact("odd_sizes") or {}).items()]
    return (
        "A product has a size that no tile divides: it is slower than with the next multiple.",
        figures,
    )


def _misaligned_here(evidence: Evidence) -> float | None:
    found = evidence.fact("misaligned")
    return None if found is None else (SYNC_THRESHOLD if found or evidence.fact("odd_sizes") else 0.0)


def _threads(more: bool) -> Callable[[Evidence], float | None]:
    """Gain of as many threads as cores, where there are more, or fewer."""

    def measure(evidence: Evidence) -> float | None:
        threads, cores, gain = evidence.fact("threads"), evidence.fact("cores"), evidence.gains.get("threads")
        if gain is None or threads is None or cores is None:
            return None
        return gain if (threads > cores) is more and threads != cores else 0.0

    return measure


def _grows(evidence: Evidence) -> float | None:
    """A process that grows to the end of its loop ends by running out of memory: nothing comes before that."""
    if "memory_growth" not in evidence.run.facts:
        return None
    return 1.0 if evidence.fact("memory_growth") else 0.0


def _grows_says(evidence: Evidence, value: float) -> Statement:
    growth = evidence.fact("memory_growth")
    holder = f": `{growth['holder']}` keeps something of every step" if growth["holder"] else ""
    have, resident = evidence.fact("memory_bytes"), evidence.run.totals.get("resident_bytes")
    figures = [f"{units.bytes_(growth['bytes_per_step'])} more after every step, evenly to the end of the loop"]
    if have and resident is not None and growth["bytes_per_step"]:
        figures.append(f"full after {max(0.0, have - resident.value) / growth['bytes_per_step']:,.0f} more steps")
    if growth["place"]:
        figures.insert(0, growth["place"])
    return f"Memory grows from step to step{holder}.", figures


def _placed(fact: str, sentence: str) -> Callable[[Evidence, float], Statement]:
    """`{share}` is the value; the line of code is the first figure."""

    def says(evidence: Evidence, value: float) -> Statement:
        found = evidence.fact(fact)
        found = max(found, key=lambda one: one["saved"]) if isinstance(found, list) else found
        figures = [found["place"]] if found.get("place") else []
        figures.append(f"{units.percent(value)}, of a step of {units.seconds(evidence.step)}")
        return sentence.format(share=units.percent(value), **found), figures

    return says


def _unread_forwards(evidence: Evidence) -> float | None:
    """Forward passes with gradients enabled that no backward pass comes through, as a share of the step."""
    forwards, read = evidence.fact("forwards_per_step"), evidence.fact("read_forwards_per_step")
    if not forwards or not read:
        return None
    return max(0.0, 1 - read / forwards) * (evidence.phase_share(Phase.FORWARD) or 0.0)


def _unread_says(evidence: Evidence, value: float) -> Statement:
    return (
        f"The model runs forward for nothing: {units.percent(value)} of the step computes, with gradients enabled, "
        "what no backward pass comes back to.",
        [*(evidence.fact("forward_lines") or [])[:3],
         f"of {evidence.fact('forwards_per_step'):.1f} forward passes per step backward passes go through "
         f"{evidence.fact('read_forwards_per_step'):.1f}"],
    )  # fmt: skip


def _profiled(evidence: Evidence) -> float | None:
    if "profiled" not in evidence.run.facts:
        return None
    return PROFILER_COSTS if evidence.fact("profiled") else 0.0


PROFILER_COSTS = 0.2  # of a short step; cited: with shapes, memory and stacks half of it


def _mode_free(evidence: Evidence) -> float | None:
    return 0.0 if evidence.gains.get("mode", 0.0) >= MODE_COSTS else _once_per_step("left_on")(evidence)


def _uncleared(evidence: Evidence) -> float | None:
    """It spoils the training itself: nothing but running out of memory comes before that."""
    if "added_gradients" not in evidence.run.facts:
        return None
    return 0.9 if evidence.fact("added_gradients") else 0.0


def _recompiles(evidence: Evidence) -> float | None:
    """Wall time of steps, after the first few, in which the compiler ran, above that of a typical step."""
    seconds, wall = evidence.fact("recompile_seconds"), evidence.fact("wall_seconds") or {}
    return None if seconds is None or not wall.get("training") else float(seconds) / float(wall["training"])


COPIES = ("copy", "clone", "contiguous", "to_copy", "to")


def _copies(evidence: Evidence) -> float | None:
    """Of the step: copies and conversions of tensors within the module's passes; autocast's own belong to it."""
    step = evidence.fact("profiled_step_seconds") or evidence.step
    if not evidence.run.lines or not step or evidence.fact("autocast"):
        return None
    passes = (line for line in evidence.run.lines if line.phase in (Phase.FORWARD, Phase.BACKWARD))
    spent = sum(line.seconds or 0.0 for line in passes if line.operation.rpartition(".")[2] in COPIES)
    return spent / float(step)


def _copies_say(evidence: Evidence, value: float) -> Statement:
    lines = (evidence.fact("lines") or {}).get(str(Phase.FORWARD), [])
    return (
        f"Copying and converting tensors takes {units.percent(value)} of the step.",
        [*(f"{place}: {units.percent(share, 0)} of the forward pass" for place, share in lines if place != "?"),
         f"{units.percent(value)}, of a step of {units.seconds(evidence.step)}"],
    )  # fmt: skip


def _once_per_step(fact: str) -> Callable[[Evidence], float | None]:
    def measure(evidence: Evidence) -> float | None:
        if fact not in evidence.run.facts:
            return None
        return SYNC_THRESHOLD if evidence.fact(fact) else 0.0

    return measure


CODE_RULES: tuple[Rule, ...] = (
    Rule(
        "memory_grows", Axis.ALGORITHM, 0.5, _grows, _grows_says,
        "keep numbers instead of tensors (.item(), .detach()), or the last few of them only",
        "the process grew by at least 2% and 4 MiB after its first quarter, about as much in every part of the rest; "
        "or the loop holds a graph of every step",
    ),
    Rule(
        "gradients_uncleared", Axis.ALGORITHM, 0.5, _uncleared,
        _placed("added_gradients", "Gradients are never cleared: every step adds to those of all steps before."),
        "optimizer.zero_grad() once per step", "a gradient that was not zero before the first backward pass of a step",
    ),
    Rule(
        "recompiles", Axis.ALGORITHM, 0.05, _recompiles,
        _says("torch.compile compiles again and again: {share} of the time, after the first steps."),
        "keep shapes the same (pad, or drop the last batch), or torch.compile(..., dynamic=True)",
        "steps in which a graph was compiled, above a typical one; a settled loop compiles nothing",
    ),
    Rule(
        "mode_left_on", Axis.ALGORITHM, MODE_COSTS, _gain("mode"),
        _placed("left_on", "{name} is left on: it costs {share} of the step."), "switch it back",
        "the same kernels timed both ways at the end of the run; 3% is above their noise",
    ),
    Rule(
        "float64", Axis.ALGORITHM, 0.03, _gain("float64"),
        _placed("float64", "The weights are float64: {share} of the step is the price of digits that training does "
                "not use."),
        "model.float(), or no .double() and no torch.set_default_dtype(torch.float64)",
        "both types timed at the end of the run",
    ),
    Rule(
        "profiler_left_on", Axis.ALGORITHM, 0.05, _profiled,
        lambda evidence, value: ("A profiler of the loop's own is running: it slows every operation.",
                                 [str(evidence.fact("profiled"))]),
        "record a few steps only (torch.profiler.schedule)", "a step of 9 ms took 22% longer under it, measured",
    ),
    Rule(
        "update_unfused", Axis.ALGORITHM, 0.05, _gain("fused_update"),
        _says("The optimizer's update is not fused: {share} of the step goes to passing over the weights again and "
              "again."),
        "fused=True in the optimizer's constructor", "both timed at the end of the run; 5% is above their noise",
    ),
    Rule(
        "attention_kernel", Axis.ALGORITHM, 0.05, _gain("blocked"),
        _says("PyTorch's fused attention is the slower kernel here: {share} of the step would be saved by batched "
              "products."),
        "from ironlaw.model.blocked import causal_attention, in place of scaled_dot_product_attention",
        "both kernels timed at the run's shapes when it ended",
    ),
    Rule(
        "forwards_unread", Axis.ALGORITHM, 0.05, _unread_forwards, _unread_says,
        "with torch.no_grad(): around what is only looked at, and less often",
        "a pass that nothing learns from is free to leave out; 5% as for evaluation",
    ),
    Rule(
        "oversubscribed", Axis.MACHINE, 0.05, _threads(more=True),
        _says("There are more threads than cores: they take turns, which costs {share} of the step.",
              "threads", "cores"),
        "torch.set_num_threads(number of cores)",
        "as many threads as cores is what compute-bound kernels want; 5% is above the noise of the experiment",
    ),
    Rule(
        "threads_few", Axis.MACHINE, 0.05, _threads(more=False),
        _says("There are fewer threads than cores: {share} of the step would be saved by using all.",
              "threads", "cores"),
        "torch.set_num_threads(number of cores), and no OMP_NUM_THREADS below it",
        "kernels timed both ways at the end of the run; 5% is above the noise of the experiment",
    ),
    Rule(
        "attention_unfused", Axis.ALGORITHM, 0.03, _gain("attention"),
        _says("Attention is not fused: it writes its scores to memory, which costs {share} of the step."),
        "torch.nn.functional.scaled_dot_product_attention", "measured, against the fused kernel's curve here",
    ),
    Rule(
        "attention_unfused_trace", Axis.ALGORITHM, 0.005, _unfused_trace,
        _says("Attention is not fused: products and a softmax where one kernel would do."),
        "torch.nn.functional.scaled_dot_product_attention, without masks or dropout that no fused kernel takes",
        "a softmax between two batched products: there is always a fused kernel for it",
    ),
    Rule(
        "batch_small", Axis.ALGORITHM, 0.30, _gain("batch"),
        _says("The micro-batch is too small: calling operations costs as much as what they compute.", "batch",
              "accumulation"),
        "a larger micro-batch", "eight times the micro-batch must save a third, else it is not the cause",
    ),
    Rule(
        "misaligned", Axis.ALGORITHM, 0.03, _gain("alignment"), _align_says,
        "pad to a multiple of 64", "both products timed at the end of the run; 3% is above their noise",
    ),
    Rule(
        "recompute_needless", Axis.ALGORITHM, 0.05, _recomputes,
        _says("Activations are recomputed although memory has room for them: {share} of the step."),
        "turn recomputation off", "forward operations within the backward pass, when memory stays under 85%",
    ),
    Rule(
        "copies", Axis.ALGORITHM, 0.15, _copies, _copies_say,
        "convert once, outside of the step; .contiguous() and .clone() only where something needs them",
        "laying out heads and residuals costs a few percent of a step",
    ),
    Rule(
        "sync_points", Axis.ALGORITHM, 0.02, _syncs_costly, _syncs_say,
        "keep values on the device, and read them every so many steps", "a step loses its run-ahead at each of them",
    ),
    Rule(
        "logging_frequent", Axis.ALGORITHM, 0.05, logging_share,
        _says("Logging takes {share} of the step."), "log every so many steps",
        "as for checkpoints: above 5% it costs more than what it tells",
    ),
    Rule(
        "sync_in_accumulation", Axis.ALGORITHM, 0.05, _extra_syncs,
        _says("Gradients are exchanged for every micro-batch: {share} of the step waits for useless exchanges.",
              "gradient_syncs_per_step", "accumulation"),
        "with model.no_sync(): around all micro-batches but the last",
        "one exchange per step is enough; 5% as for other things that are left out for free",
    ),
    Rule(
        "communication_bound", Axis.MACHINE, 0.10, _communication,
        _says("Waiting for other devices binds: {share} of the step is communication that nothing hides."),
        "larger buckets or micro-batches, less sharding, or a layout that `ironlaw plan` finds",
        "10% is where layouts differ more than kernels do (PyTorch's own advisor warned from there)",
    ),
    Rule(
        "bubble", Axis.ALGORITHM, 0.10, _bubble, _says("Pipeline stages wait: {share} of the step is bubble."),
        "more micro-batches per step, or an interleaved schedule", "(p - 1) / m with m = 8 p is 12%",
    ),
    Rule(
        "straggler", Axis.MACHINE, 0.10, _straggler,
        _says("One rank is slower than the others, and all wait for it: {share} of the step.", "slowest_rank",
              "rank_own_seconds"),
        "look at that rank's machine: other programs, storage, heat; or at uneven batches",
        "ranks of one job differ by a few percent; a tenth is a cause",
    ),
    Rule(
        "launch_bound", Axis.MACHINE, 0.20, _launch_gaps,
        _says("Launching binds: the device idles {share} of the step while the host calls operations.",
              "launches_per_step"),
        "torch.compile, CUDA graphs, a fused optimizer, larger micro-batches", "a device that is fed idles under 10%",
    ),
    Rule(
        "no_matrix_units", Axis.ALGORITHM, 0.10, _matrix_units,
        _says("Matrix products run in fp32 and leave the matrix units for 16 bits unused: {share} of the step."),
        "autocast to bf16, or torch.set_float32_matmul_precision('high')", "16 bits run 8 to 16 times faster there",
    ),
    Rule(
        "tile_quantisation", Axis.ALGORITHM, 0.25, _quantisation,
        _says("Products leave {share} of their tiles and waves without work."),
        "sizes that are multiples of the tile, and batches that fill whole waves", "tiles of 128 x 128, one per unit",
    ),
    Rule(
        "fragmentation", Axis.MACHINE, 0.15, _fragmentation,
        _says("The allocator holds memory that nothing uses: {share} of what it reserves."),
        "PYTORCH_ALLOC_CONF=expandable_segments:True", "caches of a steady loop stay under 10%",
    ),
    Rule(
        "throttled", Axis.MACHINE, 0.10, _throttled,
        _says("The device runs below its clock: {share} slower.", "clock_hertz", "clock_highest_hertz",
              "clock_held_down_by", "processor_throttled"),
        "look at its power limit and cooling", "boards vary by a few percent",
    ),
    Rule(
        "updates_skipped", Axis.ALGORITHM, 0.05, _skipped,
        _says("Loss scaling skips updates: {share} of the steps did nothing.", "skipped_updates"),
        "bf16, which needs no scaling, or a lower initial scale", "a scale that has settled skips one in 2,000",
    ),
    Rule(
        "device_busy", Axis.ALGORITHM, 0.70, _device_busy, _busy_says,
        "only less work or faster kernels shorten the step", "a device that is fed and does not wait for others",
        fault=False,
    ),
    Rule(
        "gradients_zeroed", Axis.ALGORITHM, SYNC_THRESHOLD, _once_per_step("zeroed_gradients"),
        _placed("zeroed_gradients", "Gradients are filled with zeros and added to, instead of dropped and written."),
        "optimizer.zero_grad(set_to_none=True), which is the default",
        "a pass over all gradients, and another to add to them", fault=False, notice=True,
    ),
    Rule(
        "graphs_retained", Axis.ALGORITHM, SYNC_THRESHOLD, _once_per_step("retained_graphs"),
        _placed("retained_graphs", "Every backward pass keeps its graph, whose activations stay in memory longer."),
        "loss.backward() without retain_graph", "only a second backward pass through the same graph needs it",
        fault=False, notice=True,
    ),
    Rule(
        "mode_left_on_free", Axis.ALGORITHM, SYNC_THRESHOLD, _mode_free,
        _placed("left_on", "{name} is left on: it costs little here."), "switch it back",
        "named because it costs on an accelerator", fault=False, notice=True,
    ),
    Rule(
        "sync_points_free", Axis.ALGORITHM, SYNC_THRESHOLD, _syncs, _syncs_say,
        "nothing on this machine; on an accelerator each ends the time in which the host runs ahead",
        "named because it is the first thing that costs on an accelerator", fault=False, notice=True,
    ),
    Rule(
        "misaligned_free", Axis.ALGORITHM, SYNC_THRESHOLD, _misaligned_here, _align_says,
        "little on this machine; matrix units of accelerators want multiples of 64",
        "named because it costs on an accelerator", fault=False, notice=True,
    ),
)  # fmt: skip
