"""Plans of a run: step time, memory and communication of a program, for one process or for the ranks of a layout.

    plan_run(config, load_profile())                                       # the ledger of one process on this machine
    fabric = RankFabric(load_costs())                                          # all ranks on this machine
    fabric = RankFabric(load_costs(), ranks_per_host=1, between=Link(latency_seconds=2e-4, bytes_per_second=125e6))
    plan = plan_step(config, load_profile(), Layout(dp=4, zero=3, micro_batch=2), fabric)
    plan.step_seconds, plan.stages[0].communication, plan.ledger

A single process is `Layout()`: no collective, no pipeline. The program (`workload/program.py`) lists operations,
messages and tensors; operations are timed by the measured machine, collectives by `machine/links.py`. On CPUs, FSDP,
DTensor and context parallelism wait for each collective; DDP reduces its buckets during the last backward pass; a
pipeline is simulated pass by pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ironlaw import units
from ironlaw.config import RunConfig, read_model_config
from ironlaw.errors import UserError
from ironlaw.files import at_home
from ironlaw.ledger import Decisions, Ledger, Line, Phase, merged
from ironlaw.machine import interference
from ironlaw.machine.links import RankFabric
from ironlaw.machine.profile import Profile
from ironlaw.machine.timing import MeasuredMachine, is_emulated, measured_precision
from ironlaw.model.parameters import model_parameters
from ironlaw.plan.memory import Peak, peak_memory
from ironlaw.plan.offload import Offload, host_of_machine, lines_of, plan_offload
from ironlaw.plan.recipe import Decision, batch_of, check_supported, choose_attention, recipe_of, within_budget
from ironlaw.plan.stage_costs import CollectiveCost, alike, fold, pipelined, stage_costs
from ironlaw.plan.totals import PlannedOn, add_run_totals, add_totals, data_supply, process_memory
from ironlaw.workload.collectives import aliases_of
from ironlaw.workload.finetune import ENDS, adapters_of
from ironlaw.workload.kinds import is_block
from ironlaw.workload.layout import Layout
from ironlaw.workload.operations import Operation
from ironlaw.workload.program import Program, step, with_second_model
from ironlaw.workload.recipe import Recipe


@dataclass(frozen=True)
class StagePlan:
    """The step of each rank at one pipeline position; its phases add up to the step time."""

    position: int
    phase_seconds: dict[Phase, float]
    lines: list[Line]
    communication: list[CollectiveCost]
    memory: Peak


@dataclass(frozen=True)
class StepPlan:
    """A planned step. `stages` by pipeline position; `fabric` None: one process without communication."""

    config: RunConfig
    program: Program
    precision: Decision
    step_seconds: float
    stages: list[StagePlan]
    profile: Profile = field(repr=False)
    fabric: RankFabric | None = None
    offload: Offload | None = None
    attention: Decision | None = None  # None: ranks, which use the fused kernel
    now: Mapping[str, float] | None = None  # as in `interference.expected`
    composition: Mapping[Phase, float] = field(default_factory=dict)  # as in `MeasuredMachine.composition`

    @property
    def layout(self) -> Layout:
        return self.program.layout

    @property
    def ranks(self) -> int:
        return self.layout.accelerators

    @property
    def local_ranks(self) -> int:
        """Number of ranks on one host."""
        return 1 if self.fabric is None else self.fabric.local_ranks(self.ranks)

    @property
    def hosts(self) -> int:
        return math.ceil(self.ranks / self.local_ranks)

    @property
    def peak_bytes(self) -> float:
        """Peak of the fullest rank."""
        return max(stage.memory.total for stage in self.stages)

    @property
    def fits(self) -> bool:
        """Whether all ranks of a host fit in its memory."""
        context, (_, held, _) = process_memory(self.profile, self.config)
        return self.local_ranks * (context + held * self.peak_bytes) <= self.profile.memory_bytes

    @cached_property
    def ledger(self) -> Ledger:
        """The job's ledger: seconds, counts and bytes of a mean rank, FLOPs of all ranks, memory of the fullest."""
        fullest = max(self.stages, key=lambda stage: stage.memory.total)
        notes = {t.component: t.note for tensors in self.program.tensors for t in tensors}
        ledger = Ledger("plan", lines=merged(self._lines()), memory=fullest.memory.lines(notes))
        measured = measured_precision(self.precision.value, self.profile)
        system = PlannedOn.measured(self.profile, measured, self.hosts, self.config)
        if is_emulated(self.precision.value, self.profile):
            system = system.emulating()
        ledger.facts = self._facts()
        if self.now is not None:
            seconds, expected = ledger.seconds_by_kind(), ledger.facts["slowdown"]
            at_once, usual = (
                interference.slowed(seconds, by, expected) for by in (self.now, interference.typical(self.profile))
            )
            ledger.facts["pace"] = at_once / usual
            system = system.at_pace(ledger.facts["pace"])
        ledger.decisions = self.decisions
        peak = system.peak_flops_per_second
        ledger.facts |= {
            "peak_at": fullest.memory.where, "matmul_peak_flops_per_second": peak, "planned_as": measured,
        }  # fmt: skip
        add_totals(ledger, system, self.config.model.parameters, fullest.memory.where)
        add_run_totals(ledger, self.config, self.profile)
        supply = data_supply(self.config, self.profile, ledger.totals["tokens_per_second"].value)
        ledger.facts["data_supply"] = supply
        return ledger

    @property
    def decisions(self) -> Decisions:
        recipe, ahead = self.program.recipe, 0 if self.offload is None else self.offload.block_bytes
        return Decisions(self.precision.value, recipe.loss_chunk, recipe.recompute, ahead, recipe.native)

    def _lines(self) -> Iterator[Line]:
        """Yields each stage's share in the job's lines."""
        per_stage, share = self.ranks // self.layout.pp, 1 / self.layout.pp
        for stage in self.stages:
            found = {p: sum(line.seconds or 0.0 for line in stage.lines if line.phase is p) for p in Phase}
            for line in stage.lines:
                # Ranks that share cores take longer than their operations alone.
                wanted = stage.phase_seconds[line.phase]
                scale = wanted / found[line.phase] if found[line.phase] else 1.0
                yield replace(
                    line, count=None if line.count is None else round(line.count * share),
                    flops=None if line.flops is None else line.flops * per_stage,
                    bytes_moved=None if line.bytes_moved is None else line.bytes_moved * share,
                    seconds=(line.seconds or 0.0) * scale * share,
                )  # fmt: skip

    def _facts(self) -> dict[str, Any]:
        config, profile = self.config, self.profile
        facts: dict[str, Any] = {
            "model": config.model.model_dump(mode="json", exclude_none=True),
            "machine": profile.name,
            "device": profile.device,
            "threads": profile.threads,
            "measured": profile.created,
            "versions": profile.versions,
            "precision": self.precision.value,
            "precision_reason": self.precision.reason,
            "slowdown": interference.expected(profile, self.now),
            "composition": self.composition,
            "copy_bytes_per_second": profile.copy_bytes_per_second,
            "memory_bytes": profile.memory_bytes,
            "sequence": config.sequence,
            "global_batch": config.train.global_batch,
            "micro_batch": self.layout.micro_batch,
            "accumulation": self.program.micro_batches,
            "steps": config.train.steps,
        }
        if config.finetune.adapts:
            facts["finetune"] = finetuning(config, self.program)
        if self.attention is not None:
            facts |= {"attention": self.attention.value, "attention_reason": self.attention.reason}
        if self.offload is not None:
            facts["offload"] = asdict(self.offload) | {"host": asdict(host_of_machine(profile))}
        if self.fabric is not None:
            facts |= {
                "ranks": self.ranks, "layout": str(self.layout),
                "threads_per_rank": max(1, profile.threads // self.local_ranks),
                "fabric": {
                    "ranks_per_host": self.local_ranks,
                    "between": vars(self.fabric.between) if self.fabric.between else None,
                    "measured": self.fabric.costs.created,
                },
                "stages": [stage_document(self, stage) for stage in self.stages],
            }  # fmt: skip
        return facts


def with_adapters(recipe: Recipe, config: RunConfig) -> Recipe:
    """Returns the recipe with the config's adapters, if it trains any."""
    if not config.finetune.adapts:
        return recipe
    from ironlaw.model.huggingface.configs import names_of

    names = names_of(Path(config.train.start_from or ""), config.model)
    return replace(recipe, adapters=adapters_of(config.model, names, config.finetune))


def with_objective(program: Program, config: RunConfig) -> Program:
    """Returns the program with the second model of the objective (teacher or reference), if any."""
    objective = config.objective
    if objective.kind == "distillation":
        teacher = at_home(objective.teacher or "")
        return with_second_model(
            program, objective, read_model_config(teacher, f"objective.teacher = {str(teacher)!r}"), True
        )
    if objective.kind == "dpo":  # with adapters, the reference is the base, which is already held
        return with_second_model(program, objective, config.model, held=not config.finetune.adapts)
    return program


def finetuning(config: RunConfig, program: Program) -> str:
    """Returns a sentence about the trained and the frozen parameters."""
    model, adapters = config.model, program.recipe.adapters
    assert adapters is not None
    trained = sum(p.elements for p in adapters.trained(model, range(model.layers)))
    own = {p.name: p.elements for p in model_parameters(model)}
    frozen = model.parameters - sum(count for name, count in own.items() if adapters.trains(name, model))
    known = f"{config.finetune.method} trains {trained:,} parameters beside {frozen:,} frozen ones"
    divided = config.layout is not None and config.layout.tp * config.layout.pp > 1
    if config.finetune.modules_to_save or config.objective.kind == "dpo" or divided:
        return known
    ends = sum(own.get(end, 0) for end in ENDS) / model.parameters
    return (
        f"{known}, the embedding and output layer ({ends:.0%}) among them: where the text is unlike the base's, "
        'finetune.modules_to_save = ["embeddings"] trains these too'
    )


def stage_document(plan: StepPlan, stage: StagePlan) -> dict[str, object]:
    """Returns one stage of plan.json: the seconds, collectives and memory of each of its ranks."""
    per_stage = plan.ranks // plan.layout.pp
    return {
        "position": stage.position,
        "ranks": [stage.position * per_stage, (stage.position + 1) * per_stage - 1],
        "phase_seconds": {str(phase): seconds for phase, seconds in stage.phase_seconds.items()},
        "communication": [vars(cost) for cost in stage.communication],
        "peak_bytes": stage.memory.total,
        "peak_at": stage.memory.where,
        "memory": stage.memory.components,
    }


# -- planning ----------------------------------------------------------------------------------------------------------


def plan_run(config: RunConfig, profile: Profile, now: Mapping[str, float] | None = None) -> Ledger:
    """Plans parameters, FLOPs, memory, time and energy of `config` as one process on the measured machine. No torch.

    `now`: slowdowns just measured (`Probe.slowdown`); they change times, but no decision.
    Raises UserError for settings that the machine does not support or was not measured with.
    """
    if config.train.threads not in (None, profile.threads):
        raise UserError(
            f"train.threads = {config.train.threads}, but this machine was measured with {profile.threads}: "
            f"run `ironlaw measure --threads {config.train.threads}` or drop train.threads"
        )
    return plan_step(config, profile, now=now).ledger


def plan_step(
    config: RunConfig, profile: Profile, layout: Layout | None = None, fabric: RankFabric | None = None, ranks: int = 0,
    precision: Decision | None = None, now: Mapping[str, float] | None = None,
) -> StepPlan:  # fmt: skip
    """Returns the plan of `config` in a layout, on `ranks` processes if given. Raises UserError if it cannot run.

    `precision`: a decision already made for another layout of the same config.
    """
    check_supported(config, profile.device)
    precision = precision or choose_precision(config, profile)
    measured = measured_precision(precision.value, profile)
    machine = MeasuredMachine(profile, interference.typical(profile), measured)
    if layout is None:
        fabric, layout = None, Layout(micro_batch=config.micro_batch)
        here = replace(machine, slowdown=interference.expected(profile, now))
    else:
        assert fabric is not None
        batch, sequence = config.train.global_batch, config.sequence
        layout.check(config.model, sequence=sequence, global_batch=batch, accelerators=ranks or layout.accelerators)
        layout = layout.filled(batch)
        local = fabric.local_ranks(layout.accelerators)
        at_once = min(local, fabric.costs.cores) if layout.pp > 1 else local
        here = replace(machine, fabric=fabric, ranks=layout.accelerators, at_once=at_once)
    cuda, onednn = profile.device == "cuda", profile.fp32_products == "onednn"
    recipe = recipe_of(config, precision.value, cuda=cuda, onednn=onednn, gloo=not cuda)
    recipe = with_adapters(recipe, config)
    if config.recompute.mode == "budget":
        recipe = within_budget(
            config.model, batch_of(config), layout, recipe, config.recompute.budget_bytes,
            lambda op: machine.time(op).seconds,
        )  # fmt: skip
    kernel = None
    if fabric is None:
        recipe, kernel = choose_attention(config, recipe, profile)
    program = step(config.model, batch_of(config), layout, recipe)
    program = with_objective(program, config)
    costs = {stage: stage_costs(program, stage, here) for stage in range(len(program.stages))}
    offload = _offload(program, here, profile)
    phases, communication = alike(program, costs[0], here) if layout.pp == 1 else pipelined(program, costs, here)
    stages, aliases = [], aliases_of(config.model, layout, batch_of(config), recipe)
    for position in range(layout.pp):
        lines = [line for stage in program.stages_at(position) for line in costs[stage].lines]
        lines += [cost.line(aliases) for cost in communication[position]]
        if offload is not None:
            lines += lines_of(offload)
            for phase, seconds in offload.exposed.items():
                phases[position][phase] += seconds
        memory = peak_memory(program, position)
        stages.append(StagePlan(position, phases[position], lines, communication[position], memory))
    seconds = max(sum(phase.values()) for phase in phases)
    return StepPlan(
        config, program, precision, seconds, stages, profile, fabric, offload, kernel, now,
        here.composition(measured),
    )  # fmt: skip


def step_operations(config: RunConfig, precision: str, profile: Profile | None = None) -> list[tuple[Operation, int]]:
    """Returns (operation, count) pairs of one process's optimizer step; `profile` decides the attention kernel."""
    recipe = recipe_of(config, precision)
    if profile is not None:
        recipe, _ = choose_attention(config, recipe, profile)
    return list(step(config.model, batch_of(config), Layout(micro_batch=config.micro_batch), recipe).operations())


def choose_precision(config: RunConfig, profile: Profile) -> Decision:
    """Returns the config's precision, or for "auto" the one with the shortest planned step on this machine."""
    wanted = config.train.precision
    if wanted != "auto":
        planned = measured_precision(wanted, profile)
        as_other = "" if planned == wanted else f"; planned with the times of {planned}, which was measured"
        if is_emulated(wanted, profile):
            as_other = f"; its products are emulated here: planned as {planned}'s, their rounding is not planned"
        return Decision(wanted, f"train.precision in the config{as_other}")
    seconds = {}
    for p in profile.matmul:
        machine = MeasuredMachine(profile, interference.typical(profile), p)
        seconds[p] = sum(line.seconds or 0.0 for line in fold(step_operations(config, p, profile), machine))
    # Reduced precision must justify its rounding: a gain within the plan's error does not.
    best = min(seconds, key=lambda p: seconds[p])
    if best != "fp32" and seconds[best] > 0.9 * seconds["fp32"]:
        best = "fp32"
    shown = ", ".join(f"{p} {units.seconds(s)}" for p, s in sorted(seconds.items(), key=lambda item: item[1]))
    return Decision(best, f"shortest planned step on this machine by at least 10%, else fp32: {shown}")


def _offload(program: Program, machine: MeasuredMachine, profile: Profile) -> Offload | None:
    """Returns the transfers to the host and their exposed time, beside the blocks of a micro-batch."""
    if program.recipe.offload == "none":
        return None
    seconds = dict.fromkeys((Phase.FORWARD, Phase.BACKWARD), 0.0)
    for op, count in program.operations():
        if is_block(op.group) and op.phase in seconds:
            seconds[op.phase] += machine.time(op).seconds * count / program.micro_batches
    return plan_offload(program, host_of_machine(profile), seconds)
