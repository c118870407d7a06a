"""The ledger: one table that a plan fills by calculation and a run fills by measurement.

A line gives the FLOPs, bytes moved and seconds of one operation in one phase, per optimizer step. A plan and a run use
the same keys (phase, kind, operation), so that one can be subtracted from the other. An unknown value is `None`, never
0: zero means that it was looked for and there was none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from ironlaw.errors import UserError
from ironlaw.files import read_json, write_json

SCHEMA_VERSION = 1


class Phase(StrEnum):
    """A part of a step. The phases partition its wall time."""

    DATA = "data"  # waiting for the next batch
    TRANSFER = "transfer"  # host to device
    FORWARD = "forward"
    BACKWARD = "backward"
    COMMUNICATION = "communication"  # exposed: not hidden behind compute
    OPTIMIZER = "optimizer"  # gradient clipping, the update, clearing gradients
    PREFILL = "prefill"  # serving: the forward pass of prompts
    DECODE = "decode"  # serving: the forward pass for the next token of every answer
    SAMPLING = "sampling"  # serving: choosing that token
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    HOST = "host"  # logging, the loop itself
    IDLE = "idle"


# Phases of a training step. Evaluation and checkpoints happen between steps and are reported separately.
STEP_PHASES = (
    Phase.DATA,
    Phase.TRANSFER,
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.COMMUNICATION,
    Phase.OPTIMIZER,
    Phase.HOST,
    Phase.IDLE,
)


class Kind(StrEnum):
    """A sort of operation; each has its own performance ceiling."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    NORM = "norm"
    ELEMENTWISE = "elementwise"  # activations, residuals, casts, copies
    EMBEDDING = "embedding"
    LOSS = "loss"
    OPTIMIZER = "optimizer"
    COLLECTIVE = "collective"
    DATA = "data"
    HOST = "host"
    OTHER = "other"


class Origin(StrEnum):
    CALCULATED = "calculated"
    MEASURED = "measured"
    CITED = "cited"


@dataclass(frozen=True)
class Estimate:
    """A number with its origin. `low` and `high` bound 80% of the values observed on comparable runs.

    Exact numbers have no interval. `basis` is one phrase that can be checked: a formula, a source or a method.
    """

    value: float  # SI
    origin: Origin  # calculated, measured or cited
    basis: str  # formula, source or method, in one phrase
    low: float | None = None  # 80% of comparable runs lie between low and high; null: exact
    high: float | None = None

    def scaled(self, factor: float, basis: str | None = None) -> Estimate:
        low = None if self.low is None else self.low * factor
        high = None if self.high is None else self.high * factor
        return Estimate(self.value * factor, self.origin, basis or self.basis, low, high)

    def rate(self, work: float, basis: str, origin: Origin = Origin.CALCULATED) -> Estimate:
        """Return `work` divided by this duration; the bounds swap."""
        low = None if self.high is None else work / self.high
        high = None if self.low is None else work / self.low
        return Estimate(work / self.value, origin, basis, low, high)

    def to_json(self) -> dict[str, Any]:
        interval = None if self.low is None else [self.low, self.high]
        return {"value": self.value, "interval": interval, "origin": str(self.origin), "basis": self.basis}

    @staticmethod
    def from_json(document: dict[str, Any]) -> Estimate:
        low, high = document["interval"] or (None, None)
        return Estimate(document["value"], Origin(document["origin"]), document["basis"], low, high)


@dataclass(frozen=True)
class Line:
    """One operation in one phase, summed over a step (all layers and micro-batches; `count` executions)."""

    phase: Phase  # where in the step
    kind: Kind  # sort of work
    operation: str  # name, the same in a plan and a run
    count: int | None = None  # executions
    flops: int | None = None  # of matrix products and attention, exact
    bytes_moved: float | None = None  # read and written, or sent by a collective
    seconds: float | None = None  # of all executions together
    joules: float | None = None  # null if energy was measured for whole steps only
    bound: str | None = None  # "compute", "memory", "overhead" or "network": the ceiling that set the time
    origin: Origin = Origin.CALCULATED  # calculated, measured or cited

    @property
    def key(self) -> Key:
        return self.phase, self.kind, self.operation


