"""The plan of one layout on a cluster, as a ledger.

    request = ClusterRequest(ModelConfig.named("llama3-8b"), parse_cluster("8xh100-sxm-80gb"), 8192, global_batch=64)
    plan = plan_cluster(request, parse_layout("dp=8 zero=3 micro_batch=2 recompute=selective"))
    plan.fits, plan.step_seconds, plan.ledger

The seconds of a line are those of one accelerator on the busiest pipeline stage; they add up to the step. The FLOPs are
those of all accelerators together; they add up to the model's. Both are per optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ironlaw import units
from ironlaw.catalog.formats import number_format
from ironlaw.catalog.nodes import Cluster
from ironlaw.config import RunConfig
from ironlaw.errors import UserError
from ironlaw.ledger import Decisions, Estimate, Kind, Ledger, Line, MemoryLine, Origin, Phase
from ironlaw.machine.efficiency.streaming import streaming_seconds
from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster.candidates import Array, Candidates, candidates_of
from ironlaw.plan.cluster.collective_costs import DESCRIPTIONS, default_kind
from ironlaw.plan.cluster.intervals import distance, interval_factors
from ironlaw.plan.cluster.layout_space import usable_kinds
from ironlaw.plan.cluster.layout_table import Table
from ironlaw.plan.cluster.lines import step_lines
from ironlaw.plan.cluster.memory import PARTS, PeakMemory, host_bytes, in_flight, kept_activation_bytes, peak_memory
from ironlaw.plan.cluster.step_costs import (
    StepCosts,
    operation_costs,
    precision_of,
    seconds_by_part,
    step_costs,
)
from ironlaw.plan.cluster.system import ClusterSystem, system_of, under_pressure, update_cost, usable_bytes
from ironlaw.plan.cluster.timeline import Times, part_factors
from ironlaw.plan.engines.engine import TrainingEngine
from ironlaw.plan.engines.named import engine as engine_named
from ironlaw.plan.memory import highest_peak
from ironlaw.plan.recipe import first_within, not_trained_here, recipe_of_layout, within_budget
from ironlaw.plan.request_types import Assumption, Prices
from ironlaw.workload.blocks import Policy
from ironlaw.workload.layout import Layout
from ironlaw.workload.operations import Operation
from ironlaw.workload.optimizers import PAGED
from ironlaw.workload.recipe import Recipe, StepBatch
from ironlaw.workload.sections import Recompute

DEFAULT_ENGINE = "nemo"
"""Default engine of a plan: today's Megatron core with NVIDIA's tuning."""


@dataclass(frozen=True)
class ClusterRequest:
    """A request to plan training steps on a cluster, in `layout` or, where it is None, in the best layout."""

    model: ModelConfig
    cluster: Cluster
    sequence: int  # tokens
    global_batch: int  # sequences per step
    precision: str = "bf16"
    engine: str | TrainingEngine = DEFAULT_ENGINE
    optimizer: str = "adamw"
    flash: bool = True  # where the accelerator supports it; False: attention scores are materialised
    config: RunConfig | None = None  # the run's config, where there is one
    recipe: tuple[StepBatch, Recipe] | None = None  # decisions already made for our own trainer's run
    excluded: Callable[[Layout], str | None] | None = None  # returns why a search must skip a layout, or None
    steps: int = 1
    assumed: Sequence[Assumption] = ()
    prices: Prices = field(default_factory=Prices)
    layout: Layout | None = None

    @cached_property
    def system(self) -> ClusterSystem:
        """The cluster with engine and precision. Raises UserError where the catalogue lacks a necessary figure."""
        engine = engine_named(self.engine) if isinstance(self.engine, str) else self.engine
        return system_of(self.cluster, engine, self.precision, update_cost(self.optimizer, self.model))

    def run(self, layout: Layout) -> tuple[StepBatch, Recipe]:
        """Returns the batch and recipe of our own trainer's run: those decided, else those of layout and config."""
        return self.recipe or recipe_of_layout(
            self.model, layout, self.sequence, self.global_batch, self.precision, self.optimizer, self.config
        )

    @property
    def compared(self) -> tuple[Any, ...]:
        """Arguments of `distance` after the quantity; the interval of the plan depends on them."""
        cluster, model, engine = self.cluster, self.model, self.system.engine.name
        of_model = model.parameters, model.moe is not None
        return engine, cluster.accelerator.generation, cluster.count, *of_model, self.precision

    @cached_property
    def least_seconds(self) -> float:
        """Seconds of a step's model FLOPs at the peak of all accelerators, which no step is below."""
        flops = float(self.candidates([Layout()]).model_flops()[0])
        return flops / (self.system.hardware.peak(self.precision) * self.cluster.count)

    @property
    def flashes(self) -> bool:
        return self.flash and self.cluster.accelerator.has_flash

    @property
    def tokens_per_step(self) -> int:
        return self.sequence * self.global_batch

    def candidates(self, layouts: Iterable[Layout] | Table) -> Candidates:
        recipe = self.system.engine.recipe(self.precision)
        return candidates_of(
            self.model, layouts, sequence=self.sequence, global_batch=self.global_batch, flash=self.flashes,
            narrow=None if recipe is None else recipe.blocks(self.model.layers),
        )  # fmt: skip


