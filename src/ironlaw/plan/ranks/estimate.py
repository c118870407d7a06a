"""The plan of a run on several ranks with CPUs like this machine's: step time, memory and communication of every stage.

    fabric = Fabric(load_costs())                                        # all ranks on this machine
    fabric = Fabric(load_costs(), ranks_per_host=1, between=Link(latency_seconds=2e-4, bytes_per_second=125e6))
    plan = plan_ranks(config, load_profile(), 4, Layout(dp=4, zero=3), fabric)
    plan.step_seconds, plan.stages[0].communication, plan.ledger()

Compute is that of `plan/ranks/work.py`, traffic that of `workload/collectives.py`, the time of a collective that of
`machine/links.py`. On CPUs FSDP, DTensor and context parallelism wait for each collective; DDP reduces its buckets
behind the last backward pass; a pipeline is played pass by pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from ironlaw.config import RunConfig
from ironlaw.ledger import Kind, Ledger, Line, MemoryLine, Phase
from ironlaw.machine import interference
from ironlaw.machine.links import Fabric
from ironlaw.machine.profile import Profile
from ironlaw.plan.process.estimate import add_totals, choose_precision, common_facts, solved_shape, training_shape
from ironlaw.plan.process.timing import MeasuredMachine, measured_precision
from ironlaw.plan.ranks.memory import RankPeak, rank_peak
from ironlaw.plan.ranks.work import RankMachine, StageWork, stage_work
from ironlaw.plan.recipe import batch_of, recipe_of
from ironlaw.plan.schedule import play
from ironlaw.workload.blocks import Shape
from ironlaw.workload.collectives import Collective, replicas_of
from ironlaw.workload.layout import Layout
from ironlaw.workload.pipeline import rank_of_last, stages_of
from ironlaw.workload.program import step
from ironlaw.workload.schedule import Pass, passes
from ironlaw.workload.sharding import bucket_bytes, expert_holders, stage_parameters


@dataclass(frozen=True)
class Talk:
    """One kind of collective of a mesh dimension, in a step of one rank. Exposed: the rank only waits for it."""

    dimension: str
    kind: str
    count: int
    bytes: int
    seconds: float
    exposed_seconds: float

    @property
    def name(self) -> str:
        return f"{self.dimension} {self.kind}"


@dataclass(frozen=True)
class StagePlan:
    """What each rank of one pipeline position does in a step; its phases add up to the step."""

    position: int
    phase_seconds: dict[Phase, float]
    lines: list[Line]
    communication: list[Talk]
    memory: RankPeak


@dataclass(frozen=True)
class RanksPlan:
    config: RunConfig
    layout: Layout
    ranks: int
    fabric: Fabric
    precision: str
    whole: Shape  # of the model before it is divided: what it recomputes, how its loss is computed
    step_seconds: float
    stages: list[StagePlan]
    profile: Profile = field(repr=False)

    @property
    def peak_bytes(self) -> float:
        """Of the rank that holds most."""
        return max(stage.memory.total for stage in self.stages)

    @property
    def fits(self) -> bool:
        """Whether a host holds all of its ranks."""
        local = self.fabric.local_ranks(self.ranks)
        per_host = local * (self.peak_bytes + self.profile.runtime_bytes)
        return per_host <= self.profile.memory_bytes

    def ledger(self) -> Ledger:
        return ranks_ledger(self)


def plan_ranks(config: RunConfig, profile: Profile, ranks: int, layout: Layout, fabric: Fabric) -> RanksPlan:
    """The plan of `config` on `ranks` CPU ranks. UserError when the layout cannot run on them."""
    layout.check(
        config.model, sequence=config.sequence, global_batch=config.train.global_batch, accelerators=ranks
    )  # fmt: skip
    layout = layout.filled(config.train.global_batch)
    precision = choose_precision(config, profile).value
    here = RankMachine(
        MeasuredMachine(profile, interference.typical(profile)), fabric.costs,
        min(fabric.local_ranks(ranks), fabric.costs.cores) if layout.pp > 1 else fabric.local_ranks(ranks),
    )  # fmt: skip
    onednn = profile.fp32_products == "onednn"
    # A budget of recomputation is solved for one process: what is kept of a block is decided before it is divided.
    whole = solved_shape(config, training_shape(config, precision, onednn=onednn), here.machine)
    recipe = replace(recipe_of(config, precision, onednn=onednn), recompute=whole.recompute)
    program = step(config.model, batch_of(config), layout, recipe)
    assert program.shape is not None
    measured = measured_precision(precision, profile)
    works = {
        stage: stage_work(config, layout, stage, program, measured, here)
        for stage in range(layout.pp * layout.virtual_stages)
    }
    talks = [_talks(config, layout, ranks, fabric, sent) for sent in program.collectives]
    memory = [rank_peak(config, layout, position, program.shape) for position in range(layout.pp)]
    if layout.pp > 1:
        phases, talks = _pipelined(config, layout, ranks, fabric, works, talks)
    else:
        phases, talks = _alike(config, layout, ranks, fabric, works[0], talks[0])
    stages = [
        StagePlan(p, phases[p], _stage_lines(config, layout, works, talks[p], p), talks[p], memory[p])
        for p in range(layout.pp)
    ]
    seconds = max(sum(phase.values()) for phase in phases)
    return RanksPlan(config, layout, ranks, fabric, precision, whole, seconds, stages, profile)


# -- communication -----------------------------------------------------------------------------------------------------


def _place(layout: Layout, dimension: str) -> tuple[int, int]:
    """Ranks of one group of a mesh dimension, and the distance between neighbours in it."""
    shard, copies = replicas_of(layout)
    sizes = {"tp": layout.tp, "shard": shard, "replicate": copies, "pp": layout.pp}
    if dimension in ("cp", "micro_batch"):  # who counts experts' load together: ranks of one sequence, or two replicas
        return layout.cp if dimension == "cp" else max(2, layout.cp), layout.tp
    if dimension == "world":
        return layout.accelerators, 1
    if dimension == "ep":
        return layout.ep, layout.tp
    if dimension in ("expert_shard", "expert_replicate"):  # ranks that hold the same experts
        return expert_holders(layout.dp, layout.cp, layout.ep), layout.tp * layout.ep
    stride = 1
    for name in ("tp", "shard", "replicate", "pp"):
        if name == dimension:
            break
        stride *= sizes[name]
    return sizes[dimension], stride


def _seconds(fabric: Fabric, ranks: int, layout: Layout, dimension: str, kind: str, size: float) -> float:
    """Of one collective, all groups of the dimension at it together."""
    group, stride = _place(layout, dimension)
    local = fabric.local_ranks(ranks)
    if kind == "send":
        return fabric.collective_seconds("send", size, 2, inside=2 if local >= stride * group else 1, job=ranks)
    return fabric.collective_seconds(kind, size, group, inside=max(1, min(group, local // stride)), job=ranks)


def _talks(config: RunConfig, layout: Layout, ranks: int, fabric: Fabric, lines: Iterable[Collective]) -> list[Talk]:
    """Everything a rank of this position sends in a step, each at its own buffer sizes, taken as waited for."""
    found: dict[tuple[str, str], Talk] = {}

    def add(dimension: str, kind: str, count: int, size: int, seconds: float) -> None:
        if size:
            known = found.get((dimension, kind), Talk(dimension, kind, 0, 0, 0.0, 0.0))
            seconds += known.seconds
            found[dimension, kind] = Talk(dimension, kind, known.count + count, known.bytes + size, seconds, seconds)

    for dimension, kind, count, size in lines:
        if not count:  # PowerSGD's, which sends of each of DDP's buckets what it makes of it
            count = len(bucket_bytes(stage_parameters(config.model, layout, 0)))
        add(dimension, kind, count, size, count * _seconds(fabric, ranks, layout, dimension, kind, size / count))
    return list(found.values())


# -- time --------------------------------------------------------------------------------------------------------------


def _alike(
    config: RunConfig, layout: Layout, ranks: int, fabric: Fabric, work: StageWork, talks: list[Talk]
) -> tuple[list[dict[Phase, float]], list[list[Talk]]]:
    """No pipeline: every rank does the same at the same time."""
    micro_batches = layout.accumulation or 1
    if layout.zero == 0 and layout.tp == 1 and layout.dp * layout.cp > 1:
        window = work.backward_seconds
        buckets = bucket_bytes(stage_parameters(config.model, layout, 0))
        hidden = _hidden_behind(
            window, buckets, [_seconds(fabric, ranks, layout, "replicate", "all_reduce", b) for b in buckets]
        )
        # What the processor does for a bucket it does not do for the backward pass, where ranks fill all cores.
        if fabric.local_ranks(ranks) >= fabric.costs.cores:
            hidden -= min(hidden, sum(fabric.costs.collective_seconds("all_reduce", b, ranks) for b in buckets))
        talks = [
            replace(t, exposed_seconds=max(0.0, t.seconds - hidden)) if t.dimension == "replicate" else t
            for t in talks
        ]  # fmt: skip
    phases = {
        Phase.FORWARD: micro_batches * work.forward_seconds,
        Phase.BACKWARD: micro_batches * work.backward_seconds,
        Phase.COMMUNICATION: sum(t.exposed_seconds for t in talks),
        Phase.OPTIMIZER: work.update_seconds,
    }
    return [phases], [talks]


def _hidden_behind(window: float, buckets: list[int], seconds: list[float]) -> float:
    """Seconds of the buckets' reductions that pass while the backward pass still fills others."""
    ready, free, sent = 0.0, 0.0, 0
    for size, took in zip(buckets, seconds, strict=True):
        sent += size
        ready = window * sent / sum(buckets)
        free = max(free, ready) + took
    return sum(seconds) - max(0.0, free - window)


