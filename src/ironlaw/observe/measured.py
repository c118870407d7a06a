"""Makes the measured ledger of a run from its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from ironlaw.ledger import Estimate, Kind, Ledger, Line, MemoryLine, Origin, Phase, merge_unnamed
from ironlaw.machine.interference import slowed
from ironlaw.model.linear import local_part
from ironlaw.observe.clock import StepTimes
from ironlaw.observe.profile import StepProfile
from ironlaw.workload.optimizers import OptimizerName
from ironlaw.workload.trace_kernels import storages, tensors
from ironlaw.workload.updates import EQUIVALENTS, Update


def warmup_steps(steps: int) -> int:
    """Returns the number of first steps that are slower: the heap grows, and its pages are touched for the first time.

    On two CPU cores resident memory settled after 8 or 9 steps; a short run cannot spare as many.
    """
    return min(10, max(2, steps // 8))


@dataclass
class Observations:
    """All measurements of a run. Steps that were recorded or belong to the warm-up are not in `steps`."""

    steps: list[StepTimes] = field(default_factory=list)
    probes: list[dict[str, float]] = field(default_factory=list)  # kind of kernel -> time over its best
    profile: StepProfile | None = None
    profiled_seconds: list[float] = field(default_factory=list)
    resident_peak_bytes: int | None = None
    cuda_peak_bytes: int | None = None
    cuda_resident_bytes: int | None = None
    joules: float | None = None
    joules_basis: str = "RAPL counters of the whole package"
    wall_seconds: dict[str, float] = field(default_factory=dict)
    checkpoint_copy_bytes: int = 0  # of the state, in the memory that the steps use

    def copies(self) -> dict[str, int]:
        """Returns bytes held beside the steps while a checkpoint is written."""
        return {"checkpoint copy": self.checkpoint_copy_bytes} if self.checkpoint_copy_bytes else {}


def typical(steps: Sequence[StepTimes]) -> list[StepTimes]:
    """Returns the middle 80% of the steps by duration: a shared machine stalls now and then."""
    ordered = sorted(steps, key=lambda step: step.wall_seconds)
    cut = len(ordered) // 10
    return ordered[cut : len(ordered) - cut]


def held_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer, average: Sequence[torch.Tensor] = ()
) -> dict[str, int]:
    """Returns bytes of weights (with buffers), optimizer state and averaged weights, each storage once."""
    state = () if hasattr(optimizer, "host_bytes") else list(optimizer.state.values())  # on the host: not here
    held = {"weights": tree_bytes([*model.parameters(), *model.buffers()]), "optimizer": tree_bytes(state)}
    return held | {"average": tree_bytes(list(average))} if average else held


def tree_bytes(tree: Any) -> int:
    """Returns bytes of all tensors of a nesting, each storage once; of a distributed tensor, this rank's part."""
    return sum(storage_bytes(tree).values())


def storage_bytes(tree: Any) -> dict[int, int]:
    """Returns bytes by address, as `tree_bytes`."""
    here = map(local_part, tensors(tree))
    return {part.data_ptr(): part.nbytes() for t in here for part in storages(t)}


def add_steps(ledger: Ledger, steps: Sequence[StepTimes], phases: Collection[Phase], tokens_per_step: int) -> Estimate:
    """Add time per step and by phase, and how much slower than typical the steps were. Returns the time per step."""
    measured, kept = Origin.MEASURED, typical(steps)
    walls = [step.wall_seconds for step in steps]
    value = float(np.mean([step.wall_seconds for step in kept]))
    low, high = (float(q) for q in np.percentile(walls, [10, 90]))
    basis = f"mean of the middle 80% of {len(steps)} steps; the interval holds 80% of them"
    ledger.totals["step_seconds"] = step = Estimate(value, measured, basis, low, high)
    if tokens_per_step:
        ledger.totals["tokens_per_second"] = step.rate(tokens_per_step, "tokens per step / step time", measured)
    ledger.phase_seconds = {
        phase: float(np.mean([step.phase_seconds.get(phase, 0.0) for step in kept]))
        for phase in Phase
        if phase in phases and any(phase in step.phase_seconds for step in kept)
    }
    ledger.facts["slow_steps_fraction"] = max(0.0, sum(walls) - value * len(walls)) / sum(walls)
    return step


def measured_mfu(flops: float, step: Estimate, peak: float, basis: str) -> Estimate:
    """Returns FLOPs of a step over its measured seconds and the peak in FLOP/s."""
    low, high = step.low or step.value, step.high or step.value
    return Estimate(flops / step.value / peak, Origin.MEASURED, basis, flops / high / peak, flops / low / peak)