@dataclass(frozen=True)
class PlannedCandidates:
    """Planned times and memory of many candidates, one entry each."""

    step_seconds: Array
    peak: PeakMemory
    times: Times
    costs: StepCosts
    limit_bytes: float
    host_bytes: Array  # used of one accelerator's share of its host, where something is offloaded
    host_limit_bytes: float

    @property
    def fits(self) -> np.ndarray:
        return np.asarray((self.peak.total <= self.limit_bytes) & (self.host_bytes <= self.host_limit_bytes))


@dataclass(frozen=True)
class ClusterPlan:
    """The plan of one layout. `layout` is the requested one with the kind of context parallel attention filled in and,
    except for our trainer, a recomputation budget replaced by the mode chosen for it (`recompute_choice`: why)."""

    ledger: Ledger
    layout: Layout
    outcome: PlannedCandidates
    recompute_choice: str = ""

    @property
    def fits(self) -> bool:
        return bool(self.outcome.fits[0])

    @property
    def step_seconds(self) -> float:
        return self.ledger.totals["step_seconds"].value

    @property
    def peak_bytes(self) -> float:
        return self.ledger.totals["peak_bytes"].value


def plan_candidates(candidates: Candidates, where: ClusterSystem) -> PlannedCandidates:
    """Plans step seconds and peak bytes of many candidates on one system: the fast path of search."""
    costs = step_costs(candidates, where)
    times = Times(costs, candidates, where.engine)
    peak = peak_memory(candidates, where.engine)
    seconds = under_pressure(times.step_seconds, peak.total, where)
    offloaded = host_bytes(candidates, where.engine) if (candidates.offload > 0).any() else np.zeros(len(candidates))
    host = where.host.memory_bytes if where.host else 0.0
    return PlannedCandidates(seconds, peak, times, costs, usable_bytes(where), offloaded, host)


