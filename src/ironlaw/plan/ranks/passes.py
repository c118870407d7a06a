"""A pipeline played pass by pass: who computes when, who waits for whose message.

    orders = passes("1f1b", pp=2, virtual=1, micro_batches=4)     # per rank: Pass(kind, stage, micro_batch)
    played = play(orders, seconds, message, cores)

Kinds: F forward, B backward, I its gradients of inputs alone, W its gradients of weights. The orders of `gpipe` and
`1f1b` are written here; those with several chunks or split backward passes are PyTorch's own, asked for when needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ironlaw.plan.pipeline import stages_of


class Pass(NamedTuple):
    kind: str
    stage: int
    micro_batch: int


def passes(schedule: str, pp: int, virtual: int, micro_batches: int) -> list[list[Pass]]:
    """Per pipeline rank, its passes in order."""
    if schedule == "gpipe":
        forward = [[Pass("F", rank, m) for m in range(micro_batches)] for rank in range(pp)]
        return [order + [Pass("B", rank, m) for m in range(micro_batches)] for rank, order in enumerate(forward)]
    if schedule == "1f1b" and virtual == 1:
        return [_alternating(rank, pp, micro_batches) for rank in range(pp)]
    return [list(order) for order in pytorch_passes(schedule, pp, virtual, micro_batches)]


def _alternating(rank: int, pp: int, micro_batches: int) -> list[Pass]:
    ahead = min(micro_batches, pp - rank)
    order = [Pass("F", rank, m) for m in range(ahead)]
    for m in range(micro_batches):
        order.append(Pass("B", rank, m))
        if ahead + m < micro_batches:
            order.append(Pass("F", rank, ahead + m))
    return order


@lru_cache(maxsize=16)
def pytorch_passes(schedule: str, pp: int, virtual: int, micro_batches: int) -> tuple[tuple[Pass, ...], ...]:
    """The same, as PyTorch's schedules order them."""
    from torch.distributed.pipelining import schedules

    names = {
        "1f1b": "ScheduleInterleaved1F1B", "zb": "ScheduleInterleavedZeroBubble", "zbv": "ScheduleZBVZeroBubble",
        "dualpipe": "ScheduleDualPipeV",
    }  # fmt: skip

    class Stage:
        """As much of a stage as an order needs."""

        is_first, is_last, group_rank, group, submod, device = True, False, 0, None, None, "cpu"
        has_backward, num_stages, group_size = True, pp * virtual, pp

        def __init__(self, index: int) -> None:
            self.stage_index = index
            self.stage_index_to_group_rank: dict[int, int] = {}

    held: list[Any] = [Stage(index) for index in stages_of(schedule, pp, virtual, 0)]
    order_of = getattr(schedules, names[schedule])(held, micro_batches, loss_fn=None).pipeline_order
    kinds = schedules._ComputationType
    short = {
        kinds.FORWARD: "F", kinds.FULL_BACKWARD: "B", kinds.BACKWARD_INPUT: "I", kinds.BACKWARD_WEIGHT: "W",
    }  # fmt: skip
    result = []
    for rank in range(pp):
        order = []
        for action in order_of[rank]:
            for part in [] if action is None else (getattr(action, "sub_actions", None) or [action]):
                order.append(Pass(short[part.computation_type], part.stage_index, part.microbatch_index))
        result.append(tuple(order))
    return tuple(result)


@dataclass(frozen=True)
class Played:
    """Per rank: seconds it computes, when its last pass ends, and how long it waited for messages until then."""

    busy: list[float]
    ends: list[float]
    waited: list[float]


def play(
    orders: list[list[Pass]],
    seconds: Callable[[Pass], float],
    message_seconds: Callable[[int, int], float],
    *,
    latency_seconds: float = 0.0,
    cores: Callable[[int], tuple[int, float]] = lambda rank: (0, float("inf")),
) -> Played:
    """`message_seconds(from_rank, to_rank)`: how long a message holds their link; `latency_seconds` on top of it.

    As on gloo, measured (benchmarks/results/shaped_links.md): a message is on its way from when its receiver waits for
    it, not before; and the messages of two neighbours take turns, whatever their direction, because what says "ready"
    goes behind what the same rank is sending.

    `cores(rank)`: the rank's host and how many ranks can compute there at full speed; more share what there is.
    """
    ranks = len(orders)
    holder = {p.stage: rank for rank, order in enumerate(orders) for p in order}
    last = max(holder)
    arrived: dict[Pass, float] = {}  # when what a pass needs from another stage is there
    offered: dict[Pass, tuple[int, float]] = {}  # by which rank, and since when, what is not yet on its way
    link_free: dict[frozenset[int], float] = {}
    position, remaining, now = [0] * ranks, [0.0] * ranks, 0.0
    running = [False] * ranks
    ends, busy = [0.0] * ranks, [0.0] * ranks

    def ready_at(rank: int, p: Pass) -> float | None:
        """When a rank that is free has what `p` needs; None: not known yet."""
        if p.kind == "W" or (p.kind == "F" and p.stage == 0):
            return 0.0
        if p.kind != "F" and p.stage == last:
            return 0.0
        needed = Pass("F" if p.kind == "F" else "B", p.stage, p.micro_batch)
        if needed in offered:
            sender, since = offered.pop(needed)
            link = frozenset((rank, sender))
            sent = max(since, ends[rank], link_free.get(link, 0.0)) + message_seconds(sender, rank)
            link_free[link] = sent
            arrived[needed] = sent + latency_seconds
        return arrived.get(needed)

    def finished(rank: int, p: Pass) -> None:
        target = None
        if p.kind == "F" and p.stage < last:
            target = Pass("F", p.stage + 1, p.micro_batch)
        elif p.kind in ("B", "I") and p.stage > 0:
            target = Pass("B", p.stage - 1, p.micro_batch)
        if target is None:
            return
        if holder[target.stage] == rank:
            arrived[target] = now
        else:
            offered[target] = rank, now

    while True:
        waiting: list[float] = []
        for rank, order in enumerate(orders):
            if running[rank] or position[rank] >= len(order):
                continue
            at = ready_at(rank, order[position[rank]])
            if at is not None and at <= now + 1e-12:
                running[rank], remaining[rank] = True, seconds(order[position[rank]])
            elif at is not None:
                waiting.append(at)
        active = [rank for rank in range(ranks) if running[rank]]
        if not active and not waiting:
            break
        speed = {rank: _speed(rank, active, cores) for rank in active}
        until = min([now + remaining[r] / speed[r] for r in active] + waiting)
        for rank in active:
            remaining[rank] -= (until - now) * speed[rank]
            busy[rank] += until - now
        now = until
        for rank in active:
            if remaining[rank] <= 1e-12:
                running[rank] = False
                p = orders[rank][position[rank]]
                position[rank] += 1
                ends[rank] = now
                finished(rank, p)
    assert all(position[rank] == len(order) for rank, order in enumerate(orders)), "a pipeline that never ends"
    return Played(busy, ends, [end - work for end, work in zip(ends, busy, strict=True)])


def _speed(rank: int, active: list[int], cores: Callable[[int], tuple[int, float]]) -> float:
    host, there = cores(rank)
    together = sum(cores(other)[0] == host for other in active)
    return min(1.0, there / together)


def most_in_flight(order: list[Pass]) -> int:
    """Micro-batches (of any of its stages) whose activations a rank holds at its fullest."""
    alive = most = 0
    for p in order:
        alive += p.kind == "F"
        most = max(most, alive)
        alive -= p.kind in ("B", "W")
    return most
