"""The plan of any torch module: traced on fake tensors, then timed on this machine or on a catalogued accelerator.

    ledger, fits = plan_traced("my_package.models:build", ["tokens=8x2048:int64"], "h200")

One process, one micro-batch per step, gradients in the parameters' own type, and AdamW on every trained parameter
unless a loop's own optimizers are known. The module decides the rest: what it recomputes, which types it uses. torch is
imported when a module is traced, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ironlaw import units
from ironlaw.catalog.nodes import parse_cluster
from ironlaw.errors import UserError
from ironlaw.ledger import Estimate, Kind, Ledger, Line, MemoryLine, Origin, Phase
from ironlaw.machine import interference
from ironlaw.machine.profile import Profile, load_profile
from ironlaw.plan.cluster.allocator import UNUSABLE_BYTES
from ironlaw.plan.cluster.setting import hardware_of
from ironlaw.plan.engines.named import engine_of_framework
from ironlaw.plan.process.estimate import MEMORY_INTERVAL
from ironlaw.plan.process.memory import Peak, walk
from ironlaw.plan.process.record import time_interval
from ironlaw.plan.process.timing import MeasuredMachine
from ironlaw.plan.process.traced_timing import AS_MATMUL, COPY_RATE, CataloguedAccelerator, Machine, ThisMachine
from ironlaw.workload.module_source import Input, parse_input, read_inputs, resolve_module
from ironlaw.workload.operations import Operation, line_name
from ironlaw.workload.optimizers import adamw_operations
from ironlaw.workload.updates import Update, loop_operations

if TYPE_CHECKING:
    from torch import nn

    from ironlaw.workload.trace import Loss, Trace
    from ironlaw.workload.trace_inputs import Inputs

__all__ = ["Input", "parse_input", "plan_module", "plan_traced", "resolve_module"]

EAGER_FRAMEWORK = "torchtitan"
"""Whose engine says how much slower PyTorch's kernels are in a run than alone."""

GUESSED_FACTORS = (0.5, 3.0)
"""80% of a kernel's time over its bytes at copy rate, or over the product that a convolution implies. Assumed."""

ACCELERATOR_FACTORS = (0.75, 1.6)
"""80% of measured over planned step time on an accelerator. Assumed: no traced plan has met a run on one yet."""

ACCELERATOR_MEMORY_INTERVAL = 0.1
"""A trace sees what CPU kernels keep; those of accelerators keep a little less (dropout masks) or more (workspaces)."""


@dataclass(frozen=True)
class Loop:
    """What a user's loop does around the micro-batches of a step. `gradients`: which ones the forward pass finds,
    "none" where they were cleared before it, "forward" where they are cleared after it, "kept" where never (zeroed)."""

    updates: tuple[Update, ...]
    clips: bool
    gradients: str = "none"


@dataclass(frozen=True)
class _Place:
    """Where a module is planned to run."""

    machine: Machine
    name: str
    memory_bytes: float
    context_bytes: float  # in use before any tensor is
    peak_flops_per_second: float
    peak_basis: str
    precision: str  # for the trace: "as is", "bf16", "fp16"
    precision_reason: str
    time_factors: tuple[float, float]
    time_basis: str
    memory_interval: float
    fragmentation: float  # of the tensors: how much more the allocator may hold
    facts: dict[str, Any]


def plan_traced(spec: str, inputs: Sequence[str], on: str, *, real: bool | None = None) -> tuple[Ledger, bool]:
    """The plan of `package.module:factory` with inputs as `name=8x2048:int64`, and whether it fits where it is to run.

    `on` is "this" or an accelerator of the catalogue; `real` as in `trace`.
    """
    if not inputs:
        raise UserError(f"{spec} needs its inputs: add --input NAME=SIZES:DTYPE, such as tokens=8x2048:int64")
    build = resolve_module(spec)
    ledger = plan_module(build, read_inputs(inputs), on, name=spec, real=real)
    return ledger, fits(ledger)


def plan_module(
    module_or_factory: nn.Module | Callable[[], nn.Module],
    inputs: Inputs,
    on: str = "this",
    *,
    loss: Loss | None = None,
    precision: str = "auto",
    name: str | None = None,
    real: bool | None = None,
    repeated: bool = False,
) -> Ledger:
    """A planned ledger of one training step.

    `precision`: "as is" runs the module in its own types, "bf16" and "fp16" under autocast; "auto" is as is on this
    machine, and autocast where an accelerator multiplies 16 bits faster than 32.
    """
    from ironlaw.workload.trace import trace

    profile = load_profile() if on == "this" else None
    place = _this_machine(profile, precision) if profile else _accelerator(on, precision)
    how: Any = {"loss": loss, "precision": place.precision, "real": real, "repeated": repeated}
    traced = trace(module_or_factory, inputs, **how)
    ledger = _planned(traced, place, name)
    ledger.facts["inputs"] = traced.inputs
    return ledger