def plan_cluster(request: ClusterRequest, layout: Layout) -> ClusterPlan:
    """Plans one training step. Raises UserError if the layout cannot run or the catalogue lacks a figure.

    The memory of our own trainer comes from its program, walked pass by pass.
    """
    model, where, settled, decided = request.model, request.system, "", tuple[Policy, ...]()
    layout.check(
        model, sequence=request.sequence, global_batch=request.global_batch, accelerators=request.cluster.count
    )
    if layout.cp > 1 and layout.cp_kind is None:
        layout = replace(layout, cp_kind=own_kind(model, layout, where.engine, request.sequence))
    run = None
    if not where.engine.fused:
        if reason := not_trained_here(layout, model, request.precision, request.optimizer):
            raise UserError(f"layout '{layout}': {reason}")
        run = batch, recipe = request.run(layout)
        if layout.recompute.mode == "budget":
            run = batch, recipe = batch, _within_budget(request, layout, batch, recipe)
            again = sum(policy is not None for policy in recipe.recompute)
            settled = f"{again} of {model.layers} blocks recompute within a budget of {layout.recompute.budget}"
        if layout.recompute.mode in ("budget", "selective"):
            decided = recipe.recompute or (None,) * model.layers
    elif layout.recompute.mode == "budget":
        layout, settled = _fastest_mode(request, layout)
    candidates = replace(request.candidates([layout]), decided=decided)
    if layout.offload != "none" and where.host is None:
        raise UserError(
            f"offload on {request.cluster.accelerator.name} in {request.cluster.node.name}: the catalogue lacks the "
            "host's memory, its rate or the link to it: use offload=none, or another node after @"
        )
    outcome, memory = plan_candidates(candidates, where), list[MemoryLine]()
    peak_at = _peak_at(candidates, where, outcome)
    if run is not None:
        outcome, memory, peak_at = _walked(request, layout.filled(request.global_batch), outcome, *run)
    lines = step_lines(candidates, where, outcome.costs, outcome.times)
    pressure = float(outcome.step_seconds[0] - outcome.times.step_seconds[0])
    if pressure > 0:
        lines.append(Line(Phase.IDLE, Kind.HOST, "allocator_retries", seconds=pressure, bound="overhead"))
    ledger = Ledger("plan", lines=lines, memory=memory or _memory(outcome.peak, where))
    ledger.totals = _totals(request, candidates, outcome, peak_at)
    ledger.facts = _facts(request, layout, outcome)
    ledger.facts["peak_at"] = peak_at
    ledger.facts["products"] = _products(candidates, where)
    if run is not None:
        ledger.decisions = Decisions(request.precision, recipe.loss_chunk, recipe.recompute)
    if settled:
        ledger.facts["recompute_choice"] = settled
    return ClusterPlan(ledger, layout, outcome, settled)


def _within_budget(request: ClusterRequest, layout: Layout, batch: StepBatch, recipe: Recipe) -> Recipe:
    """Returns our trainer's recipe within the layout's budget, chosen by the seconds of operations on this system."""
    where, candidates = request.system, request.candidates([layout])
    shape, factors = candidates.shape(where.engine), part_factors(candidates.flash, where.engine)

    def seconds(op: Operation) -> float:
        found = seconds_by_part(op, shape, candidates, where)
        streamed = streaming_seconds(op.bytes_moved, where.hardware)
        return sum(factors[part] * float(np.sum(streamed if of is None else of)) for part, of in found)

    budget, limit = layout.recompute.budget_bytes, usable_bytes(where)
    return within_budget(request.model, batch, layout.filled(request.global_batch), recipe, budget, seconds, limit)


def _walked(
    request: ClusterRequest, layout: Layout, outcome: PlannedCandidates, batch: StepBatch, recipe: Recipe
) -> tuple[PlannedCandidates, list[MemoryLine], str]:
    """Returns our trainer's outcome with its program's memory on the fullest rank, memory lines and peak's place."""
    position, highest, program = highest_peak(request.model, batch, layout, recipe)
    notes = {t.component: t.note for t in program.tensors[position]}
    total = np.array([highest.total])
    peak = replace(outcome.peak, total=total, stage=np.array([position]))
    seconds = under_pressure(outcome.times.step_seconds, total, request.system)
    return replace(outcome, peak=peak, step_seconds=seconds), highest.lines(notes), f"stage {position}, {highest.where}"


