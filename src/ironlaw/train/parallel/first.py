"""What all ranks would do alike, rank 0 does, and tells the others."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from ironlaw.errors import UserError

Result = TypeVar("Result")
PATIENCE = timedelta(days=7)
_patient_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}  # of the process group under way


def _patient() -> dist.ProcessGroup:
    """A group that waits as long as it takes: rank 0 may prepare data for hours. Should it die, all know at once."""
    world = dist.group.WORLD
    assert world is not None
    if world not in _patient_groups:
        _patient_groups.clear()
        group = dist.new_group(backend="gloo", timeout=PATIENCE)
        _patient_groups[world] = group
    return _patient_groups[world]


def first_does(function: Callable[[], Result]) -> Result:
    """What rank 0 makes of it, on every rank. Its UserError ends all: rank 0 says it, the others leave quietly."""
    group = _patient()
    told: list[Any] = [None, None]
    error: UserError | None = None
    if dist.get_rank() == 0:
        try:
            told = [function(), None]
        except UserError as problem:
            error, told = problem, [None, str(problem)]
    dist.broadcast_object_list(told, group=group)
    if error is not None:
        raise error
    if told[1] is not None:
        raise SystemExit(2)
    result: Result = told[0]
    return result