Key = tuple[Phase, Kind, str]
UNNAMED = "other"
"""Operation of the line, of kind `OTHER`, that collects the operations of a phase that the plan does not list. The plan
gives it 0 seconds."""


def _grouped(lines: Iterable[Line], key: Callable[[Line], Any]) -> dict[Any, list[Line]]:
    groups: dict[Any, list[Line]] = {}
    for line in lines:
        groups.setdefault(key(line), []).append(line)
    return groups


def _total(lines: Iterable[Line], column: str) -> Any:
    """Sum a column over the lines that have it; None if none has."""
    known = [value for line in lines if (value := getattr(line, column)) is not None]
    return sum(known) if known else None


def merged(lines: Iterable[Line]) -> list[Line]:
    """Merge lines of the same key. Columns are summed over the lines that have them; the rest is the longest line's."""
    return [
        replace(
            max(reversed(alike), key=lambda line: line.seconds or 0.0),
            **{column: _total(alike, column) for column in ("count", "flops", "bytes_moved", "seconds")},
        )
        for alike in _grouped(lines, lambda line: line.key).values()
    ]


def merge_unnamed(lines: Iterable[Line], planned: Iterable[Line]) -> list[Line]:
    """Sum measured lines whose keys the plan lacks into their phase's `UNNAMED` line, if the plan has that line."""
    keys = {line.key for line in planned}
    unnamed = {
        phase: Line(phase, kind, UNNAMED, seconds=0.0, origin=Origin.MEASURED)
        for phase, kind, operation in keys
        if operation == UNNAMED
    }
    result = []
    for line in lines:
        if line.key in keys or line.phase not in unnamed:
            result.append(line)
        else:
            known = unnamed[line.phase]
            unnamed[line.phase] = replace(known, seconds=(known.seconds or 0.0) + (line.seconds or 0.0))
    return result + list(unnamed.values())


@dataclass(frozen=True)
class MemoryLine:
    """Bytes of one component (weights, gradients, optimizer, activations, ...) at the moment of peak memory."""

    component: str  # weights, gradients, activations, ...
    bytes: float | None  # at the peak
    origin: Origin = Origin.CALCULATED  # calculated or measured
    note: str = ""  # contents of the component


@dataclass(frozen=True)
class Decisions:
    """A plan's choices where the config leaves them open. The reasons are in the ledger's facts."""

    precision: str  # of the matrix products
    loss_chunk: int = 0  # tokens whose logits are computed at a time; 0: all of a micro-batch
    # For each layer, the expensive results it keeps (None: all). Empty: nothing is recomputed.
    recompute: tuple[frozenset[str] | None, ...] = ()
    offload_ahead_bytes: int = 0  # saved activations that may be in transfer to or from the host
    native_attention: bool = False  # use kernels/attention.c instead of PyTorch's fused kernel

    def to_json(self) -> dict[str, Any]:
        kept = [None if layer is None else sorted(layer) for layer in self.recompute]
        return asdict(self) | {"recompute": kept}

    @staticmethod
    def from_json(document: dict[str, Any]) -> Decisions:
        kept = tuple(None if layer is None else frozenset(layer) for layer in document["recompute"])
        return Decisions(**(document | {"recompute": kept}))