def own_kind(model: ModelConfig, layout: Layout, engine: TrainingEngine, sequence: int) -> str:
    """Returns the engine's first kind of context parallel attention that can run."""
    windowed = model.sliding_window is not None and model.sliding_window < sequence
    able = usable_kinds(model, sequence, layout.cp, layout.tp, engine.cp_kinds)
    return able[0] if able else default_kind(engine, windowed)


def _fastest_mode(request: ClusterRequest, layout: Layout) -> tuple[Layout, str]:
    """Returns the layout with the fastest recomputation mode within its budget, for software with fixed modes only.

    Also returns a sentence: the modes tried, and what the next faster one would need. Raises UserError if none fits.
    """
    budget = layout.recompute.budget_bytes
    words = ["none", "selective", *(f"every:{k}" for k in range(request.model.layers, 1, -1)), "full"]
    choices = [replace(layout, recompute=Recompute.parse(word)) for word in words]
    outcome = plan_candidates(request.candidates(choices), request.system)
    peaks, seconds, path = outcome.peak.total, outcome.step_seconds, list[int]()
    for index in map(int, np.argsort(seconds, kind="stable")):
        if not path or peaks[index] < peaks[path[-1]]:
            path.append(index)
    best = first_within(path, budget, lambda index: float(peaks[index]), outcome.limit_bytes)
    explanation = (
        f"{words[best]} is what a budget of {units.bytes_(budget)} comes to, the fastest within it of none, "
        "selective, every:K and full"
    )
    if best != path[0]:
        following = path[path.index(best) - 1]
        saved = units.percent(float(1 - seconds[following] / seconds[best]))
        explanation += f"; {words[following]} would be {saved} faster and needs {units.bytes_(peaks[following])}"
    return choices[best], explanation


def _facts(request: ClusterRequest, layout: Layout, outcome: PlannedCandidates) -> dict[str, Any]:
    where = request.system
    return {
        "model": request.model.model_dump(mode="json", exclude_none=True),
        "cluster": str(request.cluster),
        "layout": str(layout.filled(request.global_batch)),
        "sequence": request.sequence,
        "global_batch": request.global_batch,
        "precision": where.precision,
        "attention": "flash" if request.flashes else "standard",
        "optimizer": where.update.name,
        "host_bytes": float(outcome.host_bytes[0]) or None,
        "host_limit_bytes": outcome.host_limit_bytes or None,
        "engine": where.engine.name,
        "low_precision": where.engine.storage.description or None,
        "low_precision_products": _narrow_products(request, where) if number_format(where.precision).narrow else None,
        "context_parallel": DESCRIPTIONS[layout.cp_kind] if layout.cp_kind else None,
        "fits": bool(outcome.fits[0]),
        "peak_stage": int(outcome.peak.stage[0]),
        "assumptions": list(where.hardware.efficiency.assumptions()),
    }


def _narrow_products(request: ClusterRequest, where: ClusterSystem) -> str:
    """Describes which blocks multiply in 8 bits or fewer, and as whose kernels they are timed."""
    recipe, layers = where.engine.recipe(where.precision), request.model.layers
    blocks = where.engine.narrow_blocks or "all blocks, as is assumed"
    if recipe is not None:
        blocks = f"the first {recipe.blocks(layers)} of {layers} blocks"
    kernels = where.hardware.efficiency.kernels(where.precision)
    return f"{blocks}; timed as {kernels}, measured in inference, in place of this software's own kernels"


