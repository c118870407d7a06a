"""The plan of a run on one measured machine: every operation timed from the machine's curves, summed by key."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ironlaw import units
from ironlaw.catalog import cpu_power
from ironlaw.config import RunConfig
from ironlaw.errors import UserError
from ironlaw.ledger import Estimate, Kind, Ledger, Line, Origin, Phase
from ironlaw.machine import interference
from ironlaw.machine.profile import Profile
from ironlaw.plan.process.memory import peak_memory
from ironlaw.plan.process.offload import Offload, host_of_machine, lines_of, plan_offload, without_update
from ironlaw.plan.process.recompute import solve
from ironlaw.plan.process.record import time_interval
from ironlaw.plan.process.supply import data_supply
from ironlaw.plan.process.supported import check_supported
from ironlaw.plan.process.timing import MeasuredMachine, measured_precision
from ironlaw.plan.recipe import batch_of, recipe_of
from ironlaw.workload.kinds import is_block
from ironlaw.workload.operations import Operation
from ironlaw.workload.optimizers import update_operations
from ironlaw.workload.parameters import model_parameters
from ironlaw.workload.program import micro_batch_shape
from ironlaw.workload.recompute import AGAIN
from ironlaw.workload.transformer import (
    Shape,
    attention_score_pairs,
    training_operations,
)

# The byte count is exact for the operations listed (tests compare it with autograd's); what is left is workspace
# that a library's kernel allocates inside.
MEMORY_INTERVAL = 0.02


@dataclass(frozen=True)
class Choice:
    """A decision the plan took, and why."""

    value: str
    reason: str


def training_shape(config: RunConfig, precision: str, *, cuda: bool = False, onednn: bool = False) -> Shape:
    recipe = recipe_of(config, precision, cuda=cuda, onednn=onednn)
    return micro_batch_shape(config.model, config.micro_batch, batch_of(config), recipe)


def step_operations(config: RunConfig, precision: str, *, cuda: bool = False) -> list[tuple[Operation, int]]:
    """All operations of an optimizer step with how often each runs in it."""
    return shaped_operations(config, training_shape(config, precision, cuda=cuda))


def shaped_operations(config: RunConfig, shape: Shape) -> list[tuple[Operation, int]]:
    """The same for a given shape of the micro-batches, of which the last may be smaller."""
    whole, rest = divmod(config.train.global_batch, shape.micro_batch)
    per_micro_batch = [(op, op.repeat * whole) for op in training_operations(shape) if op.repeat]
    if rest:
        last = replace(shape, micro_batch=rest)
        per_micro_batch += [(op, op.repeat) for op in training_operations(last) if op.repeat]
    update = update_operations(
        model_parameters(config.model), config.optimizer, accumulation=config.accumulation, cuda=shape.fused_rmsnorm
    )
    return per_micro_batch + [(op, op.repeat) for op in update]


def choose_precision(config: RunConfig, profile: Profile) -> Choice:
    """What the config says, or with `auto` the precision whose planned step is shorter on this machine."""
    wanted = config.train.precision
    if wanted != "auto":
        planned = measured_precision(wanted, profile)
        as_other = "" if planned == wanted else f"; planned with the times of {planned}, which was measured"
        return Choice(wanted, f"train.precision in the config{as_other}")
    machine = MeasuredMachine(profile, interference.typical(profile))
    seconds = {p: _seconds(step_operations(config, p), machine, p) for p in profile.matmul}
    # Reduced precision must earn its rounding: a gain inside the plan's own error is none.
    best = min(seconds, key=lambda p: seconds[p])
    if best != "fp32" and seconds[best] > 0.9 * seconds["fp32"]:
        best = "fp32"
    shown = ", ".join(f"{p} {units.seconds(s)}" for p, s in sorted(seconds.items(), key=lambda item: item[1]))
    return Choice(best, f"shortest planned step on this machine by at least 10%, else fp32: {shown}")


def plan_run(config: RunConfig, profile: Profile) -> Ledger:
    """Parameters, FLOPs, memory, time and energy of `config` on the measured machine. No torch needed."""
    if config.train.threads not in (None, profile.threads):
        raise UserError(
            f"train.threads = {config.train.threads}, but this machine was measured with {profile.threads}: "
            f"run `ironlaw measure --threads {config.train.threads}` or drop train.threads"
        )
    precision = choose_precision(config, profile)
    machine = MeasuredMachine(profile, interference.typical(profile))
    cuda, onednn = profile.device == "cuda", profile.fp32_products == "onednn"
    check_supported(config, profile.device)
    shape = solved_shape(config, training_shape(config, precision.value, cuda=cuda, onednn=onednn), machine)
    operations = shaped_operations(config, shape)
    measured = measured_precision(precision.value, profile)
    offload = _offload(config, shape, operations, machine, measured)
    if offload is not None and config.train.offloads_optimizer:
        operations = without_update(operations)
    lines = _lines(operations, machine, measured) + ([] if offload is None else lines_of(offload))
    memory, peak_where = peak_memory(config, shape)
    ledger = Ledger("plan", lines=lines, memory=memory)
    ledger.facts = common_facts(config, profile, precision, shape) | {
        "peak_at": peak_where,
        "composition": machine.composition[measured],
        "matmul_peak_flops_per_second": profile.matmul_peak(measured),
        "copy_bytes_per_second": profile.copy_bytes_per_second,
        "micro_batch": config.micro_batch,
        "accumulation": config.accumulation,
        "planned_as": measured,
    }
    if offload is not None:
        ledger.facts["offload"] = asdict(offload) | {"host": asdict(host_of_machine(profile))}
    add_totals(ledger, config, profile, measured)
    ledger.facts["data_supply"] = data_supply(config, profile, ledger.totals["tokens_per_second"].value)
    return ledger


def common_facts(config: RunConfig, profile: Profile, precision: Choice, shape: Shape) -> dict[str, Any]:
    """What every plan on measured machines says, of one process or of ranks. The trainer follows it: precision, what is
    recomputed, how the loss is computed. `shape` is the whole model's.
    """
    return {
        "model": config.model.model_dump(mode="json", exclude_none=True),
        "machine": profile.name,
        "device": profile.device,
        "threads": profile.threads,
        "measured": profile.created,
        "versions": profile.versions,
        "precision": precision.value,
        "precision_reason": precision.reason,
        "slowdown": interference.typical(profile),
        "memory_bytes": profile.memory_bytes,
        "sequence": config.sequence,
        "loss_chunk": shape.loss_chunk,
        "recompute": [None if policy is None else sorted(policy) for policy in shape.recompute],
        "global_batch": config.train.global_batch,
        "steps": config.train.steps,
    }


def _offload(
    config: RunConfig, shape: Shape, operations: list[tuple[Operation, int]], machine: MeasuredMachine, precision: str
) -> Offload | None:
    """What goes to the host and how much of its time shows behind the blocks of a micro-batch."""
    if config.train.offload == "none":
        return None
    seconds = dict.fromkeys((Phase.FORWARD, Phase.BACKWARD), 0.0)
    for op, count in operations:
        if is_block(op.group) and op.phase in seconds:
            seconds[op.phase] += machine.time(op, precision).seconds * count / config.accumulation
    return plan_offload(config, shape, host_of_machine(machine.profile), seconds)


def solved_shape(config: RunConfig, shape: Shape, machine: MeasuredMachine) -> Shape:
    """A budget becomes one policy per layer."""
    if config.recompute.mode != "budget":
        return shape
    assert config.recompute.budget is not None
    return solve(
        shape,
        units.parse_bytes(config.recompute.budget),
        seconds=lambda op: machine.time(op, shape.precision).seconds,
        peak_bytes=lambda shape: sum(line.bytes or 0 for line in peak_memory(config, shape)[0]),
    )


def _seconds(operations: Iterable[tuple[Operation, int]], machine: MeasuredMachine, precision: str) -> float:
    return sum(line.seconds or 0.0 for line in _lines(operations, machine, precision))


def _lines(operations: Iterable[tuple[Operation, int]], machine: MeasuredMachine, precision: str) -> list[Line]:
    """Fold operations with the same key (phase, kind, name); the costliest decides what bounds the line."""
    folded: dict[tuple[Phase, Kind, str], Line] = {}
    costliest: dict[tuple[Phase, Kind, str], float] = {}
    for op, count in operations:
        timing = machine.time(op, precision)
        key = (op.phase, op.kind, op.name)
        before = folded.get(key, Line(*key, count=0, bytes_moved=0.0, seconds=0.0))
        flops = before.flops if op.flops is None else (before.flops or 0) + op.flops * count
        seconds = timing.seconds * count
        bound = timing.bound if seconds >= costliest.get(key, 0.0) else before.bound
        costliest[key] = max(seconds, costliest.get(key, 0.0))
        folded[key] = Line(
            *key,
            count=(before.count or 0) + count,
            flops=flops,
            bytes_moved=(before.bytes_moved or 0.0) + op.bytes_moved * count,
            seconds=(before.seconds or 0.0) + seconds,
            bound=bound,
        )
    return list(folded.values()) + _dispatch(list(folded.values()), machine)


def _dispatch(lines: list[Line], machine: MeasuredMachine) -> list[Line]:
    """What the host adds to every call, by phase; an update is two calls, priced by its own curve."""
    result = []
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        calls = sum(line.count or 0 for line in lines if line.phase is phase)
        seconds = calls * machine.dispatch_seconds(phase)
        result.append(Line(phase, Kind.HOST, "dispatch", count=calls, seconds=seconds, bound="overhead"))
    return result


def add_totals(ledger: Ledger, config: RunConfig, profile: Profile, precision: str) -> None:
    """What the lines and the memory of a planned ledger come to."""
    calculated, tokens = Origin.CALCULATED, config.tokens_per_step
    step = sum(line.seconds or 0.0 for line in ledger.lines)
    low, high, basis = time_interval(profile)
    flops, again = model_flops(ledger), recomputed_flops(ledger)
    tensors = sum(ledger.memory_bytes().values())
    totals = ledger.totals
    totals["parameters"] = Estimate(config.model.parameters, calculated, "sum over the modules' shapes")
    totals["flops_per_step"] = Estimate(
        flops, calculated, "matrix products of forward and backward; masked attention scores cost nothing"
    )
    totals["flops_per_step_unmasked"] = Estimate(
        _unmasked_flops(ledger, config), calculated, "the same with every attention score counted, as PyTorch counts"
    )
    totals["step_seconds"] = Estimate(step, calculated, f"sum of the operations' measured curves; {basis}",
                                      step * low, step * high)  # fmt: skip
    totals["tokens_per_second"] = Estimate(
        tokens / step, calculated, "tokens per step / step time", tokens / (step * high), tokens / (step * low)
    )
    peak_rate = profile.matmul_peak(precision)
    totals["mfu"] = Estimate(
        flops / step / peak_rate, calculated,
        f"FLOPs / step time / {units.rate(peak_rate, 'FLOP')}, the measured {precision} matmul rate of this machine",
        flops / (step * high) / peak_rate, flops / (step * low) / peak_rate,
    )  # fmt: skip
    if again:
        totals["recomputed_flops_per_step"] = Estimate(again, calculated, "matrix products that run a second time")
        totals["hfu"] = Estimate(
            (flops + again) / step / peak_rate, calculated, "as MFU, with recomputed FLOPs counted",
            (flops + again) / (step * high) / peak_rate, (flops + again) / (step * low) / peak_rate,
        )  # fmt: skip
    totals["peak_bytes"] = Estimate(
        tensors, calculated, f"tensors alive at the highest moment ({ledger.facts['peak_at']})",
        tensors * (1 - MEMORY_INTERVAL), tensors * (1 + MEMORY_INTERVAL),
    )  # fmt: skip
    resident = tensors + profile.runtime_bytes
    totals["resident_bytes"] = Estimate(
        resident, calculated,
        "tensors plus the measured size of a process that trains almost nothing; more when the allocator fragments",
        resident * 0.95, resident + tensors,
    )  # fmt: skip
    totals["total_seconds"] = _total_time(ledger, config, totals["step_seconds"])
    energy = _energy(profile, totals["total_seconds"])
    if energy is not None:
        totals["energy_joules"] = energy


def _unmasked_flops(ledger: Ledger, config: RunConfig) -> int:
    masked = sum(line.flops or 0 for line in ledger.select(kind=Kind.ATTENTION) if _of_the_model(line))
    model, sequence = config.model, config.sequence
    pairs = sum(attention_score_pairs(sequence, model.window_of(layer, sequence)) for layer in range(model.layers))
    return model_flops(ledger) - masked + masked * 2 * model.layers * sequence**2 // pairs


def model_flops(ledger: Ledger) -> int:
    """Products of forward and backward, each once: neither what is recomputed nor the optimizer's own."""
    return sum(line.flops or 0 for line in ledger.lines if _of_the_model(line))


