"""Planning, data preparation, step and observer of a run: here for one process, in `parallel/` for many ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ironlaw.config import RunConfig
from ironlaw.data.dataset import Dataset
from ironlaw.data.prepare import prepare
from ironlaw.errors import UserError
from ironlaw.ledger import Ledger
from ironlaw.machine.measure import Probe
from ironlaw.machine.profile import Profile
from ironlaw.plan.step import plan_run
from ironlaw.plan.totals import fits
from ironlaw.train.mesh import Mesh, Observer
from ironlaw.train.run_directory import RunDirectory
from ironlaw.train.step import Step

LOOK_SECONDS = 0.6  # of probing the machine's current speed before a run
WORTH_A_LOOK = 0.02  # the most that probing may take of the planned run


class Strategy:
    step_class: type[Step] = Step

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def plan(self, config: RunConfig, profile: Profile) -> Ledger:
        """Plan the run. Raises UserError for a config that cannot run."""
        plan = plan_run(config, profile)
        worth = WORTH_A_LOOK * plan.totals["total_seconds"].value
        if profile.probe and profile.device == "cpu" and worth > LOOK_SECONDS:
            torch.set_num_threads(self.mesh.threads(profile))
            now = Probe(profile.fp32_products).slowdown(profile, LOOK_SECONDS)
            plan = plan_run(config, profile, now) if now is not None else plan
        if not fits(plan):
            raise UserError(
                "the plan does not fit this machine's memory: lower train.micro_batch; "
                "`ironlaw plan` shows what holds it"
            )
        return plan

    def prepare(
        self, config: RunConfig, progress: Callable[[int, int], None] | None, say: Callable[[str], None]
    ) -> Dataset:
        return prepare(config.data, config.model.vocab, progress, say)

    def step(self, config: RunConfig, plan: Ledger, profile: Profile, **named: Any) -> Step:
        """Create the step with this rank's model and optimizer."""
        return self.step_class(config, plan.decided, self.mesh, onednn=profile.fp32_products == "onednn", **named)

    def observer(self, run: RunDirectory) -> AbstractContextManager[Observer]:
        """Return the observer of this rank's steps."""
        return Observer()


def one_process(profile: Profile) -> Strategy:
    return Strategy(Mesh(torch.device(profile.device)))
