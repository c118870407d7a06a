"""Explains a profiler's trace of any training code as far as possible, and lists what a trace cannot tell."""

from __future__ import annotations

from pathlib import Path

from ironlaw.catalog.accelerators import accelerator, catalogued, peak
from ironlaw.errors import UserError
from ironlaw.explain.explanation import NOT_PLANNED, Explanation, explained
from ironlaw.explain.gap import subtract_ledgers
from ironlaw.ledger import Estimate, Ledger, Origin


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
