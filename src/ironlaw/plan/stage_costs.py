"""Costs of a program on a machine: ledger lines of its operations, their dispatch and its collectives; and seconds of
its stages on measured ranks, for each pass and each phase of a step, with the time that ranks wait.

A pipeline is simulated pass by pass: when each rank computes, and when it waits for which message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from ironlaw.ledger import UNNAMED, Kind, Line, Phase, merged
from ironlaw.machine.timing import Machine, MeasuredMachine
from ironlaw.workload.collectives import Collective, group_of
from ironlaw.workload.kinds import compiled_key, is_block
from ironlaw.workload.layout import Layout
from ironlaw.workload.operations import Operation, line_name
from ironlaw.workload.program import EMBEDDING, HEAD, Program
from ironlaw.workload.schedule import Pass, passes, rank_of_last
from ironlaw.workload.sharding import bucket_bytes


@dataclass(frozen=True)
class CollectiveCost:
    """All collectives of one kind over a mesh dimension in a step of one rank; `exposed_seconds`: the rank waits."""

    dimension: str
    kind: str
    count: int
    bytes: int
    seconds: float
    exposed_seconds: float

    def line(self, aliases: Mapping[str, str] | None = None) -> Line:
        name = f"{(aliases or {}).get(self.dimension, self.dimension)} {self.kind}"
        return Line(
            Phase.COMMUNICATION, Kind.COLLECTIVE, name, self.count, None, float(self.bytes), self.exposed_seconds,
            bound="network",
        )  # fmt: skip


def seconds_over(program: Program, machine: Machine, dimension: str, kind: str, size: float) -> float:
    """Returns the time of one collective over a dimension of the program's mesh."""
    return machine.collective_seconds(kind, size, *group_of(program.layout, dimension))


def collective_costs(program: Program, collectives: Iterable[Collective], machine: Machine) -> list[CollectiveCost]:
    """Returns the costs of a rank's collectives in a step, each at its own buffer sizes, as fully exposed."""
    found: dict[tuple[str, str], CollectiveCost] = {}
    for dimension, kind, calls, size in collectives:
        # A count of 0 is PowerSGD's: one compressed message per DDP bucket.
        count = calls or len(bucket_bytes(list(program.stages[0].parameters)))
        if not size:
            continue
        known = found.get((dimension, kind), CollectiveCost(dimension, kind, 0, 0, 0.0, 0.0))
        seconds = known.seconds + count * seconds_over(program, machine, dimension, kind, size / count)
        found[dimension, kind] = CollectiveCost(
            dimension, kind, known.count + count, known.bytes + size, seconds, seconds
        )
    return list(found.values())


def tied_seconds(program: Program, machine: Machine) -> float:
    """Returns the time to exchange a tied weight's gradients between the first and the last stage."""
    assert program.model is not None
    if program.recipe.adapters is not None or not program.model.tied or program.last_stage in program.stages_at(0):
        return 0.0
    weight = next(p for p in program.stages[0].parameters if p.name == EMBEDDING)
    return seconds_over(program, machine, "pp", "send", weight.elements * 4 / program.layout.sharing)


def fold(operations: Iterable[tuple[Operation, int]], machine: Machine, compiled: bool = False) -> list[Line]:
    """Returns ledger lines of (operation, count) pairs, and a line per pass for the host's dispatch. The costliest
    operation of a line sets its bound. `compiled`: blocks are."""

    def line(op: Operation, count: int) -> Line:
        timing, flops = machine.time(op), None if op.flops is None else op.flops * count
        seconds, moved = timing.seconds * count, float(op.bytes_moved * count)
        key = compiled_key(op) if compiled and is_block(op.group) else (op.kind, line_name(op.name))
        return Line(op.phase, *key, count, flops, moved, seconds, bound=timing.bound)

    calls: dict[int, tuple[Operation, int]] = {}
    for op, count in operations:  # a loop over tokens lists the same objects many times
        calls[id(op)] = op, count + calls.get(id(op), (op, 0))[1]
    lines = merged(line(op, count) for op, count in calls.values())
    passes = (Phase.FORWARD, Phase.BACKWARD)
    lines += [_dispatch(phase, lines, machine) for phase in passes]
    return lines + [Line(phase, Kind.OTHER, UNNAMED, count=0, seconds=0.0) for phase in passes]


def _dispatch(phase: Phase, lines: list[Line], machine: Machine) -> Line:
    """Returns the host's dispatch time in a phase. An update is two calls; its curve already includes them."""
    here = [line for line in lines if line.phase is phase]
    calls, busy = sum(line.count or 0 for line in here), sum(line.seconds or 0.0 for line in here)
    seconds = machine.dispatch_seconds(phase, calls, busy)
    return Line(phase, Kind.HOST, "dispatch", count=calls, seconds=seconds, bound="overhead")


