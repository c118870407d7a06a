"""Totals of a planned ledger's lines and memory, with intervals from the errors of past plans."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import quantiles
from typing import Any

from ironlaw import units
from ironlaw.catalog.accelerators import cpu_power
from ironlaw.config import RunConfig
from ironlaw.data.supply import read_supply
from ironlaw.files import append_json_line, cache_folder, read_json_lines
from ironlaw.ledger import Estimate, Kind, Ledger, Line, Origin, Phase
from ironlaw.machine import interference
from ironlaw.machine.interference import PROBE_WEIGHT
from ironlaw.machine.profile import Profile
from ironlaw.machine.timing import AS_MATMUL, COPY_RATE
from ironlaw.workload.blocks import attention_score_pairs
from ironlaw.workload.recompute import RECOMPUTED_SUFFIX

ENOUGH_RUNS = 8
# Used until this machine has enough runs: measured / planned over the configurations of `benchmarks/plan_error.py`
# (the table is in benchmarks/results) and over repeated demo runs, whose low end is lower.
DEFAULT_LOW, DEFAULT_HIGH = 0.90, 1.22


def record_path() -> Path:
    return cache_folder() / "machine" / "record.jsonl"


def remember(profile_created: str, planned_seconds: float, measured_seconds: float, run: str) -> None:
    """Appends one finished run."""
    seconds = {"planned_step_seconds": planned_seconds, "measured_step_seconds": measured_seconds}
    append_json_line(record_path(), {"run": run, "profile": profile_created} | seconds)


def past_ratios() -> list[float]:
    """Returns measured / planned step time of the recorded runs; unreadable lines are skipped."""
    ratios = []
    for entry in read_json_lines(record_path()):
        with suppress(ValueError, KeyError, TypeError, ZeroDivisionError):
            ratios.append(float(entry["measured_step_seconds"]) / float(entry["planned_step_seconds"]))
    return ratios


def time_interval(profile: Profile) -> tuple[float, float, str]:
    """Returns factors on a planned time that contained 80% of past runs, and their basis."""
    ratios = past_ratios()
    if len(ratios) >= ENOUGH_RUNS:
        tenths = quantiles(ratios, n=10, method="inclusive")
        low, high = min(tenths[0], 1.0), max(tenths[-1], 1.0)
        basis = f"interval from {len(ratios)} past runs on this machine"
    else:
        low, high = DEFAULT_LOW, DEFAULT_HIGH
        basis = "interval from the planner's record, no runs of this machine yet"
    share = interference.disturbed(profile)
    if share is not None:  # assumed: a kernel on shared cores waits for all of them, and again for the slowest
        low *= max(0.1, 1 - share) ** 2
        basis += f"; widened: other programs used {share:.0%} of the cores while this machine was measured"
    return low, high, basis


# The byte count is exact for the listed operations (tests compare it with autograd's); the interval covers workspace
# that library kernels allocate.
MEMORY_INTERVAL = 0.02
RESIDENT_INTERVAL = 0.05

ALLOCATION = (1.0, 1.0, 2.0)
LIBRARY_BYTES, TRAINER_ALLOCATION, PROFILED_ALLOCATION = 93 * 2**20, (1.0, 1.2, 1.4), (1.6, 1.95, 2.8)
"""Bytes that the allocator holds per byte of tensors: least, typical, most. In our trainer it keeps freed memory
(`machine/host.py`), and imports and compilation take more than in a bare process; a profiler's events fill the gaps
that freed tensors leave. Measured on a CPU: eleven variants of gpt-tiny of 65 to 850 MiB, profiled (0.97 to 1.18 times
the plan), and six models of 37 MiB to 4.2 GiB, not profiled (0.96 to 1.03)."""

GUESSED_FACTORS = (0.5, 3.0)
"""80% interval of a kernel's time relative to a copy of its bytes, or to a convolution's matrix product. Assumed."""

EMULATED_FACTOR = 10.0
"""Upper bound of measured / planned time of a step with emulated products. Assumed: gpt-tiny's forward and backward on
two CPU cores took 3.0 (fp8) to 3.9 (mxfp4) times bf16's; the ratio grows with faster or narrower products."""


def process_memory(profile: Profile, trainer: RunConfig | None) -> tuple[float, tuple[float, float, float]]:
    """Returns the bytes of a process without tensors, and the bytes held per byte of tensors, as `ALLOCATION`.

    `trainer` is the config of a run of Ironlaw's trainer; None: any module.
    """
    if trainer is None or profile.device != "cpu":
        return profile.runtime_bytes, ALLOCATION
    return profile.runtime_bytes + LIBRARY_BYTES, (
        PROFILED_ALLOCATION if trainer.train.profile_steps else TRAINER_ALLOCATION
    )


