"""What the planner of clusters is asked: a training step but for its layout, and the run around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ironlaw.catalog.nodes import Cluster
from ironlaw.config import RunConfig
from ironlaw.model.config import ModelConfig
from ironlaw.plan.budget import Prices
from ironlaw.plan.cluster.candidates import Candidates, candidates_of
from ironlaw.plan.cluster.layout_table import Known, Table
from ironlaw.plan.cluster.system import ClusterSystem, system_of
from ironlaw.plan.cluster.update_cost import update_cost
from ironlaw.plan.engines.engine import TrainingEngine
from ironlaw.plan.engines.named import engine as engine_named
from ironlaw.plan.recipe import recipe_of_layout
from ironlaw.plan.work import Assumption
from ironlaw.workload.layout import Layout
from ironlaw.workload.recipe import Recipe, StepBatch

DEFAULT_ENGINE = "nemo"
"""The engine that a plan is for unless told otherwise: today's Megatron core in NVIDIA's tuning."""


@dataclass(frozen=True)
class ClusterStep:
    """One training step on a cluster, but for its layout."""

    model: ModelConfig
    cluster: Cluster
    sequence: int  # tokens
    global_batch: int  # sequences per step
    precision: str = "bf16"
    engine: str | TrainingEngine = DEFAULT_ENGINE
    optimizer: str = "adamw"
    flash: bool = True  # where the accelerator has it; else attention's scores are materialised
    config: RunConfig | None = None  # of a run around the model, where there is one
    recipe: tuple[StepBatch, Recipe] | None = None  # what has been decided of our own trainer's run
    excluded: Callable[[Layout], str | None] | None = None  # why a search must leave a layout out, or None

    @cached_property
    def system(self) -> ClusterSystem:
        """UserError where the catalogue lacks a figure that every plan needs."""
        engine = engine_named(self.engine) if isinstance(self.engine, str) else self.engine
        return system_of(self.cluster, engine, self.precision, update_cost(self.optimizer, self.model))

    def run(self, layout: Layout) -> tuple[StepBatch, Recipe]:
        """Of our own trainer's run in a layout: what has been decided of it, or what the layout and the config say."""
        return self.recipe or recipe_of_layout(
            self.model, layout, self.sequence, self.global_batch, self.precision, self.optimizer, self.config
        )

    @property
    def compared(self) -> tuple[Any, ...]:
        """What the interval of its plan hangs on, as `distance` takes it."""
        cluster, model, engine = self.cluster, self.model, self.system.engine.name
        of_model = model.parameters, model.moe is not None
        return engine, cluster.accelerator.generation, cluster.count, *of_model, self.precision

    @property
    def flashes(self) -> bool:
        return self.flash and self.cluster.accelerator.has_flash

    def candidates(self, layouts: Iterable[Layout] | Table, known: Known | None = None) -> Candidates:
        return candidates_of(
            self.model, layouts, sequence=self.sequence, global_batch=self.global_batch, flash=self.flashes, known=known
        )


@dataclass(frozen=True)
class ClusterRequest(ClusterStep):
    """`layout` is the one to plan, or None to search."""

    engine: str = DEFAULT_ENGINE
    steps: int = 1
    assumed: Sequence[Assumption] = ()
    prices: Prices = field(default_factory=Prices)
    layout: Layout | None = None

    @property
    def tokens_per_step(self) -> int:
        return self.sequence * self.global_batch