def _products(candidates: Candidates, where: ClusterSystem) -> list[dict[str, Any]]:
    """Returns the first candidate's linear layers: shapes of one rank and micro-batch, seconds of kernels alone."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for cost in operation_costs(candidates, where):
        op = cost.operation
        if cost.part != "matmul" or cost.seconds is None:
            continue
        name, seconds = op.name.removesuffix("_cast") if op.matmul is None else op.name, float(cost.seconds[0])
        precision = where.precision if op.matmul is None else precision_of(op, where)
        start = {"name": name, "precision": precision, "forward_seconds": 0.0, "backward_seconds": 0.0,
                 "share_of_layers": 0.0, "of": op.group}  # fmt: skip
        entry = found.setdefault((name, precision), start)
        if op.matmul is not None and op.phase is Phase.FORWARD:
            m, n, k, times, share = (float(np.reshape(size, -1)[0]) for size in (*op.matmul, op.batch, cost.share))
            entry |= {"m": m, "n": n, "k": k, "times": times, "flops": 2 * m * n * k * times}
            entry["share_of_layers"] += share
        if op.group == entry["of"]:  # other kinds of blocks repeat the same layer
            entry[f"{op.phase}_seconds"] += seconds
    return list(found.values())


def _peak_at(candidates: Candidates, where: ClusterSystem, outcome: PlannedCandidates) -> str:
    """Describes the stage and moment of the first candidate's peak, when its largest temporary tensors are alive."""
    peak = outcome.peak
    flight = float(in_flight(candidates, peak.stage)[0])
    back = float(kept_activation_bytes(candidates, where.engine)[1][0])
    at_loss = float(peak.logits[0]) > 0 and float(peak.logits[0]) >= back
    moment = "at the loss" if at_loss else "recomputing a block" if back > 0 else "as a backward pass begins"
    return f"stage {int(peak.stage[0])} {moment}, {flight:.3g} micro-batch{'es' if flight != 1 else ''} in flight"


def _totals(
    request: ClusterRequest, candidates: Candidates, outcome: PlannedCandidates, peak_at: str
) -> dict[str, Estimate]:
    model, where, tokens = request.model, request.system, request.tokens_per_step
    seconds, peak_bytes = float(outcome.step_seconds[0]), float(outcome.peak.total[0])
    flops = round(float(candidates.model_flops()[0]))
    basis = (
        "compute of the busiest stage x micro-batches + bubble + exposed communication + optimizer + host, "
        f"engine {where.engine.name}; interval of runs left out of the fit: {distance('time', *request.compared)}"
    )
    step = bounded(seconds, "time", request, basis)
    peak_flops = where.hardware.peak(where.precision) * request.cluster.count
    exact = Origin.CALCULATED
    return {
        "step_seconds": step,
        "peak_bytes": bounded(peak_bytes, "memory", request, f"sum of the memory lines, on {peak_at}"),
        "parameters": Estimate(model.parameters, exact, "every weight of the model config"),
        "flops_per_step": Estimate(flops, exact, "matrix products, a causal score counted once, no recomputation"),
        "tokens_per_second": step.rate(tokens, f"{tokens:,} tokens per step over step time"),
        "mfu": step.rate(
            flops / peak_flops,
            f"model FLOPs, causal attention halved, over dense {where.precision} peak x {request.cluster.count:,}",
        ),
    }


def bounded(value: float, quantity: str, request: ClusterRequest, basis: str) -> Estimate:
    """Returns a planned value with its interval; `quantity`: "time" or "memory"."""
    low, high = (float(value * np.exp(factor)) for factor in interval_factors(quantity, *request.compared))
    if quantity == "time":
        low = max(low, min(value, request.least_seconds))
    return Estimate(value, Origin.CALCULATED, basis, low, high)


_NOTES = {
    "activations": "saved for the backward pass, all micro-batches in flight",
    "logits": "output layer and loss at their widest",
    "temporaries": "gathered weights, the block being recomputed",
    "context": "workspaces of libraries and communicators that the allocator sees",
}


def _memory(peak: PeakMemory, where: ClusterSystem) -> list[MemoryLine]:
    held = where.engine.storage
    notes = _NOTES | ({"weights": held.description} if held.copy_bytes else {})
    notes["moments"] = PAGED.get(where.update.name, "")
    return [MemoryLine(name, float(getattr(peak, name)[0]), note=notes.get(name, "")) for name in PARTS]