@dataclass(frozen=True)
class PlannedOn:
    """The system that a plan is made for, as needed for its totals. Bytes are those of one device or process."""

    name: str
    memory_bytes: float
    context_bytes: float  # in use before any tensor exists
    context_basis: str
    peak_flops_per_second: float
    peak_basis: str
    time_factors: tuple[float, float]  # on a planned time: they contained 80% of past runs
    time_basis: str
    memory_interval: float = MEMORY_INTERVAL
    allocation: tuple[float, float, float] = ALLOCATION

    @classmethod
    def measured(cls, profile: Profile, precision: str, hosts: int = 1, trainer: RunConfig | None = None) -> PlannedOn:
        """Returns `hosts` machines like this one, in a measured `precision`. `trainer`: config of a run; None: any
        module."""
        low, high, basis = time_interval(profile)
        machines = "this machine" if hosts == 1 else f"this machine and {hosts - 1} like it"
        context, allocation = process_memory(profile, trainer)
        tensors, more = "tensors", "; more when the allocator fragments"
        if allocation != ALLOCATION:
            tensors, more = f"{allocation[1]} times the tensors, as freed memory is kept,", ""
        return cls(
            profile.name, profile.memory_bytes, context,
            f"{tensors} plus the measured size of a process that trains almost nothing{more}",
            hosts * profile.matmul_peak(precision), f"the measured {precision} matmul rate of {machines}",
            (low, high), f"sum of the operations' measured curves; {basis}", allocation=allocation,
        )  # fmt: skip

    def at_pace(self, pace: float) -> PlannedOn:
        """Returns the system at the speed measured just now; the interval covers a lasting and a passing disturbance.

        `pace`: time of kernels now / typical time.
        """
        (low, high), ends = self.time_factors, (1.0, pace**-PROBE_WEIGHT, pace ** (1 - PROBE_WEIGHT))
        basis = f"{self.time_basis}; just now this machine runs at {1 / pace:.2f} of its usual speed"
        return replace(self, time_factors=(low * min(ends), high * max(ends)), time_basis=basis)

    def emulating(self) -> PlannedOn:
        """Returns the system for a run with emulated products."""
        low, high = self.time_factors
        basis = f"{self.time_basis}; rounding of emulated products not planned, up to {EMULATED_FACTOR:g} times assumed"
        return replace(self, time_factors=(low, high * EMULATED_FACTOR), time_basis=basis)


def add_totals(ledger: Ledger, system: PlannedOn, parameters: int, where: str) -> None:
    """Adds parameters, FLOPs, seconds, MFU and bytes of a planned step; `where`: the operation at the memory peak."""
    calculated, totals = Origin.CALCULATED, ledger.totals
    step = sum(line.seconds or 0.0 for line in ledger.lines)
    low, high = _bounds(ledger, step, system)
    flops = model_flops(ledger)
    again = sum(line.flops or 0 for line in ledger.lines if line.operation.endswith(RECOMPUTED_SUFFIX))
    rate, tensors = system.peak_flops_per_second, sum(ledger.memory_bytes().values())
    totals["parameters"] = Estimate(parameters, calculated, "sum over the modules' shapes, shared ones once")
    totals["flops_per_step"] = Estimate(
        flops, calculated, "matrix products of forward and backward; masked attention scores cost nothing"
    )
    totals["step_seconds"] = Estimate(step, calculated, system.time_basis, low, high)
    peak = f"{units.rate(rate, 'FLOP')}, {system.peak_basis}"
    totals["mfu"] = totals["step_seconds"].rate(flops / rate, f"FLOPs / step time / {peak}")
    if again:
        totals["recomputed_flops_per_step"] = Estimate(again, calculated, "matrix products that run a second time")
        totals["hfu"] = totals["step_seconds"].rate((flops + again) / rate, "as MFU, with recomputed FLOPs counted")
    totals["peak_bytes"] = Estimate(
        tensors, calculated, f"tensors alive at the highest moment ({where})",
        tensors * (1 - system.memory_interval), tensors * (1 + system.memory_interval),
    )  # fmt: skip
    least, resident, most = (system.context_bytes + share * tensors for share in system.allocation)
    totals["resident_bytes"] = Estimate(
        resident, calculated, system.context_basis, least * (1 - max(system.memory_interval, RESIDENT_INTERVAL)), most,
    )  # fmt: skip


