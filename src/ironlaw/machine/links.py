"""The cost of communication between CPU ranks, and of sharing one machine.

Measured by `measure_links`, used by `plan/step.py`.

    costs = load_costs()                                                 # measured between two processes
    RankFabric(costs).collective_seconds("all_reduce", 2**20, 4, job=4)  # gloo, all four on this machine
    fabric = RankFabric(costs, ranks_per_host=1, between=Link(latency_seconds=1e-3, bytes_per_second=12.5e6))
    fabric.collective_seconds("all_reduce", 2**20, 4, job=4)             # each on a host of its own

Gloo's rings over n ranks take n - 1 rounds of S / n bytes for an all-gather and 2 (n - 1) for a reduction. The
processor copies every byte into and out of the sockets, which the measured curves contain. A link between hosts adds
its latency to every round, and replaces the time of the copies if its transfer takes longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ironlaw.errors import UserError
from ironlaw.files import cache_folder
from ironlaw.machine.profile import Curve, store, stored

SCHEMA_VERSION = 2
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
MEASURED_RANKS = 2
REDUCE_ALL = ("all_reduce", "reduce_scatter")
"""PyTorch's reduce-scatter on gloo is an all-reduce and a scatter: both kinds send 2 (n - 1) / n of a buffer."""
EXCHANGE_SLOWDOWN = {"all_gather": 1.5, "all_to_all": 2.0}
"""Time of an exchange between two ranks over that of one direction alone. Gloo sends once the receiver has signalled on
the same connection that it is ready, and a signal queues behind the data sent before it. So the rank that starts later,
if only by one message, receives everything before the other begins; an all-gather sends in two parts, of which only the
first waits. Measured over shaped links with one rank 0.3 to 20 ms late (benchmarks/results/shaped_links.md). In rings
of more ranks, data and signals use different connections, and reductions send parts so small that both ways fill."""


@dataclass(frozen=True)
class RankCosts:
    """Costs measured by two processes that do the same work at the same time, each with its share of the threads."""

    machine: str  # `Profile.machine` of the measured machine
    created: str
    cores: int
    curves: dict[str, Curve]  # kind of collective -> seconds by bytes of the whole buffer
    sharing: dict[str, float]  # kind of kernel -> its time on each of two ranks over that of one process alone
    unit_seconds: float  # FSDP's overhead for one gather or reduction of a unit, without the collective
    dtensor_seconds: float  # DTensor's overhead for one divided linear layer, forward and backward
    pass_seconds: float  # the pipeline schedule's overhead for one pass of one micro-batch

    def oversubscription(self, ranks: int) -> float:
        """Return the time of each rank's work with `ranks` concurrent ranks over that with two."""
        return max(1.0, ranks / self.cores) / max(1.0, MEASURED_RANKS / self.cores)

    def slowdown(self, kind: str, ranks: int) -> float:
        """Return a kernel's time on each of `ranks` over that in one process on all cores; `kind`: compute, memory."""
        return 1.0 if ranks < 2 else self.sharing[kind] * ranks / MEASURED_RANKS


@dataclass(frozen=True)
class Link:
    """A host's connection to the others, one direction, shared by its ranks."""

    latency_seconds: float  # of an empty message, in addition to the processors' work
    bytes_per_second: float


@dataclass(frozen=True)
class RankFabric:
    """Ranks on hosts like this machine: `ranks_per_host` on each (None: all on one), with links `between` hosts."""

    costs: RankCosts
    ranks_per_host: int | None = None
    between: Link | None = None

    def local_ranks(self, ranks: int) -> int:
        return min(ranks, self.ranks_per_host or ranks)

    def collective_seconds(self, kind: str, size: float, ranks: int, stride: int = 1, *, job: int) -> float:
        """Return the seconds for a whole buffer of `size` bytes over `ranks` ranks that are `stride` apart. All groups
        of the `job` ranks run it at the same time; more ranks than cores take turns."""
        local = self.local_ranks(job)
        if kind == "send":
            inside, ranks = 2 if local >= stride * ranks else 1, 2
        else:
            inside = max(1, min(ranks, local // stride))
        if ranks < 2:
            return 0.0
        curve, others = self.costs.curves[kind], ranks - 1
        start = curve.seconds[0] * others
        moved = max(0.0, curve.at(size) - curve.seconds[0])
        # Rounds and bytes per rank, relative to two ranks.
        work = (start + moved * 2 * others / ranks) * self.costs.oversubscription(local)
        if inside >= ranks or self.between is None:
            return work
        ways = 2 if kind in REDUCE_ALL else 1
        sent = size if kind == "send" else size * others / ranks * ways
        # Groups on the same host share its link.
        wire = sent * max(1, local // inside) / self.between.bytes_per_second
        wire *= EXCHANGE_SLOWDOWN.get(kind, 1.0) if ranks == 2 else 1.0
        return start + ways * others * self.between.latency_seconds + max(wire, work - start)


def costs_path() -> Path:
    return cache_folder() / "machine" / "ranks.json"


def save_costs(costs: RankCosts) -> None:
    store(costs_path(), costs, SCHEMA_VERSION)


def load_costs() -> RankCosts:
    """Load the measured costs. UserError if there are none, since nothing is assumed instead."""
    costs = stored(costs_path(), RankCosts, SCHEMA_VERSION)
    if costs is None:
        raise UserError("what ranks of this machine cost each other has not been measured: run `ironlaw measure`")
    return costs