class SimulatedPipeline:
    """A simulated pipeline step. Per rank, in seconds: time computing (`busy`), end of the last pass (`ends`), and time
    waiting for messages until then (`waited`).

    `message_seconds(from_rank, to_rank)` is the time that a message occupies their link, `latency_seconds` its latency.

    As measured on gloo (benchmarks/results/shaped_links.md), a message is sent only once its receiver waits for it, and
    messages of two neighbours take turns in both directions, because a "ready" signal queues behind data that the same
    rank is sending.

    `cores(rank)` returns the rank's host and the number of ranks that compute there at full speed; more share them.
    """

    def __init__(
        self, orders: list[list[Pass]], seconds: Callable[[Pass], float],
        message_seconds: Callable[[int, int], float], *, latency_seconds: float = 0.0,
        cores: Callable[[int], tuple[int, float]] = lambda rank: (0, float("inf")),
    ) -> None:  # fmt: skip
        self.orders, self.seconds, self.cores = orders, seconds, cores
        self.message_seconds, self.latency = message_seconds, latency_seconds
        self.holder = {p.stage: rank for rank, order in enumerate(orders) for p in order}
        self.last = max(self.holder)
        self.arrived: dict[Pass, float] = {}  # arrival time of a pass's input from another stage
        self.offered: dict[Pass, tuple[int, float]] = {}  # sender and time of inputs that are not yet being sent
        self.link_free: dict[frozenset[int], float] = {}
        self.position, self.now = [0] * len(orders), 0.0
        self.remaining: dict[int, float] = {}  # seconds left of the running passes, by rank
        self.ends, self.busy = [0.0] * len(orders), [0.0] * len(orders)
        self._simulate()
        self.waited = [end - work for end, work in zip(self.ends, self.busy, strict=True)]

    def _simulate(self) -> None:
        while True:
            waiting = self._start()
            if not self.remaining and not waiting:
                break
            hosts = {rank: self.cores(rank) for rank in self.remaining}
            together = Counter(host for host, _ in hosts.values())
            speed = {rank: min(1.0, there / together[host]) for rank, (host, there) in hosts.items()}
            until = min([self.now + left / speed[rank] for rank, left in self.remaining.items()] + waiting)
            for rank in self.remaining:
                self.remaining[rank] -= (until - self.now) * speed[rank]
                self.busy[rank] += until - self.now
            self.now = until
            for rank in [rank for rank, left in self.remaining.items() if left <= 1e-12]:
                self._finish(rank)
        done = all(self.position[rank] == len(order) for rank, order in enumerate(self.orders))
        assert done, "a pipeline that never ends"

    def _start(self) -> list[float]:
        """Starts passes of free ranks whose inputs have arrived. Returns the known arrival times of other inputs."""
        waiting = []
        for rank, order in enumerate(self.orders):
            if rank in self.remaining or self.position[rank] >= len(order):
                continue
            p = order[self.position[rank]]
            at = self._ready_at(rank, p)
            if at is not None and at <= self.now + 1e-12:
                self.remaining[rank] = self.seconds(p)
            elif at is not None:
                waiting.append(at)
        self.remaining = dict(sorted(self.remaining.items()))
        return waiting

    def _ready_at(self, rank: int, p: Pass) -> float | None:
        """Returns when the input of `p` arrives at its free rank; None: not known yet."""
        if p.kind == "W" or p.stage == (0 if p.kind == "F" else self.last):
            return 0.0
        needed = Pass("F" if p.kind == "F" else "B", p.stage, p.micro_batch)
        if needed in self.offered:
            sender, since = self.offered.pop(needed)
            link = frozenset((rank, sender))
            sent = max(since, self.ends[rank], self.link_free.get(link, 0.0)) + self.message_seconds(sender, rank)
            self.link_free[link] = sent
            self.arrived[needed] = sent + self.latency
        return self.arrived.get(needed)

    def _finish(self, rank: int) -> None:
        p = self.orders[rank][self.position[rank]]
        del self.remaining[rank]
        self.position[rank] += 1
        self.ends[rank] = self.now
        stage = p.stage + 1 if p.kind == "F" else p.stage - 1
        if p.kind == "W" or not 0 <= stage <= self.last:
            return
        target = Pass("F" if p.kind == "F" else "B", stage, p.micro_batch)
        if self.holder[stage] == rank:
            self.arrived[target] = self.now
        else:
            self.offered[target] = rank, self.now


