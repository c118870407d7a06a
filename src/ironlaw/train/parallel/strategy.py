"""How ranks plan together, prepare data once, step on a layout and watch each other."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch.distributed as dist

from ironlaw.config import RunConfig
from ironlaw.data.dataset import Dataset
from ironlaw.data.prepare import prepare
from ironlaw.ledger import Ledger
from ironlaw.machine.profile import Profile
from ironlaw.train.journal import write_event
from ironlaw.train.parallel.hang import Note
from ironlaw.train.parallel.observer import RankObserver
from ironlaw.train.parallel.planning import plan_job
from ironlaw.train.parallel.ranks import Ranks
from ironlaw.train.parallel.step import LayoutStep
from ironlaw.train.parallel.watcher import Watcher
from ironlaw.train.run_directory import RunDirectory
from ironlaw.train.strategy import Strategy


class RankStrategy(Strategy):
    mesh: Ranks
    step_class = LayoutStep

    def __init__(self, config: RunConfig, ranks: Ranks, store: dist.Store, **named: Any) -> None:
        """`store` is these ranks' alone; `named` goes to the watcher."""
        super().__init__(ranks)
        self.config, self.store, self.named = config, store, named

    def plan(self, config: RunConfig, profile: Profile) -> Ledger:
        return plan_job(config, profile, self.mesh)

    def prepare(
        self, config: RunConfig, progress: Callable[[int, int], None] | None, say: Callable[[str], None]
    ) -> Dataset:
        """Rank 0 prepares; the others then find everything in the cache."""
        self.mesh.first_does(lambda: prepare(config.data, config.model.vocab, progress, say) and None)
        return prepare(config.data, config.model.vocab)

    def observer(self, run: RunDirectory) -> RankObserver:
        seconds = self.config.recovery.collective_seconds
        watcher = Watcher(self.mesh, self.store, seconds, partial(_hung, run), **self.named)
        return RankObserver(self.mesh, self.config, watcher)


def _hung(run: RunDirectory, report: str, notes: list[Note]) -> None:
    """On the rank that found it, whichever that is: the others may not be able to."""
    print(f"ironlaw: {report}", file=sys.stderr, flush=True)
    write_event(run, "hang", report=report, ranks=[asdict(note) for note in notes])
