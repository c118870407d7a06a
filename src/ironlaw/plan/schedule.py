"""A pipeline played pass by pass: who computes when, who waits for whose message.

played = PlayedPipeline(passes("1f1b", pp=2, virtual=1, micro_batches=4), seconds, message, cores=cores)
played.busy, played.ends, played.waited     # seconds by rank
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ironlaw.workload.schedule import Pass


class PlayedPipeline:
    """Per rank: seconds it computes (`busy`), when its last pass ends (`ends`), and how long it waited for messages
    until then (`waited`).

    `message_seconds(from_rank, to_rank)`: how long a message holds their link; `latency_seconds` on top of it.

    As on gloo, measured (benchmarks/results/shaped_links.md): a message is on its way from when its receiver waits for
    it, not before; and the messages of two neighbours take turns, whatever their direction, because what says "ready"
    goes behind what the same rank is sending.

    `cores(rank)`: the rank's host and how many ranks can compute there at full speed; more share what there is.
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
        self.arrived: dict[Pass, float] = {}  # when what a pass needs from another stage is there
        self.offered: dict[Pass, tuple[int, float]] = {}  # by which rank, and since when, what is not yet on its way
        self.link_free: dict[frozenset[int], float] = {}
        self.position, self.now = [0] * len(orders), 0.0
        self.remaining: dict[int, float] = {}  # seconds of the passes that run, by rank
        self.ends, self.busy = [0.0] * len(orders), [0.0] * len(orders)
        self._play()
        self.waited = [end - work for end, work in zip(self.ends, self.busy, strict=True)]

    def _play(self) -> None:
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
        """Let ranks begin that are free and have what they need; when the others will, as far as is known."""
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
        """When a rank that is free has what `p` needs; None: not known yet."""
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