WEIGHT_GRADIENTS = ("matmul_weight_gradient", "sum_rows", "embedding_backward")
"""Kernels whose results are needed only by the update."""

Phases = list[dict[Phase, float]]  # by pipeline position
Costs = list[list[CollectiveCost]]


@dataclass(frozen=True)
class StageCosts:
    """Seconds of one stage on one rank."""

    passes: dict[str, float]  # of a micro-batch by kind (`Pass.kind`); "W": gradients that no other stage waits for
    once_seconds: float  # per step: the update, and gradients added to those of earlier micro-batches
    accumulate_seconds: float  # the latter alone
    lines: list[Line]  # for a step


def stage_costs(program: Program, stage: int, machine: MeasuredMachine) -> StageCosts:
    here, times = program.stages[stage], program.micro_batches
    seconds, calls = dict.fromkeys("FIW", 0.0), dict.fromkeys("FIW", 0)
    for op, count in here.operations():
        weights = op.kernel in WEIGHT_GRADIENTS
        kind = "F" if op.phase is Phase.FORWARD else "W" if weights else "I"
        seconds[kind] += machine.time(op).seconds * count
        calls[kind] += count
    wrapping = _wrapping(program, stage, machine)
    lines = fold(program.operations(stage), machine, program.recipe.compiled)
    for phase, kind, number in ((Phase.FORWARD, "F", calls["F"]), (Phase.BACKWARD, "I", calls["I"] + calls["W"])):
        seconds[kind] += machine.dispatch_seconds(phase, number, seconds[kind])
        seconds[kind] += wrapping.get(phase, 0.0)
        if phase in wrapping:  # booked as dispatch: a run cannot tell this from the host's other work
            seconds_of_step = wrapping[phase] * times
            lines.append(Line(phase, Kind.HOST, "dispatch", count=0, seconds=seconds_of_step, bound="overhead"))
    update = sum(line.seconds or 0.0 for line in lines if line.phase is Phase.OPTIMIZER)
    added = sum(line.seconds or 0.0 for line in lines if line.operation == "accumulate")
    return StageCosts(seconds | {"B": seconds["I"] + seconds["W"]}, update + added, added, lines)


def _wrapping(program: Program, stage: int, machine: MeasuredMachine) -> dict[Phase, float]:
    """Returns the host overhead of FSDP, DTensor and the pipeline in a micro-batch, measured on tiny layers."""
    layout, forward, backward = program.layout, 0.0, 0.0
    if machine.fabric is None or (layout.tp == layout.pp == 1 and layout.zero < 3):
        return {}
    costs, turns = machine.fabric.costs, machine.oversubscription
    assert program.model is not None
    names = [layer.name for layer in program.stages[stage].layers]
    ends = sum(name in (EMBEDDING, HEAD) for name in names)
    if layout.tp > 1:
        linears = (len(names) - ends) * (6 + program.model.gated_ffn) + ends
        forward += linears * costs.dtensor_seconds / 3 * turns
        backward += linears * costs.dtensor_seconds * 2 / 3 * turns
    if layout.pp > 1:
        forward += costs.pass_seconds * turns
        backward += costs.pass_seconds * turns
    if layout.zero == 3:
        copies = machine.copy_seconds(sum(p.bytes for p in program.stages[stage].parameters))
        forward += len(names) * costs.unit_seconds * turns + copies
        backward += 2 * len(names) * costs.unit_seconds * turns + 2 * copies
    return {Phase.FORWARD: forward, Phase.BACKWARD: backward}


# -- a step ------------------------------------------------------------------------------------------------------------


def alike(program: Program, costs: StageCosts, machine: MeasuredMachine) -> tuple[Phases, Costs]:
    """Returns phases and collectives of a step without a pipeline: all ranks run the same at the same time."""
    layout, fabric = program.layout, machine.fabric
    sent = collective_costs(program, program.collectives[0], machine) if fabric is not None else []
    if fabric is not None and layout.zero == 0 and layout.tp == 1 and layout.dp * layout.cp > 1:
        buckets = bucket_bytes(list(program.stages[0].parameters))
        reductions = [seconds_over(program, machine, "replicate", "all_reduce", b) for b in buckets]
        hidden = _hidden_behind(costs.passes["B"], buckets, reductions)
        # If ranks use all cores, CPU work for the reduction of a bucket does not overlap with the backward pass.
        if machine.local_ranks >= fabric.costs.cores:
            here, ranks = replace(fabric, ranks_per_host=None), machine.ranks
            hidden -= min(hidden, sum(here.collective_seconds("all_reduce", b, ranks, job=ranks) for b in buckets))
        sent = [
            replace(t, exposed_seconds=max(0.0, t.seconds - hidden)) if t.dimension == "replicate" else t for t in sent
        ]
    phases = dict.fromkeys((Phase.FORWARD, Phase.BACKWARD, Phase.COMMUNICATION, Phase.OPTIMIZER), 0.0)
    for line in costs.lines:
        phases[line.phase] += line.seconds or 0.0
    phases[Phase.COMMUNICATION] = sum(t.exposed_seconds for t in sent)
    return [phases], [sent]


