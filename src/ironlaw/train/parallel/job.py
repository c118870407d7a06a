"""A job of many ranks as `ironlaw train` sees it: join, check that all agree, train, leave."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from ironlaw.config import RunConfig
from ironlaw.machine.profile import Profile
from ironlaw.plan.layout import Layout
from ironlaw.train.loop import Outcome
from ironlaw.train.parallel import preflight, session
from ironlaw.train.parallel.ranks import Ranks, check, planned_layout, sites_of, start, world_size

Result = TypeVar("Result")


@dataclass
class Job:
    config: RunConfig
    ranks: Ranks

    def first_does(self, function: Callable[[], Result]) -> Result:
        return session.first_does(function)

    @property
    def layout(self) -> Layout:
        return planned_layout(self.ranks.config, self.config.micro_batch)

    def train(self, out: Path, profile: Profile, **named: Any) -> Outcome:
        return session.run_distributed(self.config, out, profile, self.ranks, **named)


@contextmanager
def job(config: RunConfig, memory_bytes: float) -> Iterator[Job]:
    """Join the process group. `memory_bytes` of this machine decides the layout where none is written."""
    size = world_size()
    if config.layout is None:
        config = config.model_copy(update={"layout": session.default_layout(config, size, memory_bytes)})
    # Before anybody waits for anybody.
    layout = check(config, size) if os.environ.get("RANK") == "0" else _quietly(config, size)
    try:
        ranks = start(layout, sites=sites_of(config, layout))
        preflight.check(preflight.facts(config))
        yield Job(config, ranks)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _quietly(config: RunConfig, size: int) -> Any:
    """The same check, silent: rank 0 says what is wrong."""
    from ironlaw.errors import UserError

    try:
        return check(config, size)
    except UserError:
        raise SystemExit(2) from None
