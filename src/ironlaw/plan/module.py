"""Plans for any torch module: traced on fake tensors, then timed for this machine or a catalogued accelerator.

    ledger = plan_module(build, [parse_input("tokens=8x2048:int64")], "8xh200")

Several accelerators hold replicas, which may share weights, gradients and state by ZeRO. Assumed unless given: one
micro-batch per step, AdamW on every trained parameter, gradients in the parameters' own type. The module decides the
rest: what it recomputes and which types it uses. torch is imported only when a module is traced.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from ironlaw import units
from ironlaw.catalog.nodes import Cluster, parse_cluster
from ironlaw.errors import UserError
from ironlaw.ledger import Decisions, Kind, Ledger, Line, Origin, Phase
from ironlaw.machine import interference
from ironlaw.machine.efficiency.attention import BACKWARD_FLOPS_RATIO, attention_seconds
from ironlaw.machine.efficiency.collectives import collective_seconds
from ironlaw.machine.efficiency.hardware import Fabric, Hardware
from ironlaw.machine.efficiency.streaming import streaming_seconds
from ironlaw.machine.profile import Profile, load_profile
from ironlaw.machine.timing import Machine, MeasuredForModules, Timing, element_type, is_narrow
from ironlaw.plan.cluster.step_costs import kernel_slowdown, product_seconds
from ironlaw.plan.cluster.system import UNUSABLE_BYTES, fabric_of, hardware_of
from ironlaw.plan.engines.engine import TrainingEngine
from ironlaw.plan.engines.named import engine_of_framework
from ironlaw.plan.memory import peak_memory
from ironlaw.plan.stage_costs import CollectiveCost, collective_costs, fold
from ironlaw.plan.totals import PlannedOn, add_totals, fits
from ironlaw.workload.layout import Layout
from ironlaw.workload.operations import Operation
from ironlaw.workload.optimizers import FP32, OptimizerName
from ironlaw.workload.program import Program, replicated, step_of_trace
from ironlaw.workload.updates import Loop, Update

if TYPE_CHECKING:
    from torch import nn

    from ironlaw.workload.trace import Loss
    from ironlaw.workload.trace_inputs import Inputs
    from ironlaw.workload.trace_store import ModuleTrace


HOST_SECONDS_PER_CALL = 8e-6
"""Host time to launch one eager kernel: Python, dispatch and autograd. Assumed: reported values are 5 to 10 µs.
A device that needs less time per kernel waits for its host."""


@dataclass(frozen=True)
class CataloguedAccelerator:
    """Times of eager kernels from the constants of an accelerator generation; launches overlap with kernels."""

    hardware: Hardware
    engine: TrainingEngine  # how much slower kernels are inside a run than in a benchmark
    precision: str = "fp32"  # of operations without their own
    fabric: Fabric | None = None  # between accelerators

    def time(self, op: Operation) -> Timing:
        dtype = element_type(op, op.precision or self.precision)
        seconds, bound = 0.0, "memory"
        if op.matmul is not None and not is_narrow(op):
            m, n, k = op.matmul
            product = product_seconds(m, n, k, op.batch, self.hardware, dtype).item()
            seconds, bound = product * self.engine.matmul_slowdown, "compute"
        elif op.attention is not None:
            seconds, bound = self._attention(op, dtype), "compute"
        elif op.bytes_moved:
            kind = "norm" if op.kind is Kind.NORM else "elementwise"
            seconds = float(streaming_seconds(op.bytes_moved, self.hardware, kind))
        if seconds < 2 * self.hardware.efficiency.streaming.launch_seconds:
            bound = "overhead"
        return Timing(seconds, bound, Origin.CALCULATED)

    def _attention(self, op: Operation, dtype: str) -> float:
        """Scores of unequal numbers of queries and keys are timed as a square of the same area."""
        assert op.attention is not None
        sequences, tokens, heads, kv_heads, size = op.attention
        scores = op.elements / (sequences * heads)
        causal = scores <= tokens * tokens / 2
        side = round((2 * scores if causal else scores) ** 0.5)
        direction = "backward" if op.phase is Phase.BACKWARD else "forward"
        # Size of a head's values: the FLOPs without those of the scores, which take two per score and key element.
        products = 4 if op.phase is Phase.BACKWARD else 2
        value_size = (op.flops or 0) / (products * op.elements) - size if op.flops and op.elements else size
        seconds = attention_seconds(
            sequences, side, heads, kv_heads, size, causal, dtype if dtype in ("bf16", "fp16") else "bf16",
            hardware=self.hardware, direction=direction, sustained=True, value_size=value_size,
        )  # fmt: skip
        if dtype not in ("bf16", "fp16"):  # no flash kernel: limited by half of the fp32 peak
            flops = (op.flops or 0) * (BACKWARD_FLOPS_RATIO / 2 if direction == "backward" else 1.0)
            return max(float(seconds), flops / (0.5 * self.hardware.peak("fp32")))
        return float(seconds) * kernel_slowdown(self.engine, self.hardware) * self.engine.attention_slowdown

    def dispatch_seconds(self, phase: Phase, calls: int, busy_seconds: float) -> float:
        return max(0.0, calls * HOST_SECONDS_PER_CALL - busy_seconds)

    def collective_seconds(self, kind: str, size: float, ranks: int, stride: int = 1) -> float:
        assert self.fabric is not None
        inside = min(ranks, max(1, self.fabric.island_ranks // stride))
        return float(collective_seconds(kind, size, ranks, inside, fabric=self.fabric))


EAGER_FRAMEWORK = "torchtitan"
"""The framework whose engine gives the slowdown of PyTorch's kernels in a run, relative to a benchmark."""