def measured_ledger(
    observed: Observations,
    *,
    planned: Ledger,
    held: dict[str, int],
    batch_bytes: int,
    tokens_per_step: int,
    facts: dict[str, Any],
) -> Ledger:
    """The run's side of the table. What was not measured stays absent."""
    ledger = Ledger("run", facts=dict(facts))
    totals = ledger.totals
    for name in ("parameters", "flops_per_step"):
        totals[name] = planned.totals[name]
    if observed.steps:
        step = add_steps(ledger, observed.steps, tuple(Phase), tokens_per_step)
        peak = float(planned.facts["matmul_peak_flops_per_second"])
        totals["mfu"] = measured_mfu(totals["flops_per_step"].value, step, peak, planned.totals["mfu"].basis)
    profile, always = observed.profile or StepProfile(), {"batch": batch_bytes, **held}
    above = profile.peak_bytes
    add_memory(
        ledger, always, profile.peak_parts, observed.cuda_peak_bytes,
        None if above is None else sum(always.values()) + above,
        "weights and optimizer state held, plus the highest moment of the recorded steps' allocations",
    )  # fmt: skip
    resident, basis = observed.resident_peak_bytes, "largest resident size of the process"
    if observed.cuda_resident_bytes is not None:
        resident, basis = (
            observed.cuda_resident_bytes,
            "most that PyTorch's allocator held on the device, and the context",
        )
    if resident is not None:
        totals["resident_bytes"] = Estimate(resident, Origin.MEASURED, basis)
    if observed.profile is not None:
        lines = merge_unnamed(observed.profile.lines, planned.lines)
        ledger.lines = _dispatch_by_the_clock(lines, ledger.phase_seconds) if observed.cuda_peak_bytes else lines
        ledger.facts["profiled_step_seconds"] = float(np.mean(observed.profiled_seconds))
    ledger.facts["machine_speed"] = machine_speed(planned, ledger)
    ledger.facts["wall_seconds"] = observed.wall_seconds
    if observed.joules is not None:
        totals["energy_joules"] = Estimate(observed.joules, Origin.MEASURED, observed.joules_basis)
    return ledger


def _dispatch_by_the_clock(lines: list[Line], phase_seconds: Mapping[Phase, float]) -> list[Line]:
    """Kernels take no longer under a profiler, but the host does: dispatch is what they leave of the phases as timed
    without one."""
    left = dict(phase_seconds)
    dispatch = [line.kind is Kind.HOST and line.operation == "dispatch" and line.phase in left for line in lines]
    for line, is_dispatch in zip(lines, dispatch, strict=True):
        if line.phase in left and not is_dispatch:
            left[line.phase] -= line.seconds or 0.0
    return [
        replace(line, seconds=max(0.0, left[line.phase])) if is_dispatch else line
        for line, is_dispatch in zip(lines, dispatch, strict=True)
    ]


def machine_speed(planned: Ledger, run: Ledger) -> float | None:
    """Returns planned over measured step time if the machine's slowdown were the only difference: below 1 the machine
    was slower during the run. Each kind of kernel counts by its share of the planned step."""
    found = run.facts.get("machine_slowdown")
    if not found or "slowdown" not in planned.facts:
        return None
    seconds = planned.seconds_by_kind()
    return sum(seconds.values()) / slowed(seconds, found, planned.facts["slowdown"])


def add_memory(
    ledger: Ledger, held: dict[str, int], parts: Mapping[str, int], cuda_peak: int | None, peak: int | None, basis: str
) -> None:
    """Add components, those `held` all the time and `parts` of the peak, and the peak: the device's own count, else
    `peak` with its `basis`."""
    names = ("weights", "gradients", "optimizer", "activations", "temporaries")
    sizes = {**dict.fromkeys(names), **held, **parts}
    ledger.memory = [MemoryLine(name, size, Origin.MEASURED) for name, size in sizes.items()]
    if cuda_peak is not None:
        peak, basis = cuda_peak, "highest allocated bytes on the device"
    if peak is not None:
        ledger.totals["peak_bytes"] = Estimate(peak, Origin.MEASURED, basis)


def updates_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[Update]:
    """Returns one entry per group of trained parameters; call it after a step, when the states exist."""
    found = [_update(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    return [update for update in found if update is not None]


def _update(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Update | None:
    trained = [torch.view_as_real(p) if p.is_complex() else p for p in group["params"] if p.requires_grad]
    if not trained:
        return None
    known = next((EQUIVALENTS[c.__name__] for c in type(optimizer).__mro__ if c.__name__ in EQUIVALENTS), None)
    like: OptimizerName | None = "momentum" if known == "sgd" and group.get("momentum") else known
    extra = bool(group.get("amsgrad")) + bool(group.get("centered")) + (like == "rmsprop" and group["momentum"] > 0)
    foreach = group.get("foreach")
    if foreach is None:  # PyTorch's own choice; not every optimizer has one
        foreach = "foreach" in group and trained[0].is_cuda
    return Update(
        type(optimizer).__name__, like, tuple(Counter(tuple(p.shape) for p in trained).items()),
        trained[0].element_size(), bool(group.get("fused")), bool(group.get("weight_decay")), int(extra),
        tree_bytes([optimizer.state.get(p) for p in group["params"] if p.requires_grad]), bool(foreach),
    )  # fmt: skip