def plan_trace(
    traced: Trace, profile: Profile | None, on: str = "this", *, accumulation: int = 1, name: str | None = None,
    loop: Loop | None = None,
) -> Ledger:  # fmt: skip
    """The plan of a micro-batch that was traced earlier, `accumulation` of them per step: on the machine of `profile`,
    or without one on the accelerator `on`."""
    place = _this_machine(profile, "auto") if profile else _accelerator(on, "as is")
    return _planned(traced, place, name, accumulation, loop)


def _planned(traced: Trace, place: _Place, name: str | None, accumulation: int = 1, loop: Loop | None = None) -> Ledger:
    if loop is None:
        update = adamw_operations(traced.trained_parameters, traced.trained_tensors, accumulation=accumulation)
    else:
        cuda = place.facts["device"] != "cpu"
        trained = traced.trained_parameters
        update = loop_operations(loop.updates, trained, accumulation=accumulation, clips=loop.clips, cuda=cuda)
    micro_batches = [replace(op, repeat=op.repeat * accumulation) for op in traced.operations]
    operations: list[Operation] = [*micro_batches, *update]
    ledger = Ledger("plan", lines=_lines(operations, place))
    peak, ledger.memory = _memory(traced, accumulation, loop)
    ledger.facts = place.facts | {
        "model": {"name": name or traced.name},
        "machine": place.name,
        "precision": _types(traced),
        "matmul_peak_flops_per_second": place.peak_flops_per_second,
        "precision_reason": place.precision_reason,
        "peak_basis": place.peak_basis,
        "peak_at": peak.where,
        "memory_bytes": place.memory_bytes,
        "traced_operations": len(traced.operations),
        "assumed": [list(one) for one in traced.assumptions],
        "optimizers": [update.says() for update in loop.updates] if loop else ["AdamW, fused (assumed)"],
    }
    ledger.totals = _totals(ledger, traced, place)
    return ledger


def fits(ledger: Ledger) -> bool:
    """Whether what the process needs is planned to stay within the memory there is."""
    return ledger.totals["resident_bytes"].value <= float(ledger.facts["memory_bytes"])


# -- where it runs -----------------------------------------------------------------------------------------------


def _this_machine(profile: Profile, precision: str) -> _Place:
    slowdown = interference.typical(profile)
    low, high, basis = time_interval(profile)
    wanted = "as is" if precision == "auto" else precision
    curves = wanted if wanted in profile.matmul else "fp32"
    return _Place(
        machine=ThisMachine(MeasuredMachine(profile, slowdown)),
        name=profile.name,
        memory_bytes=profile.memory_bytes,
        context_bytes=profile.runtime_bytes,
        peak_flops_per_second=profile.matmul_peak(curves),
        peak_basis=f"the measured {curves} matmul rate of this machine",
        precision=wanted,
        precision_reason="the module's own types" if wanted == "as is" else "asked for, by autocast",
        time_factors=(low, high),
        time_basis=f"the machine's measured curves, bytes at copy rate where there is none; {basis}",
        memory_interval=MEMORY_INTERVAL,
        fragmentation=1.0,
        facts={
            "device": profile.device,
            "threads": profile.threads,
            "measured": profile.created,
            "slowdown": slowdown,
            "copy_bytes_per_second": profile.copy_bytes_per_second,
        },
    )


def _accelerator(on: str, precision: str) -> _Place:
    cluster = parse_cluster(on)
    if cluster.count != 1:
        raise UserError(
            f"a traced module is planned on one accelerator, not {cluster.count}: write {cluster.accelerator.name}"
        )
    found = cluster.accelerator
    hardware = hardware_of(found)
    if found.memory_bytes is None:
        raise UserError(f"the memory of {found.name} is not known: choose another accelerator")
    half = next((d for d in ("bf16", "fp16") if d in hardware.peak_flops_per_second), "as is")
    wanted = half if precision == "auto" else precision
    dtype = wanted if wanted in ("bf16", "fp16") else "fp32"
    reason = f"autocast: matrix units of {found.name} want 16 bits" if precision == "auto" else "asked for"
    peak = hardware.peak(dtype)
    engine = engine_of_framework(EAGER_FRAMEWORK).on(found.generation)
    return _Place(
        machine=CataloguedAccelerator(hardware, engine),
        name=found.name,
        memory_bytes=found.memory_bytes.value,
        context_bytes=UNUSABLE_BYTES,
        peak_flops_per_second=peak,
        peak_basis=f"dense {dtype} peak of {found.name}",
        precision=wanted,
        precision_reason=reason,
        time_factors=ACCELERATOR_FACTORS,
        time_basis=f"eager kernels by the constants of {found.generation}; interval assumed",
        memory_interval=ACCELERATOR_MEMORY_INTERVAL,
        fragmentation=0.2,
        facts={
            "device": found.name,
            "copy_bytes_per_second": hardware.memory_bytes_per_second,
            "intervals": "Intervals are assumed: no traced plan has met a run on an accelerator",
            "assumptions": list(hardware.efficiency.assumptions()),
        },
    )


# -- the ledger --------------------------------------------------------------------------------------------------


