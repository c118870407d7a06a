"""The ledger: one table that a plan fills by calculation and a run fills by measurement.

A line says which operation, in which phase, did how many FLOPs, moved how many bytes and took how long,
per optimizer step. A plan and a run use the same keys (phase, kind, operation), so subtracting one from the
other is meaningful. What a side cannot know is `None`, never 0: zero means "looked, and there was none".
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
    """Where in the step the time goes. The phases partition the wall time of a step."""

    DATA = "data"  # waiting for the next batch
    TRANSFER = "transfer"  # host to device
    FORWARD = "forward"
    BACKWARD = "backward"
    COMMUNICATION = "communication"  # exposed: not hidden behind compute
    OPTIMIZER = "optimizer"  # gradient clipping, the update, clearing gradients
    PREFILL = "prefill"  # of a serving engine's step: prompts
    DECODE = "decode"  # and the next token of every answer
    SAMPLING = "sampling"  # and its choice
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    HOST = "host"  # logging, the loop itself
    IDLE = "idle"


# What one step of training consists of; evaluation and checkpoints happen between steps and are reported beside them.
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
    """What sort of work an operation is: each kind has its own ceiling."""

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
    """A number with where it came from. `low` and `high` bound 80% of what was seen on comparable runs.

    Exact numbers have no interval. `basis` is one phrase a person can check: a formula, a source, a method.
    """

    value: float  # SI
    origin: Origin  # calculated, measured or cited
    basis: str  # formula, source or method, in one phrase
    low: float | None = None  # 80% of comparable runs lay between these two; null: exact
    high: float | None = None

    def scaled(self, factor: float, basis: str | None = None) -> Estimate:
        low = None if self.low is None else self.low * factor
        high = None if self.high is None else self.high * factor
        return Estimate(self.value * factor, self.origin, basis or self.basis, low, high)

    def rate(self, work: float, basis: str, origin: Origin = Origin.CALCULATED) -> Estimate:
        """So much work over these seconds: the bounds change places."""
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
    kind: Kind  # what sort of work
    operation: str  # its name, the same in a plan and a run
    count: int | None = None  # executions
    flops: int | None = None  # of matrix products and attention, exact
    bytes_moved: float | None = None  # read and written, or sent by a collective
    seconds: float | None = None  # of all executions together
    joules: float | None = None  # null: energy is measured of whole steps
    bound: str | None = None  # "compute", "memory", "overhead", "network": which ceiling set the time
    origin: Origin = Origin.CALCULATED  # calculated, measured or cited

    @property
    def key(self) -> Key:
        return self.phase, self.kind, self.operation


Key = tuple[Phase, Kind, str]
UNNAMED = "other"
"""Operation of a line, of kind `OTHER`, for all in a phase that a plan has no name for. A plan lists everything that it
knows, and so plans 0 seconds of it."""


def merged(lines: Iterable[Line]) -> list[Line]:
    """Lines of the same key as one: what one of them does not know the others say; the longest says what bounds it."""
    alike: dict[Key, list[Line]] = {}
    for line in lines:
        alike.setdefault(line.key, []).append(line)

    def total(column: str, among: list[Line]) -> Any:
        known = [value for line in among if (value := getattr(line, column)) is not None]
        return sum(known) if known else None

    return [
        replace(
            max(reversed(among), key=lambda line: line.seconds or 0.0),
            **{column: total(column, among) for column in ("count", "flops", "bytes_moved", "seconds")},
        )
        for among in alike.values()
    ]


def named_as(lines: Iterable[Line], planned: Iterable[Line]) -> list[Line]:
    """Measured lines under the keys of a plan: what it has no name for is one line of its phase, where it plans one."""
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
    """Bytes held at the moment of the peak, by component (weights, gradients, optimizer, activations, ...)."""

    component: str  # weights, gradients, activations, ...
    bytes: float | None  # at that moment
    origin: Origin = Origin.CALCULATED  # calculated or measured
    note: str = ""  # what it consists of


@dataclass(frozen=True)
class Decisions:
    """What a plan decides for the trainer where the config leaves it open; the reasons are among the facts."""

    precision: str  # of the matrix products
    loss_chunk: int = 0  # tokens whose logits exist at a time; 0: all of a micro-batch
    # Of each layer which expensive results it keeps, None: all; empty: nothing is recomputed.
    recompute: tuple[frozenset[str] | None, ...] = ()
    offload_ahead_bytes: int = 0  # of saved activations that may be on their way to or from the host
    native_attention: bool = False  # kernels/attention.c in place of PyTorch's fused kernel

    def to_json(self) -> dict[str, Any]:
        kept = [None if layer is None else sorted(layer) for layer in self.recompute]
        return asdict(self) | {"recompute": kept}

    @staticmethod
    def from_json(document: dict[str, Any]) -> Decisions:
        kept = tuple(None if layer is None else frozenset(layer) for layer in document["recompute"])
        return Decisions(**(document | {"recompute": kept}))


@dataclass
class Ledger:
    """All lines of one plan or one run, and the totals that are not sums of lines."""

    side: str  # "plan" or "run"
    lines: list[Line] = field(default_factory=list)  # operations
    memory: list[MemoryLine] = field(default_factory=list)  # components of the peak
    totals: dict[str, Estimate] = field(default_factory=dict)  # step_seconds, peak_bytes, flops_per_step, ...
    phase_seconds: dict[Phase, float] = field(default_factory=dict)  # measured directly, profiler off
    facts: dict[str, Any] = field(default_factory=dict)  # model, machine, versions, config: provenance
    decisions: Decisions | None = None  # of a plan

    @property
    def decided(self) -> Decisions:
        """The decisions of a plan that was made for a trainer."""
        assert self.decisions is not None, "a ledger that no plan of a run has made"
        return self.decisions

    def select(self, **wanted: Any) -> Iterator[Line]:
        """Lines whose named fields equal the given values: `ledger.select(phase=Phase.FORWARD)`."""
        for line in self.lines:
            if all(getattr(line, name) == value for name, value in wanted.items()):
                yield line

    def seconds_by_phase(self) -> dict[Phase, float]:
        """Phase totals: measured directly where there is a measurement, else the sum of the lines."""
        if self.phase_seconds:
            return dict(self.phase_seconds)
        return {p: s for p, s in summed(self.lines, lambda line: line.phase, "seconds").items() if s is not None}

    def seconds_by_kind(self) -> dict[Kind, float]:
        sums = summed(self.lines, lambda line: line.kind, "seconds")
        return {kind: seconds for kind, seconds in sums.items() if seconds is not None}

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
            lines=[line_of(entry) for entry in document["lines"]],
            memory=[MemoryLine(**(entry | {"origin": Origin(entry["origin"])})) for entry in document["memory"]],
            facts=document["facts"],
            decisions=Decisions.from_json(document["decisions"]) if "decisions" in document else None,
        )

    def save(self, path: Path) -> None:
        write_json(path, self.to_json())

    @staticmethod
    def load(path: Path) -> Ledger:
        """UserError for a file that is none, or holds values of other types than a ledger's."""
        from ironlaw.ledger_types import check_types

        document = read_json(path)
        try:
            if document.get("schema_version") == SCHEMA_VERSION:
                check_types(document, path)
            return Ledger.from_json(document)
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is not a ledger of Ironlaw ({error}): point to a run directory") from None


def line_of(entry: dict[str, Any]) -> Line:
    """From the JSON that `asdict` of a line gives."""
    known = {f.name for f in fields(Line)}
    values = {name: value for name, value in entry.items() if name in known}
    return Line(
        **(values | {"phase": Phase(entry["phase"]), "kind": Kind(entry["kind"]), "origin": Origin(entry["origin"])})
    )


def summed(lines: Iterable[Line], key: Callable[[Line], Any], column: str = "seconds") -> dict[Any, float | None]:
    """Sum one column by a key; a key whose lines are all absent stays absent."""
    sums: dict[Any, float | None] = {}
    for line in lines:
        value = getattr(line, column)
        known = sums.get(key(line))
        if value is None:
            sums.setdefault(key(line), None)
        else:
            sums[key(line)] = value if known is None else known + value
    return sums


def subtract(run: float | None, plan: float | None) -> float | None:
    """Measured minus planned; absent on either side is absent."""
    return None if run is None or plan is None else run - plan


def relative_error(run: float | None, plan: float | None) -> float | None:
    """(planned - measured) / measured: positive means the plan was too high."""
    if run is None or plan is None or run == 0:
        return None
    return (plan - run) / run