ACCELERATOR_FACTORS = (0.75, 1.6)
"""80% interval of measured / planned step time on an accelerator. Assumed: no traced plan was compared with a run."""

ACCELERATOR_MEMORY_INTERVAL = 0.1
"""A trace shows what CPU kernels keep; accelerator kernels keep a little less (dropout masks) or more (workspaces)."""


@dataclass(frozen=True)
class PlannedTarget:
    """The machine or cluster that a plan is made for."""

    machine: Machine
    system: PlannedOn
    precision: str  # for the trace: "as is", "bf16", "fp16"
    precision_reason: str
    facts: dict[str, Any]
    cluster: Cluster | None = None  # one replica on each accelerator; None: this machine

    @property
    def replicas(self) -> int:
        return 1 if self.cluster is None else self.cluster.count


def plan_module(
    module_or_factory: nn.Module | Callable[[], nn.Module],
    inputs: Inputs,
    on: str | Cluster = "this",
    *,
    loss: Loss | None = None,
    precision: str = "auto",
    name: str | None = None,
    real: bool | None = None,
    repeated: bool = False,
    layout: Layout | None = None,
    optimizer: str = "adamw",
) -> Ledger:
    """Returns the planned ledger of one training step.

    `on`: "this" machine or catalogued accelerators. `precision`: "as is" runs the module in its own types, "bf16" and
    "fp16" under autocast; "auto" is "as is" on this machine, and autocast on an accelerator with a 16-bit matrix peak.
    `inputs` are those of one replica's micro-batch. `layout`: replicas, ZeRO stage and accumulation; without it the
    ZeRO stage is the fastest that fits. `real`, `repeated`: as in `trace`. Raises UserError for what is not planned.
    """
    from ironlaw.workload.trace import trace

    if precision not in ("auto", "as is", "fp32", "bf16", "fp16"):
        raise UserError(
            f"precision {precision}: a module is traced in its own types, or under autocast: use bf16 or fp16"
        )
    if optimizer not in FOR_MODULES:
        raise UserError(f"optimizer {optimizer}: of a traced module's, {', '.join(FOR_MODULES)} are planned")
    cluster = parse_cluster(on) if isinstance(on, str) and on != "this" else on
    if isinstance(cluster, Cluster):
        target = accelerator_target(cluster, precision)
    else:
        target = _this_machine(load_profile(), precision)
    how: Any = {"loss": loss, "precision": target.precision, "real": real, "repeated": repeated}
    how["cpu"] = target.facts["device"] == "cpu"
    traced = trace(module_or_factory, inputs, **how)
    loop = None if optimizer == "adamw" else _loop(traced, optimizer, how["cpu"])
    ledger = _fastest(traced, target, name, loop, layout)
    ledger.facts["inputs"] = traced.inputs
    return ledger


def _fastest(
    traced: ModuleTrace, target: PlannedTarget, name: str | None, loop: Loop | None, layout: Layout | None
) -> Ledger:
    """Returns the plan of the layout, by default of the fastest ZeRO stage that fits, within a percent the lowest."""
    if layout is not None or target.replicas == 1:
        return _planned(traced, target, name, (layout and layout.accumulation) or 1, loop, layout)
    layouts = [Layout(dp=target.replicas, zero=zero) for zero in range(4)]
    plans = [(layout, _planned(traced, target, name, 1, loop, layout)) for layout in layouts]
    able = [(layout, ledger) for layout, ledger in plans if fits(ledger)]
    least = min((ledger.totals["step_seconds"].value for _, ledger in able), default=math.inf)
    chosen, ledger = next(one for one in able or plans[3:] if one[1].totals["step_seconds"].value <= 1.01 * least)
    others = ", ".join(
        f"zero={layout.zero} {units.seconds(other.totals['step_seconds'].value)}"
        for layout, other in able
        if layout != chosen
    )
    reason = "the fastest that fits" if able else "the least memory, and it does not fit"
    if others:
        reason += f" ({others})"
    ledger.facts["assumed"].append(["layout", str(chosen), reason, '--layout "dp=8 zero=2 accumulation=4"'])
    return ledger


