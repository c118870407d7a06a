"""Plans for any torch module: traced on fake tensors, then timed for this machine or a catalogued accelerator.

    ledger = plan_traced("my_package.models:build", ["tokens=8x2048:int64"], "h200")

Assumed: one process (or one replica on each of several accelerators), one micro-batch per step, AdamW on every trained
parameter, gradients in the parameters' own type. The module decides the rest: what it recomputes and which types it
uses. torch is imported only when a module is traced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ironlaw import units
from ironlaw.catalog.nodes import Cluster, parse_cluster
from ironlaw.config import RunConfig, build_config
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
from ironlaw.plan.recipe import batch_of, recipe_of
from ironlaw.plan.request_types import Assumption, Options, PlanOutcome, RequestedModel, assume_unsaid, settle
from ironlaw.plan.stage_costs import collective_costs, fold
from ironlaw.plan.step import finetuning, with_adapters, with_objective
from ironlaw.plan.totals import PlannedOn, add_totals, fits
from ironlaw.workload.layout import Layout
from ironlaw.workload.module_source import read_inputs, resolve_module
from ironlaw.workload.operations import Operation
from ironlaw.workload.optimizers import FP32
from ironlaw.workload.program import Program, replicated, step, step_of_trace
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
        return float(collective_seconds(kind, size, ranks, fabric=self.fabric))


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


def plan_traced(spec: str, inputs: Sequence[str], on: str, *, real: bool | None = None) -> Ledger:
    """Returns the plan of `package.module:factory` for inputs such as `name=8x2048:int64`.

    `on` is "this" or catalogued accelerators; `real` as in `trace`. Raises UserError without inputs.
    """
    if not inputs:
        raise UserError(f"{spec} needs its inputs: add --input NAME=SIZES:DTYPE, such as tokens=8x2048:int64")
    return plan_module(resolve_module(spec), read_inputs(inputs), on, name=spec, real=real)


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
    """Returns the planned ledger of one training step.

    `precision`: "as is" runs the module in its own types, "bf16" and "fp16" under autocast; "auto" is "as is" on this
    machine, and autocast on an accelerator with a 16-bit matrix peak. `inputs` are those of one replica; several
    replicas are planned with ZeRO 0, or with ZeRO 3 if that does not fit.
    """
    from ironlaw.workload.trace import trace

    if precision not in ("auto", "as is", "fp32", "bf16", "fp16"):
        raise UserError(
            f"precision {precision}: a module is traced in its own types, or under autocast: use bf16 or fp16"
        )
    target = (
        _this_machine(load_profile(), precision) if on == "this" else accelerator_target(parse_cluster(on), precision)
    )
    how: Any = {"loss": loss, "precision": target.precision, "real": real, "repeated": repeated}
    how["cpu"] = target.facts["device"] == "cpu"
    traced = trace(module_or_factory, inputs, **how)
    ledger = _planned(traced, target, name)
    if target.replicas > 1 and not fits(ledger):
        ledger = _planned(traced, target, name, zero=3)
    ledger.facts["inputs"] = traced.inputs
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
    zero: int = 0,
) -> Ledger:  # fmt: skip
    cpu = target.facts["device"] == "cpu"
    optimizers = [update.description() for update in loop.updates] if loop else ["AdamW, fused (assumed)"]
    if loop is None and traced.has_complex:
        loop, optimizers = _unfused(traced, cpu), ["AdamW, not fused, for it takes no complex parameters (assumed)"]
    facts: dict[str, Any] = {
        "model": {"name": name or traced.name},
        "precision": _types(traced),
        "traced_operations": len(traced.operations),
        "assumed": [list(one) for one in traced.assumptions],
        "optimizers": optimizers,
    }
    program = step_of_trace(traced, accumulation, loop, cpu)
    replicas = target.replicas
    if replicas > 1:
        program = replicated(program, traced, replicas, zero)
        reason = "replicas of the inputs given, ZeRO 0 where that fits, else 3"
        facts["assumed"].append(["layout", f"dp={replicas} zero={zero}", reason, ""])
    return ledger_on(target, program, traced.parameters, facts)


def _unfused(traced: ModuleTrace, cpu: bool) -> Loop:
    """Returns AdamW by PyTorch's calls on the real numbers of all parameters, in fp32."""
    numbers, tensors = traced.trained_bytes // FP32, traced.trained_tensors
    shapes = (((numbers // tensors,), tensors),)
    update = Update("AdamW", "adamw", shapes, FP32, False, True, 0, 0, foreach=not cpu)
    return Loop((update,), clips=True, cuda=not cpu)


def ledger_on(target: PlannedTarget, program: Program, parameters: int, facts: dict[str, Any]) -> Ledger:
    """Returns the ledger of a program of one replica on `target`; `facts` are added to its facts.

    Seconds and bytes are those of one replica, FLOPs those of all replicas.
    """
    system, peak = target.system, peak_memory(program)
    notes = {tensor.component: tensor.note for tensor in program.tensors[0]}
    lines = fold(program.operations(), target.machine)
    lines += _communication(program, target, lines)
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
    """Returns the collectives of a replica; their time is exposed where it exceeds that of forward and backward."""
    if target.replicas == 1:
        return []
    sent = collective_costs(program, program.collectives[0], target.machine)
    total = sum(cost.seconds for cost in sent)
    passes = sum(line.seconds or 0.0 for line in lines if line.phase in (Phase.FORWARD, Phase.BACKWARD))
    exposed = max(0.0, total - passes) / total if total else 0.0
    return [replace(cost, exposed_seconds=exposed * cost.seconds).line() for cost in sent]


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
            held=(1.0, 1.0, 1.2),
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


# -- adapters --------------------------------------------------------------------------------------------------------

USUAL_SEQUENCE = 2048
OURS = "ironlaw"  # the engine of our own trainer


def plan_adapters(requested: RequestedModel, on: str, options: Options) -> PlanOutcome:
    """Plans fine-tuning with adapters on catalogued accelerators, as Ironlaw's trainer runs it.

    Every block is recomputed if the job does not fit otherwise; a config file sets recomputation itself. Several
    accelerators hold replicas, which also shard the base (ZeRO 3) if it does not fit on one; communication overlaps
    with computation. Raises UserError for other layouts and for models whose adapters are not planned.
    """
    assert requested.config is not None
    if requested.model.latent is not None or requested.model.moe is not None:
        raise UserError("adapters of latent attention and experts are not planned: give a dense model")
    if options.layout or options.emit or options.network or options.per_node or options.engine not in (None, OURS):
        raise UserError(
            "adapters are planned on replicas alone here, as this trainer runs them: leave --layout, --emit, --engine, "
            "--network and --per-node out"
        )
    cluster = parse_cluster(on)
    config, assumed = _settled(requested.config, options, cluster.count)
    modes = [config.recompute.mode] if requested.has_file else ["none", "full"]
    choices = [(mode, zero) for zero in ((0, 3) if cluster.count > 1 else (0,)) for mode in modes]
    for mode, zero in choices:
        config = config.model_copy(update={"recompute": config.recompute.model_copy(update={"mode": mode})})
        ledger = _ledger(config, cluster, zero)
        if fits(ledger):
            break
    if cluster.count > 1:
        assumed.append(Assumption("layout", f"dp {cluster.count}, ZeRO {zero}", "the first that fits of 0 and 3", ""))
    if not requested.has_file:
        assumed.append(Assumption("recomputation", mode, "the first that fits of none and full", "a config file"))
    return PlanOutcome.of(ledger, assumed)


def _settled(config: RunConfig, options: Options, replicas: int) -> tuple[RunConfig, list[Assumption]]:
    train, usual = config.train, min(config.model.context, USUAL_SEQUENCE)
    said = options.sequence or train.sequence
    work = settle(config.model, replace(options, sequence=said or usual), replicas, config)
    assumed = assume_unsaid("usual for fine-tuning", ("sequence", said, f"{usual:,} tokens", "--seq"))
    batch = work.global_batch
    if batch % replicas:
        why = f"{batch} do not divide among {replicas} replicas"
        assumed.append(Assumption("global batch", f"{replicas} sequences", why, "--global-batch"))
        batch = replicas
    micro = train.micro_batch or 1
    if train.micro_batch is None:
        assumed.append(Assumption("micro-batch", "1 sequence", "the least memory", "train.micro_batch"))
    document = config.model_dump(exclude_none=True)
    document["train"] |= {
        "sequence": work.sequence, "global_batch": batch, "micro_batch": min(micro, batch // replicas),
        "steps": work.steps, "precision": options.precision or train.precision,
    }  # fmt: skip
    document["optimizer"]["name"] = options.optimizer or config.optimizer.name
    return build_config(document, where="the options"), assumed


def _ledger(config: RunConfig, cluster: Cluster, zero: int) -> Ledger:
    target = accelerator_target(cluster, config.train.precision)
    recipe = with_adapters(recipe_of(config, target.precision, cuda=True, gloo=False), config)
    layout = Layout(dp=cluster.count, zero=zero, micro_batch=config.micro_batch)
    program = step(config.model, batch_of(config), layout, recipe)
    program = with_objective(program, config)
    ledger = ledger_on(target, program, config.model.parameters, {
        "model": config.model.model_dump(mode="json", exclude_none=True), "sequence": config.sequence,
        "global_batch": config.train.global_batch, "micro_batch": config.micro_batch,
        "accumulation": program.micro_batches, "steps": config.train.steps,
    })  # fmt: skip
    held = {"weights", "optimizer", "gradients", "average"}
    states = sum(line.bytes or 0.0 for line in ledger.memory if line.component in held)
    left = target.system.memory_bytes - target.system.context_bytes - states
    room = f"{units.bytes_(left)} are left for activations" if left > 0 else f"{units.bytes_(-left)} too much already"
    ledger.facts["finetune"] = f"{finetuning(config, program)}; held throughout: {units.bytes_(states)}, {room}"
    return ledger