def add_run_totals(ledger: Ledger, config: RunConfig, profile: Profile) -> None:
    """Adds the totals of a whole run: tokens per second, time and energy, and FLOPs without the causal mask."""
    calculated, totals, tokens = Origin.CALCULATED, ledger.totals, config.tokens_per_step
    step = totals["step_seconds"]
    totals["flops_per_step_unmasked"] = Estimate(
        _unmasked_flops(ledger, config), calculated, "the same with every attention score counted, as PyTorch counts"
    )
    totals["tokens_per_second"] = step.rate(tokens, "tokens per step / step time")
    totals["total_seconds"] = total_time(ledger, config, step)
    energy = _energy(profile, totals["total_seconds"])
    if energy is not None:
        totals["energy_joules"] = energy


def fits(ledger: Ledger) -> bool:
    """Returns whether the planned memory of the process is at most the available memory."""
    return ledger.totals["resident_bytes"].value <= float(ledger.facts["memory_bytes"])


def model_flops(ledger: Ledger) -> int:
    """Returns the FLOPs of the matrix products of forward and backward, without recomputation and the optimizer."""
    return sum(line.flops or 0 for line in ledger.lines if _of_the_model(line))


def _of_the_model(line: Line) -> bool:
    return line.phase is not Phase.OPTIMIZER and not line.operation.endswith(RECOMPUTED_SUFFIX)


def _bounds(ledger: Ledger, step: float, system: PlannedOn) -> tuple[float, float]:
    """Returns bounds of the step time: measured kernels vary as in past plans, guessed ones by `GUESSED_FACTORS`."""
    guessed = sum(line.seconds or 0.0 for line in ledger.lines if line.bound in (COPY_RATE, AS_MATMUL))
    known = step - guessed
    low, high = system.time_factors
    return known * low + guessed * GUESSED_FACTORS[0], known * high + guessed * GUESSED_FACTORS[1]


def _unmasked_flops(ledger: Ledger, config: RunConfig) -> int:
    masked = sum(line.flops or 0 for line in ledger.select(kind=Kind.ATTENTION) if _of_the_model(line))
    model, sequence = config.model, config.sequence
    pairs = sum(attention_score_pairs(sequence, model.window_of(layer, sequence)) for layer in range(model.layers))
    return model_flops(ledger) - masked + masked * 2 * model.layers * sequence**2 // pairs


def total_time(ledger: Ledger, config: RunConfig, step: Estimate) -> Estimate:
    """Returns the time of all steps and of the validation passes between them (forward only)."""
    forward = sum(line.seconds or 0.0 for line in ledger.select(phase=Phase.FORWARD)) / step.value
    passes = 1 + (config.train.steps - 1) // config.evaluation.every if config.evaluation.every else 1
    evaluation_steps = passes * config.evaluation.batches * forward
    return step.scaled(
        config.train.steps + evaluation_steps,
        f"{config.train.steps} steps and {passes} validation passes of {config.evaluation.batches} batches",
    )


def _energy(profile: Profile, total: Estimate) -> Estimate | None:
    """Returns the energy of the processor, with a wide interval: the power per core is only known between bounds."""
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


PREPARED, STREAMED = ("read", "pack", "copy"), ("read", "tokenise", "pack", "copy")


def data_supply(config: RunConfig, profile: Profile, tokens_per_second: float) -> dict[str, Any]:
    """Returns the plan's data rates in tokens per second. `tokens_per_second` is the planned step's consumption."""
    known = read_supply(config.data, config.sequence)
    stages: dict[str, float | None] = dict.fromkeys(STREAMED if config.data.streaming else PREPARED)
    basis = "not measured: no run has loaded this source in this way yet"
    supply = None
    if known is not None:
        stages |= known["stages"]
        supply, basis = known["tokens_per_second"], f"measured by the loader of the last such run, {known['measured']}"
    elif config.data.streaming and profile.tokenizer_tokens_per_second:
        stages["tokenise"] = profile.tokenizer_tokens_per_second
        basis = f"tokenising measured on {profile.created[:10]} with all threads and no step beside it; others not"
    measured = {stage: rate for stage, rate in stages.items() if rate is not None}
    limit = supply if supply is not None else min(measured.values(), default=None)
    return {
        "demand_tokens_per_second": tokens_per_second,
        "supply_tokens_per_second": supply,
        "stage_tokens_per_second": stages,
        "slowest_stage": min(measured, key=lambda stage: measured[stage]) if measured else None,
        "times_demand": None if limit is None else limit / tokens_per_second,
        "basis": basis,
    }
