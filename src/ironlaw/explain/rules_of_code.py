"""Rules about how a loop is written: precision, attention, sizes, synchronisation, recomputation, what is left on.

Most need facts that `ironlaw.observe` collects; a run without them lists these rules as not tested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ironlaw.explain.evidence import RunEvidence
from ironlaw.explain.gap import recomputed_seconds
from ironlaw.explain.rule import Axis, Reading, Rule, Tier
from ironlaw.explain.rules_of_devices import NOTICED
from ironlaw.ledger import Phase
from ironlaw.units import bytes_, percent, seconds

ROOM = 0.85  # of the memory
MAX_SYNCS = 1.5  # per step: one reading of the loss is how most loops log
FREE = 0.5  # the threshold of what is a notice always
PROFILER_COSTS = 0.2  # of a short step; cited: with shapes, memory and stacks half of it
PASSES = (Phase.FORWARD, Phase.BACKWARD)


def _gain(name: str) -> Callable[[RunEvidence], float | None]:
    return lambda evidence: evidence.gains.get(name)


def _at_least_noticed(fact: str, gain: str) -> Callable[[RunEvidence], float | None]:
    """The planned gain, and a notice where the run has such a thing and nothing is gained here."""
    return lambda e: max(e.gains.get(gain, 0.0), NOTICED) if e.fact(fact) else _found(fact)(e)


def _found(fact: str, value: float = NOTICED) -> Callable[[RunEvidence], float | None]:
    """The value where the run has such a thing, 0 where it was looked for."""
    return lambda e: None if fact not in e.run.facts else value if e.fact(fact) else 0.0


def logging_share(e: RunEvidence) -> float | None:
    """Of the step: the loop's own time, as far as a logger was on the stack."""
    fraction = e.fact("logging_fraction")
    if fraction is None:
        return None
    return float(fraction) * sum(e.phase_share(phase) or 0.0 for phase in (Phase.HOST, Phase.IDLE))


def _syncs(e: RunEvidence) -> Reading | None:
    """Never less than a notice where there are any: what a synchronisation costs shows on an accelerator only. They are
    timed in recorded steps, which are slower."""
    points = e.fact("sync_points")
    if points is None or e.step is None:
        return None
    calls = [p for p in points if p["per_step"] > MAX_SYNCS]
    cost = sum(p["seconds"] for p in calls) / (e.fact("profiled_step_seconds") or e.step)
    figures = [f"{p['place']} ({p['call']}): {p['per_step']:.0f} per step, {seconds(p['seconds'])}" for p in calls[:4]]
    times = f"{sum(p['per_step'] for p in calls):.0f}"
    return Reading(max(cost, NOTICED) if calls else 0.0, figures, {"times": times})


def recomputed_share(e: RunEvidence) -> float | None:
    """Of the step; 0 where memory needs it."""
    if not e.run.lines or not e.step:
        return None
    resident, have = e.run.totals.get("resident_bytes"), e.fact("memory_bytes")
    kept = e.plan.memory_bytes().get("activations") or 0.0
    if resident is not None and have and resident.value + kept > ROOM * have:
        return 0.0
    return recomputed_seconds(e.run) / e.step


def _align_figures(e: RunEvidence) -> list[str]:
    figures = [
        f"{one['module']}: {one['shape'][0]} × {one['shape'][1]} takes {seconds(one['seconds'])}, "
        f"{one['aligned'][0]} × {one['aligned'][1]} {seconds(one['aligned_seconds'])}"
        for one in e.fact("misaligned") or []
    ]
    odd = (e.fact("odd_sizes") or {}).items()
    return figures + [f"{name}: {size:,}, not a multiple of 8" for name, size in odd]


def _misaligned(e: RunEvidence) -> float | None:
    """In a loop that is not ours, sizes that are no weight's matter to accelerators only."""
    if e.fact("device") == "cpu" and e.tolerance:
        return _at_least_noticed("misaligned", "alignment")(e)
    return _at_least_noticed("odd_sizes" if e.fact("odd_sizes") else "misaligned", "alignment")(e)