def _hidden_behind(window: float, buckets: list[int], seconds: list[float]) -> float:
    """Returns the seconds of the buckets' reductions that overlap with a backward pass of `window` seconds."""
    ready, free, sent = 0.0, 0.0, 0
    for size, took in zip(buckets, seconds, strict=True):
        sent += size
        ready = window * sent / sum(buckets)
        free = max(free, ready) + took
    return sum(seconds) - max(0.0, free - window)


def pipelined(program: Program, costs: dict[int, StageCosts], machine: MeasuredMachine) -> tuple[Phases, Costs]:
    """Simulates the passes of one replica's ranks, then the reductions of gradients and of loss and norm."""
    layout, micro_batches, fabric = program.layout, program.micro_batches, machine.fabric
    assert fabric is not None
    sent = [collective_costs(program, collectives, machine) for collectives in program.collectives]
    orders = passes(layout.schedule, layout.pp, layout.virtual_stages, micro_batches)
    between = ("pp", "world")
    apart = [[t for t in some if t.dimension not in between] for some in sent]
    inside = [sum(t.seconds for t in some if _inside(t, layout)) for some in apart]
    per_pass = [seconds / (2 * micro_batches * layout.virtual_stages) for seconds in inside]
    holder = {p.stage: rank for rank, order in enumerate(orders) for p in order}

    def seconds(p: Pass) -> float:
        return costs[p.stage].passes[p.kind] + (0.0 if p.kind == "W" else per_pass[holder[p.stage]])

    message_seconds, latency = seconds_over(program, machine, "pp", "send", program.message_bytes), 0.0
    local, per_stage = machine.local_ranks, machine.ranks // layout.pp
    if fabric.between and local < machine.ranks:
        latency = fabric.between.latency_seconds
    room = fabric.costs.cores / min(per_stage, local)  # stages that compute at full speed on one host
    simulated = SimulatedPipeline(
        orders, seconds, lambda a, b: message_seconds - latency, latency_seconds=latency,
        cores=lambda rank: (rank * per_stage // local, room),
    )  # fmt: skip
    after = [sum(t.seconds for t in some if not _inside(t, layout)) for some in apart]
    tied, ends = tied_seconds(program, machine), (0, rank_of_last(layout.schedule, layout.pp))
    after = [extra + tied * (rank in ends) for rank, extra in enumerate(after)]
    last_arrival = max(end + extra for end, extra in zip(simulated.ends, after, strict=True))
    stages = [[costs[stage] for stage in program.stages_at(rank)] for rank in range(layout.pp)]
    once = [sum(stage.once_seconds for stage in own) for own in stages]
    phases, exposed = [], []
    for rank, some in enumerate(sent):
        forward = micro_batches * sum(stage.passes["F"] for stage in stages[rank])
        collectives = 2 * micro_batches * layout.virtual_stages * per_pass[rank]
        slowdown = max(1.0, simulated.busy[rank] / max(1e-12, sum(map(seconds, orders[rank]))))
        agreement = next(t.seconds for t in some if t.dimension == "world")
        final_wait = last_arrival - simulated.ends[rank] - after[rank] + agreement + max(once) - once[rank]
        waits = {"pp": simulated.waited[rank], "world": final_wait}
        exposed.append([replace(t, exposed_seconds=waits.get(t.dimension, t.exposed_seconds)) for t in some])
        added = sum(stage.accumulate_seconds for stage in stages[rank])
        phases.append({
            Phase.FORWARD: forward * slowdown,
            Phase.BACKWARD: simulated.busy[rank] - (forward + collectives) * slowdown + added,
            Phase.COMMUNICATION: collectives * slowdown + simulated.waited[rank] + after[rank] + final_wait,
            Phase.OPTIMIZER: once[rank] - added,
        })  # fmt: skip
    return phases, exposed


def _inside(cost: CollectiveCost, layout: Layout) -> bool:
    """Returns whether a collective runs inside each pipeline pass, rather than after all passes."""
    return cost.dimension in ("tp", "cp", "ep", "micro_batch") or (layout.zero == 3 and cost.kind == "all_gather")