def plan_trace(
    traced: ModuleTrace,
    profile: Profile | None,
    on: str = "this",
    *,
    accumulation: int = 1,
    name: str | None = None,
    loop: Loop | None = None,
) -> Ledger:
    """Returns the plan of a traced micro-batch, `accumulation` of which make a step, on the machine of `profile`, or
    on the accelerators `on` without a profile."""
    target = _this_machine(profile, "auto") if profile else accelerator_target(parse_cluster(on), "as is")
    return _planned(traced, target, name, accumulation, loop)


def _planned(
    traced: ModuleTrace, target: PlannedTarget, name: str | None, accumulation: int = 1, loop: Loop | None = None,
    layout: Layout | None = None,
) -> Ledger:  # fmt: skip
    cpu = target.facts["device"] == "cpu"
    optimizers = [update.description() for update in loop.updates] if loop else ["AdamW, fused (assumed)"]
    if loop is None and traced.has_complex:
        loop = _loop(traced, "adamw", cpu)
        optimizers = ["AdamW, not fused, for it takes no complex parameters (assumed)"]
    facts: dict[str, Any] = {
        "model": {"name": name or traced.name},
        "precision": _types(traced),
        "traced_operations": len(traced.operations),
        "assumed": [list(one) for one in traced.assumptions],
        "optimizers": optimizers,
    }
    program = step_of_trace(traced, accumulation, loop, cpu)
    if layout is not None and layout.dp > 1:
        program = replicated(program, traced, layout)
        facts["layout"] = str(layout)
    return ledger_on(target, program, traced.parameters, facts)


FOR_MODULES: dict[str, tuple[str, bool]] = {
    "adamw": ("AdamW", True), "adam": ("Adam", True), "sgd": ("SGD", True), "momentum": ("SGD", True),
    "rmsprop": ("RMSprop", False), "adam8bit": ("Adam8bit", False),
}  # fmt: skip
"""Optimizers planned for traced modules, whose work follows from the elements alone: class, whether it has a kernel."""