def _growth(e: RunEvidence) -> Reading | float | None:
    found = e.fact("memory_grows")
    if not found:
        return _found("memory_grows")(e)
    holder, grown = found["holder"], found["bytes_per_step"]
    have, resident = e.fact("memory_bytes"), e.run.totals.get("resident_bytes")
    figures = [f"{bytes_(grown)} more after every step, evenly to the end of the loop"]
    if have and resident is not None and grown:
        figures.append(f"full after {max(0.0, have - resident.value) / grown:,.0f} more steps")
    return Reading(1.0, figures, {"keeps": f": `{holder}` keeps something of every step" if holder else ""})


def _recompiles(e: RunEvidence) -> float | None:
    """Wall time of steps, after the first few, in which the compiler ran, above that of a typical step."""
    spent, wall = e.fact("recompile_seconds"), e.fact("wall_seconds") or {}
    return None if spent is None or not wall.get("training") else float(spent) / float(wall["training"])


def _by_hand(e: RunEvidence) -> float | None:
    """Time between the backward pass and the end of the update that lines other than the optimizer's call take, and
    other than PyTorch's own clipping: where that is long, the batch is small."""
    lines, places = e.lines(Phase.OPTIMIZER), e.fact("places") or {}
    if not lines or "update" not in places:
        return None
    usual = {places["update"], places.get("clipping")}
    return sum(share for line, share in lines if line not in usual) * (e.phase_share(Phase.OPTIMIZER) or 0.0)


def _present(name: str, value: float, sentence: str, advice: str, source: str) -> Rule:
    """A fault, or with `NOTICED` a notice, of which the run has the fact or not; `value` says no more than that."""
    return Rule(
        name, Axis.ALGORITHM, FREE, _found(name, value), sentence, advice, source, lambda _: [], placed=name,
        noticed=NOTICED,
    )  # fmt: skip


def _part_of(
    phases: Sequence[Phase], name: str, threshold: float, sentence: str, advice: str, source: str, **how: Any
) -> Rule:
    """Of these phases the fact has the part; in one of them alone, where it tells of each."""

    def measure(e: RunEvidence) -> float | None:
        if name not in e.run.facts:
            return None
        found: dict[str, Any] = e.fact(name) or {}
        return sum(found.get(str(phase), found.get("part", 0.0)) * (e.phase_share(phase) or 0.0) for phase in phases)

    return Rule(name, Axis.ALGORITHM, threshold, measure, sentence, advice, source, placed=name, **how)