def recomputed_flops(ledger: Ledger) -> int:
    return sum(line.flops or 0 for line in ledger.lines if line.operation.endswith(AGAIN))


def _of_the_model(line: Line) -> bool:
    return line.phase is not Phase.OPTIMIZER and not line.operation.endswith(AGAIN)


def _total_time(ledger: Ledger, config: RunConfig, step: Estimate) -> Estimate:
    """All steps, and the validation passes between them (forward only)."""
    forward = sum(line.seconds or 0.0 for line in ledger.select(phase=Phase.FORWARD)) / step.value
    passes = 1 + (config.train.steps - 1) // config.evaluation.every if config.evaluation.every else 1
    evaluation_steps = passes * config.evaluation.batches * forward
    return step.scaled(
        config.train.steps + evaluation_steps,
        f"{config.train.steps} steps and {passes} validation passes of {config.evaluation.batches} batches",
    )


def _energy(profile: Profile, total: Estimate) -> Estimate | None:
    """Joules of the processor. A range: what one core of such a processor draws is only known between bounds."""
    power = cpu_power(profile.name) if profile.device == "cpu" else None
    if power is None:
        return None
    low, high = float(power.low) * profile.threads, float(power.high) * profile.threads
    middle = (low * high) ** 0.5
    assert total.low is not None and total.high is not None
    return Estimate(
        middle * total.value, Origin.CITED,
        f"{profile.threads} cores of {power.family} at {low:.0f} to {high:.0f} W ({power.source}); "
        "processor only, no memory, no cooling",
        low * total.low, high * total.high,
    )  # fmt: skip


def fits(ledger: Ledger) -> bool:
    """Whether the process is planned to stay within the machine's memory."""
    return ledger.totals["resident_bytes"].value <= float(ledger.facts["memory_bytes"])