@dataclass
class Ledger:
    """The lines of one plan or one run, and the totals that are not sums of lines."""

    side: str  # "plan" or "run"
    lines: list[Line] = field(default_factory=list)  # operations
    memory: list[MemoryLine] = field(default_factory=list)  # components of the peak
    totals: dict[str, Estimate] = field(default_factory=dict)  # step_seconds, peak_bytes, flops_per_step, ...
    phase_seconds: dict[Phase, float] = field(default_factory=dict)  # measured directly, without the profiler
    facts: dict[str, Any] = field(default_factory=dict)  # provenance: model, machine, versions, config
    decisions: Decisions | None = None  # plans only

    @property
    def decided(self) -> Decisions:
        """The decisions; they must be present, as in any plan of a run."""
        assert self.decisions is not None, "a ledger that no plan of a run has made"
        return self.decisions

    def select(self, **wanted: Any) -> Iterator[Line]:
        """Yield the lines whose fields equal the given values: `ledger.select(phase=Phase.FORWARD)`."""
        for line in self.lines:
            if all(getattr(line, name) == value for name, value in wanted.items()):
                yield line

    def seconds_by_phase(self) -> dict[Phase, float]:
        """Return the seconds of each phase: measured directly if available, else summed over the lines."""
        if self.phase_seconds:
            return dict(self.phase_seconds)
        return {p: s for p, s in summed(self.lines, lambda line: line.phase).items() if s is not None}

    def seconds_by_kind(self) -> dict[Kind, float]:
        return {k: s for k, s in summed(self.lines, lambda line: line.kind).items() if s is not None}

    def flops(self) -> int:
        return sum(line.flops for line in self.lines if line.flops is not None)

    def memory_bytes(self) -> dict[str, float]:
        return {line.component: line.bytes for line in self.memory if line.bytes is not None}

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "side": self.side,
            "totals": {name: estimate.to_json() for name, estimate in self.totals.items()},
            "phase_seconds": {str(phase): seconds for phase, seconds in self.phase_seconds.items()},
            "lines": [asdict(line) for line in self.lines],
            "memory": [asdict(line) for line in self.memory],
            "facts": self.facts,
        } | ({} if self.decisions is None else {"decisions": self.decisions.to_json()})

    @staticmethod
    def from_json(document: dict[str, Any]) -> Ledger:
        version = document.get("schema_version")
        if version != SCHEMA_VERSION:
            raise UserError(
                f"this ledger has schema version {version}, this Ironlaw reads {SCHEMA_VERSION}: "
                "make it again with the installed version"
            )
        return Ledger(
            side=document["side"],
            totals={name: Estimate.from_json(e) for name, e in document["totals"].items()},
            phase_seconds={Phase(p): s for p, s in document["phase_seconds"].items()},
            lines=[parse_line(entry) for entry in document["lines"]],
            memory=[MemoryLine(**(entry | {"origin": Origin(entry["origin"])})) for entry in document["memory"]],
            facts=document["facts"],
            decisions=Decisions.from_json(document["decisions"]) if "decisions" in document else None,
        )

    def save(self, path: Path) -> None:
        write_json(path, self.to_json())

    @staticmethod
    def load(path: Path) -> Ledger:
        """Read a ledger. UserError if the file is not one, or has values of wrong types."""
        from ironlaw.ledger_types import check_types

        document = read_json(path)
        try:
            if document.get("schema_version") == SCHEMA_VERSION:
                check_types(document, path)
            return Ledger.from_json(document)
        except UserError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:  # also an unknown phase or kind
            raise UserError(
                f"{path} is no ledger that this Ironlaw wrote ({error}): point to a run directory"
            ) from None


def parse_line(entry: dict[str, Any]) -> Line:
    """Build a Line from the dictionary that `asdict` makes of it."""
    known = {f.name for f in fields(Line)}
    values = {name: value for name, value in entry.items() if name in known}
    return Line(
        **(values | {"phase": Phase(entry["phase"]), "kind": Kind(entry["kind"]), "origin": Origin(entry["origin"])})
    )


def summed(lines: Iterable[Line], key: Callable[[Line], Any], column: str = "seconds") -> dict[Any, float | None]:
    """Sum one column by key. The sum is None if the column is None in all lines of the key."""
    return {name: _total(alike, column) for name, alike in _grouped(lines, key).items()}


def subtract(run: float | None, plan: float | None) -> float | None:
    """Return measured minus planned, or None if either is None."""
    return None if run is None or plan is None else run - plan


def relative_error(run: float | None, plan: float | None) -> float | None:
    """Return (planned - measured) / measured; positive means the plan was too high."""
    if run is None or plan is None or run == 0:
        return None
    return (plan - run) / run