CODE_RULES: tuple[Rule, ...] = (
    Rule(  # a process that grows to the end of its loop ends by running out of memory: nothing comes before that
        "memory_grows", Axis.ALGORITHM, FREE, _growth, "Memory grows from step to step{keeps}.",
        "keep numbers instead of tensors (.item(), .detach()), or the last few of them only",
        "the process grew by at least 2% and 4 MiB after its first quarter, about as much in every part of the rest; "
        "or the loop holds a graph of every step", placed="memory_grows", noticed=NOTICED,
    ),
    _present(  # it spoils the training itself
        "gradients_uncleared", 0.9,
        "Gradients are never cleared: every step adds to those of all steps before.",
        "optimizer.zero_grad() once per step", "a gradient that was not zero before the first backward pass of a step",
    ),
    _present(
        "updates_again", 0.9,
        "The optimizer updates again with the gradients of its last update: momentum and decay count twice.",
        "optimizer.step() once per backward pass, and after it zero_grad()",
        "an update before which no pass came since the optimizer's last one, in about every step",
    ),
    _present(
        "optimizer_rebuilt", 0.9,
        "The optimizer is made anew in every step: it forgets its moments, and is set up again and again.",
        "make it once, before the loop", "as many constructions as updates",
    ),
    _present(
        "left_in_eval", 0.9,
        "The model trains in evaluation mode: dropout is off, and batch norms keep their old averages.",
        "model.train() before training, and again after every evaluation",
        "updates that followed passes in evaluation mode only, in most steps",
    ),
    Rule(
        "recompiles", Axis.ALGORITHM, 0.05, _recompiles,
        "torch.compile compiles again and again: {share} of the time, after the first steps.",
        "keep shapes the same (pad, or drop the last batch), or torch.compile(..., dynamic=True)",
        "steps in which a graph was compiled, above a typical one; a settled loop compiles nothing",
    ),
    Rule(
        "mode_left_on", Axis.ALGORITHM, 0.03, _at_least_noticed("left_on", "mode"),
        "{name} is left on: it costs {share} of the step.",
        "switch it back", "the model's passes timed both ways at the end of the run; 3% is above their noise",
        placed="left_on", noticed=NOTICED,
    ),
    Rule(
        "float64", Axis.ALGORITHM, 0.03, _at_least_noticed("float64", "float64"),
        "The weights are float64: {share} of the step is the price of digits that training does not use.",
        "model.float(), or no .double() and no torch.set_default_dtype(torch.float64)",
        "both types timed at the end of the run", placed="float64", noticed=NOTICED,
    ),
    Rule(
        "half_slow", Axis.ALGORITHM, 0.15, _gain("half"),
        "Numbers of 16 bits are slower than fp32 on this machine: {share} of the step.",
        "fp32 here: no autocast, no .half(); 16 bits pay where the processor multiplies them", "both types timed at "
        "the end of the run; casts cost a small model up to a tenth", lambda e: [f"in {e.fact('precision')}"],
        placed="half",
    ),
    Rule(
        "profiler_left_on", Axis.ALGORITHM, 0.05, _found("profiled", PROFILER_COSTS),
        "A profiler or tracer of the loop's own is running: it slows every operation.",
        "record a few steps only (torch.profiler.schedule); cProfile, tracemalloc and a debugger off",
        "a step of 9 ms took 22% longer under PyTorch's, measured",
        lambda e: [str(e.fact("profiled"))],
    ),
    Rule(
        "update_unfused", Axis.ALGORITHM, 0.05, _gain("fused_update"),
        "The optimizer's update is not fused: {share} of the step goes to passing over the weights again and again.",
        "fused=True in the optimizer's constructor", "both timed at the end of the run; 5% is above their noise",
    ),
    _part_of(
        PASSES, "passes_apart", 0.30,
        "The model runs again and again for a part of the batch: {share} of the step is the price of calling it.",
        "one pass of the whole batch, or of larger micro-batches, where memory has room for it",
        "a third of the step, as for other batches that are too small; large micro-batches save nothing",
    ),
    _part_of(
        (Phase.BACKWARD,), "gradients_idle", 0.05,
        "Gradients are computed that no update reads: about {share} of the step.",
        ".detach() what another model gives, or make it under torch.no_grad(); requires_grad_(False) on what is frozen",
        "the backward pass, by the share of such weights; 5% as for forward passes that nothing reads",
    ),
    _part_of(
        PASSES, "padding", 0.2,
        "The model computes padding: {share} of the step is for the value that rows are filled up with.",
        "pad to the longest of each batch (in collate_fn), batches of like lengths, or several texts in a row",
        "lengths that are spread evenly leave about a quarter of a batch that is padded to its own longest",
        figures=lambda e: [f"{percent(e.fact('padding')['part'], 0)} of the elements of a batch are padding, "
                   f"{percent(e.fact('padding')['columns'], 0)} in columns that hold nothing else"],
    ),
    _part_of(
        (Phase.OPTIMIZER,), "rows_untouched", 0.10,
        "Rows of embeddings that no token of the batch was are updated all the same: {share} of the step.",
        "nn.Embedding(..., sparse=True) with torch.optim.SparseAdam of its own; moments of untouched rows then rest",
        "the update, by their share of all gradients; models of a few thousand words stay under 10%",
        eased_by="batch_small",
    ),
    Rule(
        "update_by_hand", Axis.ALGORITHM, 0.10, _by_hand,
        "The loop itself works on gradients or weights beside the optimizer's update: {share} of the step.",
        "torch.optim with fused=True, torch._foreach_ functions, clip_grad_norm_, torch.optim.swa_utils, or less often",
        "a tenth of the step is more than what loops log or count there", lambda e: e.line_figures(Phase.OPTIMIZER),
    ),
    Rule(
        "attention_kernel", Axis.ALGORITHM, 0.05, _gain("native"),
        "PyTorch's fused attention is the slower kernel here: {share} of the step would be saved by Ironlaw's own.",
        "from ironlaw.kernels.attention import causal_attention, in place of scaled_dot_product_attention",
        "both kernels timed at the run's shapes when it ended", tier=Tier.OFFER,
    ),
    _part_of(
        (Phase.FORWARD,), "forwards_unread", 0.05,
        "The model runs forward for nothing: {share} of the step computes, with gradients enabled, what no backward "
        "pass comes back to.",
        "with torch.no_grad(): around what is only looked at, and less often",
        "a pass that nothing learns from is free to leave out; 5% as for evaluation",
    ),
    _part_of(
        PASSES, "values_unread", 0.05,
        "Lines within the pass compute what no gradient comes back to: {share} of the step is for checks and measures.",
        "every so many steps, and on the device (torch.isfinite(loss) sees what each layer's check would)",
        "as for forward passes that nothing reads", noticed=0.005,
    ),
    _part_of(
        PASSES, "zeros_multiplied", 0.05,
        "Products have an operand of which 95% and more are zeros, as one-hot rows: they take {share} of the step.",
        "indices in place of one-hot rows (nn.Embedding, F.cross_entropy, gather, index_add), or sparse tensors; where "
        "the loss reads a few rows only, those alone before the product",
        "counted in one step, gradients included; what is not zero would take a twentieth", noticed=0.005,
    ),
    _part_of(
        PASSES, "broadcasts", 0.10,
        "Operands are spread out to many times their size: that takes {share} of the step.",
        "a matrix product, torch.cdist or einsum in place of differences of all pairs; expand() in place of repeat()",
        "results of eight times the elements of their operands, counted in one step; masks and rotations stay under 5%",
    ),
    _part_of(
        PASSES, "decompositions", 0.05,
        "A matrix is decomposed or inverted in every step: {share} of the step.",
        "every so many steps, or by iteration (torch.nn.utils.parametrizations.spectral_norm takes one per step)",
        "singular values, QR, inverses and the like, counted in one step; they run on one core and in no fused kernel",
        noticed=0.005,
    ),
    _part_of(
        PASSES, "float64_operations", 0.05,
        "Operations in float64 take {share} of the step, of a model that is not in float64.",
        ".float() what comes from numpy, and no .double()", "counted in one step; float32 takes half or less",
        noticed=0.005,
    ),
    _part_of(
        PASSES, "denormals", 0.05,
        "Numbers below 1e-38 slow the processor down: {share} of the step.",
        "torch.set_flush_denormal(True) at the start of the script; look why these numbers vanish",
        "such operations were timed both ways in one step", noticed=0.005,
    ),
    _part_of(
        PASSES, "half_operations", 0.05,
        "Products in 16 bits are slower than in fp32 on this machine, in a model that is in fp32: {share} of the step.",
        "fp32 here: no autocast, .bfloat16() or .half() around a part of the model", "such products were timed both "
        "ways in one step; the casts come on top", noticed=0.005,
    ),
    _part_of(
        PASSES, "operation_slow", 0.30,
        "One operation of one line, {operation}, takes {share} of the step, and is no matrix product.",
        "fewer elements, or another operation: torch.where for masks, one torch.stack for a growing torch.cat, a fused "
        "function of torch.nn.functional for what it is made of; what does not change, once before the loop",
        "norms and activations of a model take 5 to 20% beside its products, counted in one step", symptom=True,
        noticed=0.15,
    ),
    Rule(
        "attention_unfused", Axis.ALGORITHM, 0.03, _gain("attention"),
        "Attention is not fused: it writes its scores to memory, which costs {share} of the step.",
        "torch.nn.functional.scaled_dot_product_attention",
        "measured, against the fused kernel timed at the end of the run",
    ),
    _part_of(
        PASSES, "attention_masked", 0.05,
        "Attention is given a causal mask, which it reads and computes the hidden half for: {share} of the step.",
        "scaled_dot_product_attention(q, k, v, is_causal=True), and no mask",
        "both timed at the end of the run, for the calls counted in one step", noticed=0.005,
    ),
    _part_of(
        PASSES, "attention_mask_rank", 0.05,
        "Attention is given a mask of three dimensions, for which PyTorch has no fused kernel: {share} of the step.",
        "mask.unsqueeze(0): the same mask in four dimensions, for which it has one",
        "both timed at the end of the run, for the calls counted in one step", noticed=0.005,
    ),
    Rule(
        "batch_small", Axis.ALGORITHM, 0.30, _gain("batch"),
        "The micro-batch is too small: calling operations costs as much as what they compute.",
        "a larger micro-batch", "eight times the micro-batch must save a third, else it is not the cause",
        facts=("batch", "accumulation"), tier=Tier.OFFER,
    ),
    Rule(
        "misaligned", Axis.ALGORITHM, 0.03, _misaligned,
        "A product has a size that no tile divides: it is slower than with the next multiple.",
        "pad to a multiple of 64, which matrix units of accelerators want",
        "both products timed at the end of the run; 3% is above their noise", _align_figures, noticed=NOTICED,
    ),
    Rule(
        "recompute_needless", Axis.ALGORITHM, 0.05, recomputed_share,
        "Activations are recomputed although memory has room for them: {share} of the step.",
        "turn recomputation off", "forward operations within the backward pass, when memory stays under 85%",
    ),
    _part_of(
        PASSES, "copies", 0.15, "Copying and converting tensors takes {share} of the step.",
        "convert once, outside of the step; .contiguous() and .clone() only where something needs them",
        "counted in one step, but for what autocast converts; laying out heads and residuals costs a few percent",
    ),
    Rule(
        "sync_points", Axis.ALGORITHM, 0.02, _syncs,
        "The host waits for values of tensors {times} times per step, inside the loop.",
        "keep values on the device, and read them every so many steps",
        "a step loses its run-ahead at each of them, which costs on an accelerator before it does here",
        noticed=NOTICED,
    ),
    Rule(
        "logging_frequent", Axis.ALGORITHM, 0.05, logging_share, "Logging takes {share} of the step.",
        "log every so many steps", "as for checkpoints: above 5% it costs more than what it tells",
    ),
    _present(
        "gradients_zeroed", NOTICED,
        "Gradients are filled with zeros and added to, instead of dropped and written.",
        "optimizer.zero_grad(set_to_none=True), which is the default",
        "a pass over all gradients, and another to add to them",
    ),
    _part_of(
        (Phase.BACKWARD,), "graphs_again", 0.05,
        "Several backward passes go through the same graph: one of the summed losses would save {share} of the step.",
        "(loss_a + loss_b).backward(), once per forward pass",
        "passes beyond one per forward pass, the shortest ones, where the graph is kept",
    ),
    _part_of(
        PASSES, "line_slow", 0.05,
        "One line of the model or of the loss holds the step up: {share} of it is a loop of Python's there.",
        "whole tensors instead of loops and checks; what does not change between steps, once before the loop",
        "operations repeated 16 times and more in one run of a function, without weights of their own; or Python "
        "beyond three times the usual time between two operations", symptom=True,
    ),
    _present(
        "graphs_retained", NOTICED,
        "Every backward pass keeps its graph, whose activations stay in memory longer.",
        "loss.backward() without retain_graph and create_graph", "only a second pass through the same graph needs it",
    ),
    _present(
        "unscaled", NOTICED,
        "fp16 without loss scaling: gradients below 6e-8 become zero.",
        "torch.amp.GradScaler, or bf16, which needs none", "the least number that fp16 holds is 2^-24",
    ),
)  # fmt: skip
