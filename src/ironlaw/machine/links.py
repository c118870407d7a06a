"""What it costs ranks on CPUs to talk, and to share one machine.

Made by `measure_links`, read by `plan/step.py`.

    costs = load_costs()                                  # measured between two processes of this machine
    costs.collective_seconds("all_reduce", 2**20, 4)      # gloo, all four on this machine
    fabric = RankFabric(costs, ranks_per_host=1, between=Link(latency_seconds=1e-3, bytes_per_second=12.5e6))
    fabric.collective_seconds("all_reduce", 2**20, 4)     # each on a host of its own

Gloo's rings over n ranks take n - 1 rounds for an all-gather and 2 (n - 1) for a reduction, of S / n bytes each; the
processor copies every byte into and out of the sockets, which is what the measured curves are. A link between hosts
adds its latency to every round, and its bytes where they take longer than the copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ironlaw.errors import UserError
from ironlaw.files import cache_folder
from ironlaw.machine.profile import Curve, store, stored

SCHEMA_VERSION = 2
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
MEASURED_RANKS = 2
REDUCE_ALL = ("all_reduce", "reduce_scatter")
"""PyTorch on gloo scatters what it has reduced everywhere: on the sockets both send 2 (n - 1) / n of a buffer."""
TAKING_TURNS = {"all_gather": 1.5, "all_to_all": 2.0}
"""Of two ranks that send each other as much, over what one of them sends. Gloo sends when the receiver has said that it
is ready, on the same connection: what a rank says after its own data went out waits behind them. So the rank that comes
later, if only by the way of a message, has all before the other's begins; an all-gather sends in two parts, and only
the first waits. Measured over shaped links with one rank 0.3 to 20 ms late (benchmarks/results/shaped_links.md). In a
ring of more ranks data and word go different ways, and reductions come in parts so small that both directions fill."""


@dataclass(frozen=True)
class RankCosts:
    """Seconds as two processes see them that do the same at the same time, each with its share of the threads."""

    machine: str  # `Profile.machine` they belong to
    created: str
    cores: int
    curves: dict[str, Curve]  # kind of collective -> seconds by bytes of the whole buffer
    sharing: dict[str, float]  # kind of kernel -> its time on each of two ranks over that of one process alone
    unit_seconds: float  # FSDP's own work for one gather or reduction of a unit, beside the collective
    dtensor_seconds: float  # DTensor's own work for one divided linear layer, forward and backward
    pass_seconds: float  # the pipeline schedule's own work for one pass of one micro-batch

    def collective_seconds(self, kind: str, size: float, ranks: int) -> float:
        """On one machine. `size`: bytes of the whole buffer. More ranks than cores take turns."""
        if ranks < 2:
            return 0.0
        curve = self.curves[kind]
        start = curve.seconds[0]
        moved = max(0.0, curve.at(size) - start)
        if kind == "send":
            return (start + moved) * self.turns(MEASURED_RANKS)
        # Rounds, and bytes per rank, over those between two.
        return (start * (ranks - 1) + moved * 2 * (ranks - 1) / ranks) * self.turns(ranks)

    def turns(self, ranks: int) -> float:
        """How much longer the work of each of `ranks` takes that compute at once, over that of two."""
        return max(1.0, ranks / self.cores) / max(1.0, MEASURED_RANKS / self.cores)

    def slowdown(self, kind: str, ranks: int) -> float:
        """A kernel on each of `ranks` over the same in one process that has all cores; `kind`: compute or memory."""
        return 1.0 if ranks < 2 else self.sharing[kind] * ranks / MEASURED_RANKS


@dataclass(frozen=True)
class Link:
    """A host's way to the others, one direction, shared by its ranks."""

    latency_seconds: float  # of a message of no bytes, beyond what the processors do
    bytes_per_second: float


@dataclass(frozen=True)
class RankFabric:
    """Ranks on hosts like this machine: `ranks_per_host` neighbours on each (None: all of them), `between` the rest."""

    costs: RankCosts
    ranks_per_host: int | None = None
    between: Link | None = None

    def local_ranks(self, ranks: int) -> int:
        return min(ranks, self.ranks_per_host or ranks)

    def collective_seconds(self, kind: str, size: float, ranks: int, inside: int | None = None, job: int = 0) -> float:
        """`inside`: how many of the group's ranks share a host; `job`: ranks of the whole job, which all do this."""
        job = job or ranks
        inside = self.local_ranks(ranks) if inside is None else inside
        if ranks < 2:
            return 0.0
        local = self.local_ranks(job)
        scale = self.costs.turns(local) / self.costs.turns(ranks if kind != "send" else MEASURED_RANKS)
        work = self.costs.collective_seconds(kind, size, ranks) * scale
        if inside >= ranks or self.between is None:
            return work
        # Groups side by side on a host share its link.
        wire = self.wire_bytes(kind, size, ranks) * max(1, local // inside) / self.between.bytes_per_second
        wire *= TAKING_TURNS.get(kind, 1.0) if ranks == 2 else 1.0
        start = self.costs.curves[kind].seconds[0] * (1 if kind == "send" else ranks - 1)
        return start + rounds(kind, ranks) * self.between.latency_seconds + max(wire, work - start)

    @staticmethod
    def wire_bytes(kind: str, size: float, ranks: int) -> float:
        """Bytes that leave a rank."""
        if kind in ("send", "broadcast"):
            return size
        return size * (ranks - 1) / ranks * (2 if kind in REDUCE_ALL else 1)


def rounds(kind: str, ranks: int) -> int:
    """Messages one after the other."""
    if kind in REDUCE_ALL:
        return 2 * (ranks - 1)
    return {"send": 1, "broadcast": (ranks - 1).bit_length()}.get(kind, ranks - 1)


def costs_path() -> Path:
    return cache_folder() / "machine" / "ranks.json"


def save_costs(costs: RankCosts) -> None:
    store(costs_path(), costs, SCHEMA_VERSION)


def load_costs() -> RankCosts:
    """UserError where two ranks of this machine have not been measured: nothing is assumed in their place."""
    costs = stored(costs_path(), RankCosts, SCHEMA_VERSION)
    if costs is None:
        raise UserError("what ranks of this machine cost each other has not been measured: run `ironlaw measure`")
    return costs