def _pipelined(
    config: RunConfig, layout: Layout, ranks: int, fabric: Fabric, works: dict[int, StageWork], talks: list[list[Talk]]
) -> tuple[list[dict[Phase, float]], list[list[Talk]]]:
    """Passes played on one replica's ranks; then gradients are reduced, and all meet to agree on loss and norm."""
    micro_batches = layout.accumulation or 1
    orders = passes(layout.schedule, layout.pp, layout.virtual_stages, micro_batches)
    per_pass = [_inside_passes(t, layout) / (2 * micro_batches * layout.virtual_stages) for t in talks]
    holder = {p.stage: rank for rank, order in enumerate(orders) for p in order}

    def seconds(p: Pass) -> float:
        work = works[p.stage]
        took = {
            "F": work.forward_seconds, "B": work.backward_seconds, "I": work.input_seconds, "W": work.weight_seconds,
        }[p.kind]  # fmt: skip
        return took + (0.0 if p.kind == "W" else per_pass[holder[p.stage]])

    tokens = layout.micro_batch * config.sequence // layout.cp
    message = tokens * config.model.hidden * 4 // (layout.tp if layout.sp else 1)
    took = _seconds(fabric, ranks, layout, "pp", "send", message)
    local, per_stage = fabric.local_ranks(ranks), ranks // layout.pp
    latency = fabric.between.latency_seconds if fabric.between and local < ranks else 0.0
    room = fabric.costs.cores / min(per_stage, local)  # stages that compute at full speed on one host
    played = play(
        orders, seconds, lambda a, b: took - latency, latency_seconds=latency,
        cores=lambda rank: (rank * per_stage // local, room),
    )  # fmt: skip
    after = [sum(t.seconds for t in talk if t.dimension not in ("pp", "world") and not _inside(t, layout))
             for talk in talks]  # fmt: skip
    tied = _tied_seconds(config, layout, ranks, fabric)
    after = [extra + tied * (rank in (0, rank_of_last(layout.schedule, layout.pp))) for rank, extra in enumerate(after)]
    met = max(end + extra for end, extra in zip(played.ends, after, strict=True))
    phases, told = [], []
    for rank, talk in enumerate(talks):
        own = sum(works[s].forward_seconds for s in stages_of(layout.schedule, layout.pp, layout.virtual_stages, rank))
        own *= micro_batches
        talking = 2 * micro_batches * layout.virtual_stages * per_pass[rank]
        stretched = max(1.0, played.busy[rank] / max(1e-12, _work(orders[rank], seconds)))
        update = sum(
            works[s].update_seconds for s in stages_of(layout.schedule, layout.pp, layout.virtual_stages, rank)
        )
        slowest = max(
            sum(works[s].update_seconds for s in stages_of(layout.schedule, layout.pp, layout.virtual_stages, r))
            for r in range(layout.pp)
        )
        agreeing = next(t.seconds for t in talk if t.dimension == "world")
        last = met - played.ends[rank] - after[rank] + agreeing + slowest - update
        told.append([
            replace(t, exposed_seconds=played.waited[rank]) if t.dimension == "pp"
            else replace(t, exposed_seconds=last) if t.dimension == "world" else t
            for t in talk
        ])  # fmt: skip
        phases.append({
            Phase.FORWARD: own * stretched,
            Phase.BACKWARD: played.busy[rank] - (own + talking) * stretched,
            Phase.COMMUNICATION: talking * stretched + played.waited[rank] + after[rank] + last,
            Phase.OPTIMIZER: update,
        })  # fmt: skip
    return phases, told


def _tied_seconds(config: RunConfig, layout: Layout, ranks: int, fabric: Fabric) -> float:
    """The gradients of a tied weight, sent both ways at once between the first stage and the last."""
    if not config.model.tied or rank_of_last(layout.schedule, layout.pp) == 0:
        return 0.0
    weight = next(p for p in stage_parameters(config.model, layout, 0) if p.name == "embedding.weight")
    shards = (layout.shard or layout.dp) * layout.cp if layout.zero else 1
    return _seconds(fabric, ranks, layout, "pp", "send", weight.elements * 4 / shards)


def _work(order: list[Pass], seconds: Callable[[Pass], float]) -> float:
    return sum(seconds(p) for p in order)


def _inside(talk: Talk, layout: Layout) -> bool:
    """Whether a pipeline pass waits for it, rather than the end of all passes."""
    return talk.dimension in ("tp", "cp", "ep", "micro_batch") or (layout.zero == 3 and talk.kind == "all_gather")


def _inside_passes(talks: Iterable[Talk], layout: Layout) -> float:
    return sum(t.seconds for t in talks if t.dimension not in ("pp", "world") and _inside(t, layout))


# -- the ledger --------------------------------------------------------------------------------------------------------


def _stage_lines(
    config: RunConfig, layout: Layout, works: dict[int, StageWork], talks: list[Talk], position: int
) -> list[Line]:
    lines = [line for s in stages_of(layout.schedule, layout.pp, layout.virtual_stages, position)
             for line in works[s].lines]  # fmt: skip
    return lines + [
        Line(Phase.COMMUNICATION, Kind.COLLECTIVE, t.name, t.count, None, float(t.bytes), t.exposed_seconds,
             bound="network")
        for t in talks
    ]  # fmt: skip


def ranks_ledger(plan: RanksPlan) -> Ledger:
    """One table for the job: seconds, counts and bytes of a mean rank, FLOPs of all; memory of the rank with most."""
    per_stage = plan.ranks // plan.layout.pp
    folded: dict[tuple[Phase, Kind, str], Line] = {}
    for stage in plan.stages:
        wanted = stage.phase_seconds
        found = {p: sum(line.seconds or 0.0 for line in stage.lines if line.phase is p) for p in wanted}
        for line in stage.lines:
            # Ranks that take turns on the cores take longer than their operations.
            scale = wanted[line.phase] / found[line.phase] if found[line.phase] else 1.0
            key = (line.phase, line.kind, line.operation)
            known = folded.get(key, Line(*key, count=0, bytes_moved=0.0, seconds=0.0, bound=line.bound))
            share = 1 / plan.layout.pp
            folded[key] = replace(
                known, count=(known.count or 0) + round((line.count or 0) * share),
                flops=known.flops if line.flops is None else (known.flops or 0) + line.flops * per_stage,
                bytes_moved=(known.bytes_moved or 0.0) + (line.bytes_moved or 0.0) * share,
                seconds=(known.seconds or 0.0) + (line.seconds or 0.0) * scale * share,
            )  # fmt: skip
    fullest = max(plan.stages, key=lambda stage: stage.memory.total)
    memory = [MemoryLine(name, size) for name, size in fullest.memory.components.items()]
    ledger = Ledger("plan", lines=list(folded.values()), memory=memory)
    config, profile, fabric = plan.config, plan.profile, plan.fabric
    measured = measured_precision(plan.precision, profile)
    choice = choose_precision(config, profile)
    ledger.facts = common_facts(config, profile, choice, plan.whole) | {
        "peak_at": fullest.memory.where,
        "matmul_peak_flops_per_second": profile.matmul_peak(measured) * _hosts(plan),
        "micro_batch": plan.layout.micro_batch, "accumulation": plan.layout.accumulation,
        "ranks": plan.ranks, "layout": str(plan.layout),
        "threads_per_rank": max(1, profile.threads // fabric.local_ranks(plan.ranks)),
        "fabric": {
            "ranks_per_host": fabric.local_ranks(plan.ranks),
            "between": vars(fabric.between) if fabric.between else None,
            "measured": fabric.costs.created,
        },
        "stages": [stage_document(plan, stage) for stage in plan.stages],
    }  # fmt: skip
    add_totals(ledger, config, profile, measured)
    return ledger


def _hosts(plan: RanksPlan) -> int:
    return math.ceil(plan.ranks / plan.fabric.local_ranks(plan.ranks))


def stage_document(plan: RanksPlan, stage: StagePlan) -> dict[str, object]:
    """One stage of plan.json: what each of its ranks does, sends and holds."""
    per_stage = plan.ranks // plan.layout.pp
    return {
        "position": stage.position,
        "ranks": [stage.position * per_stage, (stage.position + 1) * per_stage - 1],
        "phase_seconds": {str(phase): seconds for phase, seconds in stage.phase_seconds.items()},
        "communication": [vars(talk) for talk in stage.communication],
        "peak_bytes": stage.memory.total,
        "peak_at": stage.memory.where,
        "memory": stage.memory.components,
    }


__all__ = ["RanksPlan", "StagePlan", "Talk", "plan_ranks", "ranks_ledger"]
