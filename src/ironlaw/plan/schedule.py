"""A pipeline played pass by pass: who computes when, who waits for whose message.

played = simulate_pipeline(passes("1f1b", pp=2, virtual=1, micro_batches=4), seconds, message, cores)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ironlaw.workload.schedule import Pass


@dataclass(frozen=True)
class PipelineTimes:
    """Per rank: seconds it computes, when its last pass ends, and how long it waited for messages until then."""

    busy: list[float]
    ends: list[float]
    waited: list[float]


def simulate_pipeline(
    orders: list[list[Pass]],
    seconds: Callable[[Pass], float],
    message_seconds: Callable[[int, int], float],
    *,
    latency_seconds: float = 0.0,
    cores: Callable[[int], tuple[int, float]] = lambda rank: (0, float("inf")),
) -> PipelineTimes:
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
    return PipelineTimes(busy, ends, [end - work for end, work in zip(ends, busy, strict=True)])


def _speed(rank: int, active: list[int], cores: Callable[[int], tuple[int, float]]) -> float:
    host, there = cores(rank)
    together = sum(cores(other)[0] == host for other in active)
    return min(1.0, there / together)