def _lines(operations: Sequence[Operation], place: _Place) -> list[Line]:
    """Operations folded by (phase, kind, name); the costliest decides what bounds a line."""
    folded: dict[tuple[Phase, Kind, str], Line] = {}
    costliest: dict[tuple[Phase, Kind, str], float] = {}
    for op in operations:
        timing = place.machine.time(op)
        key = (op.phase, op.kind, line_name(op.name))
        before = folded.get(key, Line(*key, count=0, bytes_moved=0.0, seconds=0.0))
        bound = timing.bound if timing.seconds >= costliest.get(key, 0.0) else before.bound
        costliest[key] = max(timing.seconds, costliest.get(key, 0.0))
        folded[key] = Line(
            *key,
            count=(before.count or 0) + op.repeat,
            flops=before.flops if op.flops is None else (before.flops or 0) + op.flops * op.repeat,
            bytes_moved=(before.bytes_moved or 0.0) + op.bytes_moved * op.repeat,
            seconds=(before.seconds or 0.0) + timing.seconds * op.repeat,
            bound=bound,
        )
    lines = list(folded.values())
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        here = [line for line in lines if line.phase is phase]
        calls, busy = sum(line.count or 0 for line in here), sum(line.seconds or 0.0 for line in here)
        seconds = place.machine.dispatch_seconds(phase, calls, busy)
        lines.append(Line(phase, Kind.HOST, "dispatch", count=calls, seconds=seconds, bound="overhead"))
    return lines


def _memory(traced: Trace, accumulation: int, loop: Loop | None) -> tuple[Peak, list[MemoryLine]]:
    """Weights, gradients and the optimizers' states, and the highest moment of the micro-batch."""
    every, before = traced.trained_bytes, loop.gradients if loop else "none"
    kept = accumulation > 1 or before == "kept"
    temporary = sum(update.temporary_bytes() for update in loop.updates) if loop else 0
    peaks = [walk(traced.operations, 1, every if kept else 0), Peak(f"update, {Phase.OPTIMIZER}", 0, temporary, every)]
    if before == "forward":
        passed = walk([op for op in traced.operations if op.phase is Phase.FORWARD], 1)
        peaks.append(replace(passed, gradient_bytes=every))
    state = sum(update.state_bytes() for update in loop.updates) if loop else 2 * every
    whose = " and ".join(dict.fromkeys(u.optimizer for u in loop.updates)) if loop else "two moments of AdamW"
    peak = max(peaks, key=lambda p: p.saved_bytes + p.temporary_bytes + p.gradient_bytes)
    return peak, [
        MemoryLine("weights", traced.parameter_bytes + traced.buffer_bytes, note="parameters and buffers"),
        MemoryLine("gradients", peak.gradient_bytes),
        MemoryLine("optimizer", state, note=whose),
        MemoryLine("activations", peak.saved_bytes, note="saved for the backward pass"),
        MemoryLine("temporaries", peak.temporary_bytes),
        MemoryLine("batch", traced.input_bytes, note="inputs"),
    ]


def _types(traced: Trace) -> str:
    """The types that the matrix products run in, the busiest first."""
    flops: dict[str, int] = {}
    for op in traced.operations:
        if op.flops:
            flops[op.dtype] = flops.get(op.dtype, 0) + op.flops
    return " and ".join(sorted(flops, key=lambda dtype: -flops[dtype])) or "no matrix products"


def _totals(ledger: Ledger, traced: Trace, place: _Place) -> dict[str, Estimate]:
    calculated = Origin.CALCULATED
    step = sum(line.seconds or 0.0 for line in ledger.lines)
    flops, tensors = ledger.flops(), sum(ledger.memory_bytes().values())
    low, high = _bounds(ledger, step, place)
    wide = place.memory_interval
    resident = tensors + place.context_bytes
    rate = place.peak_flops_per_second
    return {
        "parameters": Estimate(traced.parameters, calculated, "every parameter of the module, shared ones once"),
        "flops_per_step": Estimate(
            flops, calculated,
            "matrix products of the traced forward and backward; scores that is_causal masks cost nothing",
        ),
        "step_seconds": Estimate(step, calculated, f"sum of the operations: {place.time_basis}", low, high),
        "mfu": Estimate(flops / step / rate, calculated,
                        f"FLOPs / step time / {units.rate(rate, 'FLOP')}, {place.peak_basis}",
                        flops / high / rate, flops / low / rate),
        "peak_bytes": Estimate(tensors, calculated, f"tensors alive at the highest moment ({ledger.facts['peak_at']})",
                               tensors * (1 - wide), tensors * (1 + wide)),
        "resident_bytes": Estimate(resident, calculated,
                                   "tensors, and what the process or the driver holds without any",
                                   resident * (1 - wide), resident + tensors * place.fragmentation),
    }  # fmt: skip


def _bounds(ledger: Ledger, step: float, place: _Place) -> tuple[float, float]:
    """Known kernels vary as past plans did; guessed ones by `GUESSED_FACTORS`."""
    guessed = sum(line.seconds or 0.0 for line in ledger.lines if line.bound in (COPY_RATE, AS_MATMUL))
    known = step - guessed
    low, high = place.time_factors
    return known * low + guessed * GUESSED_FACTORS[0], known * high + guessed * GUESSED_FACTORS[1]