def _loop(traced: ModuleTrace, optimizer: str, cpu: bool) -> Loop:
    """Returns clipping and one optimizer of all parameters. Those of complex numbers are not fused."""
    kind, fused = FOR_MODULES[optimizer]
    width = FP32 if traced.has_complex else traced.trained_bytes // max(1, traced.trained_parameters)
    numbers, tensors = traced.trained_bytes // max(1, width), max(1, traced.trained_tensors)
    shapes = (((numbers // tensors,), tensors),)
    fused, decays = fused and not traced.has_complex, optimizer == "adamw"
    update = Update(
        kind, cast(OptimizerName, optimizer), shapes, width, fused, decays, 0, 0, foreach=not cpu and not fused
    )
    return Loop((update,), clips=True, cuda=not cpu)


def ledger_on(target: PlannedTarget, program: Program, parameters: int, facts: dict[str, Any]) -> Ledger:
    """Returns the ledger of a program of one replica on `target`; `facts` are added to its facts.

    Seconds and bytes are those of one replica, FLOPs those of all replicas.
    """
    system, peak = target.system, peak_memory(program)
    notes = {tensor.component: tensor.note for tensor in program.tensors[0]}
    lines = fold(program.operations(), target.machine)
    lines += _communication(program, target, lines)
    if target.cluster is not None:
        facts = {"accelerators": target.replicas} | facts
    if target.replicas > 1:
        lines = [replace(line, flops=None if line.flops is None else line.flops * target.replicas) for line in lines]
        peak_rate = system.peak_flops_per_second * target.replicas
        system = replace(system, peak_flops_per_second=peak_rate, peak_basis=f"{target.replicas} x {system.peak_basis}")
    ledger = Ledger("plan", lines=lines, memory=peak.lines(notes))
    ledger.facts = target.facts | {
        "machine": system.name,
        "precision": target.precision,
        "precision_reason": target.precision_reason,
        "matmul_peak_flops_per_second": system.peak_flops_per_second,
        "peak_basis": system.peak_basis,
        "peak_at": peak.where,
        "memory_bytes": system.memory_bytes,
    }
    ledger.facts |= facts
    ledger.decisions = Decisions(target.precision)
    add_totals(ledger, system, parameters, peak.where)
    return ledger


def _communication(program: Program, target: PlannedTarget, lines: Sequence[Line]) -> list[Line]:
    """Returns the collectives of a replica, with the time that computation does not hide.

    Weights gathered for a pass hide behind it, but for the first unit; reductions hide behind the backward pass (DDP's
    behind the last micro-batch's), but for the last one. Weights that are gathered after the update hide behind
    nothing.
    """
    layout = program.layout
    if layout.accelerators == 1:
        return []
    sent = collective_costs(program, program.collectives[0], target.machine)
    passes = {
        phase: sum(line.seconds or 0.0 for line in lines if line.phase is phase)
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    }
    if layout.zero < 2:
        passes[Phase.BACKWARD] /= program.micro_batches
    shares = [_hiding_phases(cost, layout) for cost in sent]
    hidden = dict.fromkeys(passes, 0.0)
    for phase, window in passes.items():
        demand = sum(share[phase] * cost.seconds for cost, share in zip(sent, shares, strict=True) if phase in share)
        alone = [cost.seconds / max(1, cost.count) for cost, share in zip(sent, shares, strict=True) if phase in share]
        if demand:
            hidden[phase] = min(window, demand - max(alone)) / demand
    return [
        replace(cost, exposed_seconds=cost.seconds * (1 - sum(hidden[p] * part for p, part in share.items()))).line()
        for cost, share in zip(sent, shares, strict=True)
    ]


def _hiding_phases(cost: CollectiveCost, layout: Layout) -> dict[Phase, float]:
    """Returns the phases that may hide a collective, each with its share of the collective's time."""
    if cost.dimension == "world":
        return {}
    if cost.kind == "all_gather":
        return {1: {}, 2: {Phase.FORWARD: 1.0}, 3: {Phase.FORWARD: 0.5, Phase.BACKWARD: 0.5}}.get(layout.zero, {})
    return {Phase.BACKWARD: 1.0}


# -- targets -----------------------------------------------------------------------------------------------------


def _this_machine(profile: Profile, precision: str) -> PlannedTarget:
    slowdown = interference.typical(profile)
    wanted = "as is" if precision == "auto" else precision
    system = PlannedOn.measured(profile, wanted if wanted in profile.matmul else "fp32")
    guessed = f"{system.time_basis}; bytes at copy rate where there is no curve"
    return PlannedTarget(
        machine=MeasuredForModules(profile, slowdown),
        system=replace(system, time_basis=guessed),
        precision=wanted,
        precision_reason="the module's own types" if wanted == "as is" else "asked for, by autocast",
        facts={
            "device": profile.device,
            "threads": profile.threads,
            "measured": profile.created,
            "slowdown": slowdown,
            "copy_bytes_per_second": profile.copy_bytes_per_second,
        },
    )


def accelerator_target(cluster: Cluster, precision: str) -> PlannedTarget:
    """Returns the target for catalogued accelerators. Raises UserError if the catalogue lacks their memory size."""
    found = cluster.accelerator
    hardware = hardware_of(found)
    if found.memory_bytes is None:
        raise UserError(f"the memory of {found.name} is not known: choose another accelerator")
    half = next((d for d in ("bf16", "fp16") if d in hardware.peak_flops_per_second), "as is")
    wanted = half if precision == "auto" else precision
    dtype = "fp32" if wanted == "as is" else wanted
    reason = f"autocast: matrix units of {found.name} want 16 bits" if precision == "auto" else "asked for"
    peak = hardware.peak(dtype)
    engine = engine_of_framework(EAGER_FRAMEWORK).on(found.generation)
    return PlannedTarget(
        machine=CataloguedAccelerator(hardware, engine, dtype, fabric_of(found, cluster.node)),
        system=PlannedOn(
            found.name,
            found.memory_bytes.value,
            UNUSABLE_BYTES,
            "tensors, and what the process or the driver holds without any",
            peak,
            f"dense {dtype} peak of {found.name}",
            ACCELERATOR_FACTORS,
            f"eager kernels by the constants of {found.generation}; interval assumed",
            ACCELERATOR_MEMORY_INTERVAL,
            allocation=(1.0, 1.0, 1.2),
        ),
        precision=wanted,
        precision_reason=reason,
        facts={
            "device": found.name,
            "copy_bytes_per_second": hardware.memory_bytes_per_second,
            "intervals": "Intervals are assumed: no traced plan has met a run on an accelerator",
            "assumptions": list(hardware.efficiency.assumptions()),
        },
        cluster=cluster,
    )


# -- the ledger --------------------------------------------------------------------------------------------------


def _types(traced: ModuleTrace) -> str:
    """Returns the types of the matrix products, in descending order of FLOPs."""
    flops = Counter[str]()
    for op in traced.operations:
        if op.flops:
            flops[op.dtype] += op.flops
    return " and ".join(dtype for dtype, _ in flops.most_common()) or "no matrix products"
